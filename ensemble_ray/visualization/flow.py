"""Graphs to draw: nodes, edges and groups, their layout, and both as JSON data. Pure.

`declared` builds a flow of a plan, `ran` of the steps of a run. Large flows are folded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from ensemble_ray.values.messages import JsonValue
from ensemble_ray.visualization.layout import Box, EdgeLine, Frame, Layout, Rect, lay_out

EdgeKind = Literal["dependency", "conditional", "unconditional", "delegation", "loop"]
GroupKind = Literal["phase", "loop", "graph", "map-level", "manager"]

#: Size of a node, px.
_WIDTH, _HEIGHT = 208.0, 72.0
#: Sizes of edge labels: width of a letter, longest label in letters, height.
_LETTER, _LONGEST_LABEL, _LABEL_HEIGHT = 6.6, 28, 18.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowNode:
    """A declared task, or a step of a run. `ran_flow` adds the rank, the group and the badges of a step."""

    #: key of the plan's node, such as `writer`, or a step, such as `loop:refine#0/writer#0`
    id: str
    #: `task`, `handler`, `manager`, `delegation`, `map`, `reduce`, `final-reduce`, `direct`, `state` or `end`
    kind: str
    #: one line, not shortened
    title: str
    agent: str = ""
    #: longest path to it, in nodes; in a map-reduce its level
    level: int | None = None
    #: order for the folding of large graphs
    rank: int = 0
    is_critical: bool = False
    group: str | None = None
    #: keys or steps in a folded node; empty: not folded
    folded: tuple[str, ...] = ()
    #: status of a step
    status: str | None = None
    #: number of steps by status in a folded node of a run
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    #: short words on it: `L0`, `CP`, `MAP`, `REDUCE L1`, `AGGREGATE`, `DIRECT`, `STATE`, `END`
    badges: tuple[str, ...] = ()
    #: number of its tasks, if they are not in `folded`
    count: int | None = None

    @property
    def shown_count(self) -> int | None:
        """Number of its tasks; None: it is a single one."""
        return self.count if self.count is not None or not self.folded else len(self.folded)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowEdge:
    source: str
    target: str
    #: `unconditional`: only the order of work; drawn dashed
    kind: EdgeKind = "dependency"
    label: str | None = None
    is_critical: bool = False
    #: whether the run followed this edge of a graph; None: unknown
    fired: bool | None = None
    #: whether it points back
    is_back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowGroup:
    """A frame around nodes and other groups."""

    #: key of the unit, such as `loop:refine`, or path of its execution, such as `loop:refine#1`
    id: str
    kind: GroupKind
    #: `LOOP ≤5 refine`
    title: str
    parent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    nodes: tuple[FlowNode, ...]
    edges: tuple[FlowEdge, ...] = ()
    #: each follows its parent and contains a node
    groups: tuple[FlowGroup, ...] = ()
    mode: Literal["dag", "graph"] = "dag"
    #: ids, from the first to the last
    critical_path: tuple[str, ...] = ()


def place_flow(flow: Flow) -> Layout:
    return lay_out(
        [Box(id=node.id, width=_WIDTH, height=_HEIGHT, frame=node.group) for node in flow.nodes],
        [
            EdgeLine(
                source=edge.source,
                target=edge.target,
                label_size=(8 + _LETTER * min(len(edge.label), _LONGEST_LABEL), _LABEL_HEIGHT) if edge.label else None,
                is_back=edge.is_back,
            )
            for edge in flow.edges
        ],
        [Frame(id=group.id, parent=group.parent) for group in flow.groups],
    )


def flow_data(
    flow: Flow, layout: Layout, steps: Mapping[str, Sequence[tuple[str, str]]] | None = None
) -> dict[str, JsonValue]:
    """Return a graph with its layout as JSON data for pages (S-VIZ-81). `Flow` in `page/js/types.js` describes it.

    Args:
        flow: The graph.
        layout: Its layout.
        steps: Steps and statuses by the key of a declared node; None: the graph is of a run and contains them.
    """
    return {
        "width": layout.width,
        "height": layout.height,
        "nodes": [_node_data(node, layout.places[node.id], steps) for node in flow.nodes],
        "edges": [
            {
                "from": edge.source,
                "to": edge.target,
                "points": [list(point) for point in route.points],
                "kind": edge.kind,
                "label": edge.label,
                "label_at": None if route.label_at is None else list(route.label_at),
                "critical": edge.is_critical,
                "fired": edge.fired,
            }
            for edge, route in zip(flow.edges, layout.routes, strict=True)
        ],
        "groups": [
            {"id": each.id, "title": each.title, "kind": each.kind, **_place_data(layout.places[each.id])}
            for each in flow.groups
        ],
        "mode": flow.mode,
        "critical_path": list(flow.critical_path),
    }


def _node_data(
    node: FlowNode, place: Rect, steps: Mapping[str, Sequence[tuple[str, str]]] | None
) -> dict[str, JsonValue]:
    is_folded = node.shown_count is not None
    counts = dict(node.counts)
    ran: list[str] = [] if node.kind == "end" else [node.id]
    if steps is not None:
        found = [each for key in (node.folded or (node.id,)) for each in steps.get(key, ())]
        ran, counts = [step for step, _ in found], dict(Counter(status for _, status in found))
    return {
        "id": node.id,
        **_place_data(place),
        "kind": node.kind,
        "title": node.title,
        "agent": node.agent,
        "level": node.level,
        "critical": node.is_critical,
        "group": node.group,
        "steps": None if is_folded else list[JsonValue](ran),
        "count": node.shown_count,
        "counts": dict[str, JsonValue](counts) if is_folded else None,
        "badges": list(node.badges),
    }


def _place_data(place: Rect) -> dict[str, JsonValue]:
    return {"x": place.x, "y": place.y, "w": place.width, "h": place.height}


#: Limits of the nodes of one level that are shown individually, tried in order until the graph is small enough.
_MOST_OF_LEVELS = (40, 20, 10, 5, 1)
#: Limits of a shown graph. A layout with so many edges takes up to 0.3 s.
_MAX_NODES, _MAX_EDGES = 1000, 600
#: Numbers of levels that become one node if a graph is still too large.
_BANDS = (4, 16, 64, 256, 1024, 4096, 16384, 65536)
#: Shortest common prefix of titles that replaces them.
_SHORTEST_PREFIX = 8


def fold_flow(flow: Flow) -> Flow:
    """Fold levels until the graph is small enough to show (S-VIZ-83)."""
    folded = flow
    for most in _MOST_OF_LEVELS:
        folded = _fold(flow, lambda node: (node.group, node.rank, node.kind), most)
        if _is_small(folded):
            return folded
    for width in _BANDS:  # the end of a graph stays
        folded = _fold(flow, partial(_band, width), 1)
        if _is_small(folded):
            break
    return folded


def _is_small(flow: Flow) -> bool:
    return len(flow.nodes) <= _MAX_NODES and len(flow.edges) <= _MAX_EDGES


def _band(width: int, node: FlowNode) -> Hashable:
    return node.group, node.kind == "end", node.rank // width


def _fold(flow: Flow, place_of: Callable[[FlowNode], Hashable], most: int) -> Flow:
    """Merge the nodes of each place with more than `most` nodes."""
    places: dict[Hashable, list[FlowNode]] = {}
    for node in flow.nodes:
        places.setdefault(place_of(node), []).append(node)
    nodes: list[FlowNode] = []
    new_ids: dict[str, str] = {}
    for found in places.values():
        if len(found) <= most:
            nodes += found
            continue
        one = _merge(found)
        nodes.append(one)
        new_ids.update((node.id, one.id) for node in found)
    if not new_ids:
        return flow
    return replace(
        flow,
        nodes=tuple(nodes),
        edges=_merge_edges(flow.edges, new_ids),
        critical_path=tuple(dict.fromkeys(new_ids.get(each, each) for each in flow.critical_path)),
    )


def _merge(nodes: Sequence[FlowNode]) -> FlowNode:
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
    """Return the common prefix of titles, or the first one and the number of others."""
    lowest, highest = min(titles), max(titles)
    differs = (position for position, (a, b) in enumerate(zip(lowest, highest, strict=False)) if a != b)
    shared = lowest[: next(differs, len(lowest))]
    if len(shared) >= _SHORTEST_PREFIX:
        return f"{shared.rstrip()}…" if shared != titles[0] else shared
    return f"{titles[0]}, and {len(titles) - 1} more"


def _merge_edges(edges: Iterable[FlowEdge], new_ids: Mapping[str, str]) -> tuple[FlowEdge, ...]:
    """Return the edges between the merged nodes without duplicates, and without those inside a merged node."""
    found: dict[tuple[str, str, str, str | None], FlowEdge] = {}
    for edge in edges:
        source, target = new_ids.get(edge.source, edge.source), new_ids.get(edge.target, edge.target)
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
