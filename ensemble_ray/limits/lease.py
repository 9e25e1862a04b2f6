"""A process's side of a limiter that is elsewhere. Package: limits; fulfils the `Limiter` port over a `Remote`.

In: callers of this process, all on one event loop. Out: messages to the limiter's service. Must never happen: a leased
permit taken while the limiter has reported a waiter, while a caller of this process waits there, or after the lease's
100 ms; they are counted from the sending of the request, hence end here before they end there.

`LeaseStock` is pure and holds the rules; `LeasingLimiter` carries out.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from ensemble_ray.errors import IllegalStateError, RateLimitTimeoutError
from ensemble_ray.limits.bucket import LEASE_S
from ensemble_ray.limits.limiter_service import Acquire, AwaitRecall, BucketUpdate, Message, Reply
from ensemble_ray.limits.steps import Expire, Grant, HolderGone, Refunded, Requested, Returned, Used, WaiterCancelled
from ensemble_ray.limits.waiting import MonotonicClock
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.values.ids import new_object_id

if TYPE_CHECKING:
    from ensemble_ray.ports import Clock
    from ensemble_ray.values.rate_limit import RateLimit

__all__ = ["MOST_WANTED", "LeaseStock", "LeasingLimiter", "Remote"]

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
