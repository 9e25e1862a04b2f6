"""The cluster's RateLimiter itself; how permits are given is in the limiter's contract, which has a site on Ray."""

from __future__ import annotations

import os
import signal

import pytest

from ensemble_ray import IllegalStateError, RateLimit, RateLimitTimeoutError
from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.limiter import RemoteLimiter
from ensemble_ray.actors.shared.journal import RateLimiter
from ensemble_ray.llm.limits.limiter import LeasingLimiter
from ensemble_ray.values.ids import new_object_id

HOURLY = RateLimit.of(1, 3600.0)


async def test_bucket_is_one_when_each_caller_has_a_line_of_its_own(ray_cluster: str) -> None:
    """S-RATE-20, S-RATE-12, S-CONV-32: all lines lead to one actor; what it refuses arrives as our own errors."""
    one, two = LeasingLimiter(RemoteLimiter()), LeasingLimiter(RemoteLimiter())
    bucket = new_object_id()
    await one.acquire(bucket, HOURLY, timeout_s=60.0)
    with pytest.raises(RateLimitTimeoutError):
        await two.acquire(bucket, HOURLY, timeout_s=0.0)
    await two.acquire(new_object_id(), HOURLY, timeout_s=60.0)
    with pytest.raises(IllegalStateError) as caught:
        await two.acquire(bucket, RateLimit.of(2, 3600.0), timeout_s=0.0)
    assert type(caught.value) is IllegalStateError
    for limiter in (one, two):
        await limiter.close()


async def test_callers_go_on_when_the_limiter_was_killed(ray_cluster: str) -> None:
    """S-SET-36: it comes back with empty buckets; nobody fails as long as there is time."""
    limiter = LeasingLimiter(RemoteLimiter())
    await limiter.acquire(new_object_id(), HOURLY, timeout_s=60.0)
    pid: int = await spawn.rate_limiter(RateLimiter).__ray_call__.remote(lambda _: os.getpid())
    os.kill(pid, signal.SIGKILL)
    await limiter.acquire(new_object_id(), HOURLY, timeout_s=60.0)
    assert await spawn.rate_limiter(RateLimiter).__ray_call__.remote(lambda _: os.getpid()) != pid
    await limiter.close()
