"""All checks across objects, in the order of the specification (S-DOM-61). Package: definition.

In: an ensemble, as it was declared. Out: warnings as texts; whoever runs it logs them. Nothing is logged, resolved or
called here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.budget import check_costs
from ensemble_ray.definition.durability import Durability
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.hierarchy import check_constraints, check_roles
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.run_rules import RunRules
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.team_model import uses_team_model
from ensemble_ray.definition.unit_checks import NO_MODEL_ADVICE, check_units
from ensemble_ray.definition.unit_output import UnitOutput
from ensemble_ray.definition.workflow import Workflow
from ensemble_ray.errors import ValidationError
from ensemble_ray.ports import ChatModel
from ensemble_ray.values.epochs import MOST_RESENDS

__all__ = [
    "check_hierarchy",
    "check_rules",
    "declared_agents",
    "doubled_names",
    "infer_workflow",
    "manager_model",
    "refuse_cycles",
    "validate",
]


def validate(definition: EnsembleDefinition) -> list[str]:
    """Check what the parts of an ensemble have to do with each other.

    Returns:
        Warnings to log; the run goes on (S-DOM-64).

    Raises:
        ValidationError: the first check that fails.
    """
    if not definition.tasks and not definition.has_units:
        raise ValidationError("Ensemble must have at least one task")
    check_units(definition)
    check_rules(definition)
    _check_agents(definition)
    _check_models(definition)
    _check_delegation(definition)
    workflow = infer_workflow(definition)
    if workflow is Workflow.HIERARCHICAL:
        _check_manager(definition)
    if workflow is Workflow.PARALLEL and definition.parallel_error_strategy is None:
        raise ValidationError("Ensemble parallel_error_strategy must not be None for PARALLEL workflow")
    if workflow is Workflow.HIERARCHICAL:
        _check_hierarchical(definition)
    refuse_cycles(definition.all_tasks, definition.all_loops)
    if workflow is Workflow.SEQUENTIAL:
        _check_order(definition.tasks)
    return _warnings(definition)


def doubled_names(tasks: Sequence[Task]) -> list[str]:
    """Return a warning for each name that several tasks of a list have (S-DOM-71)."""
    counts = Counter(task.name for task in tasks if task.name is not None)
    return [
        f"{count} tasks are named '{name}'; in the plan and the record the others are '{name}~2' and so on"
        for name, count in counts.items()
        if count > 1
    ]


def check_rules(definition: RunRules) -> None:
    """Check what holds for every kind of ensemble; for the start of a run.

    Raises:
        ValidationError: the first rule that cannot be kept.
    """
    if definition.rate_limit is not None and definition.llm is None:
        raise ValidationError(
            "Ensemble rate_limit is configured but llm is None. "
            "An ensemble-level llm is required when rate_limit is set."
        )
    check_costs(definition.max_cost, definition.cost_configuration)
    if definition.is_detached and definition.durability is Durability.OFF:
        raise ValidationError(
            "Ensemble review_wait 'detach' needs a record, in which the run waits, and durability is 'off'. "
            "Use durability 'effects' or 'run', or review_wait 'attached'"
        )


def infer_workflow(definition: EnsembleDefinition) -> Workflow:
    """Return the workflow that was chosen, else parallel if a task of the list is context of another (S-DET-40).

    Phases and graphs have no such list, and what loops wait for does not count (S-DET-43, S-LOOP-125).
    """
    if definition.workflow is not None:
        return definition.workflow
    listed = {task.object_id for task in definition.tasks}
    is_linked = any(entry.object_id in listed for task in definition.tasks for entry in task.context)
    return Workflow.PARALLEL if is_linked else Workflow.SEQUENTIAL


def declared_agents(definition: EnsembleDefinition) -> tuple[Agent, ...]:
    """Return the agents before any is made: those given, else those of the tasks in first-use order (S-DOM-65)."""
    agents = definition.agents
    named = agents if agents is not None else (task.agent for task in definition.all_tasks if task.agent is not None)
    return tuple(dict.fromkeys(named))


def manager_model(definition: EnsembleDefinition, workers: Sequence[Agent]) -> ChatModel:
    """Return the model of a hierarchical run's manager (S-HIER-2).

    Args:
        definition: Names the manager's own model, and one for everybody.
        workers: All of them, those made for tasks included, in order; none, where none is made yet.

    Raises:
        ValidationError: there is none.
    """
    model = definition.manager_llm
    if model is None:
        model = next((worker.llm for worker in workers if worker.runner is None), None)
    if model is None and definition.tasks:
        model = definition.tasks[0].llm  # that of the agent that will be made for it (S-DET-20)
    if model is None:
        model = definition.llm
    if model is None:
        raise ValidationError(
            "No Manager LLM available for hierarchical workflow. Set manager_llm, an agent's llm, or an ensemble-level llm."
        )
    return model


def check_hierarchy(definition: EnsembleDefinition, roles: Sequence[str]) -> None:
    """Check a hierarchical ensemble against the roles of all its workers (S-HIER-4, S-HIER-30 to S-HIER-37).

    `validate` does it where all roles are known then; where agents are made for tasks, whoever made them does it.

    Args:
        definition: Validated.
        roles: One per worker, in order.

    Raises:
        ValidationError: the first rule that is broken.
    """
    check_roles(roles)
    check_constraints(definition.hierarchical_constraints, roles)


def refuse_cycles(tasks: Sequence[Task], loops: Sequence[Loop] = ()) -> None:
    """Walk the context of every task and loop, also outside the lists, and refuse a way that leads back to itself (S-DOM-62).

    Args:
        tasks: All of them.
        loops: Those whose outputs tasks may have as context.

    Raises:
        ValidationError: S-DOM-61.10.
    """
    by_id = {loop.object_id: loop for loop in loops}
    finished: set[str] = set()
    roots: tuple[Task | Loop, ...] = (*tasks, *loops)
    for root in roots:
        root_id = root.object_id
        if root_id in finished:
            continue
        # An explicit stack: chains are longer than Python's own allows.
        path = {root_id}
        stack: list[tuple[str, Iterator[Task | UnitOutput]]] = [(root_id, iter(root.context))]
        while stack:
            object_id, rest = stack[-1]
            entry = next(rest, None)
            if entry is None:
                stack.pop()
                path.discard(object_id)
                finished.add(object_id)
            elif (entry_id := entry.object_id) in path:
                raise ValidationError(f"Circular context dependency detected involving task: '{entry.description}'")
            elif entry_id not in finished:
                path.add(entry_id)
                waited = by_id.get(entry_id) if isinstance(entry, UnitOutput) else entry
                stack.append((entry_id, iter(() if waited is None else waited.context)))


def _check_agents(definition: EnsembleDefinition) -> None:
    """S-DOM-61.3 and S-DOM-61.4."""
    if definition.agents is None:
        return
    if not definition.agents:
        raise ValidationError("Ensemble must have at least one agent")
    registered = set(definition.agents)
    for task in definition.all_tasks:
        if task.agent is not None and task.agent not in registered:
            raise ValidationError(
                f"Task '{task.description}' references agent '{task.agent.role}' "
                "which is not in the ensemble's agent list"
            )


def _check_models(definition: EnsembleDefinition) -> None:
    """S-DOM-61.5, S-DOM-73 and S-DOM-91."""
    if definition.llm is not None:
        return
    for task in definition.tasks:
        if task.handler is None and task.agent is None and task.llm is None:
            raise ValidationError(f"Task '{task.description}' has no LLM available. {NO_MODEL_ADVICE}")
    tasks = definition.all_tasks
    without = {task.agent for task in tasks if task.llm is None}
    with_model = {task.agent for task in tasks} - without
    for agent in declared_agents(definition):
        if uses_team_model(agent) and agent not in with_model:
            raise ValidationError(f"Agent '{agent.role}' has no llm: give it one, or give the ensemble llm=...")


def _check_delegation(definition: EnsembleDefinition) -> None:
    """S-DOM-61.6, and how a delegation that is lost or hangs is dealt with; for every workflow."""
    depth, timeout, retries = (
        definition.max_delegation_depth,
        definition.delegation_timeout,
        definition.delegation_retries,
    )
    if depth <= 0:
        raise ValidationError(f"Ensemble max_delegation_depth must be > 0, got: {depth}")
    if timeout is not None and timeout <= timedelta(0):
        raise ValidationError(f"Ensemble delegation_timeout must be > 0 when set, got: {timeout}")
    if not 0 <= retries <= MOST_RESENDS:
        raise ValidationError(f"Ensemble delegation_retries must be between 0 and {MOST_RESENDS}, got: {retries}")


def _check_manager(definition: EnsembleDefinition) -> None:
    """S-DOM-61.7."""
    for name, value, least in (
        ("manager_max_iterations", definition.manager_max_iterations, 1),
        ("manager_stall_turns", definition.manager_stall_turns, 0),
    ):
        if value < least:
            needed = "> 0" if least else ">= 0"
            raise ValidationError(f"Ensemble {name} must be {needed} for HIERARCHICAL workflow, got: {value}")


def _check_hierarchical(definition: EnsembleDefinition) -> None:
    """S-DOM-61.9: roles, constraints, handler tasks; roles of agents that are yet to be made are checked after that."""
    roles = [agent.role for agent in declared_agents(definition)]
    check_roles(roles)
    is_complete = all(task.agent is not None or task.handler is not None for task in definition.tasks)
    check_constraints(definition.hierarchical_constraints, roles if is_complete else None)
    for task in definition.tasks:
        if task.handler is not None:
            raise ValidationError(
                "Deterministic handler tasks are not supported in HIERARCHICAL workflow. "
                f"Task '{task.description}' has a handler configured. "
                "Give the task to an agent, or use the sequential or parallel workflow."
            )


def _check_order(tasks: Sequence[Task]) -> None:
    """S-DOM-61.11 before S-DOM-61.12, each for the first task it concerns."""
    listed = {task.object_id for task in tasks}
    seen: set[str] = set()
    absent: str | None = None
    for task in tasks:
        for entry in task.context:
            if entry.object_id in seen or isinstance(entry, UnitOutput):
                continue
            subject = f"Task '{task.description}' references context task '{entry.description}' which"
            if entry.object_id in listed:
                raise ValidationError(f"{subject} appears later in the task list")
            absent = absent or f"{subject} is not in the ensemble's task list"
        seen.add(task.object_id)
    if absent is not None:
        raise ValidationError(absent)


def _warnings(definition: EnsembleDefinition) -> list[str]:
    """Agents that were registered and have nothing to do (S-DOM-64); what of a task has no effect (S-HIER-88, S-DOM-92).

    Where work can be handed over, every agent may be asked: by a manager, or by an agent of a task that may delegate.
    """
    if definition.workflow is Workflow.HIERARCHICAL:
        return [warning for task in definition.tasks if (warning := _without_effect(task)) is not None]
    ignored = [warning for task in definition.all_tasks if (warning := _left_to_agent(task)) is not None]
    used = {task.agent for task in definition.all_tasks}
    if any(agent is not None and agent.allow_delegation for agent in used):
        return ignored
    return ignored + [
        f"Agent '{agent.role}' is registered but not assigned to any task"
        for agent in definition.agents or ()
        if agent not in used
    ]


def _left_to_agent(task: Task) -> str | None:
    """Return what a task declares that only an agent made for it would have."""
    if task.agent is None:
        return None
    has_runner = task.agent.runner is not None
    uses_llm = task.llm is not None and (not has_runner or task.reflection_config is not None)
    fields = ["tools", "max_iterations", *([] if uses_llm else ["rate_limit", "llm"])]
    declared = [field for field in fields if getattr(task, field)]
    if not declared:
        return None
    owner, of_owner = ("runner", "the runner of ") if has_runner else ("agent", "")
    return (
        f"Task '{task.description}' has {' and '.join(declared)} without effect: {of_owner}its agent '{task.agent.role}' "
        f"has its own. Set them on the {owner}"
    )


def _without_effect(task: Task) -> str | None:
    """Return what a task declares that only its own execution could keep."""
    fields = ("output_type", "input_guardrails", "output_guardrails", "reflection_config")
    declared = [field for field in fields if getattr(task, field)]
    if task.agent is not None and task.llm is not None:
        declared.append("llm")
    if not declared:
        return None
    return (
        f"Task '{task.description}' has {' and '.join(declared)} without effect in HIERARCHICAL workflow: its manager decides "
        "what becomes of it. Use a delegation policy, or another workflow"
    )
