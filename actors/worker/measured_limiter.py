"""MeasuredLimiter: tells Ray's metrics how long callers of a process waited for permits."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, cast

from ray.util import metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from ensemble_ray.ports import Limiter
    from ensemble_ray.values.rate_limit import RateLimit

__all__ = ["MeasuredLimiter", "report_wait"]

#: Upper ends of the histogram's parts, s.
_BOUNDARIES_S = [0.001, 0.01, 0.1, 1.0, 10.0, 60.0]


@functools.cache
def _histogram() -> Any:
    # Buckets have names that teams choose, and as many as they like, so there is no label.
    return cast("Any", metrics).Histogram(
        "ensemble_ray_limiter_wait_seconds",
        description="How long model calls waited for a permit of the cluster's rate limiter",
        boundaries=_BOUNDARIES_S,
    )


def report_wait(waited_s: float) -> None:
    """Report how long one call waited, s."""
    _histogram().observe(waited_s)


class MeasuredLimiter:
    """A `Limiter` that reports waits, also those that ended without a permit.

    Args:
        limiter: Hands out the permits.
        report: Takes the wait, s.
    """

    def __init__(self, limiter: Limiter, report: Callable[[float], None] = report_wait) -> None:
        self._limiter = limiter
        self._report = report

    async def acquire(self, bucket: str, limit: RateLimit, *, timeout_s: float) -> None:
        """Take one permit; see `Limiter.acquire`."""
        began = time.monotonic()
        try:
            await self._limiter.acquire(bucket, limit, timeout_s=timeout_s)
        finally:
            self._report(time.monotonic() - began)
