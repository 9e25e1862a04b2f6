"""An event loop whose clock jumps to the next timer as soon as nothing is left to do: minutes pass in no time.

For async code only: it does not wait for threads.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]  # the class depends on the platform
    """Never waits; adds what it would have waited to the clock."""

    elapsed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is not None and timeout > 0:
            self.elapsed_s += timeout
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.elapsed_s


def run_in_virtual_time(coroutine: Coroutine[object, object, T]) -> tuple[T, float]:
    """Run it; gives its result and the seconds that passed on the loop's clock."""
    loop = _VirtualLoop()
    try:
        return loop.run_until_complete(coroutine), loop.time()
    finally:
        loop.close()
