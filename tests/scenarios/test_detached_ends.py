"""How runs end that waited for decisions in their records: by a gate, a failure, a timeout, somebody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import (
    Ensemble,
    ExitReason,
    InlineRuntime,
    MapEnsemble,
    Phase,
    Review,
    ReviewDecision,
    RunState,
    TaskExecutionError,
    TaskHandlerContext,
    ValidationError,
    decide,
    resume,
)
from tests.builders import task
from tests.scenarios.detached import Given, gates_of, raws, team

APPROVE, LEAVE = ReviewDecision.continue_execution(), ReviewDecision.exit_early()


@pytest.fixture
def given(tmp_path: Path) -> Given:
    """The handler of every task of a test."""
    return Given(tmp_path / "done")


@pytest.mark.parametrize("workflow", ["parallel", "phases"])
def test_a_gate_that_ends_the_run_lets_the_others_go(
    inline_runtime: InlineRuntime, given: Given, workflow: str
) -> None:
    """S-REV-119, S-REV-32: what waits is cancelled, what was done stays."""
    tasks = [task(name, handler=given, review=Review.required()) for name in "ab"]
    ensemble = (
        team(*tasks, workflow="parallel")
        if workflow == "parallel"
        else Ensemble(phases=[Phase(name="p", tasks=tasks, workflow="parallel")], review_wait="detach")
    )
    output = ensemble.run(runtime=inline_runtime)
    decide(str(output.run_id), gates_of(output)["a"], LEAVE, runtime=inline_runtime)
    output = resume(str(output.run_id), ensemble, runtime=inline_runtime)
    assert (raws(output), output.exit_reason, output.open_reviews) == (["a"], ExitReason.USER_EXIT_EARLY, ())
    assert output.state is RunState.COMPLETED


def test_a_failure_ends_a_run_with_open_gates(inline_runtime: InlineRuntime, given: Given) -> None:
    """S-REV-119, S-PAR-21: nobody is asked about a run that failed."""

    def broken(_context: TaskHandlerContext) -> str:
        raise ValueError("no")

    first = task("a", handler=given, review=Review.required())
    ensemble = team(first, task("b", handler=broken), workflow="parallel", max_parallel_tasks=1)
    with pytest.raises(TaskExecutionError):
        ensemble.run(runtime=inline_runtime)


def test_a_run_past_a_timeout_applies_its_action(inline_runtime: InlineRuntime, given: Given) -> None:
    """S-REV-120, S-REV-84: the instant counts, and not who was there to see it pass."""
    first = task("a", handler=given, review=Review(timeout=0.01, on_timeout="continue"))
    second = task("b", handler=given, before_review=Review(timeout=0.02, on_timeout="exit_early"))
    ensemble = team(first, second, workflow="parallel")
    output = ensemble.run(runtime=inline_runtime)
    assert output.state is RunState.WAITING
    while output.state is RunState.WAITING:
        output = resume(str(output.run_id), ensemble, runtime=inline_runtime)
    assert (raws(output), output.exit_reason) == (["a"], ExitReason.TIMEOUT)


def test_a_cancelled_run_that_waited_goes_on(inline_runtime: InlineRuntime, given: Given) -> None:
    """S-REV-117, S-DUR-35: its gates are what they were."""
    first = task("a", handler=given, review=Review.required())
    ensemble = team(first, task("b", handler=given, context=[first]))
    output = ensemble.run(runtime=inline_runtime)
    attached = Ensemble(
        tasks=ensemble.tasks, review_handler=lambda request: ReviewDecision.edit(request.task_output * 2)
    )
    done = resume(str(output.run_id), attached, runtime=inline_runtime)
    assert (raws(done), given.done) == (["aa", "b+aa"], ["a", "b"])


def test_waits_are_in_no_duration(inline_runtime: InlineRuntime, given: Given) -> None:
    """S-REV-118: a task that was put down before and behind it took what its work took."""
    asked = task("a", handler=given, before_review=Review.required(), review=Review.required())
    ensemble = team(asked)
    output = ensemble.run(runtime=inline_runtime)
    decide(str(output.run_id), output.open_reviews[0].gate_id, APPROVE, runtime=inline_runtime)
    first_decided = output.open_reviews[0].created_at
    output = resume(str(output.run_id), ensemble, runtime=inline_runtime)
    behind = output.open_reviews[0]
    decide(str(output.run_id), behind.gate_id, APPROVE, runtime=inline_runtime)
    output = resume(str(output.run_id), ensemble, runtime=inline_runtime)
    given_output = output.task_outputs[0]
    assert given_output.completed_at == behind.created_at
    assert given_output.completed_at - given_output.duration > first_decided


def test_tasks_that_are_made_on_the_way_cannot_wait_in_a_record(inline_runtime: InlineRuntime) -> None:
    """S-REV-121: said before anything is done."""
    each = MapEnsemble(items=["x"], map_task=lambda item: task(str(item), handler=lambda _: "y"), review_wait="detach")
    with pytest.raises(ValidationError, match="review_wait 'detach' is for ensembles with a plan"):
        each.run(runtime=inline_runtime)
