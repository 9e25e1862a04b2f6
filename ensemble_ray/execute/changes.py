"""What an execution of a task has beside the task itself, applied where it runs. Package: execute. Pure.

In: an order as its coordinator made it, which may not look into outputs. Out: the order that the runner carries out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ensemble_ray.values.joined import join_iterations

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import TaskOrder
    from ensemble_ray.values.task_output import TaskOutput

__all__ = ["apply_changes"]


def apply_changes(order: TaskOrder) -> TaskOrder:
    """Return the order with its iterations joined (S-LOOP-72) and its task as this attempt has it (S-LOOP-100)."""
    task, revision = order.task, order.revision
    if revision is not None:
        prior = None if revision.prior is None else revision.prior.raw
        task = task.with_revision_feedback(revision.feedback, prior, revision.attempt)
    if revision is None and not order.joined:
        return order
    return replace(order, task=task, revision=None, context=tuple(_join(order)), joined=())


def _join(order: TaskOrder) -> Iterator[TaskOutput]:
    """Yield the outputs of the context, those of iterations as one."""
    position = 0
    for begin, end in order.joined:
        yield from order.context[position:begin]
        yield join_iterations(order.context[begin:end])
        position = end
    yield from order.context[position:]
