"""Places for the nodes of a graph, in layers, and lines between them. Pure.

In: boxes with their sizes, frames around them, lines. Out: a place for each, and the points of each line, in pixels; the same
input gives the same places. Never: a text, a colour, or a rule about runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ensemble_ray.errors import IllegalStateError

#: Down: layers are rows; right: layers are columns.
Direction = Literal["down", "right"]
Point = tuple[float, float]

#: Free space around the drawing, and between a frame and what lies in it.
_MARGIN = 16.0
_PADDING = 16.0
#: Height of a frame's title.
_HEADER = 28.0
#: With more lines than that, less is done against crossings: at worst 100 lines take 0.1 s, 300 would take a second. The engine
#: holds the interpreter's lock meanwhile.
_CAREFUL_LINES = 100
_DIRECTIONS: dict[Direction, str] = {"down": "topbottom", "right": "leftright"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """What gets a place."""

    id: str
    width: float
    height: float
    #: frame that it lies in
    frame: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What is drawn around boxes and other frames; it has at least one of them."""

    id: str
    #: frame that it lies in
    parent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeLine:
    """From one box or frame to another, or to itself."""

    source: str
    target: str
    #: width and height that its label needs
    label_size: tuple[float, float] | None = None
    #: it leads against the order of layers, as the way back of a loop does
    is_back: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Left upper corner and size."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Route:
    """The way of a line."""

    #: from border to border, each piece horizontal or vertical
    points: tuple[Point, ...]
    #: middle of its label; None: it has none
    label_at: Point | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where all is."""

    width: float
    height: float
    #: of boxes and frames, by id
    places: Mapping[str, Place]
    #: in the order of the lines
    routes: tuple[Route, ...]


def lay_out(
    boxes: Sequence[Box], lines: Sequence[EdgeLine] = (), frames: Sequence[Frame] = (), *, direction: Direction = "down"
) -> Layout:
    """Return places such that lines lead from layer to layer, with few crossings (S-VIZ-80).

    Args:
        boxes: In the order in which they are to stand beside each other where nothing else decides.
        lines: Between boxes and frames; a line to or from a box that does not exist is a `ValueError`.
        frames: Each behind the frame that it lies in.
        direction: Where layers follow each other.

    Raises:
        IllegalStateError: the package that does it is not installed.
        ValueError: an id is there twice, or a line, a box or a frame names one that is not.
    """
    if not boxes:
        return Layout(width=0, height=0, places={}, routes=())
    drawn = _engine().layout(_graph_of(boxes, lines, frames), options=_options(direction, len(lines)))
    names = [*(frame.id for frame in frames), *(box.id for box in boxes)]
    raw_places = {name: _place(node) for name, node in zip(names, drawn.nodes, strict=True)}
    raw_routes = [_route(edge, line) for edge, line in zip(drawn.edges, lines, strict=True)]
    framed = {frame.id for frame in frames}
    routes = [
        _outside(route, *(raw_places[end] if end in framed else None for end in (line.source, line.target)))
        for route, line in zip(raw_routes, lines, strict=True)
    ]
    places, routes = _with_titles(raw_places, routes, frames)
    return _move(places, routes, [line.label_size for line in lines])


def _engine() -> Any:
    try:
        import graphlay
    except ImportError as error:
        raise IllegalStateError(
            "Places for the nodes of a graph need the package graphlay. Install it: pip install 'ensemble-ray[studio]'"
        ) from error
    return graphlay


def _graph_of(boxes: Sequence[Box], lines: Sequence[EdgeLine], frames: Sequence[Frame]) -> dict[str, object]:
    """Return the graph as the engine takes it: frames are nodes that others have as their parent."""
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


def _place(node: Mapping[str, Any]) -> Place:
    width, height = node["size"]["width"], node["size"]["height"]
    return Place(node["center"]["x"] - width / 2, node["center"]["y"] - height / 2, width, height)


def _route(edge: Mapping[str, Any], line: EdgeLine) -> Route:
    points = tuple((point["x"], point["y"]) for point in edge["points"])
    at = edge["label_anchor"] if line.label_size is not None else None
    return Route(points, None if at is None else (at["x"], at["y"]))


def _outside(route: Route, source: Place | None, target: Place | None) -> Route:
    """Return the route up to the upper borders of frames: the engine leads lines on, to below a frame's title."""
    points = list(route.points)
    for end, beside, frame in ((0, 1, source), (-1, -2, target)):
        if frame is not None and len(points) > 1:
            (x, y), (other_x, other_y) = points[end], points[beside]
            if x == other_x and other_y <= frame.y < y:
                points[end] = (x, frame.y)
    return Route(tuple(points), route.label_at)


def _with_titles(
    places: Mapping[str, Place], routes: Sequence[Route], frames: Sequence[Frame]
) -> tuple[dict[str, Place], list[Route]]:
    """Return the drawing with room for the titles of frames whose upper part is another frame, which the engine leaves out.

    All that is below the upper border of such a frame moves down, and what stands beside it becomes higher.
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

    found: dict[str, Place] = {}
    for each, place in places.items():
        top, bottom = moved(place.y), moved(place.y + place.height)
        found[each] = Place(place.x, top, place.width, bottom - top)
    return found, [
        Route(tuple(map(moved_point, route.points)), None if route.label_at is None else moved_point(route.label_at))
        for route in routes
    ]


def _move(places: Mapping[str, Place], routes: Iterable[Route], labels: Sequence[tuple[float, float] | None]) -> Layout:
    """Return the drawing moved to where its left upper corner is at 0, with a margin around it."""
    routes = tuple(routes)
    points = [point for route in routes for point in route.points]
    points += [corner for place in places.values() for corner in _corners(place)]
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
            each: Place(*moved((place.x, place.y)), round(place.width, 1), round(place.height, 1))
            for each, place in places.items()
        },
        routes=tuple(
            Route(tuple(map(moved, route.points)), None if route.label_at is None else moved(route.label_at))
            for route in routes
        ),
    )


def _corners(place: Place) -> tuple[Point, Point]:
    return (place.x, place.y), (place.x + place.width, place.y + place.height)
