"""LimiterService: the token buckets of one process or cluster, and those who wait there. Package: limits.

In: messages as data, from this process or from others. Out: replies as data. It carries out what the bucket machines
say and decides nothing itself. `LocalLimiter` keeps one for its process, the cluster's limiter actor one for all.

Callers may be on several event loops and threads. There is no thread and no polling here: the head of each queue keeps
the time on its own loop, and the next one takes over when it leaves. A caller whose loop was closed without cancelling it counts as gone from the next message on.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.limits.bucket import TokenBucket
from ensemble_ray.limits.steps import (
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
    WaiterCancelled,
    WakeAt,
)
from ensemble_ray.limits.waiting import MonotonicClock, Wakeup
from ensemble_ray.process.forks import new_rlock, track
from ensemble_ray.values.descriptions import MOST_BUCKETS, MOST_HOLDERS, BucketDescription
from ensemble_ray.values.rate_limit import RateLimit

if TYPE_CHECKING:
    from ensemble_ray.ports import Clock

__all__ = ["Acquire", "AwaitRecall", "BucketUpdate", "LimiterService", "Message", "Reply"]

#: Buckets kept before those that nobody has touched for long are dropped.
_MANY_BUCKETS = 4096
#: A bucket left alone for so long (and at least one period) may be dropped, s. A new one holds one token, so dropping
#: never lets more calls through.
_FORGET_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquire:
    """Wait for a permit of a bucket; answered by `Grant`, `Expire` or `Dismiss`."""

    bucket: str
    limit: RateLimit
    request: Requested


@dataclass(frozen=True, slots=True)
class BucketUpdate:
    """What becomes of a waiter, a permit or a lease."""

    bucket: str
    stimulus: WaiterCancelled | Refunded | Used | Returned


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitRecall:
    """Answered when the lease may be used no more."""

    bucket: str
    lease: str


Message = Acquire | BucketUpdate | AwaitRecall | HolderGone
_Answer = Grant | Expire | Dismiss
Reply = _Answer | None


@dataclass(slots=True)
class _Waiter:
    """A caller in a queue; written under the service's lock."""

    wakeup: Wakeup
    reply: _Answer | None = None
    #: when it has to say that time has passed; only the head of the queue has one
    alarm_at: float | None = None

    def set_alarm(self, at: float) -> bool:
        """Let it keep the time until then; False when its loop is closed."""
        if self.alarm_at == at:
            return not self.wakeup.is_lost
        self.alarm_at = at
        return self.wakeup.wake()


@dataclass(slots=True)
class _Bucket:
    """A bucket and the callers that wait for it."""

    limit: RateLimit
    machine: TokenBucket
    waiters: dict[str, _Waiter] = field(default_factory=dict[str, _Waiter])
    #: by lease: its holder, waiting for the recall
    recalls: dict[str, Wakeup] = field(default_factory=dict[str, Wakeup])


class LimiterService:
    """Hands out the permits of any number of buckets.

    Args:
        clock: Where time comes from; a steady clock by default.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or MonotonicClock()
        self._buckets: dict[str, _Bucket] = {}
        self._lock = new_rlock()
        track(self)

    def after_fork(self) -> None:
        """Begin with full buckets that no caller waits for; the parent keeps its own."""
        self._buckets = {}

    async def receive(self, message: Message) -> Reply:
        """Take a message; `Acquire` and `AwaitRecall` are answered when there is something to say.

        Raises:
            IllegalStateError: the bucket is known with another limit, or the waiter's name is in use.
        """
        match message:
            case Acquire():
                return await self._acquire(message)
            case AwaitRecall():
                await self._await_recall(message)
            case BucketUpdate(bucket=bucket, stimulus=stimulus):
                self._handle(bucket, stimulus)
            case HolderGone():
                for bucket in list(self._buckets):
                    self._handle(bucket, message)
            case _:
                assert_never(message)
        return None

    def describe(self, most: int = MOST_BUCKETS) -> tuple[list[BucketDescription], int]:
        """Return how the buckets stand, those with the longest queues first, and how many are left out."""
        with self._lock:
            now = self._clock.now()
            chosen = heapq.nlargest(most, self._buckets.items(), key=lambda each: len(each[1].waiters))
            described = [
                BucketDescription(
                    name=name,
                    requests=bucket.limit.requests,
                    period_s=bucket.limit.period.total_seconds(),
                    tokens=bucket.machine.tokens_at(now),
                    waiting=len(bucket.waiters),
                    leased=sum(bucket.machine.leases.values()),
                    holders=bucket.machine.holders[:MOST_HOLDERS],
                )
                for name, bucket in chosen
            ]
            return described, len(self._buckets) - len(described)

    # Waiting.

    async def _acquire(self, message: Acquire) -> _Answer:
        name, waiter = message.request.waiter, _Waiter(Wakeup())
        with self._lock:
            bucket = self._bucket_of(message)
            if name in bucket.waiters:
                msg = f"Bucket '{message.bucket}': waiter '{name}' waits already. Waiters need unique names"
                raise IllegalStateError(msg)
            bucket.waiters[name] = waiter
            self._handle(message.bucket, message.request)
        try:
            while waiter.reply is None:
                await self._rest(message.bucket, waiter)
        except asyncio.CancelledError:
            self._abandon(message, waiter)
            raise
        return waiter.reply

    async def _rest(self, bucket: str, waiter: _Waiter) -> None:
        """Wait until something about this waiter may have changed."""
        waiter.wakeup.clear()
        alarm_at = waiter.alarm_at
        if waiter.reply is not None:
            return
        if alarm_at is None:
            await waiter.wakeup.wait()
        elif await waiter.wakeup.wait_until(alarm_at, self._clock):
            self._handle(bucket, Ticked())

    def _abandon(self, message: Acquire, waiter: _Waiter) -> None:
        """Take a cancelled caller out of the queue, or take back the grant that it has not heard of (S-RATE-13)."""
        with self._lock:
            if waiter.reply is None:
                self._handle(message.bucket, WaiterCancelled(waiter=message.request.waiter))
            elif isinstance(waiter.reply, Grant):
                # Never a lease: those are granted at once, and heard at once.
                self._handle(message.bucket, Refunded())

    async def _await_recall(self, message: AwaitRecall) -> None:
        with self._lock:
            bucket = self._buckets.get(message.bucket)
            if bucket is None or not bucket.machine.is_usable(message.lease):
                return
            wakeup = bucket.recalls.setdefault(message.lease, Wakeup())
        await wakeup.wait()

    # The machines.

    def _bucket_of(self, message: Acquire) -> _Bucket:
        name, limit = message.bucket, message.limit
        bucket = self._buckets.get(name)
        if bucket is None:
            now = self._clock.now()
            if len(self._buckets) >= _MANY_BUCKETS:
                self._drop_idle(now)
            machine = TokenBucket(requests=limit.requests, period_s=limit.period.total_seconds(), at=now)
            bucket = self._buckets[name] = _Bucket(limit, machine)
        elif bucket.limit != limit:
            raise IllegalStateError(f"Bucket '{name}' has the limit {bucket.limit!r} and was asked with {limit!r}")
        return bucket

    def _drop_idle(self, now: float) -> None:
        for name, bucket in list(self._buckets.items()):
            if bucket.machine.is_idle(now, for_s=max(_FORGET_S, bucket.limit.period.total_seconds())):
                del self._buckets[name]

    def _handle(self, name: str, stimulus: Stimulus) -> None:
        """Let a bucket handle a stimulus and carry out what it says. What concerns an unknown bucket is of the past."""
        with self._lock:
            bucket = self._buckets.get(name)
            if bucket is None:
                return
            now = self._clock.now()
            stimuli = [stimulus]
            while stimuli:
                stimuli = self._carry_out(bucket, bucket.machine.handle(*stimuli, at=now))

    @staticmethod
    def _carry_out(bucket: _Bucket, instructions: list[Instruction]) -> list[Stimulus]:
        """Wake whom it concerns; return what follows from those that cannot be woken any more."""
        lost: list[Stimulus] = []
        for instruction in instructions:
            match instruction:
                case Grant() | Expire() | Dismiss():
                    waiter = bucket.waiters.pop(instruction.waiter)
                    waiter.reply = instruction
                    if not waiter.wakeup.wake() and isinstance(instruction, Grant):
                        lost.append(Refunded())
                case Recall(lease=lease):
                    if lease in bucket.recalls:
                        bucket.recalls.pop(lease).wake()
                case WakeAt(waiter=name, at=at):
                    if not bucket.waiters[name].set_alarm(at):
                        lost.append(WaiterCancelled(waiter=name))
                case _:
                    assert_never(instruction)
        return lost
