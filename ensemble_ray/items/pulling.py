"""Sources are read here, by no more than was asked for.

In: a source's iterator. Out: entries, each an item with its index or a line that is no item.
Rules: one reader advances its source from one thread, or from one task, never two steps at the same time (S-MR-121); a
source that is slow gives what it has; an error of the source comes after the entries before it (S-MR-123).
Never: a step that nobody asked for; the event loop blocked by a synchronous source.
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
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ensemble_ray.errors import ValidationError
from ensemble_ray.errors.texts import brief, message_of
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import threads

_log = bounded_logger(__name__)
#: How long a source may take to make up the count before what it has is handed over.
_GATHER_S = 0.05
#: How long the end of a run waits for a source that is in the middle of a step.
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class RefusedItem:
    """A line of a file that is no item, or an item that nothing can be made of: a failed item without attempts.

    (S-MR-125, S-MR-171.)
    """

    index: int
    #: the line as it stands in the file, or the item's text
    text: str
    error: ValidationError
    #: what was read; None: a line that is no item
    read: object = None

    @property
    def item(self) -> object:
        """What stands for it among items."""
        return self.text if self.read is None else self.read


#: An item with its index, or what is refused.
ItemEntry: TypeAlias = tuple[int, object] | RefusedItem
#: What a synchronous source gives; it is closed where it is left before its end.
Entries: TypeAlias = Generator[ItemEntry, None, None]


@dataclass(frozen=True, slots=True)
class Pulled:
    """What one pull gave."""

    items: Sequence[ItemEntry]
    #: nothing comes any more; a source may tell so only at the pull after its last item
    is_exhausted: bool


class ItemReader(Protocol):
    """Reads one source from its beginning to its end, on one event loop."""

    async def next(self, count: int) -> Pulled:
        """Return the next entries: at most `count`, and at least one unless the source is exhausted.

        Raises:
            Exception: what the source raised, unchanged, after the entries before it were given (S-MR-123).
        """
        ...

    async def close(self) -> None:
        """Let the source go; a step that it is in the middle of is left to itself."""
        ...


class ListReader:
    """Reads a sequence in memory; needs no thread."""

    def __init__(self, items: Sequence[object]) -> None:
        self._items = items
        self._next = 0

    async def next(self, count: int) -> Pulled:
        """Return the next entries."""
        first, self._next = self._next, min(self._next + count, len(self._items))
        entries = [(index, self._items[index]) for index in range(first, self._next)]
        return Pulled(entries, is_exhausted=self._next == len(self._items))

    async def close(self) -> None:
        """Do nothing: nothing is open."""


class _PumpedReader(ABC):
    """A source that somebody else advances, as far as was asked for, while this side waits."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._come: deque[ItemEntry] = deque()
        self._wanted = 0
        #: the reader has waited long enough and takes the very next entry
        self._is_due = False
        self._is_closed = False
        self._has_ended = False
        self._error: BaseException | None = None
        self._there = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump: asyncio.Future[None] | None = None

    async def next(self, count: int) -> Pulled:
        """Return the next entries."""
        if self._pump is None:
            self._loop = asyncio.get_running_loop()
            self._pump = asyncio.ensure_future(self._advance())
        with self._lock:
            self._there.clear()
            self._wanted, self._is_due = count - len(self._come), False
            must_wait = self._wanted > 0 and not self._has_ended
        try:
            if must_wait:
                self._signal_demand()
                await self._gather()
        finally:
            with self._lock:
                self._wanted = 0  # whoever advances stops after the step that it is in
        return self._pop(count)

    async def _gather(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GATHER_S):
                await self._there.wait()
        while True:
            with self._lock:
                self._is_due = True
                if self._come or self._has_ended:
                    return
                self._there.clear()  # it may have been set for what an earlier pull took
            await self._there.wait()

    def _pop(self, count: int) -> Pulled:
        with self._lock:
            entries = [self._come.popleft() for _ in range(min(count, len(self._come)))]
            is_over = self._has_ended and not self._come
        if is_over and self._error is not None and not entries:
            raise self._error
        return Pulled(entries, is_exhausted=is_over and self._error is None)

    async def close(self) -> None:
        """Let the source go."""
        with self._lock:
            self._is_closed = True
        self._signal_demand()
        if self._pump is not None:
            self._stop(self._pump)
            await asyncio.wait({self._pump}, timeout=_CLOSE_S)

    def _put(self, entry: ItemEntry) -> None:
        with self._lock:
            self._come.append(entry)
            self._wanted -= 1
            is_awaited = self._wanted <= 0 or self._is_due
        if is_awaited:
            self._wake()

    def _finish(self, error: BaseException | None) -> None:
        with self._lock:
            self._has_ended, self._error = True, error
            is_nobodys = self._is_closed
        if is_nobodys and error is not None:
            _log.warning(
                "The source of items failed as it was let go: %s: %s", type(error).__name__, brief(message_of(error))
            )
        self._wake()

    def _wake(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._there.set)

    @abstractmethod
    async def _advance(self) -> None:
        """Give entries as they are wanted, until the end or until it is closed."""

    @abstractmethod
    def _signal_demand(self) -> None:
        """Signal that entries are wanted, or none ever again."""

    @abstractmethod
    def _stop(self, pump: asyncio.Future[None]) -> None:
        """Interrupt a step, where it can be."""


class ThreadReader(_PumpedReader):
    """Advances a synchronous source in one daemon thread: some, such as cursors of databases, bear no second one."""

    def __init__(self, entries: Callable[[], Entries]) -> None:
        """Read what this generator function gives; it runs, and is closed, in the thread."""
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
                    del entry  # an item may be large, and the next one far away
        except BaseException as caught:  # noqa: BLE001  whatever the source raises belongs to the run
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
        """Do nothing: Python cannot stop a thread; it ends after its step."""


class AsyncReader(_PumpedReader):
    """Advances an asynchronous source in one task: scopes that it opens must be left where they were entered."""

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
    """Yield the items of any iterable with their indices; a generator is closed with this one."""
    iterator = iter(items)
    try:
        yield from enumerate(iterator)
    finally:
        if inspect.isgenerator(iterator):
            iterator.close()


#: An index further behind the others than so many bytes of bits is kept by itself; a damaged file may name any.
_GAP = 1 << 16


class IndexSet:
    """A set of indices from 0; it takes a bit for each index up to the highest, some few far out left aside."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._far: set[int] = set()
        self._count = 0

    def __contains__(self, index: int) -> bool:
        position = index >> 3
        return (position < len(self._bits) and bool(self._bits[position] & (1 << (index & 7)))) or index in self._far

    def __len__(self) -> int:
        return self._count

    def add(self, index: int) -> bool:
        """Put it in; whether it was not in yet."""
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


#: Numbers are spread over so many sorted lists, by their remainder: of a million, a thousand are moved aside for one.
_LISTS = 1024


class NumberSet:
    """A set of numbers below 2**64, such as hashes, which only grows. An ordinary one takes ten times the memory."""

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
        """Put it in; whether it was not in yet.

        Raises:
            OverflowError: it is negative, or 2**64 or more.
        """
        found = self._lists.setdefault(number % _LISTS, array("Q"))
        position = bisect_left(found, number)
        if position < len(found) and found[position] == number:
            return False
        found.insert(position, number)
        self._count += 1
        return True
