"""Places for the nodes of a graph."""

from __future__ import annotations

import sys
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import IllegalStateError
from ensemble_ray.visualization.flow import Box, EdgeLine, Frame, Layout, Rect, lay_out


def _boxes(*names: str, frame: str | None = None) -> list[Box]:
    return [Box(id=name, width=100, height=40, frame=frame) for name in names]


def _overlap(one: Rect, other: Rect) -> bool:
    return (
        one.x < other.x + other.width
        and other.x < one.x + one.width
        and one.y < other.y + other.height
        and other.y < one.y + one.height
    )


def _encloses(outer: Rect, inner: Rect) -> bool:
    return (
        outer.x <= inner.x
        and outer.y <= inner.y
        and outer.x + outer.width >= inner.x + inner.width
        and outer.y + outer.height >= inner.y + inner.height
    )


def _is_on_border(place: Rect, x: float, y: float) -> bool:
    near = 0.2
    is_beside = place.x - near <= x <= place.x + place.width + near
    is_level = place.y - near <= y <= place.y + place.height + near
    ends_x = min(abs(x - place.x), abs(x - place.x - place.width))
    ends_y = min(abs(y - place.y), abs(y - place.y - place.height))
    return is_beside and is_level and min(ends_x, ends_y) <= near


def _check(found: Layout, boxes: list[Box], lines: list[EdgeLine], frames: list[Frame]) -> None:
    """S-VIZ-80."""
    for one, other in combinations([found.places[box.id] for box in boxes], 2):
        assert not _overlap(one, other)
    for box in boxes:
        assert box.frame is None or _encloses(found.places[box.frame], found.places[box.id])
        assert found.places[box.id].x >= 0
        assert found.places[box.id].x + box.width <= found.width
    for frame in frames:
        assert frame.parent is None or _encloses(found.places[frame.parent], found.places[frame.id])
    for line, route in zip(lines, found.routes, strict=True):
        assert _is_on_border(found.places[line.source], *route.points[0])
        assert _is_on_border(found.places[line.target], *route.points[-1])
        for (x, y), (next_x, next_y) in pairwise(route.points):
            assert min(abs(x - next_x), abs(y - next_y)) <= 1


def test_layers_follow_each_other_from_top_to_bottom() -> None:
    """S-VIZ-80."""
    boxes, lines = _boxes("a", "b", "c"), [EdgeLine(source="a", target="b"), EdgeLine(source="a", target="c")]
    found = lay_out(boxes, lines)
    _check(found, boxes, lines, [])
    a, b, c = (found.places[name] for name in "abc")
    assert a.y + a.height < b.y == c.y
    assert b.x < c.x
    to_right = lay_out(boxes, lines, direction="right")
    assert to_right.places["a"].x + 100 < to_right.places["b"].x == to_right.places["c"].x


def test_a_way_back_does_not_turn_the_order_around() -> None:
    """S-VIZ-80."""
    boxes = _boxes("first", "second")
    lines = [EdgeLine(source="first", target="second"), EdgeLine(source="second", target="first", is_back=True)]
    found = lay_out(boxes, lines)
    _check(found, boxes, lines, [])
    assert found.places["first"].y < found.places["second"].y


def test_frames_enclose_what_lies_in_them_with_room_for_their_titles() -> None:
    """S-VIZ-80; a frame whose upper part is a frame has a title of its own."""
    frames = [Frame(id="outer"), Frame(id="one", parent="outer"), Frame(id="two", parent="outer")]
    boxes = [*_boxes("a", "b", frame="one"), *_boxes("c", frame="two"), *_boxes("before", "beside")]
    lines = [
        EdgeLine(source="before", target="outer"),
        EdgeLine(source="before", target="beside"),
        EdgeLine(source="a", target="b"),
        EdgeLine(source="one", target="two"),
        EdgeLine(source="two", target="one", is_back=True, label_size=(60, 18)),
    ]
    found = lay_out(boxes, lines, frames)
    _check(found, boxes, lines, frames)
    assert found.places["one"].y - found.places["outer"].y >= 28
    assert found.places["a"].y - found.places["one"].y >= 28
    assert found.routes[-1].label_at is not None
    assert all(route.label_at is None for route in found.routes[:-1])


def test_labels_stand_beside_the_lines() -> None:
    """S-VIZ-91: not on their own line, on another one, on a node or on a frame's border."""
    boxes = [*_boxes("a", "b", "c", "d"), *_boxes("e", "f", frame="frame")]
    size = (70.0, 18.0)
    pairs = ["ab", "ac", "bd", "cd", "da", "ad", "de", "ef", "fe"]
    lines = [EdgeLine(source=a, target=b, label_size=size, is_back=(a + b) in {"da", "fe"}) for a, b in pairs]
    found = lay_out(boxes, lines, [Frame(id="frame")])
    _check(found, boxes, lines, [Frame(id="frame")])
    labels = [
        Rect(at[0] - size[0] / 2, at[1] - size[1] / 2, *size)
        for at in (route.label_at for route in found.routes)
        if at is not None
    ]
    assert len(labels) == len(lines)
    segments = [
        Rect(min(x, to_x), min(y, to_y), abs(x - to_x), abs(y - to_y))
        for route in found.routes
        for (x, y), (to_x, to_y) in pairwise(route.points)
    ]
    for label in labels:
        assert not any(_overlap(label, each) for each in [*segments, *(found.places[box.id] for box in boxes)])
    assert not any(_overlap(one, other) for one, other in combinations(labels, 2))


@pytest.mark.heavy
@given(
    count=st.integers(min_value=1, max_value=14),
    pairs=st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=30),
    framed=st.dictionaries(st.integers(0, 13), st.sampled_from(["outer", "inner"])),
)
def test_nothing_overlaps_and_lines_end_at_borders_whatever_the_graph(
    count: int, pairs: list[tuple[int, int]], framed: dict[int, str]
) -> None:
    """S-VIZ-80; twice the same."""
    inside = {each: frame for each, frame in framed.items() if each < count}
    frames = [Frame(id="outer")] if inside else []
    frames += [Frame(id="inner", parent="outer")] if "inner" in inside.values() else []
    boxes = [Box(id=str(each), width=100, height=40, frame=inside.get(each)) for each in range(count)]
    lines = [EdgeLine(source=str(a), target=str(b)) for a, b in pairs if a < count and b < count]
    found = lay_out(boxes, lines, frames)
    _check(found, boxes, lines, frames)
    assert lay_out(boxes, lines, frames) == found


def test_nothing_has_no_size() -> None:
    """S-VIZ-80."""
    assert lay_out([]).width == 0


def test_unknown_ends_and_doubled_names_are_refused() -> None:
    """S-VIZ-80."""
    with pytest.raises(ValueError, match=r"^the graph has no node 'nowhere'$"):
        lay_out(_boxes("a"), [EdgeLine(source="a", target="nowhere")])
    with pytest.raises(ValueError, match=r"^the graph has two nodes 'a'$"):
        lay_out(_boxes("a", "a"))


def test_without_its_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-VIZ-80."""
    monkeypatch.setitem(sys.modules, "graphlay", None)
    with pytest.raises(IllegalStateError, match=r"pip install 'ensemble-ray\[studio\]'"):
        lay_out(_boxes("a"))
