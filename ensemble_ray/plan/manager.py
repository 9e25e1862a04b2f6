"""The plan of a hierarchical run: one task, the manager's, and all workers as agents. Package: plan. Pure.

In: a definition with its texts resolved, and the agents made for its tasks. Out: who works, what the manager is told of
them, and the manager with its task. The user's tasks are no tasks of the plan: the manager decides what becomes of them
(S-HIER-1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.hierarchy import ManagerPromptContext
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.team_model import TeamModels
from ensemble_ray.definition.validation import check_hierarchy, declared_agents, manager_model
from ensemble_ray.plan.plan import MANAGER_ROLE, HierarchyRules

__all__ = ["manager_context", "manager_of", "rules_of", "task_of_manager", "workers_of"]

_GOAL = "Have the tasks done by the agents of the team, within the rules, and answer with the whole"
_EXPECTED_OUTPUT = "One answer that covers all tasks, made of what the agents of the team gave."


def workers_of(
    definition: EnsembleDefinition, tasks: Sequence[Task], synthesized: Mapping[str, Agent], *, models: TeamModels
) -> tuple[tuple[Agent, bool], ...]:
    """Return the agents that work for the manager, in order, and whether each was made for a task (S-HIER-1, S-DET-26).

    Args:
        definition: Validated.
        tasks: Resolved.
        synthesized: Agents by object id of the task they were made for.
        models: Given to those that name none.

    Raises:
        ValidationError: a rule about roles is broken, which could not be known before all agents were made.
    """
    workers = dict.fromkeys(declared_agents(definition), False)
    complete = True
    for task in tasks:
        if task.agent is None and task.handler is None:
            complete = complete and task.object_id in synthesized
            if task.object_id in synthesized:
                workers.setdefault(synthesized[task.object_id], True)
    if complete:
        check_hierarchy(definition, [agent.role for agent in workers])
    return tuple((models.resolve_agent(agent), is_synthesized) for agent, is_synthesized in workers.items())


def manager_context(workers: Sequence[Agent], tasks: Sequence[Task]) -> ManagerPromptContext:
    """Return what a prompt strategy gets."""
    return ManagerPromptContext(agents=tuple(workers), tasks=tuple(tasks))


def manager_of(definition: EnsembleDefinition, workers: Sequence[Agent], background: str) -> Agent:
    """Return the manager (S-HIER-2, S-HIER-3).

    Raises:
        ValidationError: there is no model for it.
    """
    return Agent(
        role=MANAGER_ROLE,
        goal=_GOAL,
        background=background or None,
        llm=manager_model(definition, workers),
        max_iterations=definition.manager_max_iterations,
        isolation="process",
    )


def task_of_manager(description: str) -> Task:
    """Return the manager's task."""
    return Task(description=description, expected_output=_EXPECTED_OUTPUT)


def rules_of(definition: EnsembleDefinition) -> HierarchyRules:
    """Return the manager's rules."""
    constraints = definition.hierarchical_constraints
    if constraints is None:
        return HierarchyRules(enforce_required=definition.enforce_required, stall_turns=definition.manager_stall_turns)
    return HierarchyRules(
        required_workers=constraints.required_workers,
        allowed_workers=constraints.allowed_workers,
        max_calls_per_worker=dict(constraints.max_calls_per_worker),
        global_max_delegations=constraints.global_max_delegations,
        required_stages=constraints.required_stages,
        enforce_required=definition.enforce_required,
        stall_turns=definition.manager_stall_turns,
    )
