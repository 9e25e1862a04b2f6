"""Graphs to draw, their layout, and both as JSON data. Pure."""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from os.path import commonprefix
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.values.messages import JsonValue

Direction = Literal["down", "right"]
Point = tuple[float, float]

_MARGIN = 16.0
_PADDING = 16.0
_HEADER = 28.0
#: With more lines the engine spends less effort: 300 would take a second, during which it holds the interpreter's lock.
_CAREFUL_LINES = 100
_CAREFUL_LABELS = 40_000  # labels times elements; with more, labels stay where the engine puts them
_LABEL_GAP = 5.0  # between a label and its line
_DIRECTIONS: dict[Direction, str] = {"down": "topbottom", "right": "leftright"}


class Box(Struct, frozen=True, kw_only=True):
    id: str
    width: float
    height: float
    frame: str | None = None


class Frame(Struct, frozen=True, kw_only=True):
    id: str
    parent: str | None = None


class EdgeLine(Struct, frozen=True, kw_only=True):
    source: str
    target: str
    label_size: tuple[float, float] | None = None  # width and height
    is_back: bool = False  # whether it points against the order of layers


class Rect(Struct, frozen=True):
    x: float
    y: float
    width: float
    height: float

    def overlaps(self, other: Rect) -> bool:
        """Whether they share a point; a line is a rectangle without width or height."""
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


class Route(Struct, frozen=True):
    points: tuple[Point, ...]  # from border to border; each segment is horizontal or vertical
    label_at: Point | None = None  # centre of its label


class Layout(Struct, frozen=True, kw_only=True):
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
    sizes = [line.label_size for line in lines]
    return _move(places, _with_free_labels(places, routes, sizes, framed), sizes)


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


def _with_free_labels(
    places: Mapping[str, Rect],
    routes: Sequence[Route],
    sizes: Sequence[tuple[float, float] | None],
    framed: Collection[str],
) -> list[Route]:
    """Move labels beside their lines, to the place with the fewest elements."""
    taken = [place for name, place in places.items() if name not in framed]
    for name in framed:
        taken += _border(places[name])
    taken += [_segment(*ends) for route in routes for ends in pairwise(route.points)]
    if len(taken) * sum(size is not None for size in sizes) > _CAREFUL_LABELS:
        return list(routes)
    found: list[Route] = []
    for route, size in zip(routes, sizes, strict=True):
        if route.label_at is None or size is None:
            found.append(route)
            continue
        spots = [(route.label_at, _around(route.label_at, size))]
        spots += [(at, _around(at, size)) for at in _beside(route.points, size)]
        at, best = min(spots, key=lambda spot: sum(map(spot[1].overlaps, taken)))
        taken.append(best)
        found.append(replace(route, label_at=at))
    return found


def _beside(points: Sequence[Point], size: tuple[float, float]) -> Iterator[Point]:
    """Yield centres for a label beside the segments of its line."""
    width, height = size
    for (x, y), (to_x, to_y) in pairwise(points):
        for share in (0.5, 0.3, 0.7):
            at_x, at_y = x + (to_x - x) * share, y + (to_y - y) * share
            if abs(to_y - y) > abs(to_x - x):
                yield at_x + width / 2 + _LABEL_GAP, at_y
                yield at_x - width / 2 - _LABEL_GAP, at_y
            else:
                yield at_x, at_y - height / 2 - _LABEL_GAP
                yield at_x, at_y + height / 2 + _LABEL_GAP


def _around(centre: Point, size: tuple[float, float]) -> Rect:
    return Rect(centre[0] - size[0] / 2, centre[1] - size[1] / 2, *size)


def _segment(start: Point, end: Point) -> Rect:
    return Rect(min(start[0], end[0]), min(start[1], end[1]), abs(start[0] - end[0]), abs(start[1] - end[1]))


def _border(place: Rect) -> list[Rect]:
    x, y, width, height = place.x, place.y, place.width, place.height
    return [
        Rect(x, y, width, _HEADER),
        Rect(x, y + height, width, 0),
        Rect(x, y, 0, height),
        Rect(x + width, y, 0, height),
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


#: `unconditional`: only the order of work. Each kind has one line style in all drawings.
EdgeKind = Literal["dependency", "conditional", "unconditional", "delegation", "loop"]
GroupKind = Literal["phase", "loop", "graph", "manager"]

_WIDTH, _HEIGHT = 208.0, 72.0  # px; a node is higher if its texts have more lines
_FOLDED_HEIGHT = 104.0  # of a node for several tasks, which shows their progress
_END_SIZE = (92.0, 36.0)
_TITLE_LETTER, SMALL_LETTER = 7.7, 6.6  # average width of a letter in titles and in small text, px
_TITLE_ROOM, _AGENT_ROOM = _WIDTH - 58.0, _WIDTH - 42.0  # beside the mark of a state, and a dot
_MAX_TITLE_LINES, _MAX_AGENT_LINES = 7, 3
TITLE_LINE, SMALL_LINE = 17.0, 16.0  # height of a line
_FOOT_ROOM = 118.0  # for an agent and a badge beside a duration
LABEL_LINE, _LABEL_LETTER, _LABEL_WIDTH = 18.0, 7.4, 200.0


class FlowNode(Struct, frozen=True, kw_only=True):
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
    counts: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])  # steps of a folded node by status
    badges: tuple[
        str, ...
    ] = ()  # at most one: `MAP`, `REDUCE L1`, `AGGREGATE`, `DIRECT`, `START`, `END`, `REVIEW`, `STEP 1`
    count: int | None = None  # tasks that are not in `folded`
    started_at: float | None = None  # of a step, in the unit of the record
    ended_at: float | None = None

    @property
    def shown_count(self) -> int | None:
        """Number of tasks; None: a single one."""
        return self.count if self.count is not None or not self.folded else len(self.folded)


class FlowEdge(Struct, frozen=True, kw_only=True):
    source: str
    target: str
    kind: EdgeKind = "dependency"
    label: str | None = None
    is_critical: bool = False
    fired: bool | None = None  # whether the run followed it; None: unknown
    is_back: bool = False


class FlowGroup(Struct, frozen=True, kw_only=True):
    id: str  # key of the unit, such as `loop:refine`, or path of its execution, such as `loop:refine#1`
    kind: GroupKind
    title: str  # `LOOP ≤5 refine`
    parent: str | None = None


class Flow(Struct, frozen=True, kw_only=True):
    nodes: tuple[FlowNode, ...]
    edges: tuple[FlowEdge, ...] = ()
    groups: tuple[FlowGroup, ...] = ()  # each follows its parent and contains a node
    mode: Literal["dag", "graph"] = "dag"
    critical_path: tuple[str, ...] = ()


#: A step of the critical path with the step before it, each with its ids in a graph; an empty id: it is the first step.
PathStep = tuple[Sequence[str], Sequence[str]]


def mark_path(flow: Flow, path: Sequence[PathStep]) -> Flow:
    """Mark the nodes of a critical path, and the edges that connect them or their frames. A path over all nodes is not marked."""
    shown = {each: node for node in flow.nodes for each in (node.id, *node.folded)}
    parents = {group.id: group.parent for group in flow.groups}

    def around(name: str) -> list[str]:
        node = shown[name]
        found, group = [node.id], node.group
        while group is not None:
            found.append(group)
            group = parents[group]
        return found

    marked: dict[str, None] = {}
    ways: set[tuple[str, str]] = set()
    for sources, targets in path:
        known = [each for each in targets if each in shown]
        marked.update(dict.fromkeys(shown[each].id for each in known))
        for source, target in product((each for each in sources if each in shown), known):
            ways.update(product(around(source), around(target)))
    if len(marked) == len(flow.nodes):  # a mark on all nodes has no meaning
        marked, ways = {}, set()
    return replace(
        flow,
        nodes=tuple(replace(node, is_critical=node.id in marked) for node in flow.nodes),
        edges=tuple(replace(edge, is_critical=(edge.source, edge.target) in ways) for edge in flow.edges),
        critical_path=tuple(marked),
    )


def text_width(text: str, letter: float) -> float:
    return sum(2 * letter if unicodedata.east_asian_width(char) in "WF" else letter for char in text)


def wrap_text(text: str, room: float, letter: float, most: int) -> list[str]:
    """Split a text into at most so many lines; the last one ends with an ellipsis if the text is longer."""
    lines = [""]
    for word in text.split(" "):
        rest = word
        if lines[-1] and text_width(f"{lines[-1]} {rest}", letter) <= room:
            lines[-1] = f"{lines[-1]} {rest}"
            continue
        while rest:
            part = _prefix(rest, room, letter)
            rest = rest[len(part) :]
            lines.append(part)
    lines = [line for line in lines if line]
    if len(lines) > most:
        lines[most - 1] = f"{_prefix(lines[most - 1], room - letter, letter)}…"
    return lines[:most]


def _prefix(text: str, room: float, letter: float) -> str:
    """Return the beginning that fits, at least one character."""
    used = 0.0
    for position, char in enumerate(text):
        used += text_width(char, letter)
        if used > room and position:
            return text[:position]
    return text


def title_lines(node: FlowNode) -> list[str]:
    return wrap_text(node.title, _TITLE_ROOM, _TITLE_LETTER, _MAX_TITLE_LINES)


def agent_lines(node: FlowNode) -> list[str]:
    """Return the lines of an agent's name above the last line of a node; none: the name fits into that line."""
    badge = sum(len(each) + 2 for each in node.badges) + (0 if node.shown_count is None else 8)
    if text_width(node.agent, SMALL_LETTER) + badge * SMALL_LETTER <= _FOOT_ROOM:
        return []
    return wrap_text(node.agent, _AGENT_ROOM, SMALL_LETTER, _MAX_AGENT_LINES)


def label_lines(label: str) -> list[str]:
    return wrap_text(label, _LABEL_WIDTH, _LABEL_LETTER, 2)


def _size(node: FlowNode) -> tuple[float, float]:
    if node.kind == "end":
        return _END_SIZE
    more, agents = max(0, len(title_lines(node)) - 2) * TITLE_LINE, len(agent_lines(node))
    if node.shown_count is None:
        return _WIDTH, _HEIGHT + more + agents * SMALL_LINE
    return _WIDTH, max(_FOLDED_HEIGHT, _HEIGHT + agents * SMALL_LINE) + more


def _label_size(label: str) -> tuple[float, float]:
    lines = label_lines(label)
    width = text_width(lines[0], _LABEL_LETTER) if len(lines) == 1 else _LABEL_WIDTH
    return 8 + width, LABEL_LINE * len(lines)


def layout_key(flow: Flow) -> Hashable:
    """Return a key that is equal for graphs with the same layout."""
    return (
        tuple((node.id, node.group, _size(node)) for node in flow.nodes),
        tuple((edge.source, edge.target, edge.label, edge.is_back) for edge in flow.edges),
        tuple((group.id, group.parent) for group in flow.groups),
    )


def place_flow(flow: Flow) -> Layout:
    sizes = [_size(node) for node in flow.nodes]
    return lay_out(
        [
            Box(id=node.id, width=width, height=height, frame=node.group)
            for node, (width, height) in zip(flow.nodes, sizes, strict=True)
        ],
        [
            EdgeLine(
                source=edge.source,
                target=edge.target,
                label_size=_label_size(edge.label) if edge.label and edge.label.strip() else None,
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
    """Merge the nodes of places with more than `most` nodes. A place is `width` levels; 0: one kind of a level.

    The nodes of a map-reduce are merged in any case.
    """
    places: dict[Hashable, list[FlowNode]] = {}
    for node in flow.nodes:  # the end of a graph stays
        kind, rank = (node.kind == "end", node.rank // width) if width else (node.kind, node.rank)
        if node.kind in TREE_KINDS and not width:  # a skipped reduce has no rank
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
