"""Read the items of a source on demand, and compact sets of numbers.

A reader advances its source from one thread or task, only for requested items (S-MR-121).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterable, Callable, Generator, Iterable, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from ensemble_ray.errors import ValidationError
from ensemble_ray.errors.texts import brief, message_of
from ensemble_ray.process.concurrency import threads
from ensemble_ray.process.context import bounded_logger

_log = bounded_logger(__name__)
_GATHER_S = 0.05  # a pull waits so long for the requested count
_CLOSE_S = 1.0  # the end of a run waits so long for a source in the middle of a step


class RefusedItem(Struct, frozen=True):
    """A failed item without attempts: an invalid line, or no task can be made for it (S-MR-125, S-MR-171)."""

    index: int
    text: str
    error: ValidationError
    read: object = None  # None: an invalid line

    @property
    def item(self) -> object:
        """The item, or the text of an invalid line."""
        return self.text if self.read is None else self.read


ItemEntry: TypeAlias = tuple[int, object] | RefusedItem
Entries: TypeAlias = Generator[ItemEntry, None, None]  # a reader closes the generator if it stops early


class Pulled(Struct, frozen=True):
    items: Sequence[ItemEntry]
    is_exhausted: bool  # perhaps only at the pull after the last item


class ItemReader(Protocol):
    """Reads one source once, on one event loop."""

    async def next(self, count: int) -> Pulled:
        """Return at most `count` entries, and at least one unless the source is exhausted.

        The error of the source is raised unchanged (S-MR-123).
        """
        ...

    async def close(self) -> None:
        """Close the source, without waiting for a step in progress to end."""


class ListReader:
    def __init__(self, items: Sequence[object]) -> None:
        self._items = items
        self._next = 0

    async def next(self, count: int) -> Pulled:
        first, self._next = self._next, min(self._next + count, len(self._items))
        entries = [(index, self._items[index]) for index in range(first, self._next)]
        return Pulled(entries, is_exhausted=self._next == len(self._items))

    async def close(self) -> None:
        pass


class _PumpedReader(ABC):
    """A pump advances the source as far as requested."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._ready: deque[ItemEntry] = deque()
        self._wanted = 0
        self._is_due = False  # the next entry ends the wait
        self._is_closed = False
        self._has_ended = False
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump: asyncio.Future[None] | None = None

    async def next(self, count: int) -> Pulled:
        if self._pump is None:
            self._loop = asyncio.get_running_loop()
            self._pump = asyncio.ensure_future(self._advance())
        with self._lock:
            self._arrived.clear()
            self._wanted, self._is_due = count - len(self._ready), False
            must_wait = self._wanted > 0 and not self._has_ended
        try:
            if must_wait:
                self._signal_demand()
                await self._gather()
        finally:
            with self._lock:
                self._wanted = 0  # the pump stops after its current step
        with self._lock:
            entries = [self._ready.popleft() for _ in range(min(count, len(self._ready)))]
            is_over = self._has_ended and not self._ready
        if is_over and self._error is not None and not entries:
            raise self._error
        return Pulled(entries, is_exhausted=is_over and self._error is None)

    async def _gather(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GATHER_S):
                await self._arrived.wait()
        while True:
            with self._lock:
                self._is_due = True
                if self._ready or self._has_ended:
                    return
                self._arrived.clear()  # an entry of an earlier pull may have set it
            await self._arrived.wait()

    async def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._signal_demand()
        if self._pump is not None:
            self._stop(self._pump)
            await asyncio.wait({self._pump}, timeout=_CLOSE_S)

    def _put(self, entry: ItemEntry) -> None:
        with self._lock:
            self._ready.append(entry)
            self._wanted -= 1
            is_awaited = self._wanted <= 0 or self._is_due
        if is_awaited:
            self._wake()

    def _finish(self, error: BaseException | None) -> None:
        with self._lock:
            self._has_ended, self._error = True, error
            is_unheard = self._is_closed
        if is_unheard and error is not None:
            _log.warning(
                "The source of items failed as it was closed: %s: %s", type(error).__name__, brief(message_of(error))
            )
        self._wake()

    def _wake(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no waiting reader
                self._loop.call_soon_threadsafe(self._arrived.set)

    @abstractmethod
    async def _advance(self) -> None:
        """Put entries while they are wanted, until the end or the close."""

    @abstractmethod
    def _signal_demand(self) -> None:
        """Wake the pump: entries are wanted, or the reader is closed."""

    @abstractmethod
    def _stop(self, pump: asyncio.Future[None]) -> None:
        """Interrupt a step if possible."""


class ThreadReader(_PumpedReader):
    """Advances a synchronous source in one daemon thread: database cursors cannot change threads."""

    def __init__(self, entries: Callable[[], Entries]) -> None:
        super().__init__()
        self._entries = entries

    async def _advance(self) -> None:
        await threads.run(self._pump_entries)

    def _pump_entries(self) -> None:
        error: BaseException | None = None
        try:
            with contextlib.closing(self._entries()) as entries:
                while self._is_wanted():
                    try:
                        entry = next(entries)
                    except StopIteration:
                        break
                    self._put(entry)
                    del entry  # free a large item before the wait for the next one
        except BaseException as caught:  # noqa: BLE001  any error of the source belongs to the run
            error = caught
        self._finish(error)

    def _is_wanted(self) -> bool:
        with self._lock:
            self._lock.wait_for(lambda: self._wanted > 0 or self._is_closed)
            return not self._is_closed

    def _signal_demand(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def _stop(self, pump: asyncio.Future[None]) -> None:
        pass  # Python cannot stop a thread; it ends after its step


class AsyncReader(_PumpedReader):
    """Advances an asynchronous source in one task: its context managers must exit where they were entered."""

    def __init__(self, items: AsyncIterable[object]) -> None:
        super().__init__()
        self._items = items
        self._demand = asyncio.Event()

    async def _advance(self) -> None:
        error: BaseException | None = None
        iterator = None
        try:
            iterator = aiter(self._items)
            index = 0
            while await self._is_wanted():
                try:
                    item = await anext(iterator)
                except StopAsyncIteration:
                    break
                self._put((index, item))
                index += 1
                del item  # as in a thread
        except BaseException as caught:  # noqa: BLE001  as in a thread
            error = caught
        try:
            if inspect.isasyncgen(iterator):
                await iterator.aclose()
        except BaseException as caught:  # noqa: BLE001  as in a thread
            error = error or caught
        self._finish(None if self._is_closed and isinstance(error, asyncio.CancelledError) else error)

    async def _is_wanted(self) -> bool:
        while self._wanted <= 0 and not self._is_closed:
            self._demand.clear()
            await self._demand.wait()
        return not self._is_closed

    def _signal_demand(self) -> None:
        self._demand.set()

    def _stop(self, pump: asyncio.Future[None]) -> None:
        pump.cancel()


def number_items(items: Iterable[object]) -> Entries:
    """Yield the items with their indices. A generator of items is closed with this one."""
    iterator = iter(items)
    try:
        yield from enumerate(iterator)
    finally:
        if inspect.isgenerator(iterator):
            iterator.close()


_GAP = 1 << 16  # an index so many bytes beyond the bits is stored apart: a damaged file may contain any number


class IndexSet:
    """A set of indices with a bit for each up to the highest, except for a few outliers."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._far: set[int] = set()
        self._count = 0

    def __contains__(self, index: int) -> bool:
        position = index >> 3
        return (position < len(self._bits) and bool(self._bits[position] & (1 << (index & 7)))) or index in self._far

    def __len__(self) -> int:
        return self._count

    def update(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.add(index)

    def add(self, index: int) -> bool:
        if index in self:
            return False
        self._count += 1
        position = index >> 3
        if position >= len(self._bits) + _GAP:
            self._far.add(index)
            return True
        if position >= len(self._bits):
            self._bits.extend(bytes(position + 1 - len(self._bits)))
        self._bits[position] |= 1 << (index & 7)
        return True


_LISTS = 1024  # sorted lists by remainder: an insertion into a million numbers moves a thousand


class NumberSet:
    """A growing set of numbers below 2**64, in a tenth of the memory of a `set`."""

    def __init__(self) -> None:
        self._lists: dict[int, array[int]] = {}
        self._count = 0

    def __contains__(self, number: int) -> bool:
        found = self._lists.get(number % _LISTS)
        if found is None:
            return False
        position = bisect_left(found, number)
        return position < len(found) and found[position] == number

    def __len__(self) -> int:
        return self._count

    def add(self, number: int) -> bool:
        """Return whether the number is new. An OverflowError: it is negative, or 2**64 or more."""
        found = self._lists.setdefault(number % _LISTS, array("Q"))
        position = bisect_left(found, number)
        if position < len(found) and found[position] == number:
            return False
        found.insert(position, number)
        self._count += 1
        return True
