"""Graphs that are too large to be looked at, folded. Package: visualization. Pure.

In: a graph. Out: one in which nodes that stand at the same level of the same frame are one node with their count, where there are
too many of them.

Rules:
1. More than 40 of a kind at a level of a frame are one node, always.
2. While there are still too many nodes or edges, levels of fewer nodes are folded, too.
3. What is left then are long chains: levels that follow each other become one node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from ensemble_ray.visualization.flow import Flow, FlowEdge, FlowNode

__all__ = ["MOST_OF_A_LEVEL", "fold_flow"]

#: Nodes of one level that are shown one by one.
MOST_OF_A_LEVEL = 40
#: A level of more nodes than that is folded where the whole is too large; first the largest ones.
_SMALLER_LEVELS = (20, 10, 5, 1)
#: What a graph may have; with so many edges a layout takes 0.3 s at worst.
_MOST_NODES, _MOST_EDGES = 1000, 600
#: How many levels become one node, where that is needed.
_BANDS = (4, 16, 64, 256, 1024, 4096, 16384, 65536)
#: Shortest beginning that titles have in common and that is shown for all of them.
_SHORTEST_PREFIX = 8


def fold_flow(flow: Flow) -> Flow:
    """Return a graph that is small enough to be looked at (S-VIZ-83); a small one as it is."""
    folded = _fold(flow, _level_of, MOST_OF_A_LEVEL)
    for most in _SMALLER_LEVELS:
        if _is_small(folded):
            return folded
        folded = _fold(flow, _level_of, most)
    for width in _BANDS:
        if _is_small(folded):
            return folded
        folded = _fold(flow, _band_of(width), 1)
    return folded


def _is_small(flow: Flow) -> bool:
    return len(flow.nodes) <= _MOST_NODES and len(flow.edges) <= _MOST_EDGES


def _level_of(node: FlowNode) -> Hashable:
    return node.group, node.rank, node.kind


def _band_of(width: int) -> Callable[[FlowNode], Hashable]:
    """Return what tells which nodes of a frame become one; the end of a graph stays."""
    return lambda node: (node.group, node.kind == "end", node.rank // width)


def _fold(flow: Flow, place_of: Callable[[FlowNode], Hashable], most: int) -> Flow:
    """Make one node of each place that has more nodes than `most`."""
    places: dict[Hashable, list[FlowNode]] = {}
    for node in flow.nodes:
        places.setdefault(place_of(node), []).append(node)
    nodes: list[FlowNode] = []
    now: dict[str, str] = {}
    for found in places.values():
        if len(found) <= most:
            nodes += found
            continue
        one = _one_of(found)
        nodes.append(one)
        now.update((node.id, one.id) for node in found)
    if not now:
        return flow
    return replace(
        flow,
        nodes=tuple(nodes),
        edges=_folded_edges(flow.edges, now),
        critical_path=tuple(dict.fromkeys(now.get(each, each) for each in flow.critical_path)),
    )


def _one_of(nodes: Sequence[FlowNode]) -> FlowNode:
    first = nodes[0]
    kinds = {node.kind for node in nodes}
    agents = {node.agent for node in nodes}
    statuses = Counter(node.status for node in nodes if node.status is not None)
    return FlowNode(
        id=f"{first.id}..{nodes[-1].id}",
        kind=first.kind if len(kinds) == 1 else "task",
        title=_common_title([node.title for node in nodes]),
        agent=first.agent if len(agents) == 1 else f"{len(agents)} agents",
        level=first.level,
        rank=first.rank,
        is_critical=any(node.is_critical for node in nodes),
        group=first.group,
        folded=tuple(node.id for node in nodes),
        counts=dict(statuses),
        badges=tuple(badge for badge in first.badges if all(badge in node.badges for node in nodes)),
    )


def _common_title(titles: Sequence[str]) -> str:
    """Return what the titles begin with alike; else the first one and how many more there are."""
    lowest, highest = min(titles), max(titles)
    differs = (position for position, (a, b) in enumerate(zip(lowest, highest, strict=False)) if a != b)
    shared = lowest[: next(differs, len(lowest))]
    if len(shared) >= _SHORTEST_PREFIX:
        return f"{shared.rstrip()}…" if shared != titles[0] else shared
    return f"{titles[0]}, and {len(titles) - 1} more"


def _folded_edges(edges: Iterable[FlowEdge], now: dict[str, str]) -> tuple[FlowEdge, ...]:
    """Return the edges between what there is now, each once; those inside a folded node are gone."""
    found: dict[tuple[str, str, str, str | None], FlowEdge] = {}
    for edge in edges:
        source, target = now.get(edge.source, edge.source), now.get(edge.target, edge.target)
        if source == target and edge.source != edge.target:
            continue
        known = found.get((source, target, edge.kind, edge.label), edge)
        found[source, target, edge.kind, edge.label] = replace(
            edge,
            source=source,
            target=target,
            is_critical=edge.is_critical or known.is_critical,
            fired=known.fired or edge.fired,
        )
    return tuple(found.values())
