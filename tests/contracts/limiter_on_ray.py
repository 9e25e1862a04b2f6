"""The cluster's rate limiter as a `Site` of the limiter contract: its service lives in an actor whose time the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from ensemble_ray.actors.link.limiter import RemoteLimiter
from ensemble_ray.actors.shared.journal import RateLimiter
from ensemble_ray.actors.spawn import actor_class
from ensemble_ray.llm.limits.limiter import LeasingLimiter, LimiterService, Message, Reply
from ensemble_ray.testing import ManualClock


async def turns() -> None:
    """Let everything run that can in this process."""
    for _ in range(50):
        await asyncio.sleep(0)


class TimedRateLimiter(RateLimiter):
    """The actor's class with a clock that is moved from outside, and an eye on who waits."""

    def __init__(self) -> None:
        super().__init__()
        self._unanswered = 0

    async def begin(self) -> None:
        """An empty service at the beginning of time."""
        self._clock = ManualClock(0.0)
        self._permits = LimiterService(clock=self._clock)

    async def receive(self, message: Message) -> Reply:
        self._unanswered += 1
        try:
            return await super().receive(message)
        finally:
            self._unanswered -= 1

    async def advance(self, by_s: float) -> None:
        """Move its time."""
        self._clock.advance(by_s)
        await turns()

    async def unanswered(self) -> int:
        """Messages that wait for time or for others, after everything else has happened."""
        await turns()
        return self._unanswered


class CountingLine(RemoteLimiter):
    """The way to that actor; knows what is on it."""

    def __init__(self, actor: Any, begun: Awaitable[None]) -> None:
        super().__init__()
        self._actor = actor
        self._begun = begun
        self.sent = 0
        self.answered = 0

    async def __call__(self, message: Message) -> Reply:
        self.sent += 1
        try:
            await self._begun  # calls of an asyncio actor can overtake each other
            return await super().__call__(message)
        finally:
            self.answered += 1


class RaySite:
    """`LeasingLimiter` over `RemoteLimiter`: two holders at the service in an actor."""

    #: one process for all tests; each begins with an empty service
    _actor: Any = None

    def __init__(self) -> None:
        if RaySite._actor is None:
            RaySite._actor = actor_class(TimedRateLimiter, max_restarts=0).remote()
        self._begun = self._actor.begin.remote()
        self._clock = ManualClock(0.0)
        self._lines = [CountingLine(self._actor, self._begun) for _ in range(2)]
        self.one, self.two = (
            LeasingLimiter(line, holder=name, clock=self._clock)
            for line, name in zip(self._lines, ("one", "two"), strict=True)
        )

    async def settle(self) -> None:
        """Return when nothing is on its way: what was sent and not answered is known to wait there."""
        await self._begun
        for _ in range(1000):
            await turns()
            sent = sum(line.sent for line in self._lines)
            waiting = await self._actor.unanswered.remote()
            await turns()
            on_the_way = sum(line.sent - line.answered for line in self._lines)
            if sent == sum(line.sent for line in self._lines) and waiting == on_the_way:
                return
        raise TimeoutError("messages and replies never settled")

    async def advance(self, by_s: float) -> None:
        """Move both processes' time; leases end here before they end there."""
        for _ in range(8):
            self._clock.advance(by_s / 8)
            await turns()
            await self._actor.advance.remote(by_s / 8)
            await self.settle()

    async def close(self) -> None:
        await self.one.close()
        await self.two.close()
        await self.settle()
