"""The limiter of one process. Package: limits; fulfils the `Limiter` port.

Callers may be on one event loop or several. Nothing here waits in a thread, and nothing polls.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import TYPE_CHECKING

from ensemble_ray.errors import RateLimitTimeoutError
from ensemble_ray.limits.limiter_service import Acquire, LimiterService
from ensemble_ray.limits.steps import Grant, Requested

if TYPE_CHECKING:
    from ensemble_ray.ports import Clock
    from ensemble_ray.values.rate_limit import RateLimit

__all__ = ["LocalLimiter", "process_limiter"]


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
