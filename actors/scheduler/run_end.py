"""RunEndBuffer: how a planned run ended, for its driver: waited for, then read a page at a time.

In: the end, of which outputs lie in a file. Out: its pages, each as often as it is asked for, so that a page that was lost
on its way, or a driver that begins anew, misses nothing. Must never happen: a message with all outputs of a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from ensemble_ray.actors.link.wire import EndPage, WireOutcome
from ensemble_ray.values.ids import new_object_id

__all__ = ["RunEndBuffer"]

Entry = TypeVar("Entry")
#: A page holds at most so many entries, and not many more bytes than that.
_PAGE_ENTRIES = 1000
_PAGE_BYTES = 1_000_000
#: A driver that has not asked for so long does not read any more, s.
_READ_S = 60.0


class RunEndBuffer:
    """The end of one planned run."""

    def __init__(self) -> None:
        self.id = new_object_id()
        #: gets the end
        self.result: asyncio.Future[WireOutcome] = asyncio.get_running_loop().create_future()
        self._waiting = 0
        self._asked_at = -_READ_S

    @property
    def is_read(self) -> bool:
        """Whether somebody waits for it or is about to ask for its next page."""
        return self._waiting > 0 or asyncio.get_running_loop().time() < self._asked_at + _READ_S

    async def page(self, cursor: int) -> EndPage:
        """Wait for the end and return a page of it.

        Args:
            cursor: How many entries the driver has.
        """
        self._waiting += 1
        try:
            ended = await asyncio.shield(self.result)
        finally:
            self._waiting -= 1
            self._asked_at = asyncio.get_running_loop().time()
        return _page_of(ended, self.id, cursor)


def _page_of(ended: WireOutcome, end_id: str, begin: int) -> EndPage:
    page = _Page(begin)
    part = replace(
        ended,
        completed=page.fill_from(ended.completed, lambda entry: entry[1]),
        delegated=page.fill_from(ended.delegated, lambda entry: entry[1]),
        failures=page.fill_from(ended.failures, lambda failed: failed.failure.body),
        unfinished=page.fill_from(ended.unfinished, lambda entry: entry[1].body),
        raised=page.fill_from(ended.raised, lambda entry: entry[1].body),
        failed_delegations=ended.failed_delegations if begin == 0 else (),
        units=ended.units if begin == 0 else (),
        unit_failures=ended.unit_failures if begin == 0 else (),
    )
    return EndPage(end_id=end_id, cursor=page.stop, is_last=page.stop >= page.total, end=part)


class _Page:
    """A page that is filled from several sequences, which count as one; each body is read once."""

    def __init__(self, begin: int) -> None:
        #: entries before those of the next sequence
        self.total = 0
        #: the first entry of the next page
        self.stop = begin
        self._begin = begin
        self._size_bytes = 0

    def fill_from(self, entries: Sequence[Entry], body_of: Callable[[Entry], bytes]) -> list[Entry]:
        """Return what of the next sequence is on the page."""
        found: list[Entry] = []
        for entry in entries[max(0, self._begin - self.total) :]:
            if self.stop - self._begin >= _PAGE_ENTRIES or self._size_bytes >= _PAGE_BYTES:
                break
            found.append(entry)
            self.stop += 1
            self._size_bytes += len(body_of(entry))
        self.total += len(entries)
        return found
