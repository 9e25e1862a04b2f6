"""RunEnd: how a planned run ended, for its driver: waited for, then read a page at a time.

In: the end, of which outputs lie in a file. Out: its pages, each as often as it is asked for, so that a page that was lost
on its way, or a driver that begins anew, misses nothing. Must never happen: a message with all outputs of a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from ensemble_ray.actors.link.wire import EndPage
from ensemble_ray.coordinator.planned import PlannedEnd
from ensemble_ray.values.ids import new_object_id

__all__ = ["RunEnd"]

Entry = TypeVar("Entry")
#: A page holds at most so many entries, and not many more bytes than that.
_PAGE_ENTRIES = 1000
_PAGE_BYTES = 1_000_000
#: A driver that has not asked for so long does not read any more, s.
_READ_S = 60.0


class RunEnd:
    """The end of one planned run."""

    def __init__(self) -> None:
        self.id = new_object_id()
        #: gets the end
        self.result: asyncio.Future[PlannedEnd[bytes, bytes]] = asyncio.get_running_loop().create_future()
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


def _page_of(ended: PlannedEnd[bytes, bytes], end_id: str, begin: int) -> EndPage:
    parts: Sequence[Sequence[object]] = (ended.completed, ended.delegated, ended.failures, ended.unfinished)
    total = sum(len(part) for part in parts)
    stop, size = begin, 0
    for body in islice(_payloads(ended, begin), _PAGE_ENTRIES):
        stop, size = stop + 1, size + len(body)
        if size >= _PAGE_BYTES:
            break
    first, second, third, fourth = (sum(len(part) for part in parts[:index]) for index in range(4))
    part = replace(
        ended,
        completed=_cut(ended.completed, begin - first, stop - first),
        delegated=_cut(ended.delegated, begin - second, stop - second),
        failures=_cut(ended.failures, begin - third, stop - third),
        unfinished=_cut(ended.unfinished, begin - fourth, stop - fourth),
        failed_delegations=ended.failed_delegations if begin == 0 else [],
    )
    return EndPage(end_id=end_id, cursor=stop, is_last=stop >= total, end=part)


def _payloads(ended: PlannedEnd[bytes, bytes], begin: int) -> Iterator[bytes]:
    """Yield the bodies of all entries from one on; those before are not read."""
    for keyed in (ended.completed, ended.delegated):
        yield from (body for _, body in keyed[begin:])
        begin = max(0, begin - len(keyed))
    yield from (failed.failure for failed in ended.failures[begin:])
    yield from ended.unfinished[max(0, begin - len(ended.failures)) :]


def _cut(entries: Sequence[Entry], begin: int, stop: int) -> list[Entry]:
    return list(entries[max(0, begin) : max(0, stop)])
