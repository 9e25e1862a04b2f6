"""All checks across objects, in the order of the specification (S-DOM-61). Room: definition.

In: an ensemble, as it was declared. Out: warnings as texts; whoever runs it logs them. Nothing is logged, resolved or
called here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.workflow import Workflow
from ensemble_ray.errors import ValidationError

__all__ = ["infer_workflow", "refuse_cycles", "validate"]


def validate(definition: EnsembleDefinition) -> list[str]:
    """Check what the parts of an ensemble have to do with each other.

    Returns:
        Warnings to log; the run goes on (S-DOM-64).

    Raises:
        ValidationError: the first check that fails.
    """
    if definition.workflow is Workflow.HIERARCHICAL:
        raise ValidationError(
            "The hierarchical workflow is not available in this version. Use 'sequential' or 'parallel'."
        )
    if not definition.tasks:
        raise ValidationError("Ensemble must have at least one task")
    if definition.rate_limit is not None and definition.llm is None:
        raise ValidationError(
            "Ensemble rate_limit is configured but llm is None. "
            "An ensemble-level llm is required when rate_limit is set."
        )
    _check_agents(definition)
    _check_models(definition)
    workflow = infer_workflow(definition)
    if workflow is Workflow.PARALLEL and definition.parallel_error_strategy is None:
        raise ValidationError("Ensemble parallel_error_strategy must not be None for PARALLEL workflow")
    refuse_cycles(definition.tasks)
    if workflow is Workflow.SEQUENTIAL:
        _check_order(definition.tasks)
    return _warnings(definition)


def infer_workflow(definition: EnsembleDefinition) -> Workflow:
    """The workflow that was chosen; where none was, parallel if a task of the list is context of another (S-DET-40)."""
    if definition.workflow is not None:
        return definition.workflow
    listed = {task.object_id for task in definition.tasks}
    is_linked = any(entry.object_id in listed for task in definition.tasks for entry in task.context)
    return Workflow.PARALLEL if is_linked else Workflow.SEQUENTIAL


def refuse_cycles(tasks: Sequence[Task]) -> None:
    """Walk the context of every task, also outside the list, and refuse a way that leads back to itself (S-DOM-62).

    Raises:
        ValidationError: S-DOM-61.10.
    """
    finished: set[str] = set()
    for root in tasks:
        if root.object_id in finished:
            continue
        # An explicit stack: chains are longer than Python's own allows.
        path = {root.object_id}
        stack: list[tuple[Task, Iterator[Task]]] = [(root, iter(root.context))]
        while stack:
            task, rest = stack[-1]
            entry = next(rest, None)
            if entry is None:
                stack.pop()
                path.discard(task.object_id)
                finished.add(task.object_id)
            elif entry.object_id in path:
                raise ValidationError(f"Circular context dependency detected involving task: '{entry.description}'")
            elif entry.object_id not in finished:
                path.add(entry.object_id)
                stack.append((entry, iter(entry.context)))


def _check_agents(definition: EnsembleDefinition) -> None:
    """S-DOM-61.3 and S-DOM-61.4."""
    if definition.agents is None:
        return
    if not definition.agents:
        raise ValidationError("Ensemble must have at least one agent")
    known = set(definition.agents)
    for task in definition.tasks:
        if task.agent is not None and task.agent not in known:
            raise ValidationError(
                f"Task '{task.description}' references agent '{task.agent.role}' "
                "which is not in the ensemble's agent list"
            )


def _check_models(definition: EnsembleDefinition) -> None:
    """S-DOM-61.5."""
    if definition.llm is not None:
        return
    for task in definition.tasks:
        if task.handler is None and task.agent is None and task.llm is None:
            raise ValidationError(
                f"Task '{task.description}' has no LLM available. Provide an explicit agent, a task-level llm, "
                "an ensemble-level llm, or configure a deterministic handler."
            )


def _check_order(tasks: Sequence[Task]) -> None:
    """S-DOM-61.11 before S-DOM-61.12, each for the first task it concerns."""
    listed = {task.object_id for task in tasks}
    seen: set[str] = set()
    absent: str | None = None
    for task in tasks:
        for entry in task.context:
            if entry.object_id in seen:
                continue
            told = f"Task '{task.description}' references context task '{entry.description}' which"
            if entry.object_id in listed:
                raise ValidationError(f"{told} appears later in the task list")
            absent = absent or f"{told} is not in the ensemble's task list"
        seen.add(task.object_id)
    if absent is not None:
        raise ValidationError(absent)


def _warnings(definition: EnsembleDefinition) -> list[str]:
    """Agents that were registered and have nothing to do (S-DOM-64)."""
    used = {task.agent for task in definition.tasks}
    return [
        f"Agent '{agent.role}' is registered but not assigned to any task"
        for agent in definition.agents or ()
        if agent not in used
    ]
