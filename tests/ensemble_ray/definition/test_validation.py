"""Checks across objects, at the start of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.validation import infer_workflow, validate
from ensemble_ray.definition.workflow import Workflow
from ensemble_ray.errors import ValidationError
from ensemble_ray.limits.rate_limit import RateLimit
from ensemble_ray.testing import ScriptedModel

MODEL = ScriptedModel()
WRITER = Agent(role="Writer", goal="Write", llm=MODEL)


def handle(context: Any) -> str:
    """A handler."""
    return "done"


def task(description: str, *context: Task, **fields: object) -> Task:
    """A task of that description."""
    return Task(description=description, expected_output="e", context=context, **fields)


def refusal(**fields: object) -> str:
    """The text that validation refuses such an ensemble with."""
    with pytest.raises(ValidationError) as caught:
        validate(EnsembleDefinition(**fields))
    return str(caught.value)


FACTS = task("Find facts on {topic}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tasks": []}, "Ensemble must have at least one task"),
        (
            {"tasks": [FACTS], "rate_limit": RateLimit.per_minute(1)},
            (
                "Ensemble rate_limit is configured but llm is None. "
                "An ensemble-level llm is required when rate_limit is set."
            ),
        ),
        ({"tasks": [FACTS], "llm": MODEL, "agents": []}, "Ensemble must have at least one agent"),
        (
            {"tasks": [task("Write on {topic}", agent=WRITER)], "agents": [WRITER.replace()]},
            "Task 'Write on {topic}' references agent 'Writer' which is not in the ensemble's agent list",
        ),
        (
            {"tasks": [task("a", agent=WRITER), FACTS]},
            (
                "Task 'Find facts on {topic}' has no LLM available. Provide an explicit agent, a task-level llm, "
                "an ensemble-level llm, or configure a deterministic handler."
            ),
        ),
        (
            {"tasks": [FACTS], "llm": MODEL, "workflow": "parallel", "parallel_error_strategy": None},
            "Ensemble parallel_error_strategy must not be None for PARALLEL workflow",
        ),
    ],
)
def test_run_is_refused_with_the_exact_text_when_a_check_fails(fields: dict[str, object], message: str) -> None:
    """S-DOM-61.1, S-DOM-61.2, S-DOM-61.3, S-DOM-61.4, S-DOM-61.5 and S-DOM-61.8; S-DOM-65, S-RATE-21."""
    assert refusal(**fields) == message


def test_hierarchical_is_refused_first_when_chosen() -> None:
    """S-SET-41: the word is known, the workflow comes with a later version; nothing else is said before it."""
    assert refusal(tasks=[], workflow="hierarchical") == (
        "The hierarchical workflow is not available in this version. Use 'sequential' or 'parallel'."
    )


def test_only_the_first_failure_is_told_when_several_checks_fail() -> None:
    """S-CONV-14, S-DOM-61: the order of the table."""
    later = task("later")
    fields: dict[str, object] = {
        "tasks": [],
        "workflow": "parallel",
        "rate_limit": RateLimit.per_minute(1),
        "agents": [],
        "parallel_error_strategy": None,
    }
    for fix, message in (
        ({}, "Ensemble must have at least one task"),
        ({"tasks": [task("a", later, agent=WRITER), later]}, "Ensemble rate_limit is configured"),
        ({"rate_limit": None}, "Ensemble must have at least one agent"),
        ({"agents": [WRITER.replace()]}, "Task 'a' references agent 'Writer'"),
        ({"agents": [WRITER]}, "Task 'later' has no LLM available"),
        ({"llm": MODEL}, "Ensemble parallel_error_strategy must not be None"),
        ({"workflow": "sequential"}, "Task 'a' references context task 'later' which appears later"),
    ):
        fields |= fix
        assert refusal(**fields).startswith(message)


@pytest.mark.parametrize(
    "fields",
    [
        {"tasks": [task("a", handler=handle)]},
        {"tasks": [task("a", agent=WRITER)]},
        {"tasks": [task("a", llm=MODEL)]},
        {"tasks": [task("a")], "llm": MODEL},
        {"tasks": [task("a", agent=WRITER), task("b", agent=WRITER)], "agents": [WRITER]},
        {"tasks": [task("a", agent=WRITER), FACTS], "agents": [WRITER], "llm": MODEL},
        {"tasks": [task("a")], "llm": MODEL, "parallel_error_strategy": None},
    ],
)
def test_ensemble_passes_when_every_task_has_somebody_to_do_it(fields: dict[str, object]) -> None:
    """S-DOM-61.5, S-DOM-66, S-DOM-67, S-DET-32: inputs may be missing, one agent may do all, handlers need no model."""
    assert validate(EnsembleDefinition(**fields)) == []


def test_same_agent_passes_when_it_came_through_an_internal_rewrite() -> None:
    """S-DOM-61.4, S-CONV-30: membership is by identity, not by looks."""
    rewritten = WRITER.rewritten(goal="other")
    assert validate(EnsembleDefinition(tasks=[task("a", agent=rewritten)], agents=[WRITER])) == []


def closed_ring(*descriptions: str) -> Sequence[Task]:
    """Tasks whose context leads round; only an internal rewrite can make such."""
    first = task(descriptions[0])
    last = first
    ring = [first]
    for description in descriptions[1:]:
        last = task(description, last)
        ring.append(last)
    ring[0] = first.rewritten(context=(last,))
    return ring


@pytest.mark.parametrize("workflow", ["sequential", "parallel", None])
def test_cycle_is_refused_when_context_leads_back(workflow: str | None) -> None:
    """S-DOM-61.10, S-DOM-62: for every workflow, before the order is looked at."""
    ring = closed_ring("a", "b", "c")
    assert refusal(tasks=ring, llm=MODEL, workflow=workflow) == (
        "Circular context dependency detected involving task: 'a'"
    )


def test_cycle_is_refused_when_it_lies_outside_the_list() -> None:
    """S-DOM-62: the walk follows context tasks that are not listed."""
    outside = closed_ring("x", "y")[0]
    assert "Circular context dependency" in refusal(tasks=[task("a", outside)], llm=MODEL, workflow="parallel")


def test_shared_context_is_no_cycle_when_ways_meet_again() -> None:
    """S-DOM-62: a diamond."""
    top = task("top")
    left, right = task("left", top), task("right", top)
    assert validate(EnsembleDefinition(tasks=[top, left, right, task("join", left, right, top)], llm=MODEL)) == []


def test_long_chain_passes_when_it_is_longer_than_the_stack() -> None:
    """S-DOM-62: the walk needs no recursion."""
    chain = [task("0")]
    for number in range(1, 5000):
        chain.append(task(str(number), chain[-1]))
    assert validate(EnsembleDefinition(tasks=chain, llm=MODEL)) == []


def test_order_is_refused_when_a_sequential_context_comes_later() -> None:
    """S-DOM-61.11, S-DOM-63: parallel takes any order."""
    article = task("Write", FACTS)
    assert refusal(tasks=[article, FACTS], llm=MODEL) == (
        "Task 'Write' references context task 'Find facts on {topic}' which appears later in the task list"
    )
    assert validate(EnsembleDefinition(tasks=[article, FACTS], llm=MODEL, workflow="parallel")) == []
    assert validate(EnsembleDefinition(tasks=[FACTS, article], llm=MODEL)) == []


def test_context_is_refused_when_a_sequential_list_lacks_it() -> None:
    """S-DOM-61.12, S-DOM-63; an inferred sequential workflow counts as well."""
    article = task("Write", FACTS)
    message = "Task 'Write' references context task 'Find facts on {topic}' which is not in the ensemble's task list"
    assert refusal(tasks=[article], llm=MODEL) == message
    assert refusal(tasks=[article], llm=MODEL, workflow=None) == message
    assert validate(EnsembleDefinition(tasks=[article], llm=MODEL, workflow="parallel")) == []


def test_later_context_is_told_before_an_absent_one_when_both_are_wrong() -> None:
    """S-CONV-14: S-DOM-61.11 stands above S-DOM-61.12, whichever task comes first."""
    later = task("later")
    listed = [task("a", task("absent")), task("b", later), later]
    assert refusal(tasks=listed, llm=MODEL).endswith("which appears later in the task list")


def test_warning_is_given_when_an_agent_has_nothing_to_do(caplog: pytest.LogCaptureFixture) -> None:
    """S-DOM-64: returned for the caller to log, in the order of the list; nothing is logged here."""
    idle = Agent(role="Idle", goal="Wait", llm=MODEL)
    with caplog.at_level(logging.DEBUG):
        warnings = validate(EnsembleDefinition(tasks=[task("a", agent=WRITER)], agents=[idle, WRITER]))
    assert warnings == ["Agent 'Idle' is registered but not assigned to any task"]
    assert not caplog.records


def test_workflow_is_inferred_when_none_is_chosen() -> None:
    """S-DET-40, S-DET-41, S-DET-42."""
    article = task("Write", FACTS)
    for listed, chosen, expected in (
        ([FACTS, article], None, Workflow.PARALLEL),
        ([article, FACTS], None, Workflow.PARALLEL),
        ([article], None, Workflow.SEQUENTIAL),
        ([FACTS], None, Workflow.SEQUENTIAL),
        ([FACTS, article], "sequential", Workflow.SEQUENTIAL),
        ([FACTS], "parallel", Workflow.PARALLEL),
    ):
        assert infer_workflow(EnsembleDefinition(tasks=listed, llm=MODEL, workflow=chosen)) is expected
    assert validate(EnsembleDefinition(tasks=[article, FACTS], llm=MODEL, workflow=None)) == []
