"""The units of a run that ended, as its parts are assembled from them. Pure.

In: the plan, what its machines said of the units, and the outputs by instance. Out: which unit or task a path or an instance is
of, and the outputs that a unit shows to the rest (S-LOOP-70 to S-LOOP-78). Nothing is copied but joined iterations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from ensemble_ray.plan.plan import GraphUnit, LoopUnit, PhaseUnit, Unit, in_waiting_order
from ensemble_ray.record.levels import in_level_order
from ensemble_ray.schedule.instructions import GraphResult, LoopResult, PhaseResult, UnitFailure, UnitResult
from ensemble_ray.schedule.unit import list_shown
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.task_output import join_iterations

if TYPE_CHECKING:
    from ensemble_ray.plan.plan import Node, Plan
    from ensemble_ray.values.task_output import TaskOutput


class KeyedOutput(NamedTuple):
    """An output in its place among those of the run."""

    #: of the task in the plan
    key: str
    output: TaskOutput


def key_of_path(path: str) -> str:
    """Return the key of the unit that a path leads to.

    Examples:
        >>> key_of_path("graph:triage#3/loop:refine")
        'loop:refine'
    """
    return path.rpartition("/")[2]


@dataclass(kw_only=True)
class EndedUnits:
    """What became of the units of a run."""

    plan: Plan
    #: in the order in which they ended
    results: Sequence[UnitResult] = ()
    #: of units that failed where none of their tasks did, in order
    failures: Sequence[UnitFailure] = ()
    #: by instance, in completion order
    outputs: Mapping[str, TaskOutput] = field(default_factory=dict[str, "TaskOutput"])

    @cached_property
    def units(self) -> Mapping[str, Unit]:
        """The units of the plan by key."""
        return {unit.key: unit for unit in self.plan.units}

    @cached_property
    def nodes(self) -> Mapping[str, Node]:
        """The tasks of the plan by key."""
        return {node.key: node for node in self.plan.nodes}

    def loops(self) -> Iterator[tuple[LoopUnit, LoopResult]]:
        """Return the runs of loops, in the order in which they ended."""
        for result in self.results:
            unit = self.units.get(key_of_path(result.unit))
            if isinstance(result, LoopResult) and isinstance(unit, LoopUnit):
                yield unit, result

    def phases(self) -> Iterator[tuple[PhaseUnit, PhaseResult]]:
        """Return the phases, in the order in which they ended."""
        for result in self.results:
            unit = self.units.get(key_of_path(result.unit))
            if isinstance(result, PhaseResult) and isinstance(unit, PhaseUnit):
                yield unit, result

    def graph(self) -> tuple[GraphUnit, GraphResult] | None:
        """Return the graph; None where none ran."""
        for result in self.results:
            unit = self.units.get(key_of_path(result.unit))
            if isinstance(result, GraphResult) and isinstance(unit, GraphUnit):
                return unit, result
        return None

    # What the caller of a run sees of its outputs.

    def list_visible(self) -> list[KeyedOutput]:
        """Return the outputs in the caller's order.

        Tasks as they completed or in the order of levels, with loops in their places (S-LOOP-75); phases as they completed
        (S-PHASE-41); the steps of a graph (S-GRAPH-70). Of a run that ended early: what there is (S-LOOP-112, S-PHASE-56,
        S-GRAPH-53).
        """
        if not self.plan.units:
            ordered = in_level_order(self.plan, [*self.outputs.items()])
            return [KeyedOutput(node_key(instance), output) for instance, output in ordered]
        if (graph := self.graph()) is not None:
            return [each for step in graph[1].steps for each in self.shown_of(step.instance)]
        if any(isinstance(unit, PhaseUnit) for unit in self.plan.units):
            return [each for _, result in self.phases() for each in self.shown_of_phase(result)]
        return self._tasks_and_loops(result for _, result in self.loops())

    def shown_of_completed(self) -> list[KeyedOutput]:
        """Return the outputs of plain tasks and of the loops that did not fail."""
        failed = {failure.unit for failure in self.failures}  # a cap may fail a loop that has a reason (S-LOOP-61)
        return self._tasks_and_loops(
            result for _, result in self.loops() if result.termination_reason is not None and result.unit not in failed
        )

    def _tasks_and_loops(self, loops: Iterable[LoopResult]) -> list[KeyedOutput]:
        return self._in_place([*(name for name in self.outputs if "/" not in name), *(each.unit for each in loops)])

    def _in_place(self, paths: Iterable[str]) -> list[KeyedOutput]:
        """Return what tasks, in this order, and loops show.

        A loop comes right before the first task or loop that waits for it, else behind all tasks, as declared (S-LOOP-75).
        """
        by_key = {key_of_path(path).partition("#")[0]: path for path in paths}
        tasks = [key for key in by_key if key not in self.units]
        loops = [unit for unit in self.plan.units if unit.key in by_key and isinstance(unit, LoopUnit)]
        places: dict[str, int] = {}
        for place, key in reversed([*enumerate(tasks)]):
            context = self.nodes[key].context if key in self.nodes else ()  # the plan on record may be damaged
            places.update(dict.fromkeys(context, place))
        last = {loop.key: place for place, loop in enumerate(loops, start=len(tasks))}
        waits_for = {loop.key: loop.context for loop in loops}
        ordered = in_waiting_order([*waits_for], waits_for)
        for key in reversed(ordered):
            place = places.setdefault(key, last[key])
            places.update((each, min(place, places.get(each, place))) for each in waits_for[key])
        placed = sorted([*((places[key], key) for key in ordered), *enumerate(tasks)], key=itemgetter(0))
        return [each for _, key in placed for each in self.shown_of(by_key[key])]

    def shown_of(self, path: str) -> list[KeyedOutput]:
        """Return what a task's instance, or the path of a loop, shows."""
        if "#" in path.rpartition("/")[2]:
            output = self.outputs.get(path)
            return [] if output is None else [KeyedOutput(node_key(path), output)]
        result = self._loop_results.get(path)
        return [] if result is None else self.shown_of_loop(result)

    def shown_of_phase(self, result: PhaseResult) -> list[KeyedOutput]:
        """Return the outputs of a phase's accepted attempt; of another, those of its last."""
        return self._in_place(result.outputs)

    def shown_of_loop(self, result: LoopResult) -> list[KeyedOutput]:
        """Return the outputs that a loop shows, in body order."""
        unit = self.units[key_of_path(result.unit)]
        if not isinstance(unit, LoopUnit):
            return []
        shown: list[KeyedOutput] = []
        for instances in list_shown(unit, result.iterations):
            outputs = [self.outputs[name] for name in instances if name in self.outputs]
            if outputs and unit.output_mode == "all_iterations":
                outputs = [join_iterations(outputs)]
            shown += [KeyedOutput(node_key(instances[0]), output) for output in outputs]
        return shown

    @cached_property
    def _loop_results(self) -> Mapping[str, LoopResult]:
        return {result.unit: result for _, result in self.loops()}
