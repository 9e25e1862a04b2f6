"""What of an order follows from what a source wants started. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Never, Protocol, TypeVar

from ensemble_ray.execute.orders import Revision, TaskBody, TaskOrder
from ensemble_ray.schedule.instructions import ContextPart, TaskChanges
from ensemble_ray.values.ids import instance_of, node_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ensemble_ray.plan.plan import Node
    from ensemble_ray.schedule.instructions import Changes, Start

Task = TypeVar("Task")
Output = TypeVar("Output")
Output_co = TypeVar("Output_co", covariant=True)


class PrecedingOutputs(Protocol[Output_co]):
    """Outputs of the tasks that have ended, by instance; a run's `OutputStore` is that."""

    def get(self, instance: str) -> Output_co:
        """Return the output of a task that has one."""
        ...

    def __contains__(self, instance: str) -> bool:
        """Whether it has one."""
        ...


def make_order(
    start: Start,
    nodes: Mapping[str, Node],
    body: TaskBody[Task],
    outputs: PrecedingOutputs[Output],
    *,
    run_id: str,
    epoch: int,
    is_sequential: bool,
) -> TaskOrder[Task, Never, Output]:
    """Return the order of a task of a plan, by its place and the outputs of the tasks before it.

    Args:
        start: What the source wants.
        nodes: The tasks of the plan by key.
        body: The task.
        outputs: Of the tasks that have ended.
        run_id: The run's id.
        epoch: Of the run's owner.
        is_sequential: Whether a context task without an output fails the task (S-ENG-11).
    """
    node = nodes[node_key(start.instance)]
    parts, absent = start.context, [] if start.missing is None else [start.missing]
    if parts is None:
        given = [(key, instance_of(key)) for key in node.context]
        parts = tuple(ContextPart((instance,)) for _, instance in given if instance in outputs)
        absent = [key for key, instance in given if instance not in outputs] if is_sequential else []
    missing = [nodes[key].description if key in nodes else key for key in absent]
    if start.context is None and is_sequential:
        missing += node.context_outside
    context, joined = gather_context(parts, outputs)
    return TaskOrder(
        run_id=run_id,
        key=node.key,
        instance=start.instance,
        epoch=epoch,
        index=node.index,
        task=body.task,
        agent_key=node.agent_key,
        agent_role=node.agent_role,
        total_tasks=node.total,
        context=context,
        joined=joined,
        missing_context=next(iter(missing), None),
        revision=revision_of(start.changes, outputs),
        is_streaming=node.is_streaming,
        input_guardrails=body.input_guardrails,
        output_guardrails=body.output_guardrails,
        wants_text=start.wants_text,
        description=node.description,
    )


def gather_context(
    parts: Sequence[ContextPart], outputs: PrecedingOutputs[Output]
) -> tuple[tuple[Output, ...], tuple[tuple[int, int], ...]]:
    """Return the outputs that a task is given, and the ranges of them that arrive as one."""
    context: list[Output] = []
    joined: list[tuple[int, int]] = []
    for part in parts:
        begin = len(context)
        context += (outputs.get(instance) for instance in part.instances)
        joined += [(begin, len(context))] if part.is_joined else []
    return tuple(context), tuple(joined)


def revision_of(changes: Changes | None, outputs: PrecedingOutputs[Output]) -> Revision[Output] | None:
    """Return what another attempt has beside the task; None: the task as it stands."""
    if not isinstance(changes, TaskChanges):
        return None
    prior = outputs.get(changes.prior) if changes.prior in outputs else None
    return Revision(attempt=changes.attempt, feedback=changes.feedback, prior=prior)
