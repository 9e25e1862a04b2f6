"""Events for readers who pull: `Run.events()` and `stream`. Layer: above listeners.

The newest events are kept, so that a reader who comes late sees them; each reader goes at its own pace.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator

from ensemble_ray.events import EVENT_TYPES, Event
from ensemble_ray.process.loop import library_loop, submit

__all__ = ["KEPT_EVENTS", "EventLog", "EventStream"]

#: Events kept for readers who come late; older ones are dropped and counted.
KEPT_EVENTS = 10_000


class EventLog:
    """Keeps a run's events and wakes its readers. Thread-safe."""

    def __init__(self, *, is_open: bool, kept: int | None = None) -> None:
        """Make an empty log.

        Args:
            is_open: False: nobody will read, nothing is kept.
            kept: How many events are kept, older ones are dropped; None: `KEPT_EVENTS`.
        """
        self._is_open = is_open
        self._most = KEPT_EVENTS if kept is None else kept
        self._kept: deque[Event] = deque()
        self._first = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._waiters: set[asyncio.Event] = set()

    @property
    def interest(self) -> frozenset[str]:
        """The event types that readers want: all, or none."""
        return frozenset(EVENT_TYPES) if self._is_open else frozenset()

    def wants(self, event_type: type[Event]) -> bool:
        """Whether events of that type are kept."""
        return self._is_open and event_type.method in EVENT_TYPES

    def emit(self, event: Event) -> None:
        """Keep the event and wake readers."""
        if not self._is_open or event.method not in EVENT_TYPES:
            return
        with self._changed:
            self._kept.append(event)
            if len(self._kept) > self._most:
                self._kept.popleft()
                self._first += 1
            self._wake()

    def close(self) -> None:
        """No more events will come."""
        with self._changed:
            self._is_closed = True
            self._wake()

    def stream(self) -> EventStream:
        """Return a reader of its own, from the oldest kept event."""
        return EventStream(self)

    def read(self, cursor: int) -> tuple[list[Event], int, bool]:
        """Events from a cursor on, the next cursor, and whether that was all there will ever be."""
        with self._changed:
            start = max(0, cursor - self._first)
            found = [self._kept[position] for position in range(start, len(self._kept))]
            return found, self._first + len(self._kept), self._is_closed

    def wait(self, cursor: int) -> None:
        """Block until there is something behind the cursor, or the log is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._first + len(self._kept) > cursor)

    async def wait_until_changed(self, cursor: int, *, timeout_s: float | None = None) -> bool:
        """Return True when there is something behind the cursor or the log is closed, False when the time is up.

        On the library's loop.
        """
        waiter = asyncio.Event()
        with self._changed:
            self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    _, reached, is_closed = self.read(cursor)
                    if is_closed or reached > cursor:
                        return True
                    waiter.clear()
                    await waiter.wait()
        except TimeoutError:
            return False
        finally:
            with self._changed:
                self._waiters.discard(waiter)

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._waiters:
            waiters = tuple(self._waiters)
            library_loop().call_soon_threadsafe(_set_all, waiters)


def _set_all(waiters: Iterable[asyncio.Event]) -> None:
    for waiter in waiters:
        waiter.set()


class EventStream:
    """A reader: `for event in stream` in a thread, `async for event in stream` on any loop."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def __iter__(self) -> Iterator[Event]:
        cursor = 0
        while True:
            found, cursor, is_closed = self._log.read(cursor)
            yield from found
            if is_closed:
                return
            self._log.wait(cursor)

    async def __aiter__(self) -> AsyncIterator[Event]:
        cursor = 0
        while True:
            found, cursor, is_closed = self._log.read(cursor)
            for event in found:
                yield event
            if is_closed:
                return
            await asyncio.wrap_future(submit(self._log.wait_until_changed(cursor)))
