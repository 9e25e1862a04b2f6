"""A task's slot among those that its agent works on at the same time. Package: execute.

It is released while the task only waits for others, so that agents that ask each other cannot wait for ever: with
`max_concurrency=1`, A asks B and B asks A, and A's second task needs A's only slot (S-DEL-12).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Self

__all__ = ["Slot"]


class Slot:
    """One slot; None as the semaphore means that there are as many as one likes."""

    def __init__(self, slots: asyncio.Semaphore | None = None) -> None:
        self._slots = slots
        self._is_held = False
        #: calls of the turn that have not returned, and those of them that only wait
        self._open = 0
        self._waiting = 0

    async def __aenter__(self) -> Self:
        """Acquire the slot."""
        await self.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave it for good."""
        self._release()

    async def acquire(self) -> None:
        """Acquire the slot, after a wait where another task has it."""
        if self._slots is not None and not self._is_held:
            await self._slots.acquire()
            self._is_held = True

    def begin(self, calls: int) -> None:
        """So many calls of a turn begin."""
        self._open += calls

    def end(self) -> None:
        """One call returned."""
        self._open -= 1
        self._release_if_waiting()

    @asynccontextmanager
    async def waiting(self) -> AsyncGenerator[None]:
        """Mark this call as one that only waits in the block; the slot is released while all open calls do. `acquire` gets it again."""
        self._waiting += 1
        self._release_if_waiting()
        try:
            yield
        finally:
            self._waiting -= 1

    def _release_if_waiting(self) -> None:
        if self._waiting and self._waiting == self._open:
            self._release()

    def _release(self) -> None:
        if self._slots is not None and self._is_held:
            self._is_held = False
            self._slots.release()
