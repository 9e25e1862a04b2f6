"""What of an order follows from what a source wants started: context and revision. Package: coordinator. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from ensemble_ray.execute.orders import Revision
from ensemble_ray.schedule.instructions import TaskChanges

if TYPE_CHECKING:
    from ensemble_ray.schedule.instructions import Changes, ContextPart

__all__ = ["PrecedingOutputs", "gather_context", "revision_of"]

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
