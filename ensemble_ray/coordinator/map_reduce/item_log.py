"""ItemLog: what came of items, in the order in which it came, for readers that may come late (S-MR-131).

In: completions and failures, on the library's loop. Out: streams of `ItemResult`, read from the store. A reader that
is slow holds the pull of further items back: never more results wait for it than the window is wide.
"""

from __future__ import annotations

import asyncio
import pickle
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from ensemble_ray.errors import OutputParsingError, message_of
from ensemble_ray.items.spool import Spool, SpooledSequence
from ensemble_ray.process.forks import bridge, run_blocking
from ensemble_ray.values.outputs import FailedItem, ItemResult

if TYPE_CHECKING:
    from ensemble_ray.coordinator.map_reduce.outputs import MapReduceOutputs

#: A reader is told of so many results at a time, at most: the run goes on with what it has not read yet in its window.
_MOST_AT_ONCE = 32
_PART_OF_WINDOW = 8


class ItemLog:
    """Results of one run's items."""

    def __init__(self, store: MapReduceOutputs, *, is_read: bool = True) -> None:
        """Begin with none; where nobody will read them, only failures are kept."""
        self._store = store
        self._is_read = is_read
        #: how many results may wait for a reader
        self.window = 1
        #: what came, in order: number of a completed map, or the place of a failure as -1 - place
        self._came = array("q")
        #: index of each completed map, in the same order
        self._indices = array("q")
        #: how many items have their output
        self.completed_count = 0
        self._failures = Spool()
        self._failed = array("q")
        self._changed = asyncio.Condition()
        self._readers: dict[int, int] = {}
        self._is_over = False
        self._waking: asyncio.Task[None] | None = None

    # What comes in, on the library's loop.

    def add_output(self, number: int, index: int) -> None:
        """Note that a map has its output, which is in the store."""
        self.completed_count += 1
        self._come(number, index)

    def add_failure(self, index: int, item: object, error: BaseException, attempts: int) -> FailedItem:
        """Note that a map has failed for good; return it with the item itself, of which only a text may be kept."""
        failed = FailedItem(
            index=index,
            item=item,
            error_type=type(error).__name__,
            message=message_of(error),
            attempts=attempts,
            raw=error.raw_output if isinstance(error, OutputParsingError) else None,
        )
        try:
            packed = pickle.dumps(failed, protocol=5)
        except Exception:  # noqa: BLE001  pickle raises whatever the item's own methods do
            packed = pickle.dumps(failed.replace(item=str(item)), protocol=5)
        self._failures.put(packed)
        self._failed.append(index)
        self._come(-len(self._failed), index)
        return failed

    def _come(self, what: int, index: int) -> None:
        if self._is_read:
            self._came.append(what)
            self._indices.append(index)
            self._notify_readers()

    def close(self) -> None:
        """Nothing comes any more."""
        self._is_over = True
        self._notify_readers()

    async def free_slots(self, in_flight: Callable[[], int]) -> int:
        """How many more items may be pulled, when some may: so many that no reader gets further behind than the window.

        Args:
            in_flight: Tells how many items were pulled whose results have not come.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._free_slots(in_flight()) > 0)
            return self._free_slots(in_flight())

    def _free_slots(self, in_flight: int) -> int:
        if not self._readers:
            return self.window
        return self.window - in_flight - len(self._came) + min(self._readers.values())

    def _notify_readers(self) -> None:
        if self._readers and self._waking is None:
            self._waking = asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        self._waking = None
        async with self._changed:
            self._changed.notify_all()

    # What is asked.

    @property
    def failed_count(self) -> int:
        """How many items have failed for good."""
        return len(self._failed)

    @property
    def failed_items(self) -> Sequence[FailedItem]:
        """Failed items in item order."""
        order = array("q", sorted(range(len(self._failed)), key=self._failed.__getitem__))
        return SpooledSequence(self._failures, order, _failure, what="failed items")

    def stream(self) -> ItemStream:
        """All results, the past ones first."""
        return ItemStream(self)

    async def come(self, reader: int, cursor: int) -> int:
        """How many results have come, when there is one at that place; that place itself after the last one.

        A reader is told of a few more at a time: each question wakes two threads. Those count as read when it asks again.
        """
        async with self._changed:
            self._readers[reader] = cursor
            self._changed.notify_all()
            await self._changed.wait_for(lambda: cursor < len(self._came) or self._is_over)
        most = min(_MOST_AT_ONCE, max(1, self.window // _PART_OF_WINDOW))
        return min(len(self._came), cursor + most)

    def result(self, position: int) -> ItemResult:
        """Return the result at a place that has come; in the reader's thread, since reading it is work."""
        came = self._came[position]
        if came < 0:
            failed = _failure(self._failures.get(-1 - came))
            return ItemResult(index=failed.index, item=failed.item, error=failed, attempts=failed.attempts)
        item, output = self._store.get_mapped(came)
        return ItemResult(index=self._indices[position], item=item, output=output)

    async def leave(self, reader: int) -> None:
        """Wait for a reader no more, since it comes no more."""
        async with self._changed:
            self._readers.pop(reader, None)
            self._changed.notify_all()


class ItemStream:
    """Results of items as they come; iterate with `for` or `async for`. Ends with the run."""

    def __init__(self, log: ItemLog) -> None:
        self._log = log

    def __iter__(self) -> Iterator[ItemResult]:
        cursor = 0
        try:
            while (end := run_blocking(self._log.come(id(self), cursor))) > cursor:
                yield from map(self._log.result, range(cursor, end))
                cursor = end
        finally:
            run_blocking(self._log.leave(id(self)))

    async def __aiter__(self) -> AsyncIterator[ItemResult]:
        cursor = 0
        try:
            while (end := await bridge(self._log.come(id(self), cursor))) > cursor:
                for position in range(cursor, end):
                    yield self._log.result(position)
                cursor = end
        finally:
            await bridge(self._log.leave(id(self)))


def _failure(packed: bytes) -> FailedItem:
    return cast("FailedItem", pickle.loads(packed))  # noqa: S301  our own temporary file
