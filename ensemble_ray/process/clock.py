"""The clock of a process. Package: process. In: the computer's clocks. Out: a time that never goes back."""

from __future__ import annotations

import asyncio
import time

from ensemble_ray.process.forks import new_lock

__all__ = ["SystemClock"]


class _SteadyClock:
    """Counts on from the latest time that the computer's clock has shown."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._offset_s = float("-inf")

    def now(self) -> float:
        """Return the Unix time, s; never an earlier one than before."""
        # In this order, a pause between the two readings makes the offset too small, and a later reading replaces it. In the other
        # order it would be too large for good: this process would be ahead of others by the longest pause.
        wall_s = time.time()
        elapsed_s = time.monotonic()
        offset_s = wall_s - elapsed_s
        if offset_s > self._offset_s:  # seldom: the offset only grows, so that most calls need no lock
            with self._lock:
                self._offset_s = max(self._offset_s, offset_s)
        return self._offset_s + elapsed_s


#: One for the whole process: what one part of it began, another one ends.
_steady = _SteadyClock()


class SystemClock:
    """The computer's clock; within a process it never goes back, so that nothing takes less than no time."""

    #: Returns the Unix time, s; after the computer's clock was set back, it counts on from the time before. Each task asks for it
    #: eight times.
    now = staticmethod(_steady.now)

    async def sleep(self, delay_s: float) -> None:
        """Sleep on the loop."""
        await asyncio.sleep(delay_s)
