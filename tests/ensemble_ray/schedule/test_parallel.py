"""A graph of tasks: who starts when, who is skipped."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ensemble_ray.plan.plan import Plan
from ensemble_ray.schedule.instructions import Instruction
from ensemble_ray.schedule.states import TaskState
from ensemble_ray.schedule.stimuli import Stimulus
from tests.ensemble_ray.schedule.plans import (
    CANCEL,
    COMPLETED,
    FAILED,
    STARTED,
    Told,
    cancels,
    done,
    failed,
    plan_of,
    skips,
    starts,
)

Begin = Callable[[Plan], Told]
DIAMOND = {"top": (), "left": ("top",), "right": ("top",), "join": ("left", "right")}
#: two chains and a task alone
CHAINS = {"a": (), "b": (), "c": ("a",), "d": ("b",), "alone": ()}


def test_all_roots_start_at_once() -> None:
    """S-PAR-10: in list order."""
    assert Told(plan_of("parallel", CHAINS))(STARTED) == starts("a", "b", "alone")


def test_task_starts_when_its_last_dependency_is_resolved(told: Begin) -> None:
    """S-PAR-11: no level barrier; a slow b does not delay c."""
    tell = told(plan_of("parallel", CHAINS))
    assert tell(done("a")) == starts("c")
    assert tell(done("c"), done("alone")) == []
    assert tell(done("b")) == starts("d")
    assert tell(done("d")) == [COMPLETED]


def test_join_of_a_diamond_runs_once(told: Begin) -> None:
    """S-PAR-12."""
    tell = told(plan_of("parallel", DIAMOND))
    assert tell(done("top")) == starts("left", "right")
    assert tell(done("right")) == []
    assert tell(done("left")) == starts("join")
    assert tell(done("left"), done("right")) == []
    assert tell(done("join")) == [COMPLETED]
    assert tell.completed == ("top", "right", "left", "join")


def test_task_starts_when_it_names_a_context_task_twice(told: Begin) -> None:
    """S-PAR-11: it waits for tasks, not for mentions of them."""
    tell = told(plan_of("parallel", {"a": (), "b": ("a", "a")}))
    assert tell(done("a")) == starts("b")


def test_tasks_wait_for_places_in_the_order_of_their_readiness(told: Begin) -> None:
    """S-PAR-17: a root that waits comes before a dependent that became ready later; the run still finishes."""
    tell = told(plan_of("parallel", {"a": (), "b": (), "c": ("a",), "d": ()}, cap=1))
    assert tell.states("a", "b", "c", "d") == [
        TaskState.RUNNING,
        TaskState.READY,
        TaskState.PENDING,
        TaskState.READY,
    ]
    assert tell(done("a")) == starts("b")
    assert tell(done("b")) == starts("d")
    assert tell(done("d")) == starts("c")
    assert tell(done("c")) == [COMPLETED]


def test_as_many_run_as_there_are_places() -> None:
    """S-PAR-17: and no more, when several ends come together."""
    tell = Told(plan_of("parallel", dict.fromkeys("abcde", ()), cap=2))
    assert tell(STARTED) == starts("a", "b")
    assert tell(done("a"), done("b")) == starts("c", "d")
    assert tell(done("c")) == starts("e")


@pytest.mark.parametrize("strategy", ["fail_fast", "continue_on_error"])
def test_run_completes_when_nothing_fails(told: Begin, strategy: str) -> None:
    """S-PAR-29: under either strategy."""
    tell = told(plan_of("parallel", {"a": (), "b": ("a",)}, error_strategy=strategy))
    assert tell(done("a")) == starts("b")
    assert tell(done("b")) == [COMPLETED]


# fail_fast.


def test_nothing_starts_after_a_failure(told: Begin) -> None:
    """S-PAR-21: neither dependents nor other branches nor roots queued under a cap; the run waits for what runs."""
    tell = told(plan_of("parallel", CHAINS, cap=2))
    assert tell(failed("a")) == skips("task 'a' failed", "c", "d", "alone")
    assert tell(done("b")) == [FAILED]
    assert tell.states("a", "b", "c") == [TaskState.FAILED, TaskState.COMPLETED, TaskState.SKIPPED]


def test_running_tasks_are_not_interrupted_by_a_failure(told: Begin) -> None:
    """S-PAR-21: no instruction to stop them."""
    tell = told(plan_of("parallel", {"a": (), "b": ()}))
    assert tell(failed("a")) == []
    assert tell.states("b") == [TaskState.RUNNING]


def test_first_failure_counts_when_a_second_one_comes(told: Begin) -> None:
    """S-PAR-23: the second is kept behind it."""
    tell = told(plan_of("parallel", {"a": (), "b": ()}))
    tell(failed("b"))
    assert tell(failed("a")) == [FAILED]
    assert tell.failed == ("b", "a")


def test_nothing_starts_when_a_completion_and_a_failure_come_together(told: Begin) -> None:
    """S-PAR-21: c was ready for a moment, and never started."""
    tell = told(plan_of("parallel", CHAINS))
    assert tell(done("a"), failed("b")) == skips("task 'b' failed", "c", "d")


# continue_on_error.


def _reason(key: str) -> str:
    return f"context task '{key}' did not complete"


def test_dependents_are_skipped_transitively_when_a_task_fails(told: Begin) -> None:
    """S-PAR-24: the others go on."""
    context = {"a": (), "b": ("a",), "c": ("b",), "x": (), "y": ("x",)}
    tell = told(plan_of("parallel", context, error_strategy="continue_on_error"))
    assert tell(failed("a")) == [*skips(_reason("a"), "b"), *skips(_reason("b"), "c")]
    assert tell(done("x")) == starts("y")
    assert tell(done("y")) == [FAILED]


def test_task_is_skipped_once_when_two_dependencies_fail(told: Begin) -> None:
    """S-PAR-24, S-PAR-12."""
    tell = told(plan_of("parallel", {"a": (), "b": (), "c": ("a", "b")}, error_strategy="continue_on_error"))
    assert tell(failed("b")) == skips(_reason("b"), "c")
    assert tell(failed("a")) == [FAILED]


def test_skipped_task_stays_skipped_when_its_other_dependency_completes(told: Begin) -> None:
    """S-PAR-24: it has a failed dependency all the same."""
    tell = told(plan_of("parallel", {"a": (), "b": (), "c": ("a", "b")}, error_strategy="continue_on_error"))
    tell(failed("a"))
    assert tell(done("b")) == [FAILED]


def test_place_of_a_failed_task_goes_to_the_next_one(told: Begin) -> None:
    """S-PAR-24, S-PAR-17: also under a cap."""
    tell = told(plan_of("parallel", {"a": (), "b": ()}, error_strategy="continue_on_error", cap=1))
    assert tell(failed("a")) == starts("b")


def test_skipped_tasks_are_not_cancelled_again(told: Begin) -> None:
    """S-PAR-12: cancelling resolves only what is open."""
    tell = told(plan_of("parallel", {"a": (), "b": (), "c": ("a",)}, error_strategy="continue_on_error"))
    tell(failed("a"))
    assert tell(CANCEL) == cancels("b")
    assert tell.states("c") == [TaskState.SKIPPED]


# Long plans.


def test_long_chain_is_skipped_without_recursion(told: Begin) -> None:
    """S-PAR-24: deeper than Python's stack."""
    keys = [str(number) for number in range(3000)]
    context = {key: keys[position - 1 : position] if position else () for position, key in enumerate(keys)}
    tell = told(plan_of("parallel", context, error_strategy="continue_on_error"))
    found: list[Instruction] = tell(failed("0"))
    assert len(found) == 3000
    assert found[-1] == FAILED


def test_wide_fan_out_starts_the_same_together_or_apart(told: Begin) -> None:
    """S-PAR-11: one after the other or together, a wide fan-out gives the same starts."""
    context: dict[str, tuple[str, ...]] = {"a": (), "b": ()}
    context |= {str(number): ("a", "b") for number in range(500)}
    stimuli: list[Stimulus] = [done("a"), done("b")]
    apart, together = told(plan_of("parallel", context)), told(plan_of("parallel", context))
    assert [*apart(stimuli[0]), *apart(stimuli[1])] == together(*stimuli) == starts(*(str(n) for n in range(500)))
