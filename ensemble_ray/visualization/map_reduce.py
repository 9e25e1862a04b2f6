"""Graphs of map-reduces whose tasks are made while they run. Package: visualization. Pure.

In: a definition, or what the levels of a run did. Out: a `Flow` with a node for each level, which knows how many tasks it stands
for. Never: a call of a factory, or an item that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ensemble_ray.definition.map_reduce import MapReduceDefinition
from ensemble_ray.execute.callables import callable_name
from ensemble_ray.visualization.declared import TREE_BADGES, title_of
from ensemble_ray.visualization.flow import Flow, FlowEdge, FlowNode

if TYPE_CHECKING:
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.definition.task import Task
    from ensemble_ray.record.levels import LevelTally

__all__ = ["map_reduce_flow", "tally_flow"]

#: What a function without a name is called.
_NAMELESS = "<lambda>"
#: Titles of what has none of its own.
_TITLES = {"map": "items", "reduce": "groups", "final-reduce": "the last group", "direct": "all items at once"}


def map_reduce_flow(definition: MapDefinition) -> Flow:
    """Return the graph of a map-reduce before it runs: a node for the items, and one for each kind of task behind it."""
    count = definition.item_source.count
    nodes = [_side(definition, "map", "map", count=count)]
    if not isinstance(definition, MapReduceDefinition):
        return Flow(nodes=tuple(nodes))
    nodes += [_side(definition, "reduce", "reduce"), _side(definition, "reduce", "final-reduce")]
    edges = [FlowEdge(source=one.id, target=other.id) for one, other in pairwise(nodes)]
    size = f"{definition.budget:,} tokens" if definition.budget else f"{definition.effective_chunk_size} outputs"
    edges.append(FlowEdge(source="reduce", target="reduce", kind="loop", label=f"groups of {size}"))
    if definition.direct_task is not None:
        nodes.append(_side(definition, "direct", "direct"))
    return Flow(nodes=tuple(nodes), edges=tuple(edges))


def _side(definition: MapDefinition, side: str, kind: str, *, count: int | None = None) -> FlowNode:
    factory = getattr(definition, f"{side}_task", None)
    task: Task | None = getattr(factory, "task", None)
    role = "" if task is None or task.agent is None else task.agent.role
    name = callable_name(factory)
    title = task.description if task is not None else _TITLES[kind] if name == _NAMELESS else name
    return FlowNode(
        id=kind, kind=kind, title=title_of(title), agent=title_of(role), badges=(TREE_BADGES[kind],), count=count
    )


def tally_flow(levels: Sequence[LevelTally]) -> Flow:
    """Return the graph of what the levels of a run did, lowest first."""
    nodes = [_level(tally) for tally in levels]
    edges = [FlowEdge(source=one.id, target=other.id) for one, other in pairwise(nodes)]
    return Flow(nodes=tuple(nodes), edges=tuple(edges))


def _level(tally: LevelTally) -> FlowNode:
    counts = {
        "completed": tally.done,
        "failed": tally.failed,
        "running": max(0, tally.total - tally.done - tally.failed),
    }
    level = f" L{tally.level}" if tally.node_type == "reduce" else ""
    return FlowNode(
        id=f"level:{tally.level}",
        kind=tally.node_type,
        title=_TITLES.get(tally.node_type, tally.node_type),
        level=tally.level,
        rank=tally.level,
        counts={status: count for status, count in counts.items() if count},
        badges=(TREE_BADGES.get(tally.node_type, tally.node_type.upper()) + level,),
        count=tally.total,
    )
