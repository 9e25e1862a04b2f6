"""What a run raises of which a loop, a phase or a graph failed."""

from dataclasses import replace
from typing import cast

import pytest
from msgspec import structs

from ensemble_ray import (
    AgentExecutionError,
    GraphNoEdgeMatchedError,
    MaxGraphStepsExceededError,
    MaxLoopIterationsExceededError,
    ParallelExecutionError,
    PhaseStatus,
    TaskExecutionError,
    ValidationError,
)
from ensemble_ray.record.result import FailureSeen, failure_of, failures_seen
from ensemble_ray.record.units import EndedUnits
from ensemble_ray.schedule.instructions import GraphResult, LoopResult, PhaseResult, StepResult, UnitFailure
from tests.ensemble_ray.record.units.plans import (
    DRAFT,
    POLISH,
    PRINT,
    REFINE,
    TRIAGE,
    graph_plan,
    loop_plan,
    outputs,
    phase_plan,
)
from tests.ensemble_ray.record.units.test_projection import ALL, TWO

CAP = UnitFailure(unit="loop:refine", at=9.0, reason="cap", completed_before=5)
BOOM = UnitFailure(
    unit="loop:refine", at=9.0, reason="evaluation", completed_before=5, message="boom", error_type="RuntimeError"
)


def _failed(ended: EndedUnits, key: str, at: float = 5.0, before: int = 0) -> FailureSeen:
    error = AgentExecutionError("the model failed")
    return FailureSeen(at=at, error=error, completed_before=before, node=ended.nodes[key])


def _raised(ended: EndedUnits, *tasks: FailureSeen, **raised: BaseException) -> BaseException:
    by_unit = [(f"loop:{name}", error) for name, error in raised.items()]
    return failure_of(ended, failures_seen(ended, tasks, by_unit))


@pytest.mark.parametrize("workflow", ["sequential", "parallel"])
def test_cap_that_raises_is_unwrapped(workflow: str) -> None:
    """S-LOOP-61, S-LOOP-62: in sequential workflow, and in parallel workflow with fail_fast."""
    ended = EndedUnits(plan=loop_plan(REFINE, workflow=workflow), failures=[CAP], outputs=ALL)
    error = _raised(ended)
    assert type(error) is MaxLoopIterationsExceededError
    assert str(error) == "Loop 'refine' did not converge after 3 iterations"
    assert (error.loop_name, error.max_iterations) == ("refine", 3)
    assert [each.raw for each in error.completed_task_outputs] == list(ALL)


def test_cap_is_one_of_the_causes_when_the_others_go_on() -> None:
    """S-LOOP-62, S-LOOP-182: a loop counts as one; completed ones show what they show in an output."""
    plan = loop_plan(REFINE, POLISH, workflow="parallel", strategy="continue_on_error")
    results = [
        LoopResult(unit="loop:polish", iterations=(("loop:polish#0/shine#0",),), termination_reason="predicate"),
        LoopResult(unit="loop:refine", iterations=TWO, termination_reason="max_iterations"),
    ]
    made = {**ALL, **outputs(["loop:polish#0/shine#0"])}
    error = _raised(EndedUnits(plan=plan, results=results, failures=[CAP], outputs=made))
    assert isinstance(error, ParallelExecutionError)
    assert str(error).startswith("1 of 3 tasks failed: 'refine': ")
    assert isinstance(error.failed_task_causes["refine"], MaxLoopIterationsExceededError)
    assert [each.raw for each in error.completed_task_outputs] == ["facts#0", "loop:polish#0/shine#0"]


def test_error_of_a_predicate_leaves_as_it_is() -> None:
    """S-LOOP-53, S-SET-44: under sequential workflow the very object."""
    boom = RuntimeError("boom")
    ended = EndedUnits(plan=loop_plan(REFINE), failures=[BOOM], outputs=ALL)
    assert _raised(ended, refine=boom) is boom


def test_error_of_a_predicate_is_the_cause_under_parallel_workflow() -> None:
    """S-LOOP-53."""
    boom = RuntimeError("boom")
    ended = EndedUnits(plan=loop_plan(REFINE, workflow="parallel"), failures=[BOOM], outputs=ALL)
    error = _raised(ended, refine=boom)
    assert type(error) is TaskExecutionError
    assert str(error) == "Loop 'refine' failed: boom (RuntimeError)"
    assert error.__cause__ is boom
    assert len(error.completed_task_outputs) == 5


def test_failed_task_of_a_body_ends_the_run_as_any_does() -> None:
    """S-LOOP-110, S-LOOP-182: with what every iteration gave before."""
    ended = EndedUnits(plan=loop_plan(REFINE), outputs=ALL)
    error = _raised(ended, _failed(ended, "critic", before=4))
    assert type(error) is TaskExecutionError
    assert str(error) == "Task 'critic' failed: the model failed"
    assert (error.task_description, error.agent_role) == ("Do critic", "criticer")
    assert [each.raw for each in error.completed_task_outputs] == list(ALL)[:4]


def test_first_failure_counts() -> None:
    """S-PAR-23, S-LOOP-62: of tasks and loops alike, whichever order they are kept in."""
    ended = EndedUnits(plan=loop_plan(REFINE, workflow="parallel"), failures=[CAP], outputs=ALL)
    assert isinstance(_raised(ended, _failed(ended, "facts", at=8.0)), TaskExecutionError)
    assert isinstance(_raised(ended, _failed(ended, "facts", at=10.0)), MaxLoopIterationsExceededError)


# Phases.

DRAFTED = ("phase:draft#0/plan#0", "phase:draft#0/write#0")
DONE = PhaseResult(unit="phase:draft", status="completed", outputs=DRAFTED, attempts=1)
SKIPPED = PhaseResult(unit="phase:print", status="skipped")


def test_rejected_phase_fails_with_the_reason() -> None:
    """S-PHASE-54, S-PHASE-85: and with where each phase stands."""
    failed = structs.replace(DONE, status="failed")
    refused = UnitFailure(unit="phase:draft", at=4.0, reason="rejected", completed_before=3, message="too long")
    made = outputs([*DRAFTED, "phase:draft#0/check#0"])
    ended = EndedUnits(plan=phase_plan(DRAFT, PRINT), results=[failed, SKIPPED], failures=[refused], outputs=made)
    error = _raised(ended)
    assert type(error) is TaskExecutionError
    assert str(error) == "Phase 'draft' was rejected by review: too long"
    assert error.phase_statuses == {"draft": PhaseStatus.FAILED, "print": PhaseStatus.SKIPPED}
    assert [each.raw for each in error.completed_task_outputs] == list(DRAFTED)


def test_failed_task_of_a_phase_is_told_as_it_is() -> None:
    """S-PHASE-53, S-PHASE-54: completed phases first, then what the failing phase completed itself."""
    phase = replace(PRINT, members=("layout", "press"), after=())
    failed = PhaseResult(unit="phase:print", status="failed", outputs=("phase:print#0/layout#0",), attempts=1)
    made = outputs(["phase:print#0/layout#0", *DRAFTED])
    ended = EndedUnits(plan=phase_plan(DRAFT, phase), results=[failed, DONE], outputs=made)
    error = _raised(ended, _failed(ended, "press", before=1))
    assert str(error) == "Task 'press' failed: the model failed"
    assert isinstance(error, TaskExecutionError)
    assert [each.raw for each in error.completed_task_outputs] == [*DRAFTED, "phase:print#0/layout#0"]
    assert error.phase_statuses == {"draft": "completed", "print": "failed"}


@pytest.mark.parametrize("error", [ValidationError("no such tool"), MaxLoopIterationsExceededError("refine", 3)])
def test_other_errors_of_a_phase_are_wrapped(error: Exception) -> None:
    """S-PHASE-53: `Phase failed: {message}`."""
    failed = structs.replace(DONE, status="failed", outputs=())
    ended = EndedUnits(plan=phase_plan(DRAFT), results=[failed])
    seen = FailureSeen(at=1.0, error=error, completed_before=0, node=ended.nodes["plan"])
    if isinstance(error, MaxLoopIterationsExceededError):
        seen = structs.replace(seen, node=None, unit="phase:draft#0/loop:refine")
    wrapped = failure_of(ended, [seen])
    assert type(wrapped) is TaskExecutionError
    assert str(wrapped) == f"Phase failed: {error}"
    assert wrapped.__cause__ is error


def test_parallel_phase_that_goes_on_fails_with_all_its_causes() -> None:
    """S-PHASE-50, S-PHASE-53: under the phase's own rules; failures of other phases are none of its."""
    phase = replace(DRAFT, workflow="parallel", review=None)
    plan = phase_plan(phase, replace(PRINT, after=()), strategy="continue_on_error")
    failed = structs.replace(DONE, status="failed", outputs=())
    ended = EndedUnits(plan=plan, results=[failed, structs.replace(SKIPPED, status="failed")])
    error = _raised(ended, *(_failed(ended, key) for key in ("layout", "plan", "write")))
    assert isinstance(error, TaskExecutionError)
    assert str(error).startswith("Phase failed: 2 of 2 tasks failed: 'plan': ")
    cause = error.__cause__
    assert isinstance(cause, ParallelExecutionError)
    assert list(cause.failed_task_causes) == ["plan", "write"]


def test_review_that_raises_and_a_rerun_that_fails_are_failures_of_the_phase() -> None:
    """S-PHASE-92, S-PHASE-93: the rerun of an earlier phase is blamed on the one that wanted it."""
    failed = structs.replace(DONE, status="failed")
    ended = EndedUnits(plan=phase_plan(DRAFT, PRINT), results=[failed, SKIPPED], outputs=outputs(DRAFTED))
    assert str(_raised(ended, _failed(ended, "check"))) == "Task 'check' failed: the model failed"
    printing = PhaseResult(unit="phase:print", status="failed", outputs=("phase:print#0/layout#0",), attempts=1)
    made = outputs([*DRAFTED, "phase:print#0/layout#0"])
    ended = EndedUnits(plan=phase_plan(DRAFT, PRINT), results=[DONE, printing], outputs=made)
    error = cast("TaskExecutionError", _raised(ended, _failed(ended, "write")))
    assert str(error) == "Task 'write' failed: the model failed"
    assert error.phase_statuses == {"draft": "completed", "print": "failed"}


# Graphs.


def _walked(*steps: tuple[str, str, str | None]) -> GraphResult:
    results = tuple(
        StepResult(state=state, instance=f"graph:triage#{number}/{key}#0", next_state=next_state)
        for number, (state, key, next_state) in enumerate(steps)
    )
    return GraphResult(unit="graph:triage", steps=results, termination_reason=None)


def test_graph_without_a_matching_edge_says_which_were_tried() -> None:
    """S-GRAPH-45, S-GRAPH-47: with the label, or that there is a predicate."""
    result = _walked(("write", "write", "critique"), ("critique", "critic", None))
    failure = UnitFailure(unit="graph:triage", at=3.0, reason="no_edge", completed_before=2)
    made = outputs(step.instance for step in result.steps)
    error = _raised(EndedUnits(plan=graph_plan(), results=[result], failures=[failure], outputs=made))
    assert isinstance(error, GraphNoEdgeMatchedError)
    assert (error.graph_name, error.current_state, error.output_preview) == (
        *("triage", "critique"),
        "graph:triage#1/critic#0",
    )
    assert error.candidate_edges == ("→ write (again)", "→ __END__ (predicate)")
    assert len(error.completed_task_outputs) == 2


def test_graph_at_its_cap_says_where_it_stood() -> None:
    """S-GRAPH-50."""
    result = _walked(("write", "write", "critique"), ("critique", "critic", "write"))
    failure = UnitFailure(unit="graph:triage", at=3.0, reason="cap", completed_before=2)
    made = outputs(step.instance for step in result.steps)
    error = _raised(EndedUnits(plan=graph_plan(), results=[result], failures=[failure], outputs=made))
    assert isinstance(error, MaxGraphStepsExceededError)
    assert (error.max_steps, error.last_state) == (4, "critique")


def test_error_of_a_condition_and_of_a_states_task_leave_as_in_a_sequence() -> None:
    """S-GRAPH-46, S-GRAPH-52."""
    result = _walked(("write", "write", None))
    failure = UnitFailure(unit="graph:triage", at=3.0, reason="evaluation", completed_before=1, message="boom")
    made = outputs(step.instance for step in result.steps)
    ended = EndedUnits(plan=graph_plan(), results=[result], failures=[failure], outputs=made)
    boom = RuntimeError("boom")
    assert failure_of(ended, failures_seen(ended, (), [("graph:triage", boom)])) is boom
    ended = EndedUnits(plan=graph_plan(TRIAGE), results=[result], outputs=made)
    assert str(_raised(ended, _failed(ended, "critic", before=1))) == "Task 'critic' failed: the model failed"
