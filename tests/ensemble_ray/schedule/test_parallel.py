"""A graph of tasks: who starts when, who is skipped."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ensemble_ray import Plan
from ensemble_ray.schedule.instructions import Instruction
from ensemble_ray.schedule.machine import TaskState
from ensemble_ray.schedule.stimuli import Stimulus
from tests.ensemble_ray.schedule.plans import (
    CANCEL,
    COMPLETED,
    FAILED,
    STARTED,
    CheckedMachine,
    cancels,
    done,
    failed,
    plan_of,
    skips,
    starts,
)

Begin = Callable[[Plan], CheckedMachine]
DIAMOND = {"top": (), "left": ("top",), "right": ("top",), "join": ("left", "right")}
#: two chains and a task alone
CHAINS = {"a": (), "b": (), "c": ("a",), "d": ("b",), "alone": ()}


def test_all_roots_start_at_once() -> None:
    """S-PAR-10: in list order."""
    assert CheckedMachine(plan_of("parallel", CHAINS))(STARTED) == starts("a", "b", "alone")


def test_task_starts_when_its_last_dependency_is_resolved(begin_run: Begin) -> None:
    """S-PAR-11: no level barrier; a slow b does not delay c."""
    handle = begin_run(plan_of("parallel", CHAINS))
    assert handle(done("a")) == starts("c")
    assert handle(done("c"), done("alone")) == []
    assert handle(done("b")) == starts("d")
    assert handle(done("d")) == [COMPLETED]


def test_join_of_a_diamond_runs_once(begin_run: Begin) -> None:
    """S-PAR-12."""
    handle = begin_run(plan_of("parallel", DIAMOND))
    assert handle(done("top")) == starts("left", "right")
    assert handle(done("right")) == []
    assert handle(done("left")) == starts("join")
    assert handle(done("left"), done("right")) == []
    assert handle(done("join")) == [COMPLETED]
    assert handle.completed == ("top", "right", "left", "join")


def test_task_starts_when_it_names_a_context_task_twice(begin_run: Begin) -> None:
    """S-PAR-11: it waits for tasks, not for mentions of them."""
    handle = begin_run(plan_of("parallel", {"a": (), "b": ("a", "a")}))
    assert handle(done("a")) == starts("b")


def test_tasks_wait_for_places_in_the_order_of_their_readiness(begin_run: Begin) -> None:
    """S-PAR-17: a root that waits comes before a dependent that became ready later; the run still finishes."""
    handle = begin_run(plan_of("parallel", {"a": (), "b": (), "c": ("a",), "d": ()}, cap=1))
    assert handle.states("a", "b", "c", "d") == [
        TaskState.RUNNING,
        TaskState.READY,
        TaskState.PENDING,
        TaskState.READY,
    ]
    assert handle(done("a")) == starts("b")
    assert handle(done("b")) == starts("d")
    assert handle(done("d")) == starts("c")
    assert handle(done("c")) == [COMPLETED]


def test_as_many_run_as_there_are_places() -> None:
    """S-PAR-17: and no more, when several ends come together."""
    handle = CheckedMachine(plan_of("parallel", dict.fromkeys("abcde", ()), cap=2))
    assert handle(STARTED) == starts("a", "b")
    assert handle(done("a"), done("b")) == starts("c", "d")
    assert handle(done("c")) == starts("e")


@pytest.mark.parametrize("strategy", ["fail_fast", "continue_on_error"])
def test_run_completes_when_nothing_fails(begin_run: Begin, strategy: str) -> None:
    """S-PAR-29: under either strategy."""
    handle = begin_run(plan_of("parallel", {"a": (), "b": ("a",)}, error_strategy=strategy))
    assert handle(done("a")) == starts("b")
    assert handle(done("b")) == [COMPLETED]


# fail_fast.


def test_nothing_starts_after_a_failure(begin_run: Begin) -> None:
    """S-PAR-21: neither dependents nor other branches nor roots queued under a cap; the run waits for what runs."""
    handle = begin_run(plan_of("parallel", CHAINS, cap=2))
    assert handle(failed("a")) == skips("task 'a' failed", "c", "d", "alone")
    assert handle(done("b")) == [FAILED]
    assert handle.states("a", "b", "c") == [TaskState.FAILED, TaskState.COMPLETED, TaskState.SKIPPED]


def test_running_tasks_are_not_interrupted_by_a_failure(begin_run: Begin) -> None:
    """S-PAR-21: no instruction to stop them."""
    handle = begin_run(plan_of("parallel", {"a": (), "b": ()}))
    assert handle(failed("a")) == []
    assert handle.states("b") == [TaskState.RUNNING]


def test_first_failure_counts_when_a_second_one_comes(begin_run: Begin) -> None:
    """S-PAR-23: the second is kept behind it."""
    handle = begin_run(plan_of("parallel", {"a": (), "b": ()}))
    handle(failed("b"))
    assert handle(failed("a")) == [FAILED]
    assert handle.failed == ("b", "a")


def test_nothing_starts_when_a_completion_and_a_failure_come_together(begin_run: Begin) -> None:
    """S-PAR-21: c was ready for a moment, and never started."""
    handle = begin_run(plan_of("parallel", CHAINS))
    assert handle(done("a"), failed("b")) == skips("task 'b' failed", "c", "d")


# continue_on_error.


def _reason(key: str) -> str:
    return f"context task '{key}' did not complete"


def test_dependents_are_skipped_transitively_when_a_task_fails(begin_run: Begin) -> None:
    """S-PAR-24: the others go on."""
    context = {"a": (), "b": ("a",), "c": ("b",), "x": (), "y": ("x",)}
    handle = begin_run(plan_of("parallel", context, error_strategy="continue_on_error"))
    assert handle(failed("a")) == [*skips(_reason("a"), "b"), *skips(_reason("b"), "c")]
    assert handle(done("x")) == starts("y")
    assert handle(done("y")) == [FAILED]


def test_task_is_skipped_once_when_two_dependencies_fail(begin_run: Begin) -> None:
    """S-PAR-24, S-PAR-12."""
    handle = begin_run(plan_of("parallel", {"a": (), "b": (), "c": ("a", "b")}, error_strategy="continue_on_error"))
    assert handle(failed("b")) == skips(_reason("b"), "c")
    assert handle(failed("a")) == [FAILED]


def test_skipped_task_stays_skipped_when_its_other_dependency_completes(begin_run: Begin) -> None:
    """S-PAR-24: it has a failed dependency all the same."""
    handle = begin_run(plan_of("parallel", {"a": (), "b": (), "c": ("a", "b")}, error_strategy="continue_on_error"))
    handle(failed("a"))
    assert handle(done("b")) == [FAILED]


def test_place_of_a_failed_task_goes_to_the_next_one(begin_run: Begin) -> None:
    """S-PAR-24, S-PAR-17: also under a cap."""
    handle = begin_run(plan_of("parallel", {"a": (), "b": ()}, error_strategy="continue_on_error", cap=1))
    assert handle(failed("a")) == starts("b")


def test_skipped_tasks_are_not_cancelled_again(begin_run: Begin) -> None:
    """S-PAR-12: cancelling resolves only what is open."""
    handle = begin_run(plan_of("parallel", {"a": (), "b": (), "c": ("a",)}, error_strategy="continue_on_error"))
    handle(failed("a"))
    assert handle(CANCEL) == cancels("b")
    assert handle.states("c") == [TaskState.SKIPPED]


# Long plans.


def test_long_chain_is_skipped_without_recursion(begin_run: Begin) -> None:
    """S-PAR-24: deeper than Python's stack."""
    keys = [str(number) for number in range(3000)]
    context = {key: keys[position - 1 : position] if position else () for position, key in enumerate(keys)}
    handle = begin_run(plan_of("parallel", context, error_strategy="continue_on_error"))
    found: list[Instruction] = handle(failed("0"))
    assert len(found) == 3000
    assert found[-1] == FAILED


def test_wide_fan_out_starts_the_same_together_or_apart(begin_run: Begin) -> None:
    """S-PAR-11: one after the other or together, a wide fan-out gives the same starts."""
    context: dict[str, tuple[str, ...]] = {"a": (), "b": ()}
    context |= {str(number): ("a", "b") for number in range(500)}
    stimuli: list[Stimulus] = [done("a"), done("b")]
    apart, together = begin_run(plan_of("parallel", context)), begin_run(plan_of("parallel", context))
    assert [*apart(stimuli[0]), *apart(stimuli[1])] == together(*stimuli) == starts(*(str(n) for n in range(500)))
