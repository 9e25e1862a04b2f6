"""Graphs to draw, their layout, and both as JSON data. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Any, Literal

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.values.messages import JsonValue

Direction = Literal["down", "right"]
Point = tuple[float, float]

_MARGIN = 16.0
_PADDING = 16.0
_HEADER = 28.0
#: With more lines the engine spends less effort: 300 would take a second, during which it holds the interpreter's lock.
_CAREFUL_LINES = 100
_DIRECTIONS: dict[Direction, str] = {"down": "topbottom", "right": "leftright"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    id: str
    width: float
    height: float
    frame: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    id: str
    parent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeLine:
    source: str
    target: str
    label_size: tuple[float, float] | None = None  # width and height
    is_back: bool = False  # whether it points against the order of layers


@dataclass(frozen=True, slots=True)
class Rect:
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Route:
    points: tuple[Point, ...]  # from border to border; each segment is horizontal or vertical
    label_at: Point | None = None  # centre of its label


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    width: float
    height: float
    places: Mapping[str, Rect]  # boxes and frames by id
    routes: tuple[Route, ...]


def lay_out(
    boxes: Sequence[Box], lines: Sequence[EdgeLine] = (), frames: Sequence[Frame] = (), *, direction: Direction = "down"
) -> Layout:
    """Return a layout in which lines lead from layer to layer with few crossings (S-VIZ-80).

    Frames follow their outer frames; boxes are in their preferred order within a layer.

    Raises:
        IllegalStateError: The layout package is not installed.
        ValueError: An id is duplicate, or a line, box or frame names an unknown id.
    """
    if not boxes:
        return Layout(width=0.0, height=0.0, places={}, routes=())
    try:
        import graphlay
    except ImportError as error:
        raise IllegalStateError(
            "Places for the nodes of a graph need the package graphlay. Install it: pip install 'ensemble-ray[studio]'"
        ) from error
    engine: Any = graphlay
    drawn = engine.layout(_graph_of(boxes, lines, frames), options=_options(direction, len(lines)))
    names = [*(frame.id for frame in frames), *(box.id for box in boxes)]
    raw_places: dict[str, Rect] = {}
    for name, node in zip(names, drawn.nodes, strict=True):
        centre, width, height = node["center"], node["size"]["width"], node["size"]["height"]
        raw_places[name] = Rect(centre["x"] - width / 2, centre["y"] - height / 2, width, height)
    framed = {frame.id for frame in frames}
    routes = [
        _route(edge, line, *(raw_places[end] if end in framed else None for end in (line.source, line.target)))
        for edge, line in zip(drawn.edges, lines, strict=True)
    ]
    places, routes = _with_titles(raw_places, routes, frames)
    return _move(places, routes, [line.label_size for line in lines])


def _graph_of(boxes: Sequence[Box], lines: Sequence[EdgeLine], frames: Sequence[Frame]) -> dict[str, object]:
    """Frames are nodes that other nodes name as their parent."""
    nodes: list[dict[str, object]] = []
    known: dict[str, int] = {}

    def find(name: str) -> int:
        if name not in known:
            raise ValueError(f"the graph has no node '{name}'")
        return known[name]

    def add(name: str, width: float, height: float, above: str | None) -> None:
        if name in known:
            raise ValueError(f"the graph has two nodes '{name}'")
        node: dict[str, object] = {"size": {"width": width, "height": height}, "shape": "box", "key": " "}
        nodes.append(node if above is None else {**node, "parent": find(above)})
        known[name] = len(known)

    for frame in frames:
        add(frame.id, 1, 1, frame.parent)
    for box in boxes:
        add(box.id, box.width, box.height, box.frame)
    edges: list[dict[str, object]] = []
    for line in lines:
        edge: dict[str, object] = {"source": find(line.source), "target": find(line.target), "weight": 1.0}
        if line.is_back:
            edge["reverse_for_ranking"] = True
        if line.label_size is not None:
            edge["label_size"] = dict(zip(("width", "height"), line.label_size, strict=True))
        edges.append(edge)
    return {"nodes": nodes, "edges": edges}


def _options(direction: Direction, line_count: int) -> dict[str, object]:
    return {
        "direction": _DIRECTIONS[direction],
        "effort": "balanced" if line_count <= _CAREFUL_LINES else "fast",
        "coords": {"branch_style": "symmetric"},
        "spacing": {
            "layer_gap": 44.0,
            "node_gap": 28.0,
            "dummy_gap": 20.0,
            "isolated_gap": 28.0,
            "isolated_max_columns": 6,
            "compound_padding": _PADDING,
            "compound_header": _HEADER,
        },
    }


def _route(edge: Mapping[str, Any], line: EdgeLine, source: Rect | None, target: Rect | None) -> Route:
    """Cut a route at the upper borders of its frames: the engine continues lines below the title of a frame."""
    points = [(point["x"], point["y"]) for point in edge["points"]]
    for end, beside, frame in ((0, 1, source), (-1, -2, target)):
        if frame is not None and len(points) > 1:
            (x, y), (other_x, other_y) = points[end], points[beside]
            if x == other_x and other_y <= frame.y < y:
                points[end] = (x, frame.y)
    at = edge["label_anchor"] if line.label_size is not None else None
    return Route(tuple(points), None if at is None else (at["x"], at["y"]))


def _with_titles(
    places: Mapping[str, Rect], routes: Sequence[Route], frames: Sequence[Frame]
) -> tuple[dict[str, Rect], list[Route]]:
    """Add room for the titles of frames that begin with another frame, which the engine omits.

    All parts below the upper border of such a frame move down; rectangles that cross the border grow.
    """
    borders = sorted(
        {
            round(places[frame.parent].y, 1)
            for frame in frames
            if frame.parent is not None and places[frame.id].y - places[frame.parent].y < _PADDING + _HEADER - 1
        }
    )

    def moved(y: float) -> float:
        return y + _HEADER * bisect_left(borders, round(y - 0.5, 1))

    def moved_point(point: Point) -> Point:
        return point[0], moved(point[1])

    found: dict[str, Rect] = {}
    for each, place in places.items():
        top, bottom = moved(place.y), moved(place.y + place.height)
        found[each] = Rect(place.x, top, place.width, bottom - top)
    return found, [
        Route(tuple(map(moved_point, route.points)), None if route.label_at is None else moved_point(route.label_at))
        for route in routes
    ]


def _move(places: Mapping[str, Rect], routes: Sequence[Route], labels: Sequence[tuple[float, float] | None]) -> Layout:
    points = [point for route in routes for point in route.points]
    for place in places.values():
        points += [(place.x, place.y), (place.x + place.width, place.y + place.height)]
    for route, size in zip(routes, labels, strict=True):
        if route.label_at is not None and size is not None:
            (x, y), (width, height) = route.label_at, size
            points += [(x - width / 2, y - height / 2), (x + width / 2, y + height / 2)]
    left, top = min(x for x, _ in points) - _MARGIN, min(y for _, y in points) - _MARGIN
    right, bottom = max(x for x, _ in points) + _MARGIN, max(y for _, y in points) + _MARGIN

    def moved(point: Point) -> Point:
        return round(point[0] - left, 1), round(point[1] - top, 1)

    return Layout(
        width=round(right - left, 1),
        height=round(bottom - top, 1),
        places={
            each: Rect(*moved((place.x, place.y)), round(place.width, 1), round(place.height, 1))
            for each, place in places.items()
        },
        routes=tuple(
            Route(tuple(map(moved, route.points)), None if route.label_at is None else moved(route.label_at))
            for route in routes
        ),
    )


EdgeKind = Literal["dependency", "conditional", "unconditional", "delegation", "loop"]
GroupKind = Literal["phase", "loop", "graph", "manager"]

_WIDTH, _HEIGHT = 208.0, 72.0  # px
_FOLDED_HEIGHT = 104.0  # of a node for several tasks, which shows their progress
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
        [
            Box(
                id=node.id,
                width=_WIDTH,
                height=_HEIGHT if node.shown_count is None else _FOLDED_HEIGHT,
                frame=node.group,
            )
            for node in flow.nodes
        ],
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
#: Kinds of tasks in the tree of a map-reduce, in their order within a level. A level is always one node.
TREE_KINDS = ("map", "reduce", "final-reduce", "direct")


def fold_flow(flow: Flow) -> Flow:
    """Fold levels until the graph is small enough to show (S-VIZ-83)."""
    folded = flow
    for most, width in (*((most, 0) for most in _MOST_OF_LEVELS), *((1, width) for width in _BANDS)):
        folded = _fold(flow, most, width)
        if len(folded.nodes) <= _MAX_NODES and len(folded.edges) <= _MAX_EDGES:
            break
    return folded


def _fold(flow: Flow, most: int, width: int) -> Flow:
    """Merge the nodes of each place with more than `most` nodes. A place is `width` levels; 0: one kind of a level.

    The nodes of a map-reduce are merged in any case.
    """
    places: dict[Hashable, list[FlowNode]] = {}
    for node in flow.nodes:  # the end of a graph stays
        kind, rank = (node.kind == "end", node.rank // width) if width else (node.kind, node.rank)
        if node.kind in TREE_KINDS and not width:  # a skipped reduce has no rank of its own
            rank = node.level or 0
        places.setdefault((node.group, kind, rank), []).append(node)
    nodes: list[FlowNode] = []
    new_ids: dict[str, str] = {}
    for found in places.values():
        if len(found) <= (1 if found[0].kind in TREE_KINDS else most):
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


def shared_title(titles: Sequence[str]) -> str | None:
    """Return the common beginning of titles; None: it is too short."""
    shared = commonprefix(titles)  # noqa: RUF071  titles are no paths
    if all(title == shared for title in titles):
        return shared
    return f"{shared.rstrip()}…" if len(shared) >= _SHORTEST_PREFIX else None


def _merge(nodes: Sequence[FlowNode]) -> FlowNode:
    first = nodes[0]
    kinds = {node.kind for node in nodes}
    agents = {node.agent for node in nodes}
    statuses = Counter(node.status for node in nodes if node.status is not None)
    return FlowNode(
        id=f"{first.id}..{nodes[-1].id}",
        kind=first.kind if len(kinds) == 1 else "task",
        title=shared_title([node.title for node in nodes]) or f"{first.title}, and {len(nodes) - 1} more",
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
