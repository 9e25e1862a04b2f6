"""Items of a map-reduce, compared with those of its record."""

from __future__ import annotations

import pytest

from ensemble_ray import ValidationError
from ensemble_ray.items.pulling import ListReader
from ensemble_ray.record.identity.definition import item_digest
from ensemble_ray.runs.map_reduce.items import ItemBuffer
from ensemble_ray.runs.map_reduce.outputs import MapReduceOutputs
from ensemble_ray.runs.map_reduce.resume_point import MapReduceResumePoint
from tests.ensemble_ray.record.facts_of_dynamic_runs import items_fact


def recorded(count: int, *, are_all: bool) -> MapReduceResumePoint:
    """The record of a run that pulled 0, 1, 2, ..."""
    record = MapReduceResumePoint(MapReduceOutputs())
    digests = [item_digest(number) for number in range(count)]
    record.facts.apply([items_fact("r", 1.0, indices=range(count), digests=digests, are_all=are_all)])
    return record


async def test_items_are_news_once() -> None:
    """S-MR-162: what is on record is not told again, but for what came after it, and the end."""
    items = ItemBuffer(ListReader(range(5)), recorded(3, are_all=False))
    batch = await items.pull(2)
    assert (batch.count, batch.has_unrecorded, list(batch.indices)) == (2, False, [])
    batch = await items.pull(9)
    assert (batch.count, batch.has_unrecorded, list(batch.indices), batch.is_exhausted) == (3, True, [3, 4], True)
    known = ItemBuffer(ListReader(range(3)), recorded(3, are_all=True))
    assert not (await known.pull(9)).has_unrecorded


@pytest.mark.parametrize(
    ("items", "are_all", "message"),
    [
        ([0, 7, 2], False, "item 1 is not what it was"),
        ([0, 1], False, "recorded 3 items, the source has 2"),
        ([0, 1, 2, 3], True, "recorded 3 items, the source has more"),
    ],
)
async def test_other_items_are_refused(items: list[int], message: str, *, are_all: bool) -> None:
    """S-MR-162: another item, fewer; more where the run had seen the end."""
    with pytest.raises(ValidationError, match=f"^items changed: .*{message}"):
        await ItemBuffer(ListReader(items), recorded(3, are_all=are_all)).pull(9)


async def test_items_are_held_until_their_maps_are_done() -> None:
    """S-MR-132: and no longer."""
    items = ItemBuffer(ListReader(["a", "b"]), None)
    await items.pull(2)
    assert (items.in_flight, items.item(1)) == (2, "b")
    assert items.pop(1) == "b"
    assert (items.in_flight, items.count) == (1, 2)
