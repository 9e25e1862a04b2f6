"""One task at a time, in list order."""

from __future__ import annotations

from collections.abc import Callable

from ensemble_ray import Plan
from ensemble_ray.schedule.machine import TaskState
from tests.ensemble_ray.schedule.plans import (
    CANCEL,
    CANCELLED,
    COMPLETED,
    EXITED,
    FAILED,
    STARTED,
    CheckedMachine,
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

Begin = Callable[[Plan], CheckedMachine]
THREE = sequence("a", "b", "c")


def test_next_task_starts_when_the_previous_one_ended() -> None:
    """S-ENG-10: in list order, one at a time."""
    handle = CheckedMachine(THREE)
    assert handle(STARTED) == starts("a")
    assert handle(done("a")) == starts("b")
    assert handle(done("b")) == starts("c")
    assert handle(done("c")) == [COMPLETED]
    assert handle.completed == ("a", "b", "c")


def test_later_tasks_wait_while_one_runs(begin_run: Begin) -> None:
    """S-ENG-10: they are not even ready."""
    handle = begin_run(THREE)
    assert handle.states("a", "b", "c") == [TaskState.RUNNING, TaskState.PENDING, TaskState.PENDING]


def test_list_order_decides_whatever_the_context_is() -> None:
    """S-ENG-10: a task without context waits all the same; there is no cap to set."""
    handle = CheckedMachine(plan_of("sequential", {"a": (), "b": ("a",), "c": ()}, cap=3))
    assert handle(STARTED) == starts("a")
    assert handle(done("a")) == starts("b")


def test_later_tasks_never_start_when_one_fails(begin_run: Begin) -> None:
    """S-ENG-13: execution stops at the first failure."""
    handle = begin_run(THREE)
    handle(done("a"))
    assert handle(failed("b")) == [*skips("task 'b' failed", "c"), FAILED]
    assert (handle.completed, handle.failed) == (("a",), ("b",))


def test_failure_stops_the_run_whatever_the_error_strategy_is(begin_run: Begin) -> None:
    """S-ENG-13: the strategy is for parallel runs."""
    handle = begin_run(plan_of("sequential", {"a": (), "b": ()}, error_strategy="continue_on_error"))
    assert handle(failed("a")) == [*skips("task 'a' failed", "b"), FAILED]


def test_run_ends_with_outputs_so_far_when_a_task_exits(begin_run: Begin) -> None:
    """S-ENG-17, S-ENG-59."""
    handle = begin_run(THREE)
    handle(done("a"))
    assert handle(exited("b")) == [*skips("run ending early", "c"), EXITED]
    assert handle.completed == ("a",)


def test_running_task_is_stopped_when_the_run_is_cancelled(begin_run: Begin) -> None:
    """S-SET-27."""
    handle = begin_run(THREE)
    handle(done("a"))
    assert handle(CANCEL) == [*skips("run cancelled", "c"), *cancels("b")]
    assert handle(stopped("b")) == [CANCELLED]
