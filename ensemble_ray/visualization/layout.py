"""Layered layout of a graph, in pixels. Pure and deterministic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ensemble_ray.errors import IllegalStateError

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
