"""A clock that a test moves. Package: testing; fulfils the `Clock` port without real waiting."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading


class ManualClock:
    """A `Clock` whose time changes only by `advance`.

    Sleepers wake in order of their time, each at its own instant, on the loop they sleep on; `advance` may be called
    from any thread.

    Args:
        start: Unix time at which it stands, s.
    """

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._lock = threading.Lock()
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Unix time of this clock, s."""
        return self._now

    @property
    def sleepers(self) -> int:
        """How many wait for this clock."""
        with self._lock:
            return sum(not future.done() for _, _, _, future in self._sleepers)

    async def sleep(self, delay_s: float) -> None:
        """Return once the clock has been advanced by that much; at once for no delay."""
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            heapq.heappush(self._sleepers, (self._now + delay_s, next(self._order), loop, future))
        await future

    def advance(self, by_s: float) -> None:
        """Move time forward and wake everybody whose time has come.

        Raises:
            ValueError: time does not run backwards.
        """
        if by_s < 0:
            raise ValueError(f"by_s must be >= 0, got: {by_s}")
        with self._lock:
            self._now += by_s
            due = []
            while self._sleepers and self._sleepers[0][0] <= self._now:
                due.append(heapq.heappop(self._sleepers))
        for _, _, loop, future in due:
            loop.call_soon_threadsafe(_wake, future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
