"""The items of a map-reduce and their results. Eight bytes of an item remain after its map."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import cast

import msgspec
from msgspec import Struct

from ensemble_ray.errors import OutputParsingError, message_of
from ensemble_ray.items.line_file import Spool, SpooledSequence
from ensemble_ray.items.pulling import ItemReader, RefusedItem
from ensemble_ray.items.results import DeadLetterFile, ResultsFile
from ensemble_ray.process.concurrency import bridge, run_blocking
from ensemble_ray.record.identity.definition import item_digest
from ensemble_ray.runs.map_reduce.outputs import MapReduceOutputs
from ensemble_ray.runs.map_reduce.resume_point import MapReduceResumePoint
from ensemble_ray.text.redaction import Redaction
from ensemble_ray.values.outputs import FailedItem, ItemResult
from ensemble_ray.values.task_output import TaskOutput


class PulledBatch(Struct, kw_only=True):
    count: int  # with refused items
    is_exhausted: bool
    refused: dict[int, RefusedItem] = msgspec.field(default_factory=dict[int, RefusedItem])
    indices: Sequence[int] = ()  # unrecorded indices and hashes
    digests: Sequence[str] = ()
    has_unrecorded: bool = False  # a fact must be recorded


class ItemBuffer:
    """The items of one run, with positions and hashes for the record (S-MR-162)."""

    def __init__(
        self, reader: ItemReader, record: MapReduceResumePoint | None, redaction: Redaction | None = None
    ) -> None:
        self._reader = reader
        self._redaction = redaction  # factories receive the items, all others the clean ones
        self._record = record
        self._indices = array("q")
        self._items: dict[int, object] = {}

    @property
    def count(self) -> int:
        return len(self._indices)

    @property
    def in_flight(self) -> int:
        return len(self._items)

    def index(self, number: int) -> int:
        return self._indices[number]

    def item(self, number: int) -> object:
        return self._items[number]

    def pop(self, number: int) -> object:
        """Return and release an item after its map."""
        return self._clean(self._items.pop(number, None))

    def shown(self, number: int) -> object:
        return self._clean(self._items[number])

    def _clean(self, item: object) -> object:
        return item if self._redaction is None else self._redaction.clean_data(item)

    async def pull(self, count: int) -> PulledBatch:
        """Pull at most this many items. `ValidationError`: they differ from the record (S-MR-162)."""
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
            digests.append(item_digest(self._clean(item)))
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


_MOST_AT_ONCE = 32  # most results per notification of a reader
_PART_OF_WINDOW = 8


class ItemLog:
    def __init__(self, store: MapReduceOutputs, *, is_read: bool = True) -> None:
        """Create an empty log; if no reader will come, only failures are stored."""
        self._store = store
        self._is_read = is_read
        self.redaction: Redaction | None = None  # of the run, when it is prepared
        self.window = 1  # results that may wait for a reader
        self._came = array("q")  # by arrival: number of a completed map, or -1 - position of a failure
        self._indices = array("q")  # of completed maps, in the same order
        self.completed_count = 0  # items with an output
        self._failures = Spool()
        self._failed = array("q")
        self._changed = asyncio.Condition()
        self._readers: dict[int, int] = {}
        self._is_over = False
        self._waking: asyncio.Task[None] | None = None

    def add_output(self, number: int, index: int) -> None:
        self.completed_count += 1
        self._come(number, index)

    def add_failure(self, index: int, item: object, error: BaseException, attempts: int) -> FailedItem:
        """Add a final failure; return it with the item itself, of which the log may store only a text."""
        failed = FailedItem(
            index=index,
            item=item,
            error_type=type(error).__name__,
            message=message_of(error),
            attempts=attempts,
            raw=error.raw_output if isinstance(error, OutputParsingError) else None,
        )
        if self.redaction is not None:
            failed = self.redaction.clean_data(failed)
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
        self._is_over = True
        self._notify_readers()

    async def free_slots(self, in_flight: Callable[[], int]) -> int:
        """Wait until items may be pulled and return how many; no reader falls behind by more than the window."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._free_slots(in_flight()) > 0)
            return self._free_slots(in_flight())

    def _free_slots(self, in_flight: int) -> int:
        if not self._readers:
            return self.window
        return self.window - in_flight - len(self._came) + min(self._readers.values())

    def _notify_readers(self) -> None:
        async def wake() -> None:
            self._waking = None
            async with self._changed:
                self._changed.notify_all()

        if self._readers and self._waking is None:
            self._waking = asyncio.get_running_loop().create_task(wake())

    @property
    def failed_count(self) -> int:
        return len(self._failed)

    @property
    def failed_items(self) -> Sequence[FailedItem]:
        order = array("q", sorted(range(len(self._failed)), key=self._failed.__getitem__))
        return SpooledSequence(self._failures, order, _failure, what="failed items")

    def stream(self) -> ItemStream:
        return ItemStream(self)

    async def come(self, reader: int, cursor: int) -> int:
        """Wait for results at `cursor`; return the end of the ones to read now, or `cursor` after the last.

        Each call wakes two threads, so it returns several results.
        """
        async with self._changed:
            self._readers[reader] = cursor
            self._changed.notify_all()
            await self._changed.wait_for(lambda: cursor < len(self._came) or self._is_over)
        most = min(_MOST_AT_ONCE, max(1, self.window // _PART_OF_WINDOW))
        return min(len(self._came), cursor + most)

    def result(self, position: int) -> ItemResult:
        """Return a known result; runs in the reader's thread, since loading is work."""
        came = self._came[position]
        if came < 0:
            failed = _failure(self._failures.get(-1 - came))
            return ItemResult(index=failed.index, item=failed.item, error=failed, attempts=failed.attempts)
        item, output = self._store.get_mapped(came)
        return ItemResult(index=self._indices[position], item=item, output=output)

    async def detach(self, reader: int) -> None:
        """Remove a reader, for which the run then does not wait."""
        async with self._changed:
            self._readers.pop(reader, None)
            self._changed.notify_all()


class ItemStream:
    """Results of items in order of arrival; iterate with `for` or `async for`. Ends with the run."""

    def __init__(self, log: ItemLog) -> None:
        self._log = log

    def __iter__(self) -> Iterator[ItemResult]:
        cursor = 0
        try:
            while (end := run_blocking(self._log.come(id(self), cursor))) > cursor:
                yield from map(self._log.result, range(cursor, end))
                cursor = end
        finally:
            run_blocking(self._log.detach(id(self)))

    async def __aiter__(self) -> AsyncIterator[ItemResult]:
        cursor = 0
        try:
            while (end := await bridge(self._log.come(id(self), cursor))) > cursor:
                for position in range(cursor, end):
                    yield self._log.result(position)
                cursor = end
        finally:
            await bridge(self._log.detach(id(self)))


def _failure(packed: bytes) -> FailedItem:
    return cast("FailedItem", pickle.loads(packed))  # noqa: S301  our own temporary file


_MOST_WAITING = 1024  # rows that wait for a file before items are held back


class ItemResultWriter:
    def __init__(
        self,
        log: ItemLog,
        *,
        results: ResultsFile | None = None,
        dead_letters: DeadLetterFile | None = None,
        is_direct: bool = False,
    ) -> None:
        """If `is_direct`, no result is written: the short-circuit's task belongs to no item (S-MR-82)."""
        self._is_direct = is_direct
        self._log = log
        self._results = results
        self._dead_letters = dead_letters
        self._waiting: list[ItemResult | FailedItem] = []
        self._writing: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self.on_error: Callable[[BaseException], None] = lambda _: None  # called if a file cannot be written

    @property
    def redaction(self) -> Redaction | None:
        return self._log.redaction

    async def free_slots(self, in_flight: Callable[[], int]) -> int:
        """Wait as `ItemLog` does, and for slow files (S-MR-131)."""
        while len(self._waiting) >= _MOST_WAITING and self._writing is not None:
            await asyncio.wait([self._writing])
        return await self._log.free_slots(in_flight)

    def write_output(self, number: int, index: int, item: object, output: TaskOutput) -> None:
        if self._is_direct:
            return
        self._log.add_output(number, index)
        if self._results is not None and index not in self._results:
            self._write(ItemResult(index=index, item=item, output=output))

    def write_failure(self, index: int, item: object, error: BaseException, attempts: int) -> None:
        if self._is_direct:
            return
        failed = self._log.add_failure(index, item, error, attempts)
        if self._dead_letters is not None:
            self._write(failed)

    def _write(self, what: ItemResult | FailedItem) -> None:
        self._waiting.append(what)
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_waiting())

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                claimed, self._waiting = self._waiting, []
                rows = [each for each in claimed if isinstance(each, ItemResult)]
                lost = [each for each in claimed if isinstance(each, FailedItem)]
                if rows and self._results is not None:
                    await self._results.write(rows)
                if lost and self._dead_letters is not None:
                    await self._dead_letters.write(lost)
        except Exception as error:  # noqa: BLE001  whatever it is, the run must hear of it
            self._error = error
            self.on_error(error)
        finally:
            self._writing = None

    async def detach(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """`error` is the reason of an abort, None at a normal end."""
        await self.close(is_complete=error is None)

    async def wait_until_written(self) -> None:
        while self._writing is not None:
            await asyncio.wait([self._writing])

    async def close(self, *, is_complete: bool = True) -> None:
        """Write waiting rows and complete the files, which an aborted run leaves to its owner. May raise RecordError."""
        await self.wait_until_written()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._log.close)
            if self._dead_letters is not None:
                stack.push_async_callback(self._dead_letters.close)
            if self._results is not None:
                stack.push_async_callback(self._results.close, is_complete=is_complete)
        if self._error is not None:
            raise self._error
