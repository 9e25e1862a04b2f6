"""How callers wait: woken from any thread, or when a time has passed. Package: limits."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble_ray.ports import Clock

__all__ = ["MonotonicClock", "Wakeup"]


class MonotonicClock:
    """The `Clock` of limits: it never jumps. Its zero is arbitrary; only differences count here."""

    def now(self) -> float:
        """Return the seconds of this process's steady clock."""
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """Return after that many seconds."""
        await asyncio.sleep(delay_s)


class Wakeup:
    """Wakes the coroutine that made it, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    @property
    def is_lost(self) -> bool:
        """Whether its loop is closed, so that its coroutine never goes on."""
        return self._loop.is_closed()

    def wake(self) -> bool:
        """Wake the coroutine; False when its loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            return False
        return True

    def clear(self) -> None:
        """Forget what woke it before. First cleared, then looked at: what changes after the look wakes it again."""
        self._event.clear()

    async def wait(self) -> None:
        """Return when it is woken."""
        await self._event.wait()

    async def wait_until(self, at: float, clock: Clock) -> bool:
        """Return when it is woken, or at that instant; True: the instant has come."""
        woken = asyncio.ensure_future(self._event.wait())
        alarm = asyncio.ensure_future(clock.sleep(max(0.0, at - clock.now())))
        try:
            await asyncio.wait((woken, alarm), return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_time = alarm.done()
            woken.cancel()
            alarm.cancel()
        return is_time
