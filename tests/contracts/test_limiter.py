"""The contract of the `Limiter` port, over every adapter.

An adapter is set up as a `Site`: two limiters, as two processes would hold them, that draw from the same buckets, and
a clock that the test moves. To add one, write a `Site` and put it into `SITES`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import pytest

from ensemble_ray import RateLimit, RateLimitTimeoutError
from ensemble_ray.llm.limits.limiter import LeasingLimiter, LimiterService, LocalLimiter
from ensemble_ray.ports import Limiter
from ensemble_ray.testing import ManualClock


class Site(Protocol):
    """One adapter, set up for a test."""

    @property
    def one(self) -> Limiter:
        """The limiter as one process holds it."""
        ...

    @property
    def two(self) -> Limiter:
        """The limiter as another process holds it."""
        ...

    async def settle(self) -> None:
        """Return when everything that can happen without time has happened."""
        ...

    async def advance(self, by_s: float) -> None:
        """Let that much time pass, in small steps, and settle."""
        ...

    async def close(self) -> None:
        """Take everything down."""
        ...


class _OneLoop:
    """What sites on the test's own event loop have in common."""

    def __init__(self) -> None:
        self.clock = ManualClock(0.0)

    async def settle(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def advance(self, by_s: float) -> None:
        for _ in range(8):
            self.clock.advance(by_s / 8)
            await self.settle()


class LocalSite(_OneLoop):
    """`LocalLimiter`: one object for the whole process."""

    def __init__(self) -> None:
        super().__init__()
        self.one = LocalLimiter(clock=self.clock)
        self.two = self.one

    async def close(self) -> None:
        await self.settle()


class LeasingSite(_OneLoop):
    """`LeasingLimiter`: two holders at one service."""

    def __init__(self) -> None:
        super().__init__()
        service = LimiterService(clock=self.clock)
        self.one = LeasingLimiter(service.receive, holder="one", clock=self.clock)
        self.two = LeasingLimiter(service.receive, holder="two", clock=self.clock)

    async def close(self) -> None:
        await self.one.close()
        await self.two.close()
        await self.settle()


def ray_site() -> Site:
    """The cluster's rate limiter."""
    from tests.contracts.limiter_on_ray import RaySite

    return RaySite()


SITES: tuple[Callable[[], Site], ...] = (LocalSite, LeasingSite, ray_site)

PER_SECOND = RateLimit.per_second(1)


@pytest.fixture(params=SITES, ids=lambda make: make.__name__)
def make_site(request: pytest.FixtureRequest) -> Callable[[], Site]:
    """Each adapter in turn; the cluster is started for the one that needs it."""
    chosen: Callable[[], Site] = request.param
    if chosen is ray_site:
        request.getfixturevalue("ray_cluster")
    return chosen


@pytest.fixture
async def site(make_site: Callable[[], Site]) -> AsyncIterator[Site]:
    """Each adapter in turn."""
    made = make_site()
    yield made
    await made.close()


def started(limiter: Limiter, limit: RateLimit = PER_SECOND, *, timeout_s: float = 60.0) -> "asyncio.Task[None]":
    """A call that asks for a permit of bucket `b`."""
    return asyncio.create_task(limiter.acquire("b", limit, timeout_s=timeout_s))


async def test_second_call_waits_when_the_bucket_is_new(site: Site) -> None:
    """S-RATE-11: one token at first, the next after period / requests."""
    limit = RateLimit.of(4, 2.0)
    first = started(site.one, limit)
    await site.settle()
    second = started(site.one, limit)
    await site.settle()
    assert (first.done(), second.done()) == (True, False)
    await site.advance(0.25)
    assert not second.done()
    await site.advance(0.25)
    assert second.done()


async def test_capacity_passes_at_once_when_it_was_quiet(site: Site) -> None:
    """S-RATE-11: after a long quiet time `requests` calls, and not one more."""
    limit = RateLimit.of(4, 4.0)
    await site.one.acquire("b", limit, timeout_s=0.0)
    await site.advance(40.0)
    calls = [started(site.one, limit) for _ in range(6)]
    await site.settle()
    # Sent at the same time, they may reach a limiter elsewhere in any order; how many pass is what counts here.
    assert sum(call.done() for call in calls) == 4
    await site.advance(1.0)
    assert sum(call.done() for call in calls) == 5
    for call in calls:
        call.cancel()


async def test_call_times_out_when_no_token_comes(site: Site) -> None:
    """S-RATE-12: after its timeout and not before, with limit and timeout in the error."""
    await site.one.acquire("b", PER_SECOND, timeout_s=0.0)
    call = started(site.one, timeout_s=0.5)
    await site.advance(0.4)
    assert not call.done()
    await site.advance(0.2)
    assert call.done()
    with pytest.raises(RateLimitTimeoutError) as timed_out:
        await call
    assert timed_out.value.rate_limit == PER_SECOND
    assert timed_out.value.wait_timeout.total_seconds() == 0.5


async def test_loop_is_free_when_somebody_waits(site: Site) -> None:
    """S-RATE-13: other work goes on beside a waiting call."""
    await site.one.acquire("b", PER_SECOND, timeout_s=0.0)
    call = started(site.one)
    await site.settle()
    await site.one.acquire("another bucket", PER_SECOND, timeout_s=0.0)
    assert not call.done()
    call.cancel()


async def test_callers_are_served_in_order_when_they_are_in_different_processes(site: Site) -> None:
    """S-RATE-13: one queue per bucket, wherever its callers are."""
    await site.one.acquire("b", PER_SECOND, timeout_s=0.0)
    calls: list[asyncio.Task[None]] = []
    for limiter in (site.two, site.one, site.one, site.two):
        calls.append(started(limiter))
        await site.settle()
    for served in range(1, 5):
        await site.advance(1.0)
        assert [call.done() for call in calls] == [True] * served + [False] * (4 - served)


async def test_token_is_left_to_the_next_when_a_waiter_is_cancelled(site: Site) -> None:
    """S-RATE-13, S-RATE-14: it gets its CancelledError and takes nothing."""
    await site.one.acquire("b", PER_SECOND, timeout_s=0.0)
    cancelled = started(site.one)
    await site.settle()
    waits = started(site.two)
    await site.settle()
    cancelled.cancel()
    await site.settle()
    assert cancelled.cancelled()
    await site.advance(1.0)
    assert waits.done()


async def test_bucket_is_one_when_processes_share_it(site: Site) -> None:
    """S-RATE-20: whoever asks, wherever, draws from the same tokens; other buckets are not touched."""
    await site.one.acquire("b", PER_SECOND, timeout_s=0.0)
    elsewhere = started(site.two, timeout_s=0.1)
    await site.two.acquire("other", PER_SECOND, timeout_s=0.0)
    await site.advance(0.2)
    with pytest.raises(RateLimitTimeoutError):
        await elsewhere


async def test_limit_holds_when_processes_call_as_fast_as_they_can(site: Site) -> None:
    """S-RATE-11, S-SET-36: with leases or without, what passes is the capacity and what time refills."""
    limit = RateLimit.of(10, 10.0)
    passed = 0

    async def hurry(limiter: Limiter) -> None:
        nonlocal passed
        while True:
            await limiter.acquire("b", limit, timeout_s=100.0)
            passed += 1

    await site.one.acquire("b", limit, timeout_s=0.0)
    await site.advance(50.0)
    hurried = [asyncio.create_task(hurry(limiter)) for limiter in (site.one, site.two)]
    await site.settle()
    await site.advance(1.0)
    assert passed == 11
    await site.advance(4.0)
    assert passed == 15
    for task in hurried:
        task.cancel()
    await asyncio.gather(*hurried, return_exceptions=True)
