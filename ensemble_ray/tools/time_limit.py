"""TimeLimit: how long a call of a tool may take, without the time that a person takes (S-REV-88). Package: tools."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

__all__ = ["TimeLimit"]


class TimeLimit:
    """Like `asyncio.timeout`, which it is made of, but that it can stand still. For the loop of its call alone."""

    def __init__(self, limit_s: float | None, limits: list[TimeLimit]) -> None:
        """Make one that has not begun.

        Args:
            limit_s: How long what is in its block may take, s; None: as long as it likes.
            limits: Those of the call, to which it belongs while it runs.
        """
        self._timer = asyncio.timeout(limit_s)
        self._limits = limits
        self._pauses = 0
        self._left_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the time was up; a `TimeoutError` that the block raised itself is told apart by it."""
        return self._timer.expired()

    def pause(self) -> None:
        """Stand still, until every pause has been ended."""
        self._pauses += 1
        ends_at = self._timer.when()
        if self._pauses == 1 and ends_at is not None:
            self._left_s = max(0.0, ends_at - asyncio.get_running_loop().time())
            self._timer.reschedule(None)
        elif self._pauses == 1:
            self._left_s = -1.0

    def go_on(self) -> None:
        """End a pause."""
        self._pauses -= 1
        if not self._pauses and self._left_s >= 0 and self in self._limits:
            self._timer.reschedule(asyncio.get_running_loop().time() + self._left_s)

    async def __aenter__(self) -> Self:
        await self._timer.__aenter__()
        self._limits.append(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._limits.remove(self)
        await self._timer.__aexit__(kind, error, where)
