"""Graphs to draw, their layout, and both as JSON data. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Literal

from ensemble_ray.values.messages import JsonValue
from ensemble_ray.visualization.layout import Box, EdgeLine, Frame, Layout, Rect, lay_out

EdgeKind = Literal["dependency", "conditional", "unconditional", "delegation", "loop"]
GroupKind = Literal["phase", "loop", "graph", "map-level", "manager"]

_WIDTH, _HEIGHT = 208.0, 72.0  # px
_LETTER, _LONGEST_LABEL, _LABEL_HEIGHT = 6.6, 28, 18.0  # width of a letter, longest label in letters, height


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowNode:
    """A declared task, or a step of a run."""

    id: str  # key of the plan's node, such as `writer`, or a step, such as `loop:refine#0/writer#0`
    kind: str  # `task`, `handler`, `manager`, `delegation`, `map`, `reduce`, `final-reduce`, `direct`, `state` or `end`
    title: str
    agent: str = ""
    level: int | None = None  # longest path to it, or level of a map-reduce
    rank: int = 0
    is_critical: bool = False
    group: str | None = None
    folded: tuple[str, ...] = ()  # keys or steps in a folded node
    status: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict[str, int])  # steps of a folded node by status
    badges: tuple[str, ...] = ()  # `L0`, `CP`, `MAP`, `REDUCE L1`, `AGGREGATE`, `DIRECT`, `STATE`, `END`
    count: int | None = None  # tasks that are not in `folded`

    @property
    def shown_count(self) -> int | None:
        """Number of tasks; None: a single one."""
        return self.count if self.count is not None or not self.folded else len(self.folded)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowEdge:
    source: str
    target: str
    kind: EdgeKind = "dependency"  # `unconditional`: only the order of work
    label: str | None = None
    is_critical: bool = False
    fired: bool | None = None  # whether the run followed it; None: unknown
    is_back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowGroup:
    id: str  # key of the unit, such as `loop:refine`, or path of its execution, such as `loop:refine#1`
    kind: GroupKind
    title: str  # `LOOP ≤5 refine`
    parent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    nodes: tuple[FlowNode, ...]
    edges: tuple[FlowEdge, ...] = ()
    groups: tuple[FlowGroup, ...] = ()  # each follows its parent and contains a node
    mode: Literal["dag", "graph"] = "dag"
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
    """Return a graph as JSON data (S-VIZ-81), described by `Flow` in `page/js/types.js`.

    `steps` has steps and statuses by the key of a declared node; None: the graph is of a run and contains them.
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


_MOST_OF_LEVELS = (40, 20, 10, 5, 1)  # nodes of one level that are shown individually, tried in order
_MAX_NODES, _MAX_EDGES = 1000, 600  # a layout with so many edges takes up to 0.3 s
_BANDS = (4, 16, 64, 256, 1024, 4096, 16384, 65536)  # levels that become one node if a graph is still too large
_SHORTEST_PREFIX = 8  # shortest common prefix that replaces titles


def fold_flow(flow: Flow) -> Flow:
    """Fold levels until the graph is small enough to show (S-VIZ-83)."""
    folded = flow
    for most, width in (*((most, 0) for most in _MOST_OF_LEVELS), *((1, width) for width in _BANDS)):
        folded = _fold(flow, most, width)
        if len(folded.nodes) <= _MAX_NODES and len(folded.edges) <= _MAX_EDGES:
            break
    return folded


def _fold(flow: Flow, most: int, width: int) -> Flow:
    """Merge the nodes of each place with more than `most` nodes. A place is `width` levels; 0: one kind of a level."""
    places: dict[Hashable, list[FlowNode]] = {}
    for node in flow.nodes:  # the end of a graph stays
        kind, rank = (node.kind == "end", node.rank // width) if width else (node.kind, node.rank)
        places.setdefault((node.group, kind, rank), []).append(node)
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
    title, shared = first.title, commonprefix([node.title for node in nodes])  # noqa: RUF071  titles are no paths
    if len(shared) < _SHORTEST_PREFIX:
        title = f"{title}, and {len(nodes) - 1} more"
    elif shared != title:
        title = f"{shared.rstrip()}…"
    return FlowNode(
        id=f"{first.id}..{nodes[-1].id}",
        kind=first.kind if len(kinds) == 1 else "task",
        title=title,
        agent=first.agent if len(agents) == 1 else f"{len(agents)} agents",
        level=first.level,
        rank=first.rank,
        is_critical=any(node.is_critical for node in nodes),
        group=first.group,
        folded=tuple(node.id for node in nodes),
        counts=dict(statuses),
        badges=tuple(badge for badge in first.badges if all(badge in node.badges for node in nodes)),
    )


def _merge_edges(edges: Iterable[FlowEdge], new_ids: Mapping[str, str]) -> tuple[FlowEdge, ...]:
    """Drop duplicate edges and those inside a merged node."""
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
