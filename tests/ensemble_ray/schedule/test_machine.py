"""What all scheduling machines share: ending, cancelling, early exit, late messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ensemble_ray import ExitReason, Plan
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import StimulusRecorded
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.machine import InvalidTransitionError, ParallelMachine, SequentialMachine, TaskState
from ensemble_ray.schedule.stimuli import Completed, Exited, Stimulus, decode_stimulus, encode_stimulus
from tests.ensemble_ray.schedule.invariants import check
from tests.ensemble_ray.schedule.plans import (
    CANCEL,
    CANCELLED,
    COMPLETED,
    EXITED,
    FAILED,
    OUT_OF_BUDGET,
    STARTED,
    TIMED_OUT,
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
#: a and b run at once, c waits for a place, d for a
WIDE = plan_of("parallel", {"a": (), "b": (), "c": (), "d": ("a",)}, cap=2)


def test_workflow_names_the_machine() -> None:
    """One machine per workflow kind."""
    assert type(machine_for(WIDE)) is ParallelMachine
    assert type(machine_for(sequence("a"))) is SequentialMachine


def test_nothing_happens_when_nothing_is_told(begin_run: Begin) -> None:
    """An empty step is no step."""
    assert begin_run(WIDE)() == []
    assert CheckedMachine(WIDE)() == []


def test_run_ends_once_when_every_task_is_resolved(begin_run: Begin) -> None:
    """S-PAR-12: later messages say nothing about its end."""
    handle = begin_run(sequence("a"))
    assert handle(done("a")) == [COMPLETED]
    assert handle(done("a"), failed("a"), CANCEL) == []


def test_story_tells_a_task_from_its_beginning(begin_run: Begin) -> None:
    """What a defect report needs: states and times, oldest first, of that task alone."""
    handle = begin_run(sequence("a", "b"))
    handle(done("a", at=1.25))
    handle(failed("b", at=2.5))
    assert handle.machine.story("b#0") == "ready at 1.250, running at 1.250, failed at 2.500"


def test_story_is_told_when_a_run_is_begun_twice(begin_run: Begin) -> None:
    """A defect of ours is an error with the task's story, never silence."""
    handle = begin_run(plan_of("parallel", {"a": ()}))
    with pytest.raises(InvalidTransitionError) as refused:
        handle(STARTED)
    assert str(refused.value) == "Task 'a': no transition running -> ready. Story: ready at 0.000, running at 0.000"


# Late messages.


@pytest.mark.parametrize("late", [done("a"), failed("a"), exited("a"), stopped("a")])
@pytest.mark.parametrize("first", [done("a"), failed("a"), exited("a")])
def test_nothing_changes_when_a_resolved_task_is_reported_again(
    begin_run: Begin, first: Stimulus, late: Stimulus
) -> None:
    """S-PAR-12: the first report counts; a late one of a replaced process changes nothing."""
    handle = begin_run(WIDE)
    handle(first)
    before = (dict(handle.machine.states), handle.machine.completed, handle.machine.failed, handle.machine.story("a#0"))
    assert handle(late) == []
    assert before == (
        dict(handle.machine.states),
        handle.machine.completed,
        handle.machine.failed,
        handle.machine.story("a#0"),
    )


@pytest.mark.parametrize("early", [done("c"), failed("c"), exited("c"), done("nobody")])
def test_nothing_changes_when_a_task_is_reported_that_does_not_run(begin_run: Begin, early: Stimulus) -> None:
    """S-PAR-12: only running tasks have results."""
    handle = begin_run(WIDE)
    assert handle(early) == []
    assert handle.states("a", "b", "c") == [TaskState.RUNNING, TaskState.RUNNING, TaskState.READY]


# Cancelling.


def test_what_runs_is_stopped_and_the_rest_is_not_started_when_a_run_is_cancelled(begin_run: Begin) -> None:
    """S-SET-27, S-PAR-33: the run ends when no task runs any more."""
    handle = begin_run(WIDE)
    assert handle(CANCEL) == [*skips("run cancelled", "c", "d"), *cancels("a", "b")]
    assert handle(stopped("a")) == []
    assert handle(stopped("b")) == [CANCELLED]
    assert handle.states("a", "b", "c", "d") == [TaskState.CANCELLED] * 4


def test_completed_outputs_are_kept_when_a_run_is_cancelled(begin_run: Begin) -> None:
    """S-SET-27: also of a task that was done before it could be stopped."""
    handle = begin_run(WIDE)
    handle(done("a"))
    handle(CANCEL)
    assert handle(done("b"), stopped("c"), stopped("d")) == [CANCELLED]
    assert handle.completed == ("a", "b")


def test_nothing_starts_when_a_task_completes_after_the_cancellation(begin_run: Begin) -> None:
    """S-PAR-33: a is done, d stays unstarted."""
    handle = begin_run(WIDE)
    handle(CANCEL)
    assert handle(done("a")) == []
    assert handle(failed("b")) == [CANCELLED]


def test_second_cancellation_says_nothing(begin_run: Begin) -> None:
    """S-SET-27: tasks are told to stop once."""
    handle = begin_run(WIDE)
    handle(CANCEL)
    assert handle(CANCEL) == []


# Early exit.


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        (ExitReason.USER_EXIT_EARLY, EXITED),
        (ExitReason.TIMEOUT, TIMED_OUT),
        (ExitReason.BUDGET_EXHAUSTED, OUT_OF_BUDGET),
    ],
)
def test_run_ends_without_error_when_a_task_exits_early(begin_run: Begin, reason: ExitReason, end: object) -> None:
    """S-ENG-17, S-ENG-59, S-PAR-30, S-BUD-4: nothing more starts, running tasks finish."""
    handle = begin_run(WIDE)
    assert handle(exited("a", reason=reason)) == skips("run ending early", "c", "d")
    assert handle(done("b")) == [end]
    assert handle.completed == ("b",)


def test_task_is_completed_whose_gate_ends_the_run(begin_run: Begin) -> None:
    """S-REV-32: its output is there; nothing more starts."""
    handle = begin_run(WIDE)
    assert handle(exited("a", has_output=True)) == skips("run ending early", "c", "d")
    assert handle(done("b")) == [EXITED]
    assert handle.completed == ("a", "b")


def test_exit_with_an_output_is_told_again_as_it_was() -> None:
    """S-REV-32, S-DUR-30: one without is recorded as it always was."""
    for has_output in (True, False):
        stimulus = exited("a", has_output=has_output)
        recorded = encode_stimulus(stimulus)
        assert ("has_output" in recorded.to_data(), recorded.is_completion) == (has_output, has_output)
        read = StimulusRecorded.from_data(recorded.to_data(), 1.0)
        assert decode_stimulus(Fact(run="r", name="a#0", at=1.0, data=read)) == stimulus


def test_first_reason_wins_when_two_tasks_exit_early(begin_run: Begin) -> None:
    """S-PAR-30."""
    handle = begin_run(WIDE)
    handle(exited("a", reason=ExitReason.TIMEOUT))
    assert handle(exited("b")) == [TIMED_OUT]


@pytest.mark.parametrize("order", [(failed("a"), exited("b")), (exited("a"), failed("b"))])
def test_early_exit_outranks_a_failure(begin_run: Begin, order: tuple[Stimulus, Stimulus]) -> None:
    """S-PAR-30: whichever came first."""
    handle = begin_run(WIDE)
    handle(order[0])
    assert handle(order[1]) == [EXITED]


def test_cancellation_outranks_an_early_exit(begin_run: Begin) -> None:
    """S-SET-27: who cancels is told that the run was cancelled."""
    handle = begin_run(WIDE)
    handle(exited("a"))
    handle(CANCEL)
    assert handle(stopped("b")) == [CANCELLED]


# Several facts in one step.


def test_facts_of_one_step_are_taken_in_order(begin_run: Begin) -> None:
    """S-PAR-14, S-PAR-23: what is started depends on all of them, the order of endings is theirs."""
    handle = begin_run(WIDE)
    assert handle(done("b"), done("a")) == starts("c", "d")
    assert handle.completed == ("b", "a")
    assert handle(failed("d"), failed("c")) == [FAILED]
    assert handle.failed == ("d", "c")


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
    machine = CheckedMachine(sequence("a")).machine
    machine._states["a#0"] = TaskState.RUNNING
    with pytest.raises(AssertionError, match="running set"):
        check(machine)
