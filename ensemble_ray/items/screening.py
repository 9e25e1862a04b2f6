"""A source of which only some items are wanted, or which may hold items that nothing can be made of. Package: items.

In: a source. Out: a source that ends after so many items, and gives those that do not pass as refused (S-MR-171), with the
place that they have. Never: an item read beyond the last one that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ensemble_ray.errors import ValidationError
from ensemble_ray.items.pulling import Pulled, RefusedItem

if TYPE_CHECKING:
    from ensemble_ray.items.pulling import ItemEntry, ItemReader
    from ensemble_ray.items.sources import ItemSource

__all__ = ["screen_source"]


def screen_source(
    source: ItemSource, *, limit: int | None = None, problem: Callable[[object], str | None] | None = None
) -> ItemSource:
    """Return that source with fewer items.

    Args:
        source: It is never taken for a list afterwards: its items are pulled one by one.
        limit: How many items at most, from the first on; None: all.
        problem: What is wrong with an item, None where nothing is.
    """
    count = source.count if limit is None or source.count is None else min(limit, source.count)
    look = source.look
    return replace(
        source,
        reader=lambda: _ScreenedReader(source.reader(), limit, problem, source.place),
        count=count,
        look=look if look is None or limit is None else lambda: min(limit, look()),
        is_list=False,
        items=(),
    )


class _ScreenedReader:
    """Reads as far as it may."""

    def __init__(
        self, reader: ItemReader, limit: int | None, problem: Callable[[object], str | None] | None, place: str
    ) -> None:
        self._reader = reader
        self._left = limit
        self._problem = problem
        self._place = place

    async def next(self, count: int) -> Pulled:
        """Return the next entries."""
        if self._left is not None:
            count = min(count, self._left)
            if not count:
                return Pulled((), is_exhausted=True)
        pulled = await self._reader.next(count)
        is_exhausted = pulled.is_exhausted
        if self._left is not None:
            self._left -= len(pulled.items)
            is_exhausted = is_exhausted or not self._left
        items = pulled.items if self._problem is None else [self._screen(entry) for entry in pulled.items]
        return Pulled(items, is_exhausted=is_exhausted)

    def _screen(self, entry: ItemEntry) -> ItemEntry:
        if isinstance(entry, RefusedItem) or self._problem is None:
            return entry
        index, item = entry
        problem = self._problem(item)
        if problem is None:
            return entry
        return RefusedItem(index, str(item), ValidationError(f"{self._place}, item {index}: {problem}"), item)

    async def close(self) -> None:
        """Let the source go."""
        await self._reader.close()
