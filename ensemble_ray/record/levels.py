"""The tasks of a planned map-reduce in their levels: traces that say so, and their order. Pure.

In: a plan, and how its run ended. Out: the same, each task's trace with its node type and level, and everything in the
order of levels (S-MR-38, S-MR-90, S-SET-20). Never: a change of a run whose plan has no levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ensemble_ray.values.ids import node_key
from ensemble_ray.values.trace import MapReduceLevelSummary, TaskTrace

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import RunOutcome, TaskFailure
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.values.task_output import TaskOutput

_T = TypeVar("_T")


def place_trace(trace: TaskTrace, node_type: str | None, level: int | None) -> TaskTrace:
    """Return the trace of a task, saying where in the tree it stands."""
    return trace.model_copy(update={"node_type": node_type, "map_reduce_level": level})


def placed_outcome(plan: Plan, outcome: RunOutcome) -> RunOutcome:
    """How a run ended, each task's trace saying where in the tree it stands."""
    if not plan.has_levels:
        return outcome
    places = {node.key: (node.node_type, node.level) for node in plan.nodes}

    def output_of(instance: str, output: TaskOutput) -> TaskOutput:
        trace = None if output.trace is None else place_trace(output.trace, *places[node_key(instance)])
        return output.model_copy(update={"trace": trace})

    def failure_of(instance: str, failure: TaskFailure) -> TaskFailure:
        return (
            failure
            if failure.trace is None
            else replace(failure, trace=place_trace(failure.trace, *places[node_key(instance)]))
        )

    return replace(
        outcome,
        completed=[(instance, output_of(instance, output)) for instance, output in outcome.completed],
        failures=[replace(each, failure=failure_of(each.instance, each.failure)) for each in outcome.failures],
        unfinished=[(instance, failure_of(instance, each)) for instance, each in outcome.unfinished],
    )


def in_level_order(plan: Plan, keyed: Sequence[tuple[str, _T]]) -> Sequence[tuple[str, _T]]:
    """Return what belongs to tasks, by instance, in the order of levels; unchanged where the plan has none."""
    if not plan.has_levels:
        return keyed
    positions = {node.key: position for position, node in enumerate(plan.nodes)}
    return sorted(keyed, key=lambda entry: positions[node_key(entry[0])])


def level_summaries(traces: Iterable[TaskTrace]) -> tuple[MapReduceLevelSummary, ...]:
    """Return what each level did, by the traces of its tasks (S-MR-93); those without a level are passed over."""
    by_level: dict[int, list[TaskTrace]] = {}
    for trace in traces:
        if trace.map_reduce_level is not None:
            by_level.setdefault(trace.map_reduce_level, []).append(trace)
    return tuple(
        MapReduceLevelSummary(
            level=level,
            task_count=len(found),
            duration=max(trace.completed_at for trace in found) - min(trace.started_at for trace in found),
        )
        for level, found in sorted(by_level.items())
    )
