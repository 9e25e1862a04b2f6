"""One task at a time, in list order."""

from __future__ import annotations

from collections.abc import Callable

from ensemble_ray.plan.plan import Plan
from ensemble_ray.schedule.states import TaskState
from tests.ensemble_ray.schedule.plans import (
    CANCEL,
    CANCELLED,
    COMPLETED,
    EXITED,
    FAILED,
    STARTED,
    Told,
    cancels,
    done,
    exited,
    failed,
    plan_of,
    sequence,
    skips,
    starts,
    stopped,
)

Begin = Callable[[Plan], Told]
THREE = sequence("a", "b", "c")


def test_next_task_starts_when_the_previous_one_ended() -> None:
    """S-ENG-10: in list order, one at a time."""
    tell = Told(THREE)
    assert tell(STARTED) == starts("a")
    assert tell(done("a")) == starts("b")
    assert tell(done("b")) == starts("c")
    assert tell(done("c")) == [COMPLETED]
    assert tell.completed == ("a", "b", "c")


def test_later_tasks_wait_while_one_runs(told: Begin) -> None:
    """S-ENG-10: they are not even ready."""
    tell = told(THREE)
    assert tell.states("a", "b", "c") == [TaskState.RUNNING, TaskState.PENDING, TaskState.PENDING]


def test_list_order_decides_whatever_the_context_is() -> None:
    """S-ENG-10: a task without context waits all the same; there is no cap to set."""
    tell = Told(plan_of("sequential", {"a": (), "b": ("a",), "c": ()}, cap=3))
    assert tell(STARTED) == starts("a")
    assert tell(done("a")) == starts("b")


def test_later_tasks_never_start_when_one_fails(told: Begin) -> None:
    """S-ENG-13: execution stops at the first failure."""
    tell = told(THREE)
    tell(done("a"))
    assert tell(failed("b")) == [*skips("task 'b' failed", "c"), FAILED]
    assert (tell.completed, tell.failed) == (("a",), ("b",))


def test_failure_stops_the_run_whatever_the_error_strategy_is(told: Begin) -> None:
    """S-ENG-13: the strategy is for parallel runs."""
    tell = told(plan_of("sequential", {"a": (), "b": ()}, error_strategy="continue_on_error"))
    assert tell(failed("a")) == [*skips("task 'a' failed", "b"), FAILED]


def test_run_ends_with_outputs_so_far_when_a_task_exits(told: Begin) -> None:
    """S-ENG-17, S-ENG-59."""
    tell = told(THREE)
    tell(done("a"))
    assert tell(exited("b")) == [*skips("run ending early", "c"), EXITED]
    assert tell.completed == ("a",)


def test_running_task_is_stopped_when_the_run_is_cancelled(told: Begin) -> None:
    """S-SET-27."""
    tell = told(THREE)
    tell(done("a"))
    assert tell(CANCEL) == [*skips("run cancelled", "c"), *cancels("b")]
    assert tell(stopped("b")) == [CANCELLED]
