"""Steps of a graph as it routes them: what they show, and what is asked about them. Package: schedule. Pure values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ensemble_ray.plan.units import EdgeEntry, GraphUnit
from ensemble_ray.schedule.branches import GraphBranch
from ensemble_ray.schedule.instructions import AsksAfter, ContextPart, EdgeMatches
from ensemble_ray.schedule.unit import HistoryEntry

__all__ = ["UnroutedStep", "list_questions", "shown_of"]


class UnroutedStep(NamedTuple):
    """A step that completed and is not routed."""

    branch: GraphBranch
    duration_s: float
    output: ContextPart

    @property
    def entry(self) -> HistoryEntry:
        """Return what the history has of it."""
        return HistoryEntry((self.branch.at,), self.output.instances, self.output.is_joined)


def shown_of(part: ContextPart) -> ContextPart:
    """Return what a step shows of the last part of its state's outputs: all of it where that is one, else its last."""
    return part if part.is_joined else ContextPart(part.instances[-1:])


def list_questions(
    unit: GraphUnit, leaving: Sequence[int], *, path: str, step: int, state: str, instance: str
) -> AsksAfter | None:
    """Return what is asked when a step completed, if nothing runs beside it; None: nothing.

    Args:
        unit: The graph.
        leaving: Positions of what leaves the state, in declared order.
        path: Of the graph, without an occurrence.
        step: Its number, 1-based.
        state: Whose step it is.
        instance: Of its task.
    """
    questions: list[EdgeMatches] = []
    for position in leaving:
        entry = unit.edges[position]
        if not (isinstance(entry, EdgeEntry) and entry.has_condition):
            break
        questions.append(EdgeMatches(unit=path, step=step, edge=position))
    return AsksAfter(questions=tuple(questions), names=(state,), instances=(instance,)) if questions else None
