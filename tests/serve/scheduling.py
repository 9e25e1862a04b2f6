"""A clock that a test sets, and a team whose runs tell when they begin and end when they are let."""

from __future__ import annotations

import asyncio
import queue
import threading
from datetime import UTC, datetime
from typing import Any

from ensemble_ray import Ensemble, Schedule, Task, TaskHandlerContext

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
_PATIENCE_S = 60


class SetClock:
    """Stands still until the test moves it."""

    def __init__(self, at: datetime = NOON) -> None:
        self._now = self._seen = at.timestamp()
        self._changed = threading.Condition()
        self._sleeper: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def now(self) -> float:
        """The time that was set."""
        self._seen = self._now
        return self._now

    async def sleep(self, delay_s: float) -> None:
        """Wait until the clock was moved."""
        loop = asyncio.get_running_loop()
        own = (loop, loop.create_future())
        with self._changed:
            if self._now >= self._seen + delay_s:
                return
            self._sleeper = own
            self._changed.notify_all()
        try:
            await own[1]
        finally:
            with self._changed:
                if self._sleeper is own:
                    self._sleeper = None

    async def move(self, seconds: float) -> None:
        """Move it, and wait until all that is due was decided."""
        await asyncio.to_thread(self._move, seconds)

    def _move(self, seconds: float) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._sleeper is not None, _PATIENCE_S)
            assert self._sleeper is not None
            self._now += seconds
            loop, future = self._sleeper
            self._sleeper = None
            loop.call_soon_threadsafe(lambda: future.done() or future.set_result(None))
            assert self._changed.wait_for(lambda: self._sleeper is not None, _PATIENCE_S)


class Desk:
    """A team with one task, "Read {text}", which a function does."""

    def __init__(self, *, is_held: bool = False, text: str = "Read {text}") -> None:
        """Make it; `is_held`: each run waits until it is let go."""
        self._begun: queue.SimpleQueue[TaskHandlerContext] = queue.SimpleQueue()
        self._is_held = is_held
        self._let_go = threading.Semaphore(0)
        self._text = text

    def team(self, **schedules: Schedule) -> Ensemble:
        """The team with these schedules."""
        return Ensemble([Task(self._text, handler=self._work)], inputs={"text": "nothing"}, schedules=schedules)

    async def next(self) -> Any:
        """What the next run reads, as soon as it begins."""
        return await asyncio.to_thread(self._begun.get, timeout=_PATIENCE_S)

    @property
    def is_idle(self) -> bool:
        """Whether no further run has begun."""
        return self._begun.empty()

    def let_go(self) -> None:
        """Let one run end."""
        self._let_go.release()

    def _work(self, context: TaskHandlerContext) -> str:
        self._begun.put(context)
        if self._is_held:
            assert self._let_go.acquire(timeout=_PATIENCE_S)
        return "done"
