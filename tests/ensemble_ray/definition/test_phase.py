"""What a phase and its review are, and what they refuse to be."""

from __future__ import annotations

import pytest

from ensemble_ray import Loop, Phase, PhaseReview, Task, ValidationError, Workflow

A, B = Task.of("a"), Task.of("b")
JUDGE = Task.of("judge")


def test_fields_have_their_defaults_when_only_name_and_tasks_are_given() -> None:
    """S-PHASE-1: None entries of `after` are dropped."""
    first = Phase(name="first", tasks=[A])
    assert (first.name, first.tasks, first.workflow, first.after, first.review) == ("first", (A,), None, (), None)
    second = Phase(name="second", tasks=[B], after=[None, first], workflow="parallel")  # type: ignore[list-item]
    assert (second.after, second.workflow) == ((first,), Workflow.PARALLEL)
    assert first != Phase(name="first", tasks=[A])


def test_phase_is_made_of_tasks_when_the_short_form_is_used() -> None:
    """S-PHASE-2."""
    for made in (Phase.of("p", A, B), Phase.of("p", [A, B])):
        assert (made.name, made.tasks, made.workflow, made.after, made.review) == ("p", (A, B), None, (), None)


def test_phase_has_no_rules_of_its_own_when_it_is_declared() -> None:
    """S-PHASE-5, S-PHASE-6."""
    for field in ("listeners", "rate_limit", "input_guardrails", "phases"):
        with pytest.raises(ValidationError, match=f"unknown field '{field}'"):
            Phase(name="p", tasks=[A], **{field: []})  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="Phase 'p' tasks element at index 0 must be a Task, got: Phase"):
        Phase(name="p", tasks=[Phase.of("q", A)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"name": None}, "Phase name must not be None or blank", id="S-PHASE-10-none"),
        pytest.param({"name": " ", "tasks": []}, "Phase name must not be None or blank", id="S-PHASE-10"),
        pytest.param({"tasks": []}, "Phase 'p' must contain at least one task", id="S-PHASE-11"),
        pytest.param(
            {"tasks": [], "workflow": "hierarchical"}, "Phase 'p' must contain at least one task", id="S-PHASE-11-first"
        ),
        pytest.param(
            {"workflow": "hierarchical"},
            "Phase 'p': Workflow.HIERARCHICAL is not supported at the phase level. Use HIERARCHICAL at the ensemble level "
            "(without phases) for hierarchical delegation.",
            id="S-PHASE-12",
        ),
        pytest.param({"after": ["q"]}, "Phase 'p' after element at index 0 must be a Phase, got: str", id="after"),
    ],
)
def test_phase_is_refused_when_a_check_fails(fields: dict[str, object], message: str) -> None:
    """S-PHASE-10 to S-PHASE-12: exact texts, in this order."""
    with pytest.raises(ValidationError) as caught:
        Phase(**{"name": "p", "tasks": [A], **fields})  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_phase_holds_loops_when_they_are_given_beside_or_in_place_of_tasks() -> None:
    """S-PHASE-110: tasks, bodies and reviewer are all of its tasks."""
    loop = Loop(name="refine", body=[B])
    assert Phase(name="p", loops=[loop]).all_tasks == (B,)
    assert Phase(name="p", tasks=[A], loops=[loop], review=PhaseReview.of(JUDGE)).all_tasks == (A, B, JUDGE)
    with pytest.raises(ValidationError, match="Phase 'p' loops element at index 0 must be a Loop, got: Task"):
        Phase(name="p", tasks=[A], loops=[B])  # type: ignore[list-item]


def test_output_stands_for_the_phase_when_it_is_context() -> None:
    """S-PHASE-111."""
    phase = Phase.of("draft", A)
    reader = Task(description="r", expected_output="e", context=[phase.output])
    assert reader.context == (phase.output,)
    assert phase.output.description == "output of phase 'draft'"
    with pytest.raises(ValidationError, match=r"got: Phase\. Name what it gives: the \.output of phase 'draft'"):
        Task(description="r", expected_output="e", context=[phase])  # type: ignore[list-item]


def test_review_has_two_retries_of_each_kind_when_none_are_given() -> None:
    """S-PHASE-60."""
    full, short = PhaseReview(task=JUDGE), PhaseReview.of(JUDGE, 0)
    assert (full.task, full.max_retries, full.max_predecessor_retries) == (JUDGE, 2, 2)
    assert (short.max_retries, short.max_predecessor_retries) == (0, 2)
    assert PhaseReview.of(JUDGE) == full


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": None, "max_retries": -1}, "PhaseReview task must not be None"),
        ({"max_retries": -1}, "PhaseReview max_retries must be >= 0, got: -1"),
        ({"max_predecessor_retries": -2}, "PhaseReview max_predecessor_retries must be >= 0, got: -2"),
    ],
)
def test_review_is_refused_when_a_check_fails(fields: dict[str, object], message: str) -> None:
    """S-PHASE-61."""
    with pytest.raises(ValidationError) as caught:
        PhaseReview(**{"task": JUDGE, **fields})  # type: ignore[arg-type]
    assert str(caught.value) == message
