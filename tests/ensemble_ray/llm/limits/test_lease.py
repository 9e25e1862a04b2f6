"""A process's side of a limiter elsewhere: what it asks, what it uses without asking, what it gives back."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from ensemble_ray import IllegalStateError, RateLimit, RateLimitTimeoutError
from ensemble_ray.llm.limits.bucket import LEASE_S, HolderGone, Requested, Returned, Used
from ensemble_ray.llm.limits.limiter import (
    MOST_WANTED,
    Acquire,
    AwaitRecall,
    BucketUpdate,
    LeaseStock,
    LeasingLimiter,
    LimiterService,
    Message,
    Reply,
)
from ensemble_ray.testing import ManualClock
from tests.ensemble_ray.llm.limits.settling import settle

HUNDRED = RateLimit.of(100, 1000)


class Line:
    """A way to a service that counts what is said, and can be cut."""

    def __init__(self, service: LimiterService) -> None:
        self.service = service
        self.said: list[Message] = []
        self.is_cut = False

    async def __call__(self, message: Message) -> Reply:
        if self.is_cut:
            msg = "the limiter is away"
            raise ConnectionError(msg)
        self.said.append(message)
        return await self.service.receive(message)

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.said)


@pytest.fixture
def clock() -> ManualClock:
    """Time made by hand, from 0."""
    return ManualClock(0.0)


@pytest.fixture
async def line(clock: ManualClock) -> Line:
    """The way to a service whose bucket `b` of `HUNDRED` holds 20 tokens."""
    service = LimiterService(clock=clock)
    await service.receive(
        Acquire(bucket="b", limit=HUNDRED, request=Requested(holder="old", waiter="first", timeout_s=0.0))
    )
    await service.receive(HolderGone(holder="old"))
    clock.advance(200.0)
    return Line(service)


@pytest.fixture
async def limiter(line: Line, clock: ManualClock) -> AsyncIterator[LeasingLimiter]:
    """A process that draws from the service."""
    limiter = LeasingLimiter(line, holder="one", clock=clock)
    yield limiter
    line.is_cut = False
    await limiter.close()


@pytest.fixture
def other(line: Line, clock: ManualClock) -> LeasingLimiter:
    """Another process that draws from the same service."""
    return LeasingLimiter(line, holder="two", clock=clock)


async def claim(limiter: LeasingLimiter, times: int = 1, *, timeout_s: float = 60.0) -> None:
    """Take permits one after the other; what they cause in the background happens too."""
    for _ in range(times):
        await limiter.acquire("b", HUNDRED, timeout_s=timeout_s)
        await settle()


# The stock, pure.


def test_stock_leases_nothing_when_calls_are_far_apart() -> None:
    """S-SET-36: as many are wanted as were asked for within a lease's life."""
    stock = LeaseStock()
    for number in range(5):
        at = number * 2 * LEASE_S
        assert stock.claim(at) is None
        assert stock.permits_to_request(at) == 1


def test_stock_wants_more_when_calls_follow_quickly() -> None:
    """S-SET-36: it grows with what was asked lately, up to a cap."""
    stock = LeaseStock()
    wanted = []
    for number in range(2 * MOST_WANTED):
        at = number * LEASE_S / 1000
        stock.claim(at)
        wanted.append(stock.permits_to_request(at))
    assert wanted[:3] == [1, 2, 3]
    assert max(wanted) == wanted[-1] == MOST_WANTED


def test_stock_wants_one_when_others_wait_at_the_limiter() -> None:
    """S-SET-36: many who ask at once do not each lease a lot."""
    stock = LeaseStock()
    stock.claim(0.0)
    stock.claim(0.0)
    stock.asking = 1
    assert stock.permits_to_request(0.0) == 1


def test_stock_gives_nothing_when_somebody_waits_at_the_limiter() -> None:
    """S-SET-36: first come is first at the limiter; those who asked there came before."""
    stock = LeaseStock()
    stock.add("lease", size=3, expires_at=1.0)
    stock.asking = 1
    assert stock.claim(0.0) is None
    stock.asking = 0
    assert stock.claim(0.0) == "lease"


def test_stock_gives_nothing_when_the_lease_is_over_recalled_or_used_up() -> None:
    """S-SET-36: 100 ms, a report of a waiter, or its size end it; its count stays for the return."""
    stock = LeaseStock()
    stock.add("short", size=3, expires_at=1.0)
    assert stock.claim(0.9) == "short"
    assert stock.claim(1.0) is None
    stock.add("small", size=1, expires_at=5.0)
    assert [stock.claim(1.0), stock.claim(1.0)] == ["small", None]
    stock.add("wanted back", size=3, expires_at=5.0)
    stock.recall("wanted back")
    assert stock.claim(1.0) is None
    assert [stock.end(lease) for lease in ("short", "small", "wanted back")] == [1, 1, 0]
    assert stock.count_used("short") is None


# The limiter.


async def test_limiter_is_asked_less_often_when_permits_are_leased(limiter: LeasingLimiter, line: Line) -> None:
    """S-SET-36: leased permits are used without asking, and every use is counted."""
    await claim(limiter, 15)
    assert line.count(Acquire) == 4  # grants of 1, 2, 4 and 8 permits
    assert (line.service._buckets["b"].machine.tokens, line.service._buckets["b"].machine.leases) == (5, {})


async def test_unused_permits_are_given_back_when_the_lease_is_over(
    limiter: LeasingLimiter, line: Line, clock: ManualClock
) -> None:
    """S-SET-36: 100 ms after the request was sent, by the holder itself."""
    await claim(limiter, 5)
    assert line.service._buckets["b"].machine.leases == {"one/2": 2}
    clock.advance(LEASE_S)
    await settle()
    assert line.said[-1] == BucketUpdate("b", Returned(lease="one/2", used=1))
    assert line.service._buckets["b"].machine.tokens == 15


async def test_leased_permits_are_not_taken_when_the_limiter_reports_a_waiter(
    limiter: LeasingLimiter, other: LeasingLimiter, line: Line, clock: ManualClock
) -> None:
    """S-SET-36: the lease goes back at the report; the waiter elsewhere comes first, then the holder asks anew."""
    await claim(limiter, 12)
    assert line.service._buckets["b"].machine.leases == {"one/3": 3}
    await claim(other, 5)  # the tokens that are left
    elsewhere = [asyncio.create_task(other.acquire("b", HUNDRED, timeout_s=60.0)) for _ in range(12)]
    await settle()
    assert line.service._buckets["b"].machine.leases == {}
    here = asyncio.create_task(limiter.acquire("b", HUNDRED, timeout_s=60.0))
    await settle()
    assert [task.done() for task in elsewhere] == [True] * 3 + [False] * 9
    assert not here.done()
    for task in (*elsewhere, here):
        task.cancel()
    await settle()


async def test_leased_permit_is_not_taken_when_its_time_is_over_and_nobody_noticed(
    limiter: LeasingLimiter, line: Line, clock: ManualClock
) -> None:
    """S-SET-36: also where the loop was busy while the 100 ms ran out."""
    await claim(limiter, 5)
    asked = line.count(Acquire)
    clock.advance(LEASE_S)
    await limiter.acquire("b", HUNDRED, timeout_s=60.0)
    assert line.count(Acquire) == asked + 1


async def test_leased_permit_is_not_taken_when_the_recall_has_just_arrived(line: Line, clock: ManualClock) -> None:
    """S-SET-36: from the very turn of the loop in which the report of a waiter comes in."""
    recall = asyncio.Event()

    async def watched(message: Message) -> Reply:
        if isinstance(message, AwaitRecall):
            await recall.wait()
            return None
        return await line(message)

    limiter = LeasingLimiter(watched, holder="one", clock=clock)
    await claim(limiter, 5)
    asked = line.count(Acquire)
    recall.set()
    await asyncio.sleep(0)
    await limiter.acquire("b", HUNDRED, timeout_s=60.0)
    assert line.count(Acquire) == asked + 1
    await limiter.close()


async def test_cancelled_caller_takes_nothing_when_it_waits_elsewhere(
    limiter: LeasingLimiter, line: Line, clock: ManualClock
) -> None:
    """S-RATE-13: it is withdrawn, and the next one gets the token."""
    await claim(limiter, 20)
    cancelled = asyncio.create_task(limiter.acquire("b", HUNDRED, timeout_s=60.0))
    waits = asyncio.create_task(limiter.acquire("b", HUNDRED, timeout_s=60.0))
    await settle()
    cancelled.cancel()
    await settle()
    clock.advance(10.0)
    await settle()
    assert cancelled.cancelled()
    assert waits.done()


async def test_grant_is_refunded_when_it_crosses_the_cancellation(line: Line, clock: ManualClock) -> None:
    """S-RATE-13: a grant on its way to a caller that has left is given back, the lease with it."""
    gate = asyncio.Event()

    async def slow(message: Message) -> Reply:
        reply = await line(message)
        if isinstance(message, Acquire) and message.request.waiter.endswith("/1"):
            await gate.wait()
        return reply

    limiter = LeasingLimiter(slow, holder="one", clock=clock)
    await claim(limiter)
    cancelled = asyncio.create_task(limiter.acquire("b", HUNDRED, timeout_s=60.0))
    await settle()
    bucket = line.service._buckets["b"].machine
    assert (bucket.tokens, bucket.leases) == (17, {"one/1": 1})
    cancelled.cancel()
    gate.set()
    await settle()
    assert (bucket.tokens, bucket.leases) == (19, {})
    await limiter.close()


async def test_uses_travel_together_when_made_in_one_turn(limiter: LeasingLimiter, line: Line) -> None:
    """S-SET-36: the limiter hears of every use, in few messages."""
    await claim(limiter, 7)
    line.said.clear()
    await claim(limiter)
    assert line.count(Acquire) == 1
    await asyncio.gather(*(limiter.acquire("b", HUNDRED, timeout_s=1.0) for _ in range(5)))
    await settle()
    updates = [message.stimulus for message in line.said if isinstance(message, BucketUpdate)]
    assert [update.used for update in updates if isinstance(update, Used)] == [5]


async def test_limiter_is_asked_again_when_it_was_away(limiter: LeasingLimiter, line: Line, clock: ManualClock) -> None:
    """S-RATE-12: within the timeout an outage is only a wait."""
    line.is_cut = True
    call = asyncio.create_task(limiter.acquire("b", HUNDRED, timeout_s=1.0))
    await settle()
    line.is_cut = False
    clock.advance(0.1)
    await call


async def test_call_times_out_when_the_limiter_stays_away(
    limiter: LeasingLimiter, line: Line, clock: ManualClock
) -> None:
    """S-RATE-12: the same error as without a token; its cause says why."""
    line.is_cut = True
    call = asyncio.create_task(limiter.acquire("b", HUNDRED, timeout_s=0.25))
    for _ in range(3):
        await settle()
        clock.advance(0.125)
    with pytest.raises(RateLimitTimeoutError) as timed_out:
        await call
    assert isinstance(timed_out.value.__cause__, ConnectionError)


async def test_everything_is_given_back_when_closed(limiter: LeasingLimiter, line: Line) -> None:
    """S-SET-36: leases end with their holder, and a closed limiter is of no use."""
    await claim(limiter, 5)
    assert line.service._buckets["b"].machine.leases == {"one/2": 2}
    await limiter.close()
    await settle()
    assert line.service._buckets["b"].machine.leases == {}
    assert line.service._buckets["b"].machine.tokens == 15
    with pytest.raises(IllegalStateError, match="'one' is closed"):
        await limiter.acquire("b", HUNDRED, timeout_s=1.0)


async def test_recall_is_awaited_once_when_a_lease_begins(limiter: LeasingLimiter, line: Line) -> None:
    """S-SET-36: each lease has one open line to the limiter."""
    await claim(limiter, 7)
    assert line.count(AwaitRecall) == 2
