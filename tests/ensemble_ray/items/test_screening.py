"""A source that is read in part: so many items, and those that nothing can be made of refused in their places."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import DeadLetters
from ensemble_ray.items.pulling import RefusedItem
from ensemble_ray.items.sources import ItemSource, screen_source, source_of


async def _all(source: ItemSource, at_once: int) -> list[object]:
    reader = source.open()
    found: list[object] = []
    while True:
        pulled = await reader.next(at_once)
        assert len(pulled.items) <= at_once
        found += pulled.items
        if pulled.is_exhausted:
            await reader.close()
            return found


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize(("limit", "count"), [(1, 1), (3, 3), (9, 5)])
async def test_only_the_first_items_are_read_when_there_is_a_limit(limit: int, count: int, at_once: int) -> None:
    """S-MR-181: N items at most, never one more."""
    read: list[int] = []

    def items() -> object:
        for number in range(5):
            read.append(number)
            yield number

    source = screen_source(source_of(items()), limit=limit)
    assert await _all(source, at_once) == [(number, number) for number in range(count)]
    assert len(read) == count


async def test_items_that_do_not_pass_are_refused_in_their_places() -> None:
    """S-MR-171: with the place, what is wrong, and the item as it stands."""
    source = screen_source(source_of([{"a": 1}, {"b": 2}]), problem=lambda item: None if "a" in str(item) else "no 'a'")
    passed, refused = await _all(source, 10)
    assert passed == (0, {"a": 1})
    assert isinstance(refused, RefusedItem)
    assert (refused.index, refused.item, str(refused.error)) == (1, {"b": 2}, "2 items, item 1: no 'a'")
    assert not source.is_list, "its items are pulled"


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("a.jsonl", "1\n\n2\n  \n3", 3),
        ("a.csv", 'x,y\n1,"two\nlines"\n\n3,4\n', 2),
        ("empty.csv", "", 0),
    ],
)
def test_a_file_tells_how_many_items_it_has_when_it_is_looked_through(
    tmp_path: Path, name: str, text: str, count: int
) -> None:
    """S-MR-185: for the time that is left."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    source = source_of(path)
    assert source.count is None
    assert source.look is not None
    assert source.look() == count
    limited = screen_source(source, limit=1)
    assert limited.look is not None
    assert limited.look() == min(1, count)


def test_only_a_run_can_tell_how_many_dead_letters_there_are(tmp_path: Path) -> None:
    """One item may have several lines."""
    path = tmp_path / "dead.jsonl"
    path.write_text('{"index": 3, "item": "x"}\n', encoding="utf-8")
    assert source_of(DeadLetters(path)).look is None
