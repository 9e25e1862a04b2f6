"""What all scheduling machines share: ending, cancelling, early exit, late messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ensemble_ray.plan.plan import Plan
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.parallel import ParallelMachine
from ensemble_ray.schedule.sequential import SequentialMachine
from ensemble_ray.schedule.states import InvalidTransitionError, TaskState
from ensemble_ray.schedule.stimuli import Completed, Exited, Stimulus, encode_stimulus
from ensemble_ray.values.outputs import ExitReason
from tests.ensemble_ray.schedule.plans import (
    CANCEL,
    CANCELLED,
    COMPLETED,
    EXITED,
    FAILED,
    OUT_OF_BUDGET,
    STARTED,
    TIMED_OUT,
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
#: a and b run at once, c waits for a place, d for a
WIDE = plan_of("parallel", {"a": (), "b": (), "c": (), "d": ("a",)}, cap=2)


def test_workflow_names_the_machine() -> None:
    """One machine per workflow kind."""
    assert type(machine_for(WIDE)) is ParallelMachine
    assert type(machine_for(sequence("a"))) is SequentialMachine


def test_nothing_happens_when_nothing_is_told(told: Begin) -> None:
    """An empty step is no step."""
    assert told(WIDE)() == []
    assert Told(WIDE)() == []


def test_run_ends_once_when_every_task_is_resolved(told: Begin) -> None:
    """S-PAR-12: later messages say nothing about its end."""
    tell = told(sequence("a"))
    assert tell(done("a")) == [COMPLETED]
    assert tell(done("a"), failed("a"), CANCEL) == []


def test_story_tells_a_task_from_its_beginning(told: Begin) -> None:
    """What a defect report needs: states and times, oldest first, of that task alone."""
    tell = told(sequence("a", "b"))
    tell(done("a", at=1.25))
    tell(failed("b", at=2.5))
    assert tell.machine.story("b#0") == "ready at 1.250, running at 1.250, failed at 2.500"


def test_story_is_told_when_a_run_is_begun_twice(told: Begin) -> None:
    """A defect of ours is an error with the task's story, never silence."""
    tell = told(plan_of("parallel", {"a": ()}))
    with pytest.raises(InvalidTransitionError) as refused:
        tell(STARTED)
    assert str(refused.value) == "Task 'a': no transition running -> ready. Story: ready at 0.000, running at 0.000"


# Late messages.


@pytest.mark.parametrize("late", [done("a"), failed("a"), exited("a"), stopped("a")])
@pytest.mark.parametrize("first", [done("a"), failed("a"), exited("a")])
def test_nothing_changes_when_a_resolved_task_is_reported_again(told: Begin, first: Stimulus, late: Stimulus) -> None:
    """S-PAR-12: the first report counts; a late one of a replaced process changes nothing."""
    tell = told(WIDE)
    tell(first)
    before = (dict(tell.machine.states), tell.machine.completed, tell.machine.failed, tell.machine.story("a#0"))
    assert tell(late) == []
    assert before == (dict(tell.machine.states), tell.machine.completed, tell.machine.failed, tell.machine.story("a#0"))


@pytest.mark.parametrize("early", [done("c"), failed("c"), exited("c"), done("nobody")])
def test_nothing_changes_when_a_task_is_reported_that_does_not_run(told: Begin, early: Stimulus) -> None:
    """S-PAR-12: only running tasks have results."""
    tell = told(WIDE)
    assert tell(early) == []
    assert tell.states("a", "b", "c") == [TaskState.RUNNING, TaskState.RUNNING, TaskState.READY]


# Cancelling.


def test_what_runs_is_stopped_and_the_rest_is_not_started_when_a_run_is_cancelled(told: Begin) -> None:
    """S-SET-27, S-PAR-33: the run ends when no task runs any more."""
    tell = told(WIDE)
    assert tell(CANCEL) == [*skips("run cancelled", "c", "d"), *cancels("a", "b")]
    assert tell(stopped("a")) == []
    assert tell(stopped("b")) == [CANCELLED]
    assert tell.states("a", "b", "c", "d") == [TaskState.CANCELLED] * 4


def test_completed_outputs_are_kept_when_a_run_is_cancelled(told: Begin) -> None:
    """S-SET-27: also of a task that was done before it could be stopped."""
    tell = told(WIDE)
    tell(done("a"))
    tell(CANCEL)
    assert tell(done("b"), stopped("c"), stopped("d")) == [CANCELLED]
    assert tell.completed == ("a", "b")


def test_nothing_starts_when_a_task_completes_after_the_cancellation(told: Begin) -> None:
    """S-PAR-33: a is done, d stays unstarted."""
    tell = told(WIDE)
    tell(CANCEL)
    assert tell(done("a")) == []
    assert tell(failed("b")) == [CANCELLED]


def test_second_cancellation_says_nothing(told: Begin) -> None:
    """S-SET-27: tasks are told to stop once."""
    tell = told(WIDE)
    tell(CANCEL)
    assert tell(CANCEL) == []


# Early exit.


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        (ExitReason.USER_EXIT_EARLY, EXITED),
        (ExitReason.TIMEOUT, TIMED_OUT),
        (ExitReason.BUDGET_EXHAUSTED, OUT_OF_BUDGET),
    ],
)
def test_run_ends_without_error_when_a_task_exits_early(told: Begin, reason: ExitReason, end: object) -> None:
    """S-ENG-17, S-ENG-59, S-PAR-30, S-BUD-4: nothing more starts, running tasks finish."""
    tell = told(WIDE)
    assert tell(exited("a", reason=reason)) == skips("run ending early", "c", "d")
    assert tell(done("b")) == [end]
    assert tell.completed == ("b",)


def test_first_reason_wins_when_two_tasks_exit_early(told: Begin) -> None:
    """S-PAR-30."""
    tell = told(WIDE)
    tell(exited("a", reason=ExitReason.TIMEOUT))
    assert tell(exited("b")) == [TIMED_OUT]


@pytest.mark.parametrize("order", [(failed("a"), exited("b")), (exited("a"), failed("b"))])
def test_early_exit_outranks_a_failure(told: Begin, order: tuple[Stimulus, Stimulus]) -> None:
    """S-PAR-30: whichever came first."""
    tell = told(WIDE)
    tell(order[0])
    assert tell(order[1]) == [EXITED]


def test_cancellation_outranks_an_early_exit(told: Begin) -> None:
    """S-SET-27: who cancels is told that the run was cancelled."""
    tell = told(WIDE)
    tell(exited("a"))
    tell(CANCEL)
    assert tell(stopped("b")) == [CANCELLED]


# Several facts in one step.


def test_facts_of_one_step_are_taken_in_order(told: Begin) -> None:
    """S-PAR-14, S-PAR-23: what is started depends on all of them, the order of endings is theirs."""
    tell = told(WIDE)
    assert tell(done("b"), done("a")) == starts("c", "d")
    assert tell.completed == ("b", "a")
    assert tell(failed("d"), failed("c")) == [FAILED]
    assert tell.failed == ("d", "c")


def test_stimulus_is_data_for_the_record() -> None:
    """Class name and fields, as the record format has them."""
    assert encode_stimulus(
        Completed(at=1.5, instance="a#0", duration_s=0.5, total_tokens=7, tool_call_count=2)
    ).to_data() == {
        "type": "TaskCompleted",
        "at": 1.5,
        "key": "a",
        "duration_s": 0.5,
        "total_tokens": 7,
        "tool_call_count": 2,
    }
    assert encode_stimulus(CANCEL).to_data() == {"type": "CancelRequested", "at": 5.0}
    assert encode_stimulus(Exited(at=1.0, instance="a#0", reason=ExitReason.TIMEOUT)).to_data()["reason"] == "timeout"


def test_invariants_are_watched() -> None:
    """The check of the other tests finds what is wrong."""
    machine = machine_for(sequence("a"))
    machine._states["a#0"] = TaskState.RUNNING
    with pytest.raises(AssertionError, match="running set"):
        machine.validate()
