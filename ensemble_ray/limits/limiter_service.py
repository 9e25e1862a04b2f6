"""Where permits are handed out: the buckets of one place, and those who wait there. Room: limits.

In: messages as data, from this process or from others. Out: replies as data. It carries out what the bucket machines
say and decides nothing itself. `LocalLimiter` keeps one for its process, the cluster's limiter actor one for all.

Callers may be on several event loops and threads. There is no thread and no polling here: the head of each queue keeps
the watch on its own loop, and the next one takes over when it leaves. A caller whose loop was closed without cancelling it counts as gone from the next message on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.limits.bucket import TokenBucket
from ensemble_ray.limits.steps import (
    Cancelled,
    Dismiss,
    Expire,
    Grant,
    HolderGone,
    Instruction,
    Recall,
    Refunded,
    Requested,
    Returned,
    Stimulus,
    Ticked,
    Used,
    WakeAt,
)
from ensemble_ray.values.rate_limit import RateLimit

if TYPE_CHECKING:
    from ensemble_ray.ports import Clock

__all__ = [
    "Acquire",
    "AwaitRecall",
    "Dismissed",
    "GiveBack",
    "Granted",
    "Leave",
    "LimiterService",
    "Message",
    "MonotonicClock",
    "Refund",
    "Refused",
    "Reply",
    "Report",
    "Withdraw",
]

#: Buckets kept before those that nobody has touched for long are dropped.
_MANY_BUCKETS = 4096
#: A bucket left alone for so long (and at least one period) may be dropped, s. A new one holds one token, so dropping
#: never lets more calls through.
_FORGET_S = 3600.0


class MonotonicClock:
    """The `Clock` of limits: it never jumps. Its zero is arbitrary; only differences count here."""

    def now(self) -> float:
        """Seconds of this process's steady clock."""
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """Return after that many seconds."""
        await asyncio.sleep(delay_s)


# What a desk is told.


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquire:
    """Wait for a permit; answered by `Granted`, `Refused` or `Dismissed`."""

    bucket: str
    limit: RateLimit
    #: process that asks
    holder: str
    #: unique over all holders; also the name of the lease
    waiter: str
    timeout_s: float
    #: permits the holder could use within a lease's life
    want: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Stop waiting; its `Acquire` is then answered by `Dismissed`, unless it was granted before."""

    bucket: str
    waiter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refund:
    """A granted permit was not used."""

    bucket: str
    permits: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How many permits of a lease are used, counted from its beginning."""

    bucket: str
    lease: str
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """The end of a lease; what is unused is free again."""

    bucket: str
    lease: str
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitRecall:
    """Answered when the lease may be used no more."""

    bucket: str
    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A holder is dead or done: its leases are free, its waiters are dismissed."""

    holder: str


Message = Acquire | Withdraw | Refund | Report | GiveBack | AwaitRecall | Leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The permit; with `permits` above 1 also a lease on the rest, named like the waiter."""

    permits: int = 1


@dataclass(frozen=True, slots=True)
class Refused:
    """No permit came in time."""


@dataclass(frozen=True, slots=True)
class Dismissed:
    """The waiter was withdrawn, or its holder was said to be gone."""


Reply = Granted | Refused | Dismissed | None


class _Bell:
    """Wakes one coroutine from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.event = asyncio.Event()

    @property
    def is_unheard(self) -> bool:
        """Whether its loop is closed, so that nobody is there any more."""
        return self._loop.is_closed()

    def ring(self) -> bool:
        """Wake it; False when its loop is closed and nobody can hear."""
        try:
            self._loop.call_soon_threadsafe(self.event.set)
        except RuntimeError:
            return False
        return True


@dataclass(slots=True)
class _Seat:
    """Where one waiter sits; written under the desk's lock."""

    bell: _Bell
    reply: Granted | Refused | Dismissed | None = None
    #: when it has to say that time has passed; only the head of the queue has one
    alarm_at: float | None = None

    def watch_until(self, at: float) -> bool:
        """Keep the watch until then; False when nobody sits here any more."""
        if self.alarm_at == at:
            return not self.bell.is_unheard
        self.alarm_at = at
        return self.bell.ring()


@dataclass(slots=True)
class _Line:
    """A bucket and those who wait for it."""

    limit: RateLimit
    bucket: TokenBucket
    seats: dict[str, _Seat] = field(default_factory=dict[str, _Seat])
    #: lease -> who wants to hear of its end
    watchers: dict[str, _Bell] = field(default_factory=dict[str, _Bell])


class LimiterService:
    """Hands out the permits of any number of buckets.

    Args:
        clock: Where time comes from; a steady clock by default.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or MonotonicClock()
        self._lines: dict[str, _Line] = {}
        self._lock = threading.RLock()

    async def receive(self, message: Message) -> Reply:
        """Take a message; `Acquire` and `AwaitRecall` are answered when there is something to say.

        Raises:
            IllegalStateError: the bucket is known with another limit, or the waiter's name is taken.
        """
        match message:
            case Acquire():
                return await self._acquire(message)
            case AwaitRecall():
                await self._await_recall(message)
            case Withdraw():
                self._tell(message.bucket, lambda at: Cancelled(at=at, waiter=message.waiter))
            case Refund():
                self._tell(message.bucket, lambda at: Refunded(at=at, permits=message.permits))
            case Report():
                self._tell(message.bucket, lambda at: Used(at=at, lease=message.lease, used=message.used))
            case GiveBack():
                self._tell(message.bucket, lambda at: Returned(at=at, lease=message.lease, used=message.used))
            case Leave():
                for bucket in list(self._lines):
                    self._tell(bucket, lambda at: HolderGone(at=at, holder=message.holder))
            case _:
                assert_never(message)
        return None

    # Waiting.

    async def _acquire(self, ask: Acquire) -> Granted | Refused | Dismissed:
        seat = _Seat(_Bell())
        with self._lock:
            line = self._line_of(ask)
            if ask.waiter in line.seats:
                msg = f"Bucket '{ask.bucket}': waiter '{ask.waiter}' waits already. Waiters need unique names"
                raise IllegalStateError(msg)
            line.seats[ask.waiter] = seat
            self._tell(
                ask.bucket,
                lambda at: Requested(
                    at=at, waiter=ask.waiter, holder=ask.holder, deadline=at + ask.timeout_s, want=ask.want
                ),
            )
        try:
            while seat.reply is None:
                await self._rest(ask.bucket, seat)
        except asyncio.CancelledError:
            self._abandon(ask, seat)
            raise
        return seat.reply

    async def _rest(self, bucket: str, seat: _Seat) -> None:
        """Wait until something about this seat may have changed."""
        bell = seat.bell.event
        # First cleared, then looked at: what is written after the look rings again.
        bell.clear()
        alarm_at = seat.alarm_at
        if seat.reply is not None:
            return
        if alarm_at is None:
            await bell.wait()
            return
        called = asyncio.ensure_future(bell.wait())
        watch = asyncio.ensure_future(self._clock.sleep(max(0.0, alarm_at - self._clock.now())))
        try:
            await asyncio.wait((called, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_time = watch.done()
            called.cancel()
            watch.cancel()
        if is_time:
            self._tell(bucket, lambda at: Ticked(at=at))

    def _abandon(self, ask: Acquire, seat: _Seat) -> None:
        """The caller was cancelled: it leaves the queue, or its unheard grant is taken back (S-RATE-13)."""
        with self._lock:
            if seat.reply is None:
                self._tell(ask.bucket, lambda at: Cancelled(at=at, waiter=ask.waiter))
            elif isinstance(seat.reply, Granted):
                # Never a lease: those are granted at once, and heard at once.
                self._tell(ask.bucket, lambda at: Refunded(at=at))

    async def _await_recall(self, message: AwaitRecall) -> None:
        with self._lock:
            line = self._lines.get(message.bucket)
            if line is None or not line.bucket.is_usable(message.lease):
                return
            bell = line.watchers.setdefault(message.lease, _Bell())
        await bell.event.wait()

    # The machines.

    def _line_of(self, ask: Acquire) -> _Line:
        line = self._lines.get(ask.bucket)
        if line is None:
            now = self._clock.now()
            if len(self._lines) >= _MANY_BUCKETS:
                self._drop_idle(now)
            period_s = ask.limit.period.total_seconds()
            bucket = TokenBucket(requests=ask.limit.requests, period_s=period_s, at=now)
            line = self._lines[ask.bucket] = _Line(ask.limit, bucket)
        elif line.limit != ask.limit:
            msg = f"Bucket '{ask.bucket}' has the limit {line.limit!r} and was asked with {ask.limit!r}"
            raise IllegalStateError(msg)
        return line

    def _drop_idle(self, now: float) -> None:
        for name, line in list(self._lines.items()):
            if line.bucket.is_idle(now, for_s=max(_FORGET_S, line.limit.period.total_seconds())):
                del self._lines[name]

    def _tell(self, bucket: str, fact: Callable[[float], Stimulus]) -> None:
        """Tell a bucket and carry out what it says. What is said of an unknown bucket is of the past."""
        with self._lock:
            line = self._lines.get(bucket)
            if line is None:
                return
            now = self._clock.now()
            stimuli = [fact(now)]
            while stimuli:
                stimuli = self._carry_out(line, line.bucket.handle(*stimuli), now)

    def _carry_out(self, line: _Line, instructions: list[Instruction], now: float) -> list[Stimulus]:
        """Wake whom it concerns; gives what has to be told about those who cannot be woken any more."""
        unheard: list[Stimulus] = []
        for instruction in instructions:
            match instruction:
                case Grant(waiter=waiter, permits=permits):
                    if not self._settle(line, waiter, Granted(permits=permits)):
                        unheard.append(Refunded(at=now))
                case Expire(waiter=waiter):
                    self._settle(line, waiter, Refused())
                case Dismiss(waiter=waiter):
                    self._settle(line, waiter, Dismissed())
                case Recall(lease=lease):
                    if lease in line.watchers:
                        line.watchers.pop(lease).ring()
                case WakeAt(waiter=waiter, at=at):
                    if not line.seats[waiter].watch_until(at):
                        unheard.append(Cancelled(at=now, waiter=waiter))
                case _:
                    assert_never(instruction)
        return unheard

    @staticmethod
    def _settle(line: _Line, waiter: str, reply: Granted | Refused | Dismissed) -> bool:
        seat = line.seats.pop(waiter)
        seat.reply = reply
        return seat.bell.ring()
