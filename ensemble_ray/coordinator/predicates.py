"""LocalPredicates: the user's predicates and edge conditions in the process that has them.

Inline that is the caller's, so that closures over its state work; on Ray the one host of the run's callables (S-LOOP-54).
In: a question, and what of its unit's history was not sent before. Out: the verdict, or what was raised. Histories are kept
here and shown as views, so that the thousandth question costs what the first one did (S-LOOP-145).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar, cast, overload

from ensemble_ray.definition.graph import Graph, GraphEdge
from ensemble_ray.definition.loop import Loop
from ensemble_ray.errors.texts import user_exc_info
from ensemble_ray.execute.orders import EvaluationFailed
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import USER_ERRORS, call_user
from ensemble_ray.schedule.instructions import EdgeMatches, UntilHolds
from ensemble_ray.values.task_output import GraphRoutingContext, LoopIterationContext, join_iterations

if TYPE_CHECKING:
    from ensemble_ray.definition.phase import Phase
    from ensemble_ray.execute.orders import HistoryPart
    from ensemble_ray.values.task_output import TaskOutput

_log = bounded_logger(__name__)
T = TypeVar("T")
#: A predicate or a condition of the user's; what it is given depends on which of them it is.
_Asked = Callable[[object], object]


def predicate_path(question: UntilHolds | EdgeMatches) -> str:
    """Return the name of the predicate that a question is for; every execution of a unit asks the same one.

    Examples:
        >>> predicate_path(EdgeMatches(unit="graph:triage", step=4, edge=3))
        'graph:triage/edge/3'
        >>> predicate_path(UntilHolds(unit="graph:triage#3/loop:refine", iteration=1))
        'loop:refine/until/0'
    """
    key = question.unit.rpartition("/")[2]
    return f"{key}/until/0" if isinstance(question, UntilHolds) else f"{key}/edge/{question.edge}"


def list_predicates(units: Mapping[str, Loop | Phase | Graph]) -> dict[str, object]:
    """Return the predicates of loops and the conditions of edges, by path.

    Args:
        units: As the user declared them, by key.
    """
    found: dict[str, object] = {}
    for key, unit in units.items():
        if isinstance(unit, Loop) and unit.until is not None:
            found[f"{key}/until/0"] = unit.until
        elif isinstance(unit, Graph):
            conditions = {n: edge.condition for n, edge in enumerate(unit.edges) if isinstance(edge, GraphEdge)}
            found.update({f"{key}/edge/{n}": each for n, each in conditions.items() if each is not None})
    return found


class LocalPredicates:
    """Predicates of one run that live in this process. Fulfils `Predicates` with outputs as objects."""

    def __init__(self, predicates: Mapping[str, object]) -> None:
        """Make them of what is asked, by path."""
        self._predicates = predicates
        #: unit path -> what it has done so far
        self._histories: dict[str, _History] = {}

    async def holds(
        self, question: UntilHolds | EdgeMatches, *, sent_count: int, new: Sequence[HistoryPart[TaskOutput]]
    ) -> bool | EvaluationFailed | None:
        """Ask one: async on the loop, sync in a thread (S-CONV-16). What it raises is logged (S-LOOP-53, S-GRAPH-46)."""
        if not sent_count:
            self._histories[question.unit] = _History()
        history = self._histories.get(question.unit)
        if history is None or len(history.parts) < sent_count:
            return None
        for part in new[max(0, len(history.parts) - sent_count) :]:
            history.add(part)
        path = predicate_path(question)
        try:
            asked = cast("_Asked", self._predicates[path])
            return bool(await call_user(asked, history.view(question)))
        except USER_ERRORS as error:
            _log.error("The predicate '%s' raised", path, exc_info=user_exc_info(error))
            note = f"raised by the predicate '{path}', asked about '{question.unit}'"
            if note not in getattr(error, "__notes__", ()):  # one object may be raised again and again
                error.add_note(note)
            return EvaluationFailed.of(error)

    def forget(self, unit: str) -> None:
        """Let the history of a unit go that has ended."""
        self._histories.pop(unit, None)


class _History:
    """What a unit has done so far, as its predicates see it."""

    def __init__(self) -> None:
        self.parts: list[Mapping[str, TaskOutput]] = []
        self._lasts: list[TaskOutput] = []
        #: of a graph: state -> its outputs in the order of visits
        self._visits: dict[str, Sequence[TaskOutput]] = {}
        self._outputs: dict[str, list[TaskOutput]] = {}

    def add(self, part: HistoryPart[TaskOutput]) -> None:
        """Take an iteration or a step."""
        given = (join_iterations(part.outputs),) if part.is_joined else part.outputs
        self.parts.append(MappingProxyType(dict(zip(part.names, given, strict=True))))
        self._lasts.append(given[-1])
        if len(part.names) == 1:
            state = part.names[0]
            visits = self._outputs.setdefault(state, [])
            visits.append(given[0])
            self._visits[state] = _View(visits)

    def view(self, question: UntilHolds | EdgeMatches) -> LoopIterationContext | GraphRoutingContext:
        """Return what the predicate is given."""
        last = self._lasts[-1]
        if isinstance(question, UntilHolds):
            return LoopIterationContext(
                iteration_number=question.iteration,
                last_iteration_outputs=self.parts[-1],
                history=_View(self.parts),
                last_body_output=last,
            )
        return GraphRoutingContext(
            current_state=next(iter(self.parts[-1])),
            last_output=last,
            step_number=question.step,
            state_history=MappingProxyType(self._visits),
        )


class _View(Sequence[T]):
    """The entries that a list has now; it may grow, and nothing is copied."""

    def __init__(self, entries: Sequence[T]) -> None:
        self._entries = entries
        self._length = len(entries)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._entries[position] for position in range(self._length)[index]]
        return self._entries[range(self._length)[index]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(cast("Sequence[object]", other))

    def __hash__(self) -> int:
        raise TypeError("a history is not hashable")

    def __repr__(self) -> str:
        return repr(list(self))
