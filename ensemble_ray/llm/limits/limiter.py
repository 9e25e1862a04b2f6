"""LimiterService: the token buckets of one process or cluster, and those who wait there.

In: messages as data, from this process or from others. Out: replies as data. It carries out what the bucket machines
say and decides nothing itself. `LocalLimiter` keeps one for its process, the cluster's limiter actor one for all.

Callers may be on several event loops and threads. There is no thread and no polling here: the head of each queue keeps
the time on its own loop, and the next one takes over when it leaves. A caller whose loop was closed without cancelling it counts as gone from the next message on.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, assert_never

from ensemble_ray.errors import IllegalStateError, RateLimitTimeoutError
from ensemble_ray.llm.limits.machines import (
    LEASE_S,
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
    TokenBucket,
    Used,
    WaiterCancelled,
    WakeAt,
)
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import new_rlock, track
from ensemble_ray.values.descriptions import MOST_BUCKETS, MOST_HOLDERS, BucketDescription
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.value import RateLimit

if TYPE_CHECKING:
    from ensemble_ray.ports import Clock


class MonotonicClock:
    """The `Clock` of limits: it never jumps. Its zero is arbitrary; only differences count here."""

    def now(self) -> float:
        """Return the seconds of this process's steady clock."""
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """Return after that many seconds."""
        await asyncio.sleep(delay_s)


class Wakeup:
    """Wakes the coroutine that made it, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    @property
    def is_lost(self) -> bool:
        """Whether its loop is closed, so that its coroutine never goes on."""
        return self._loop.is_closed()

    def wake(self) -> bool:
        """Wake the coroutine; False when its loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            return False
        return True

    def clear(self) -> None:
        """Forget what woke it before. First cleared, then looked at: what changes after the look wakes it again."""
        self._event.clear()

    async def wait(self) -> None:
        """Return when it is woken."""
        await self._event.wait()

    async def wait_until(self, at: float, clock: Clock) -> bool:
        """Return when it is woken, or at that instant; True: the instant has come."""
        woken = asyncio.ensure_future(self._event.wait())
        alarm = asyncio.ensure_future(clock.sleep(max(0.0, at - clock.now())))
        try:
            await asyncio.wait((woken, alarm), return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_time = alarm.done()
            woken.cancel()
            alarm.cancel()
        return is_time


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


class LocalLimiter:
    """A `Limiter` whose buckets live in this object.

    Args:
        clock: Where time comes from; a steady clock by default.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._service = LimiterService(clock=clock)
        self._waiters = itertools.count()

    async def acquire(self, bucket: str, limit: RateLimit, *, timeout_s: float) -> None:
        """Take one permit, first come first served. A cancelled caller takes none (S-RATE-13).

        Raises:
            RateLimitTimeoutError: none came in time.
            IllegalStateError: the bucket is known with another limit.
        """
        waiter = str(next(self._waiters))
        request = Requested(waiter=waiter, holder="local", timeout_s=timeout_s)
        if not isinstance(await self._service.receive(Acquire(bucket=bucket, limit=limit, request=request)), Grant):
            raise RateLimitTimeoutError(limit, timedelta(seconds=timeout_s))


_process_limiter = LocalLimiter()


def process_limiter() -> LocalLimiter:
    """Return the limiter of this process for calls outside any run."""
    return _process_limiter


_log = bounded_logger(__name__)

#: Most permits ever asked for at once.
MOST_WANTED = 32
#: Pause before a limiter that could not be reached is asked again, s.
_RETRY_S = 0.1


class Remote(Protocol):
    """The way to a `LimiterService` of another process."""

    async def __call__(self, message: Message) -> Reply:
        """Deliver a message and return its reply.

        Raises:
            ConnectionError: the limiter cannot be reached now; it, or its successor, may be later.
        """
        ...


@dataclass(slots=True, kw_only=True)
class _Leased:
    size: int
    expires_at: float
    used: int = 0
    is_recalled: bool = False

    def is_usable(self, at: float) -> bool:
        return self.used < self.size and at < self.expires_at and not self.is_recalled


class LeaseStock:
    """The leases of one bucket in one process. Pure.

    Rules:
    1. A leased permit is taken only while nobody of this process waits at the limiter: those came first.
    2. Nor after the lease's end or recall; the oldest lease is used up first.
    3. Somebody who asks alone wants as many permits as were asked for within the last lease's life; slow callers lease
       none, and of many who ask at once each wants its own only.
    """

    def __init__(self) -> None:
        self._leases: dict[str, _Leased] = {}
        self._asked_at: deque[float] = deque(maxlen=MOST_WANTED)
        #: callers of this process who wait at the limiter
        self.asking = 0

    def claim(self, at: float) -> str | None:
        """Use a leased permit and return its lease; None when the limiter has to be asked."""
        self._asked_at.append(at)
        if self.asking:
            return None
        for name, lease in self._leases.items():
            if lease.is_usable(at):
                lease.used += 1
                return name
        return None

    def want(self, at: float) -> int:
        """Return the permits worth asking for now; `claim` was called for the caller's own before."""
        return 1 if self.asking else max(1, sum(at - asked_at < LEASE_S for asked_at in self._asked_at))

    def add(self, lease: str, *, size: int, expires_at: float) -> None:
        """Add the lease that came with a grant; `size` is without the first permit."""
        self._leases[lease] = _Leased(size=size, expires_at=expires_at)

    def count_used(self, lease: str) -> int | None:
        """Return the permits used of a lease; None when it has ended."""
        found = self._leases.get(lease)
        return None if found is None else found.used

    def recall(self, lease: str) -> None:
        """Stop using a lease: the limiter wants it back."""
        if (found := self._leases.get(lease)) is not None:
            found.is_recalled = True

    def end(self, lease: str) -> int:
        """End a lease and return how many of its permits were used."""
        return self._leases.pop(lease).used


class LeasingLimiter:
    """A `Limiter` that asks one elsewhere, and uses what it is leased without asking.

    All callers must be on one event loop.

    Args:
        remote: The way to the limiter.
        holder: This process's name at the limiter, unique for its life; made up by default.
        clock: Where time comes from; a steady clock by default.
    """

    def __init__(self, remote: Remote, *, holder: str | None = None, clock: Clock | None = None) -> None:
        self._remote = remote
        self._holder = holder or new_object_id()
        self._clock: Clock = clock or MonotonicClock()
        self._waiters = itertools.count()
        self._stocks: dict[str, LeaseStock] = {}
        #: (bucket, lease) with uses that the limiter has not heard of
        self._unreported: set[tuple[str, str]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def acquire(self, bucket: str, limit: RateLimit, *, timeout_s: float) -> None:
        """Take one permit, first come first served at the limiter. A cancelled caller takes none.

        A limiter that cannot be reached is asked again until the timeout.

        Raises:
            RateLimitTimeoutError: none came in time.
            IllegalStateError: this limiter is closed, or the bucket is known with another limit.
        """
        stock = self._stocks.setdefault(bucket, LeaseStock())
        now = self._clock.now()
        lease = stock.claim(now)
        if lease is not None:
            self._report_soon(bucket, lease)
            return
        deadline = now + timeout_s
        while not self._is_closed:
            reply, lost = await self._ask(bucket, stock, limit, now=now, deadline=deadline)
            if isinstance(reply, Grant):
                return
            now = self._clock.now()
            if isinstance(reply, Expire) or now >= deadline:
                raise RateLimitTimeoutError(limit, timedelta(seconds=timeout_s)) from lost
            await self._clock.sleep(min(_RETRY_S, deadline - now))
            now = self._clock.now()
        msg = f"Limiter of holder '{self._holder}' is closed"
        raise IllegalStateError(msg)

    async def close(self) -> None:
        """Release every lease; callers that wait are turned away."""
        self._is_closed = True
        leaving = list(self._background)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        self._stocks.clear()
        await self._send(HolderGone(holder=self._holder))

    # Asking.

    async def _ask(
        self, bucket: str, stock: LeaseStock, limit: RateLimit, *, now: float, deadline: float
    ) -> tuple[Reply, ConnectionError | None]:
        waiter = f"{self._holder}/{next(self._waiters)}"
        request = Requested(
            waiter=waiter, holder=self._holder, timeout_s=max(0.0, deadline - now), want=stock.want(now)
        )
        call = asyncio.create_task(self._deliver(Acquire(bucket=bucket, limit=limit, request=request)))
        stock.asking += 1
        try:
            # Shielded: a grant on its way to a caller that has left must be heard, so that it can be given back.
            reply = await asyncio.shield(call)
        except asyncio.CancelledError:
            if not call.cancelling():  # else the loop is ending, and the limiter learns it from this process's end
                self._start(self._withdraw(bucket, waiter, call))
            raise
        except ConnectionError as lost:
            return None, lost
        finally:
            stock.asking -= 1
        if isinstance(reply, Grant) and reply.permits > 1:
            stock.add(waiter, size=reply.permits - 1, expires_at=now + LEASE_S)
            self._start(self._tend(bucket, stock, waiter, until=now + LEASE_S))
        return reply, None

    async def _withdraw(self, bucket: str, waiter: str, call: asyncio.Task[Reply]) -> None:
        await self._send(BucketUpdate(bucket, WaiterCancelled(waiter=waiter)))
        try:
            reply = await call
        except ConnectionError:
            return
        if isinstance(reply, Grant):
            await self._send(BucketUpdate(bucket, Returned(lease=waiter, used=0)))
            await self._send(BucketUpdate(bucket, Refunded()))

    # Leases.

    async def _tend(self, bucket: str, stock: LeaseStock, lease: str, *, until: float) -> None:
        """End a lease when its time is over or the limiter wants it back, whichever comes first."""
        recall = asyncio.ensure_future(self._heed_recall(bucket, stock, lease))
        end = asyncio.ensure_future(self._clock.sleep(max(0.0, until - self._clock.now())))
        try:
            await asyncio.wait((recall, end), return_when=asyncio.FIRST_COMPLETED)
        finally:
            recall.cancel()
            end.cancel()
            used = stock.end(lease)
        await self._send(BucketUpdate(bucket, Returned(lease=lease, used=used)))

    async def _heed_recall(self, bucket: str, stock: LeaseStock, lease: str) -> None:
        await self._send(AwaitRecall(bucket=bucket, lease=lease))
        stock.recall(lease)

    def _report_soon(self, bucket: str, lease: str) -> None:
        """Report a use to the limiter; those of one turn of the loop travel together."""
        if not self._unreported:
            self._start(self._report())
        self._unreported.add((bucket, lease))

    async def _report(self) -> None:
        while self._unreported:
            bucket, lease = self._unreported.pop()
            used = self._stocks[bucket].count_used(lease)
            # An ended lease was given back with its final count.
            if used is not None:
                await self._send(BucketUpdate(bucket, Used(lease=lease, used=used)))

    async def _deliver(self, message: Message) -> Reply:
        return await self._remote(message)

    async def _send(self, message: Message) -> None:
        """Deliver what needs no answer. An unreachable limiter ends leases and waiters by itself."""
        try:
            await self._remote(message)
        except ConnectionError as lost:
            _log.debug("Limiter not reached for %s: %s", type(message).__name__, lost)

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
