"""The assembly of outputs and errors, of results given by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from ensemble_ray import ExitReason, RunState, TaskExecutionError, TaskOutput
from ensemble_ray.record.result import RunEnd, RunResultHead, RunResults, assemble, failures_by_label, task_error

BEGUN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
RUN = RunResultHead(run_id="r", workflow="parallel", inputs={"topic": "tea"}, trace_id="t")


def end(state: RunState, reason: ExitReason = ExitReason.COMPLETED) -> RunEnd:
    """An end after two seconds."""
    return RunEnd(state=state, exit_reason=reason, started_at=BEGUN, completed_at=BEGUN + timedelta(seconds=2))


def output(raw: str) -> TaskOutput:
    """An output of some task."""
    return TaskOutput(
        raw=raw, task_description="d", agent_role="a", completed_at=BEGUN, duration=timedelta(), tool_call_count=1
    )


def test_output_has_the_trace_and_the_figures_of_its_run() -> None:
    """S-DOM-51: sums and times of the whole run."""
    made = assemble(RUN, RunResults(outputs=(output("x"),), raw="x", tool_calls=1), end(RunState.COMPLETED))

    assert (made.raw, made.run_id, made.total_tool_calls) == ("x", "r", 1)
    assert made.total_duration == made.trace.total_duration == timedelta(seconds=2)
    assert (made.trace.ensemble_id, made.trace.trace_id, made.trace.metadata) == ("r", "t", {})


def test_trace_says_how_the_run_ended_when_it_did_not_complete() -> None:
    """A partial trace is told from a whole one."""
    made = assemble(RUN, RunResults(), end(RunState.CANCELLED, ExitReason.CANCELLED))

    assert (made.exit_reason, made.trace.metadata) == (ExitReason.CANCELLED, {"state": "cancelled"})


def test_error_carries_the_trace_and_the_run_when_a_run_failed() -> None:
    """S-SET-26: up to the failure."""
    failure = task_error(ValueError("no"), (output("x"),), label="draft", task_description="Write", agent_role="Writer")
    with pytest.raises(TaskExecutionError, match="Task 'draft' failed: no") as caught:
        assemble(RUN, RunResults(), end(RunState.FAILED, ExitReason.ERROR), failure)

    assert (caught.value.run_id, [each.raw for each in caught.value.completed_task_outputs]) == ("r", ["x"])
    assert caught.value.trace is not None
    assert caught.value.trace.metadata == {"state": "failed"}


def test_error_of_user_code_is_raised_as_it_is() -> None:
    """S-MR-106: the very object, without a field of ours."""
    error = KeyError("theirs")
    with pytest.raises(KeyError) as caught:
        assemble(RUN, RunResults(), end(RunState.FAILED), error)

    assert caught.value is error
    assert not hasattr(error, "trace")


@pytest.mark.parametrize(
    ("descriptions", "labels"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "a", "a"], ["a", "a #2", "a #3"]),
        (["a", "a #2", "a"], ["a", "a #2", "a #3"]),
        (["a #2", "a #2", "a", "a"], ["a #2", "a #2 #2", "a", "a #3"]),
    ],
)
def test_failures_of_equal_descriptions_are_numbered(descriptions: list[str], labels: list[str]) -> None:
    """S-PAR-25: none is lost, also where a description looks like a number of another."""
    errors = [ValueError(str(place)) for place in range(len(descriptions))]
    found = failures_by_label(zip(descriptions, errors, strict=True))

    assert (list(found), list(found.values())) == (labels, errors)
