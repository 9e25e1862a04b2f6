"""Runs of one process that are not over, and their turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ensemble_ray.record.following import LiveEvents

if TYPE_CHECKING:
    from ensemble_ray.runs.handle import Run
    from ensemble_ray.serve.driving.ledger import LedgerEntry
    from ensemble_ray.serve.run_schemas import NewRun, RunDetail
    from ensemble_ray.serve.team import ServedTeam


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveRun:
    """A run that was accepted and is not over."""

    entry: LedgerEntry
    team: ServedTeam
    asked: NewRun
    #: what its models say just now, where the team streams; closed when its outcome is kept
    live: LiveEvents = field(default_factory=LiveEvents)
    #: None: it has not begun here
    run: Run | None = None
    #: whether the ledger has it
    is_kept: bool = False
    #: whether it had its turn, here or in another process
    has_begun: bool = False
    #: whether it waits for people, and has no turn meanwhile
    is_aside: bool = False
    #: set when somebody has decided at a gate of it at this endpoint, until it goes on
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    #: whether somebody asked for its end
    is_cancelled: bool = False
    #: its last state, when `done` is set
    ended: RunDetail | None = None
    #: set when its outcome is kept
    done: asyncio.Event = field(default_factory=asyncio.Event)
    #: does the work
    task: asyncio.Task[None] | None = None


class Turns:
    """Runs of one team: so many at a time, the others one after the other."""

    def __init__(self, most: int, on_change: Callable[[Turns], None]) -> None:
        """Begin without a run.

        Args:
            most: Runs at a time.
            on_change: Called when there are more or fewer that run or wait.
        """
        self._most = most
        self._on_change = on_change
        self._running = 0
        self._waiting = 0
        #: first come, first served; each hears of its own turn alone, however many wait
        self._queue: OrderedDict[ActiveRun, asyncio.Future[bool]] = OrderedDict()

    @property
    def running(self) -> int:
        """How many run."""
        return self._running

    @property
    def queued(self) -> int:
        """How many wait for their turn."""
        return len(self._queue)

    @property
    def waiting(self) -> int:
        """How many wait for people, and need no turn."""
        return self._waiting

    @contextmanager
    def aside(self, active: ActiveRun) -> Generator[None]:
        """Count a run that waits for people, as long as it does."""
        active.is_aside = True
        self._waiting += 1
        self._on_change(self)
        try:
            yield
        finally:
            active.is_aside = False
            self._waiting -= 1
            self._on_change(self)

    async def acquire(self, active: ActiveRun) -> bool:
        """Wait for the turn of a run; False: it was cancelled before."""
        if active.is_cancelled:
            return False
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue[active] = turn
        self._call_next()
        try:
            return await turn
        except asyncio.CancelledError:
            if self._queue.pop(active, None) is None and not turn.cancelled() and turn.result():
                self.release()  # it was called just now
            raise

    def release(self) -> None:
        """Take notice that a run is over."""
        self._running -= 1
        self._call_next()

    def cancel(self, active: ActiveRun) -> None:
        """Let a run that waits go."""
        active.is_cancelled = True
        turn = self._queue.pop(active, None)
        if turn is not None:
            turn.set_result(False)
            self._on_change(self)

    def _call_next(self) -> None:
        while self._queue and self._running < self._most:
            _, turn = self._queue.popitem(last=False)
            if not turn.done():
                self._running += 1
                turn.set_result(True)
        self._on_change(self)
