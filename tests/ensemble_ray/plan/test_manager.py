"""The plan of a hierarchical run."""

from __future__ import annotations

from ensemble_ray import Agent, HierarchicalConstraints, Plan, Task
from ensemble_ray.definition import EnsembleDefinition
from ensemble_ray.definition.validation import TeamModels
from ensemble_ray.plan.plan import MANAGER_KEY, HierarchyRules
from ensemble_ray.plan.planner import plan_run, resolve_tasks, rules_of, workers_of
from ensemble_ray.testing import ScriptedModel

MODEL = ScriptedModel()
WRITER, DIGGER = (Agent(role=role, goal=f"be a {role}", llm=MODEL) for role in ("Writer", "Digger"))


def definition(**fields: object) -> EnsembleDefinition:
    """A hierarchical ensemble of two tasks."""
    tasks = [
        Task(description=f"do {n} of {{x}}", expected_output="a text", agent=each)
        for n, each in enumerate((WRITER, DIGGER))
    ]
    return EnsembleDefinition(**{"tasks": tasks, "workflow": "hierarchical", "inputs": {"x": "gold"}, **fields})  # type: ignore[arg-type]


def test_plan_has_one_task_and_all_agents() -> None:
    """S-HIER-1, S-HIER-3, S-HIER-7: the manager's, described by its prompt; workers in order, the manager not among them."""
    made = definition(manager_max_iterations=7, max_delegation_depth=2)
    planned = plan_run(made, resolve_tasks(made))
    (node,) = planned.plan.nodes
    assert (node.key, node.agent_key, node.agent_role, node.index) == (MANAGER_KEY, MANAGER_KEY, "Manager", 1)
    assert "Task 1: do 0 of gold" in node.description
    assert [entry.role for entry in planned.plan.agents] == ["Manager", "Writer", "Digger"]
    assert [each.role for each in planned.peers] == ["Writer", "Digger"]
    manager = planned.agents[MANAGER_KEY]
    assert (manager.role, manager.max_iterations, tuple(manager.tools)) == ("Manager", 7, ())
    assert "Writer" in (manager.background or "")
    assert planned.tasks[MANAGER_KEY].description == node.description


def test_words_of_a_strategy_take_their_places() -> None:
    """S-HIER-10: the system text is the background; none is fine."""
    made = definition()
    planned = plan_run(made, resolve_tasks(made), prompts=("lead", "do it"))
    assert planned.agents[MANAGER_KEY].background == "lead"
    assert planned.plan.nodes[0].description == "do it"
    assert plan_run(made, resolve_tasks(made), prompts=("", "do it")).agents[MANAGER_KEY].background is None


def test_manager_may_be_a_workers_key_without_clashing() -> None:
    """S-HIER-4: a role that is spelled like the key in another way gets another key."""
    odd = Agent(role="Manager!", goal="g", llm=MODEL)
    made = definition(tasks=[Task(description="d", expected_output="e", agent=odd)])
    planned = plan_run(made, resolve_tasks(made))
    assert list(planned.agents) == [MANAGER_KEY, f"{MANAGER_KEY}~2"]


def test_workers_are_known_in_order_and_made_ones_last() -> None:
    """S-HIER-1, S-DET-26: each once."""
    tasks = [
        Task(description="a", expected_output="e", agent=WRITER),
        Task(description="b", expected_output="e"),
        Task(description="c", expected_output="e", agent=WRITER),
    ]
    made = definition(tasks=tasks)
    found = workers_of(made, tasks, {tasks[1].object_id: DIGGER}, models=TeamModels(made))
    assert found == ((WRITER, False), (DIGGER, True))
    alone = definition(agents=[DIGGER], tasks=[])
    assert workers_of(alone, [], {}, models=TeamModels(alone)) == ((DIGGER, False),)


def test_rules_are_data_that_travels_with_the_plan() -> None:
    """S-HIER-82, S-HIER-84, S-HIER-47: what was declared, and nothing where nothing was."""
    rules = HierarchicalConstraints(
        required_workers=["Writer"],
        allowed_workers={"Writer", "Digger"},
        max_calls_per_worker={"Writer": 2},
        global_max_delegations=3,
        required_stages=[["Writer"], ["Digger"]],
    )
    made = definition(hierarchical_constraints=rules, enforce_required="fail", manager_stall_turns=0)
    plan = plan_run(made, resolve_tasks(made)).plan
    assert plan.hierarchy == rules_of(made)
    assert plan.hierarchy is not None
    assert (plan.hierarchy.enforce_required, plan.hierarchy.stall_turns) == ("fail", 0)
    assert plan.hierarchy.max_calls_per_worker == {"Writer": 2}
    assert plan.hierarchy.required_stages == (("Writer",), ("Digger",))
    assert rules_of(definition()) == HierarchyRules()
    assert isinstance(plan, Plan)
