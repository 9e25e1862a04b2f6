"""Waits for permits are reported, whatever came of them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ensemble_ray import RateLimit, RateLimitTimeoutError
from ensemble_ray.actors.worker.agent import MeasuredLimiter

LIMIT = RateLimit.per_minute(1)


class Once:
    """Grants one permit."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, RateLimit, float]] = []

    async def acquire(self, bucket: str, limit: RateLimit, *, timeout_s: float) -> None:
        self.asked.append((bucket, limit, timeout_s))
        if len(self.asked) > 1:
            raise RateLimitTimeoutError(limit, timedelta(seconds=timeout_s))


async def test_each_wait_is_reported_once() -> None:
    """S-SRV-171: also one that ended without a permit."""
    reported: list[float] = []
    inner = Once()
    limiter = MeasuredLimiter(inner, reported.append)
    await limiter.acquire("model", LIMIT, timeout_s=5)
    with pytest.raises(RateLimitTimeoutError):
        await limiter.acquire("model", LIMIT, timeout_s=0)
    assert inner.asked == [("model", LIMIT, 5), ("model", LIMIT, 0)]
    assert len(reported) == 2
    assert min(reported) >= 0
