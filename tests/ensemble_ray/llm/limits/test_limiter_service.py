"""The service, spoken to in messages as a process elsewhere would. Time is made by hand."""

import asyncio
import pickle

import pytest

from ensemble_ray import IllegalStateError, RateLimit
from ensemble_ray.llm.limits import limiter as limiter_service
from ensemble_ray.llm.limits.bucket import (
    Dismiss,
    Expire,
    Grant,
    HolderGone,
    Refunded,
    Requested,
    Returned,
    Used,
    WaiterCancelled,
)
from ensemble_ray.llm.limits.limiter import Acquire, AwaitRecall, BucketUpdate, LimiterService, Message
from ensemble_ray.testing import ManualClock
from tests.ensemble_ray.llm.limits.settling import settle

HUNDRED = RateLimit.of(100, 1000)


def ask(
    waiter: str, *, limit: RateLimit = HUNDRED, want: int = 1, timeout_s: float = 60.0, holder: str = "one"
) -> Acquire:
    """A request for bucket `b`."""
    request = Requested(holder=holder, waiter=waiter, timeout_s=timeout_s, want=want)
    return Acquire(bucket="b", limit=limit, request=request)


@pytest.fixture
def clock() -> ManualClock:
    """Time made by hand, from 0."""
    return ManualClock(0.0)


@pytest.fixture
async def service(clock: ManualClock) -> LimiterService:
    """A service whose bucket `b` of `HUNDRED` holds 10 tokens."""
    service = LimiterService(clock=clock)
    assert await service.receive(ask("first", holder="old")) == Grant(waiter="first")
    await service.receive(HolderGone(holder="old"))
    clock.advance(100.0)
    return service


async def test_lease_is_granted_and_recalled_when_somebody_waits(service: LimiterService, clock: ManualClock) -> None:
    """S-SET-36: the holder hears at once that it may not go on, and what it gives back serves the waiter."""
    assert await service.receive(ask("a", want=10)) == Grant(waiter="a", permits=10)
    recall = asyncio.create_task(service.receive(AwaitRecall(bucket="b", lease="a")))
    await settle()
    assert not recall.done()
    waiter = asyncio.create_task(service.receive(ask("b", holder="two")))
    await settle()
    assert recall.done()
    assert not waiter.done()
    await service.receive(BucketUpdate("b", Returned(lease="a", used=4)))
    assert await waiter == Grant(waiter="b")


async def test_unused_permits_return_when_a_lease_is_forgotten(service: LimiterService, clock: ManualClock) -> None:
    """S-SET-36: after 100 ms they serve whoever waits, although the holder said nothing."""
    await service.receive(ask("a", want=10))
    waiter = asyncio.create_task(service.receive(ask("b", holder="two")))
    await settle()
    clock.advance(0.09)
    await settle()
    assert not waiter.done()
    clock.advance(0.01)
    assert await waiter == Grant(waiter="b")


async def test_permits_of_a_dead_holder_return_when_it_leaves(service: LimiterService) -> None:
    """S-SET-36: all but those that it reported, at once; its waiters are dismissed."""
    await service.receive(ask("a", want=9))
    await service.receive(BucketUpdate("b", Used(lease="a", used=8)))
    assert await service.receive(ask("z", holder="two")) == Grant(waiter="z")
    queued = asyncio.create_task(service.receive(ask("q")))
    other = asyncio.create_task(service.receive(ask("p", holder="two")))
    await settle()
    await service.receive(HolderGone(holder="one"))
    assert await queued == Dismiss(waiter="q")
    await settle()
    assert not other.done()
    other.cancel()


async def test_recall_is_answered_at_once_when_the_lease_is_over(service: LimiterService) -> None:
    """S-SET-36: an unknown, ended or recalled lease may not be used."""
    await service.receive(AwaitRecall(bucket="never heard of", lease="a"))
    await service.receive(AwaitRecall(bucket="b", lease="a"))
    await service.receive(ask("a", want=5))
    await service.receive(BucketUpdate("b", Returned(lease="a", used=0)))
    await service.receive(AwaitRecall(bucket="b", lease="a"))


async def test_waiter_is_dismissed_when_withdrawn(service: LimiterService, clock: ManualClock) -> None:
    """S-RATE-13: it leaves without a token."""
    for number in range(10):
        await service.receive(ask(str(number)))
    withdrawn, stays = (asyncio.create_task(service.receive(ask(name))) for name in "ab")
    await settle()
    await service.receive(BucketUpdate("b", WaiterCancelled(waiter="a")))
    assert await withdrawn == Dismiss(waiter="a")
    clock.advance(10.0)
    assert await stays == Grant(waiter="b")


async def test_call_is_refused_when_its_timeout_passes(service: LimiterService, clock: ManualClock) -> None:
    """S-RATE-12: the answer is data, for the asking process to raise."""
    for number in range(10):
        await service.receive(ask(str(number)))
    late = asyncio.create_task(service.receive(ask("late", timeout_s=3.0)))
    await settle()
    clock.advance(3.0)
    assert await late == Expire(waiter="late")


async def test_permit_is_free_again_when_refunded(service: LimiterService) -> None:
    """S-RATE-13: a granted permit that found nobody."""
    for number in range(10):
        await service.receive(ask(str(number)))
    waiter = asyncio.create_task(service.receive(ask("next")))
    await settle()
    await service.receive(BucketUpdate("b", Refunded()))
    assert await waiter == Grant(waiter="next")


async def test_permit_is_taken_back_when_the_asking_call_was_cancelled(service: LimiterService) -> None:
    """S-RATE-13: the grant was made and not heard."""
    for number in range(10):
        await service.receive(ask(str(number)))
    lost = asyncio.create_task(service.receive(ask("lost")))
    await settle()
    await service.receive(BucketUpdate("b", Refunded()))
    lost.cancel()
    await settle()
    assert lost.cancelled()
    assert await service.receive(ask("next", timeout_s=0.0)) == Grant(waiter="next")


async def test_name_is_refused_when_its_waiter_still_waits(service: LimiterService) -> None:
    """S-RATE-13: one place in the queue per name."""
    for number in range(10):
        await service.receive(ask(str(number)))
    waiter = asyncio.create_task(service.receive(ask("twin")))
    await settle()
    with pytest.raises(IllegalStateError, match="'twin' waits already"):
        await service.receive(ask("twin"))
    waiter.cancel()


async def test_idle_buckets_are_dropped_when_there_are_many(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-RATE-33: run-scoped buckets do not pile up; a dropped one begins with one token, so nothing more gets through."""
    monkeypatch.setattr(limiter_service, "_MANY_BUCKETS", 2)
    service = LimiterService(clock=clock)
    for name in ("old", "young"):
        await service.receive(
            Acquire(bucket=name, limit=HUNDRED, request=Requested(holder="h", waiter=name, timeout_s=0.0))
        )
        clock.advance(1800.0)
    third = Acquire(bucket="new", limit=HUNDRED, request=Requested(holder="h", waiter="w", timeout_s=0.0))
    await service.receive(third)
    assert set(service._buckets) == {"young", "new"}


@pytest.mark.parametrize(
    "message",
    [
        ask("w"),
        BucketUpdate("b", WaiterCancelled(waiter="w")),
        BucketUpdate("b", Refunded()),
        BucketUpdate("b", Used(lease="l", used=1)),
        BucketUpdate("b", Returned(lease="l", used=1)),
        AwaitRecall(bucket="b", lease="l"),
        HolderGone(holder="h"),
    ],
)
def test_messages_travel(message: Message) -> None:
    """S-RATE-20: what is said to the limiter crosses processes unchanged."""
    assert pickle.loads(pickle.dumps(message)) == message  # noqa: S301  our own bytes


async def test_buckets_are_described_those_with_long_queues_first(clock: ManualClock) -> None:
    """S-CLU-102: what is there now, though nobody asked for it since; how many wait; what is lent; how many are left out."""
    service = LimiterService(clock=clock)
    for name in ("a", "b", "c"):
        request = Requested(holder="one", waiter=f"{name}/0", timeout_s=60.0)
        await service.receive(Acquire(bucket=name, limit=RateLimit.of(10, 1000.0), request=request))
    waiting = asyncio.create_task(
        service.receive(
            Acquire(
                bucket="c",
                limit=RateLimit.of(10, 1000.0),
                request=Requested(holder="one", waiter="c/1", timeout_s=1000.0),
            )
        )
    )
    await settle()
    (first, *others), more = service.describe()
    assert (first.name, first.requests, first.period_s, first.tokens, first.waiting) == ("c", 10, 1000.0, 0, 1)
    assert ([each.name for each in others], more) == (["a", "b"], 0)
    assert [(each.tokens, each.waiting) for each in others] == [(0, 0), (0, 0)]
    clock.advance(250.0)
    assert {each.name: each.tokens for each in service.describe()[0]}["a"] == 2
    (only,), more = service.describe(most=1)
    assert more == 2
    del only
    waiting.cancel()
    request = Requested(holder="one", waiter="a/1", timeout_s=60.0, want=2)
    assert await service.receive(Acquire(bucket="a", limit=RateLimit.of(10, 1000.0), request=request)) == Grant(
        waiter="a/1", permits=2
    )
    assert {each.name: each.leased for each in service.describe()[0]}["a"] == 1
