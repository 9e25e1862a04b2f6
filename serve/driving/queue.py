"""The queue of a team's runs: by priority and waiting time, with the position and the probable start of each run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Generic, TypeVar

from ensemble_ray.ports import Clock
from ensemble_ray.process.concurrency import SystemClock
from ensemble_ray.serve.driving.run_driver import ActiveRun
from ensemble_ray.serve.schemas import QueuePlace, RunPriority

T = TypeVar("T", bound=Hashable)
_STEPS = {RunPriority.LOW: -1, RunPriority.NORMAL: 0, RunPriority.HIGH: 1}
#: Turns whose durations an estimate uses.
_RECENT_TURNS = 20


def rank(priority: RunPriority, since_s: float, *, step_s: float) -> float:
    """Return a number by which runs have their turns, lowest first.

    A run gains urgency while it waits, a step of priority in each `step_s`. All runs gain it at the same rate, so the order of two
    runs never changes, and their ranks need no clock.
    """
    return since_s - _STEPS[priority] * step_s


class TurnOrder(Generic[T]):
    """Values by rank; values of equal rank in the order in which they were added."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._keys: dict[T, tuple[float, int]] = {}
        self._order: list[tuple[float, int]] = []
        self._values: dict[tuple[float, int], T] = {}

    def __len__(self) -> int:
        return len(self._order)

    def add(self, value: T, at_rank: float) -> None:
        key = self._keys[value] = at_rank, next(self._numbers)
        self._values[key] = value
        insort(self._order, key)

    def pop(self) -> T:
        """Remove and return the first value."""
        value = self._values[self._order[0]]
        self.discard(value)
        return value

    def discard(self, value: T) -> bool:
        """Remove a value; return whether it was in the order."""
        key = self._keys.pop(value, None)
        if key is None:
            return False
        del self._order[bisect_left(self._order, key)], self._values[key]
        return True

    def position(self, value: T) -> int | None:
        """Return the position of a value, from 1; None: it is not in the order."""
        key = self._keys.get(value)
        return None if key is None else bisect_left(self._order, key) + 1


def estimate_start(
    position: int, *, places: int, running_for_s: Sequence[float], durations_s: Sequence[float]
) -> float | None:
    """Return the seconds until the turn of a run, if each turn takes the mean of `durations_s`; None: no turn has ended.

    Runs that begin earlier because of their priority are unknown, so the run may start later.
    """
    if not durations_s:
        return None
    mean_s = sum(durations_s) / len(durations_s)
    left = sorted(max(0.0, mean_s - each) for each in running_for_s)
    left = [0.0] * (places - len(left)) + left
    rounds, place = divmod(position - 1, places)
    return left[place] + rounds * mean_s


class RunQueue:
    """Queue of one team's runs. `on_change` is called after each change of a count."""

    def __init__(
        self,
        most: int,
        on_change: Callable[[RunQueue], None],
        *,
        step_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._most = most
        self._on_change = on_change
        self._step_s = step_s
        self._clock = clock or SystemClock()
        self._order = TurnOrder[ActiveRun]()
        #: each future wakes only its own run
        self._turns: dict[ActiveRun, asyncio.Future[bool]] = {}
        #: with the start of its turn, Unix time, s; waiting ones are outside of the queue
        self._running: dict[ActiveRun, float] = {}
        self._durations = deque[float](maxlen=_RECENT_TURNS)
        self.waiting = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._order)

    def rank(self, active: ActiveRun) -> float:
        """Return a number by which runs have their turns. It is the same after a restart."""
        return rank(_priority(active), active.entry.created_at.timestamp(), step_s=self._step_s)

    def place(self, active: ActiveRun) -> QueuePlace | None:
        """Return the place of a run in the queue; None: it does not wait for its turn."""
        position = self._order.position(active)
        if position is None:
            return None
        now = self._clock.now()
        running = [now - each for each in self._running.values()]
        start_s = estimate_start(position, places=self._most, running_for_s=running, durations_s=self._durations)
        shown_s = None if start_s is None else round(start_s, 1)
        return QueuePlace(priority=_priority(active), position=position, estimated_start_s=shown_s)

    @contextlib.contextmanager
    def aside(self, active: ActiveRun) -> Generator[None]:
        active.is_aside = True
        self.waiting += 1
        self._on_change(self)
        try:
            yield
        finally:
            active.is_aside = False
            self.waiting -= 1
            self._on_change(self)

    async def acquire(self, active: ActiveRun) -> bool:
        """Wait for the turn of a run; False: it was cancelled before."""
        if active.is_cancelled:
            return False
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._turns[active] = turn
        self._order.add(active, self.rank(active))
        self._call_next()
        try:
            return await turn
        except asyncio.CancelledError:
            if not self._order.discard(active) and not turn.cancelled() and turn.result():
                self._running.pop(active)  # its turn came at the same moment
                self._call_next()
            raise
        finally:
            self._turns.pop(active, None)

    def release(self, active: ActiveRun) -> None:
        self._durations.append(self._clock.now() - self._running.pop(active))
        self._call_next()

    def cancel(self, active: ActiveRun) -> None:
        active.is_cancelled = True
        if self._order.discard(active):
            self._turns[active].set_result(False)
            self._on_change(self)

    def _call_next(self) -> None:
        while len(self._order) and len(self._running) < self._most:
            active = self._order.pop()
            turn = self._turns[active]
            if not turn.done():
                self._running[active] = self._clock.now()
                turn.set_result(True)
        self._on_change(self)


def _priority(active: ActiveRun) -> RunPriority:
    return active.asked.priority or RunPriority.NORMAL
