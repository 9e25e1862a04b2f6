"""Checks across objects, at the start of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from ensemble_ray import Agent, HierarchicalConstraints, RateLimit, Task, ValidationError, Workflow, tool
from ensemble_ray.definition import EnsembleDefinition, validate
from ensemble_ray.definition.validation import (
    check_hierarchy,
    declared_agents,
    doubled_names,
    infer_workflow,
    manager_model,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import task_after as task
from tests.ensemble_ray.definition.test_own_runner import Echo

MODEL = ScriptedModel()
WRITER = Agent(role="Writer", goal="Write", llm=MODEL)


def handle(context: Any) -> str:
    """A handler."""
    return "done"


@tool
def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()


def refusal(**fields: object) -> str:
    """The text that validation refuses such an ensemble with."""
    with pytest.raises(ValidationError) as caught:
        validate(EnsembleDefinition(**fields))
    return str(caught.value)


FACTS = task("Find facts on {topic}")
HANDLER_TOLD = (
    "Deterministic handler tasks are not supported in HIERARCHICAL workflow. Task 'Check' has a handler configured."
)


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_delegation_depth": 0}, "max_delegation_depth must be > 0, got: 0"),
        ({"max_delegation_depth": -1}, "max_delegation_depth must be > 0, got: -1"),
        ({"delegation_timeout": 0}, "delegation_timeout must be > 0 when set, got: 0:00:00"),
        (
            {"delegation_timeout": timedelta(seconds=-1)},
            "delegation_timeout must be > 0 when set, got: -1 day, 23:59:59",
        ),
        ({"delegation_retries": -1}, "delegation_retries must be between 0 and 9, got: -1"),
        ({"delegation_retries": 10}, "delegation_retries must be between 0 and 9, got: 10"),
    ],
)
@pytest.mark.parametrize("workflow", ["sequential", "parallel", "hierarchical"])
def test_run_is_refused_when_a_limit_of_delegations_cannot_work(
    fields: dict[str, object], message: str, workflow: str
) -> None:
    """S-DOM-61.6, S-DOM-60: in every workflow, since agents delegate in all of them; what can work passes."""
    team: dict[str, object] = {"tasks": [task("a", agent=WRITER)], "workflow": workflow}
    assert refusal(**team, **fields) == f"Ensemble {message}"
    most = {"max_delegation_depth": 1, "delegation_timeout": 0.1, "delegation_retries": 9}
    assert validate(EnsembleDefinition(**team, **most)) == []
    assert validate(EnsembleDefinition(**team, delegation_retries=0)) == []


@pytest.mark.parametrize(
    ("field", "value", "needed"),
    [("manager_max_iterations", 0, "> 0"), ("manager_max_iterations", -1, "> 0"), ("manager_stall_turns", -1, ">= 0")],
)
def test_run_is_refused_when_a_limit_of_the_manager_cannot_work(field: str, value: int, needed: str) -> None:
    """S-DOM-61.7: other workflows have no manager and do not mind."""
    team: dict[str, object] = {"tasks": [task("a", agent=WRITER)], field: value}
    assert refusal(**team, workflow="hierarchical") == (
        f"Ensemble {field} must be {needed} for HIERARCHICAL workflow, got: {value}"
    )
    for workflow in ("sequential", "parallel"):
        assert validate(EnsembleDefinition(**team, workflow=workflow)) == []


def test_constraints_are_ignored_when_the_workflow_has_no_manager() -> None:
    """S-DOM-60, S-DOM-61.9: even those that could not work, and roles that a manager could not tell apart."""
    broken = HierarchicalConstraints(required_workers=["Nobody"], global_max_delegations=-1)
    twin = Agent(role="writer", goal="g", llm=MODEL)
    manager = Agent(role="Manager", goal="g", llm=MODEL)
    team = [task("a", agent=WRITER), task("b", agent=twin), task("c", agent=manager), task("d", handler=handle)]
    for workflow in ("sequential", "parallel"):
        definition = EnsembleDefinition(tasks=team, workflow=workflow, hierarchical_constraints=broken)
        assert validate(definition) == []


def test_hierarchical_rules_are_told_in_order_when_several_are_broken() -> None:
    """S-DOM-61.9, S-HIER-4, S-HIER-31, S-DET-8: roles, constraints, handler tasks; then cycles (S-DOM-61.10)."""
    manager = Agent(role="manager", goal="g", llm=MODEL)
    twin = Agent(role="WRITER", goal="g", llm=MODEL)
    ring = closed_ring("x", "y")
    fields: dict[str, object] = {
        "tasks": [*ring, task("Check", handler=handle)],
        "llm": MODEL,
        "agents": [WRITER, twin, manager],
        "workflow": "hierarchical",
        "hierarchical_constraints": HierarchicalConstraints(global_max_delegations=-1),
        "max_delegation_depth": 0,
        "manager_max_iterations": 0,
    }
    for mend, message in (
        ({}, "Ensemble max_delegation_depth must be > 0"),
        ({"max_delegation_depth": 1}, "Ensemble manager_max_iterations must be > 0"),
        ({"manager_max_iterations": 1}, "Agent role 'Manager' is reserved for the virtual manager"),
        ({"agents": [WRITER, twin]}, "Duplicate agent role 'WRITER' detected"),
        ({"agents": [WRITER]}, "HierarchicalConstraints.global_max_delegations must be >= 0"),
        ({"hierarchical_constraints": None}, HANDLER_TOLD),
        ({"tasks": ring}, "Circular context dependency"),
    ):
        fields |= mend
        assert refusal(**fields).startswith(message)


def test_any_order_passes_when_a_manager_decides() -> None:
    """S-DOM-63, S-DOM-64, S-HIER-4: context may come later or be absent, every agent is a worker."""
    idle = Agent(role="Idle", goal="Wait", llm=MODEL)
    article = task("Write", FACTS, task("absent"), agent=WRITER)
    team = [article, FACTS.replace(agent=WRITER), FACTS]
    definition = EnsembleDefinition(tasks=team, llm=MODEL, agents=[idle, WRITER, WRITER], workflow="hierarchical")
    assert validate(definition) == []


def test_unknown_roles_wait_for_the_agents_when_some_are_yet_to_be_made() -> None:
    """S-DET-26, S-HIER-31: all else is told before any model call."""
    rules = HierarchicalConstraints(required_workers=["Researcher"])
    fields: dict[str, object] = {"llm": MODEL, "workflow": "hierarchical", "hierarchical_constraints": rules}
    made = EnsembleDefinition(tasks=[task("a", agent=WRITER), FACTS], **fields)
    assert validate(made) == []
    check_hierarchy(made, ["Writer", "Researcher"])
    for roles, message in (
        (["Writer", "Agent"], "required_workers references unknown agent: 'Researcher'"),
        (["Writer", "manager"], "is reserved for the virtual manager"),
        (["Writer", "writer"], "Duplicate agent role 'writer'"),
    ):
        with pytest.raises(ValidationError, match=message):
            check_hierarchy(made, roles)
    assert "unknown agent: 'Researcher'" in refusal(tasks=[task("a", agent=WRITER)], **fields)


def test_agents_are_those_given_else_those_of_the_tasks_when_asked_who_is_known() -> None:
    """S-DOM-65, S-HIER-1: each once, in first-use order."""
    other = Agent(role="Other", goal="g", llm=MODEL)
    tasks = [task("a", agent=other), task("b", agent=WRITER), task("c", agent=other), FACTS]
    assert declared_agents(EnsembleDefinition(tasks=tasks)) == (other, WRITER)
    assert declared_agents(EnsembleDefinition(tasks=tasks, agents=[WRITER, other])) == (WRITER, other)


def test_managers_model_is_the_first_that_there_is_when_asked() -> None:
    """S-HIER-2: its own, the first worker's, the ensemble's; none is refused."""
    own, shared, first = ScriptedModel(), ScriptedModel(), ScriptedModel()
    workers = [Agent(role="First", goal="g", llm=first), WRITER]
    assert manager_model(EnsembleDefinition(manager_llm=own, llm=shared), workers) is own
    assert manager_model(EnsembleDefinition(llm=shared), workers) is first
    assert manager_model(EnsembleDefinition(llm=shared), []) is shared
    to_be_made = [task("a", llm=first), task("b", llm=own)]
    assert manager_model(EnsembleDefinition(llm=shared, tasks=to_be_made), []) is first
    with pytest.raises(ValidationError) as caught:
        manager_model(EnsembleDefinition(), [])
    assert str(caught.value).startswith("No Manager LLM available for hierarchical workflow.")


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


@pytest.mark.parametrize("workflow", ["sequential", "parallel", "hierarchical", None])
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


def test_warning_is_given_when_tasks_share_a_name() -> None:
    """S-DOM-71: one for each name; nameless tasks share none."""
    tasks = [Task.of("x").replace(name=name) for name in ("a", None, "b", "a", None, "a")]
    assert doubled_names(tasks) == ["3 tasks are named 'a'; in the plan and the record the others are 'a~2' and so on"]


def test_no_warning_is_given_when_an_agent_may_be_asked_by_another() -> None:
    """S-DOM-64: delegation makes every agent a possible worker; one that does nothing itself asks nobody."""
    idle = Agent(role="Idle", goal="Wait", llm=MODEL, allow_delegation=True)
    asking = WRITER.replace(allow_delegation=True)
    assert validate(EnsembleDefinition(tasks=[task("a", agent=asking)], agents=[idle, asking])) == []
    assert validate(EnsembleDefinition(tasks=[task("a", agent=WRITER)], agents=[idle, WRITER])) == [
        "Agent 'Idle' is registered but not assigned to any task"
    ]


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


def test_warning_is_given_when_a_manager_cannot_keep_what_a_task_declares() -> None:
    """S-HIER-88: output types and guardrails belong to a task's own execution, which a led run does not have."""
    kept = task("plain", agent=WRITER)
    lost = task("typed", agent=WRITER, output_type=dict[str, int], output_guardrails=[handle])
    warned = validate(EnsembleDefinition(tasks=[kept, lost], workflow="hierarchical"))
    assert len(warned) == 1
    assert warned[0].startswith(
        "Task 'typed' has output_type and output_guardrails without effect in HIERARCHICAL workflow"
    )
    assert validate(EnsembleDefinition(tasks=[kept, lost])) == []
    own = task("own", agent=WRITER, llm=MODEL)
    (warning,) = validate(EnsembleDefinition(tasks=[own], workflow="hierarchical"))
    assert warning.startswith("Task 'own' has llm without effect in HIERARCHICAL workflow")


def test_warning_is_given_when_a_task_leaves_to_its_agent_what_it_declares() -> None:
    """S-DOM-92: a model is no such thing (S-DOM-90), and has the limit; beside a runner it is."""
    limit = RateLimit.per_minute(3)
    lost = task("lost", agent=WRITER, tools=[shout], max_iterations=3, rate_limit=limit)
    kept = task("kept", agent=WRITER, llm=MODEL, rate_limit=limit)
    made = task("made", tools=[shout], max_iterations=3, rate_limit=limit)
    (warning,) = validate(EnsembleDefinition(tasks=[lost, kept, made], llm=MODEL))
    assert warning == (
        "Task 'lost' has tools and max_iterations and rate_limit without effect: its agent 'Writer' has its own. "
        "Set them on the agent"
    )
    runs = Agent(role="Runner", goal="Run", runner=Echo())
    lost = task("lost", agent=runs, llm=MODEL, rate_limit=limit)
    kept = task("kept", agent=runs, llm=MODEL, reflection_config=True)  # reflects with it
    (warning,) = validate(EnsembleDefinition(tasks=[lost, kept]))
    assert warning == (
        "Task 'lost' has rate_limit and llm without effect: the runner of its agent 'Runner' has its own. "
        "Set them on the runner"
    )
