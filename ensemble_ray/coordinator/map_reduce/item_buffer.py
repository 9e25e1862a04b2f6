"""ItemBuffer: items as they come from their source, each with its place, until their maps are done.

In: a reader, what the record knows of earlier items. Out: items by their number, and their hashes for the record
(S-MR-162). An item is held from its pull to the end of its map; of one that is done eight bytes stay.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ensemble_ray.items.pulling import RefusedItem
from ensemble_ray.record.identity.map_reduce import item_digest

if TYPE_CHECKING:
    from ensemble_ray.coordinator.map_reduce.ports import RecordedTasks
    from ensemble_ray.items.pulling import ItemReader


@dataclass(slots=True, kw_only=True)
class PulledBatch:
    """What one pull gave."""

    #: how many, refused ones included
    count: int
    is_exhausted: bool
    #: by number
    refused: dict[int, RefusedItem] = field(default_factory=dict[int, RefusedItem])
    #: indices and hashes that are not on record yet
    indices: Sequence[int] = ()
    digests: Sequence[str] = ()
    #: whether the record has to be told
    has_unrecorded: bool = False


class ItemBuffer:
    """The items of one run."""

    def __init__(self, reader: ItemReader, record: RecordedTasks | None) -> None:
        """Read from the beginning; items that `record` knows are compared with it."""
        self._reader = reader
        self._record = record
        #: index of each item by its number
        self._indices = array("q")
        self._items: dict[int, object] = {}

    @property
    def count(self) -> int:
        """How many items have come."""
        return len(self._indices)

    @property
    def in_flight(self) -> int:
        """How many of them have no end yet."""
        return len(self._items)

    def index(self, number: int) -> int:
        """Return the index of an item in its source."""
        return self._indices[number]

    def item(self, number: int) -> object:
        """Return an item whose map is not done."""
        return self._items[number]

    def pop(self, number: int) -> object:
        """Return an item and let it go, since its map is done."""
        return self._items.pop(number, None)

    async def pull(self, count: int) -> PulledBatch:
        """Take at most so many of the next items.

        Raises:
            ValidationError: one is not what the record says, or there are fewer or more than it says (S-MR-162).
            Exception: what the source raised.
        """
        pulled = await self._reader.next(count)
        first = len(self._indices)
        batch = PulledBatch(count=len(pulled.items), is_exhausted=pulled.is_exhausted)
        digests: list[str] = []
        for number, entry in enumerate(pulled.items, start=first):
            item: object
            if isinstance(entry, RefusedItem):
                index, item = entry.index, entry.item
                batch.refused[number] = entry
            else:
                index, item = entry
            self._indices.append(index)
            self._items[number] = item
            digests.append(item_digest(item))
        indices = self._indices[first:]
        recorded = 0
        if self._record is not None:
            recorded = self._record.check_items(first, indices, digests)
            if pulled.is_exhausted:
                self._record.check_end(len(self._indices))
        batch.indices, batch.digests = indices[recorded:], digests[recorded:]
        batch.has_unrecorded = len(batch.digests) > 0 or (
            pulled.is_exhausted and (self._record is None or not self._record.knows_all)
        )
        return batch
