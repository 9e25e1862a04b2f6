"""The limiter of one process, on one event loop and on several. Time is made by hand."""

import asyncio
from collections.abc import Iterator

import pytest

from ensemble_ray import IllegalStateError, RateLimit, RateLimitTimeoutError
from ensemble_ray.llm.limits.limiter import LocalLimiter, process_limiter
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.testing import ManualClock
from tests.ensemble_ray.llm.limits.settling import settle
from tests.forking import call_in_child

PER_SECOND = RateLimit.per_second(1)


@pytest.fixture
def clock() -> ManualClock:
    """Time made by hand, from 0."""
    return ManualClock(0.0)


@pytest.fixture
def limiter(clock: ManualClock) -> LocalLimiter:
    """A limiter on that clock."""
    return LocalLimiter(clock=clock)


async def test_one_watch_is_kept_when_many_wait(limiter: LocalLimiter, clock: ManualClock) -> None:
    """S-RATE-13: no polling; only the head of the queue sleeps, and it sleeps once."""
    waiting = [asyncio.create_task(limiter.acquire("b", PER_SECOND, timeout_s=60)) for _ in range(20)]
    await settle()
    assert sum(task.done() for task in waiting) == 1
    assert clock.sleepers == 1
    clock.advance(1.0)
    await settle()
    assert sum(task.done() for task in waiting) == 2
    assert clock.sleepers == 1
    for task in waiting:
        task.cancel()
    await settle()
    assert clock.sleepers == 0


async def test_unheard_grant_is_taken_back_when_its_caller_was_cancelled(
    limiter: LocalLimiter, clock: ManualClock
) -> None:
    """S-RATE-13: cancelled in the very moment of the grant; the next caller gets the token."""
    await limiter.acquire("b", PER_SECOND, timeout_s=60)
    cancelled = asyncio.create_task(limiter.acquire("b", PER_SECOND, timeout_s=60))
    await settle()
    leaves = asyncio.create_task(limiter.acquire("b", PER_SECOND, timeout_s=60))
    await settle()
    # The third call enters just after the clock has moved: its stimulus makes the grant of the second one, which is
    # cancelled before it hears of it.
    clock.advance(1.0)
    third = asyncio.create_task(limiter.acquire("b", PER_SECOND, timeout_s=60))
    asyncio.get_running_loop().call_soon(cancelled.cancel)
    await settle()
    assert cancelled.cancelled()
    assert leaves.done()
    assert not third.done()
    third.cancel()


async def test_bucket_is_refused_when_its_limit_changes(limiter: LocalLimiter) -> None:
    """S-SET-36: a bucket is one limit; two limits under one name are a mistake that is told."""
    await limiter.acquire("b", PER_SECOND, timeout_s=1)
    with pytest.raises(IllegalStateError, match="'b' has the limit"):
        await limiter.acquire("b", RateLimit.per_second(2), timeout_s=1)


async def test_time_passes_by_itself_when_no_clock_is_given() -> None:
    """S-RATE-12: the process's limiter runs on a steady clock of its own."""
    limiter = process_limiter()
    assert limiter is process_limiter()
    hourly = RateLimit.of(1, 3600)
    await limiter.acquire("test of the process's limiter", hourly, timeout_s=0)
    with pytest.raises(RateLimitTimeoutError):
        await limiter.acquire("test of the process's limiter", hourly, timeout_s=0.001)


# Several loops, each turned by hand, so that the order of things is the test's.


class Turned:
    """An event loop that runs when told to."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def turn(self) -> None:
        self.loop.run_until_complete(settle())

    def acquire(self, limiter: LocalLimiter, limit: RateLimit = PER_SECOND) -> "asyncio.Task[None]":
        task = self.loop.create_task(limiter.acquire("b", limit, timeout_s=60.0))
        self.turn()
        return task


@pytest.fixture
def loops() -> Iterator[tuple[Turned, Turned]]:
    """Two event loops of one thread."""
    pair = Turned(), Turned()
    yield pair
    for turned in pair:
        if not turned.loop.is_closed():
            turned.turn()
            turned.loop.close()


def test_waiters_are_served_in_order_when_they_are_on_different_loops(
    limiter: LocalLimiter, clock: ManualClock, loops: tuple[Turned, Turned]
) -> None:
    """S-RATE-13: one queue for all loops; the watch passes from one to the other."""
    one, two = loops
    assert one.acquire(limiter).done()
    first, second, third = two.acquire(limiter), one.acquire(limiter), two.acquire(limiter)
    for expected in ((True, False, False), (True, True, False), (True, True, True)):
        clock.advance(1.0)
        for _ in range(2):
            two.turn()
            one.turn()
        assert (first.done(), second.done(), third.done()) == expected


def test_watch_is_taken_over_when_the_head_is_cancelled_on_another_loop(
    limiter: LocalLimiter, clock: ManualClock, loops: tuple[Turned, Turned]
) -> None:
    """S-RATE-13: a cancelled waiter consumes no token, and nobody waits for its loop."""
    one, two = loops
    one.acquire(limiter)
    head, next_in_line = one.acquire(limiter), two.acquire(limiter)
    head.cancel()
    one.turn()
    two.turn()
    # The first loop is never turned again.
    clock.advance(1.0)
    two.turn()
    assert next_in_line.done()
    next_in_line.result()


@pytest.mark.parametrize("passes_s", [1.0, 2.0])
def test_token_goes_to_the_next_when_a_loop_was_closed_under_its_waiter(
    limiter: LocalLimiter, clock: ManualClock, loops: tuple[Turned, Turned], passes_s: float
) -> None:
    """S-RATE-13: nobody can hear it, be it made head of the queue (1 s) or granted the token (2 s)."""
    one, two = loops
    two_at_once = RateLimit.of(2, 2.0)
    two.acquire(limiter, two_at_once)
    first, lost, last = (turned.acquire(limiter, two_at_once) for turned in (two, one, two))
    one.loop.close()
    for _ in range(int(2.0 / passes_s)):
        clock.advance(passes_s)
        two.turn()
    assert (first.done(), last.done()) == (True, True)
    last.result()
    # asyncio would complain about the task that was left on purpose.
    lost._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = lost.get_coro()
    assert coroutine is not None
    coroutine.close()


@pytest.mark.program
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_callers_of_a_forked_child_do_not_wait_behind_its_parents() -> None:
    """S-ENG-81: whose loop is not there to let them go on."""
    limiter = LocalLimiter(clock=ManualClock())
    limit = RateLimit.per_minute(1)
    await limiter.acquire("a", limit, timeout_s=1)
    waiting = asyncio.ensure_future(limiter.acquire("a", limit, timeout_s=60))
    await settle()
    call_in_child(lambda: run_blocking(limiter.acquire("a", limit, timeout_s=0)))
    assert not waiting.done()
    waiting.cancel()
