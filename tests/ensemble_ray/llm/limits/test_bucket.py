"""The bucket machine, fed with stimuli: its instructions are compared, its invariants checked after each one."""

import pytest

from ensemble_ray import IllegalStateError
from ensemble_ray.llm.limits.bucket import (
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


def asked(waiter: str, *, timeout_s: float = 30.0, holder: str = "h", want: int = 1) -> Requested:
    """A request."""
    return Requested(waiter=waiter, holder=holder, timeout_s=timeout_s, want=want)


def told(bucket: TokenBucket, *stimuli: Stimulus, at: float = 0.0) -> list[Instruction]:
    """What the bucket answers; its invariants hold afterwards."""
    instructions = bucket.handle(*stimuli, at=at)
    bucket.validate()
    return instructions


def full_bucket(*, requests: int, period_s: float = 1.0) -> TokenBucket:
    """A bucket that had been left alone for long when time 0 came."""
    bucket = TokenBucket(requests=requests, period_s=period_s, at=-10.0 * period_s)
    assert told(bucket, Ticked(), at=0.0) == []
    return bucket


# Tokens.


def test_second_call_waits_for_one_interval_when_the_bucket_is_new() -> None:
    """S-RATE-11: a new bucket holds one token; the next one is there after period / requests."""
    bucket = TokenBucket(requests=10, period_s=5.0, at=0.0)
    assert told(bucket, asked("a")) == [Grant(waiter="a")]
    assert told(bucket, asked("b")) == [WakeAt(at=0.5, waiter="b")]
    assert told(bucket, Ticked(), at=0.25) == [WakeAt(at=0.5, waiter="b")]
    assert told(bucket, Ticked(), at=0.5) == [Grant(waiter="b")]


def test_refill_is_continuous_when_a_fraction_has_passed() -> None:
    """S-RATE-11: half an interval before the call is half an interval less to wait."""
    bucket = TokenBucket(requests=1, period_s=4.0, at=0.0)
    told(bucket, asked("a"))
    assert told(bucket, asked("b"), at=3.0) == [WakeAt(at=4.0, waiter="b")]


def test_at_most_capacity_is_kept_when_nobody_calls() -> None:
    """S-RATE-11: after any quiet time `requests` calls pass at once, and not one more."""
    bucket = full_bucket(requests=3, period_s=3.0)
    assert bucket.tokens == 3
    given_now = told(bucket, asked("a"), asked("b"), asked("c"), asked("d"))
    assert given_now == [*map(_grant, "abc"), WakeAt(at=1.0, waiter="d")]


def test_nothing_is_lost_when_the_tick_comes_late() -> None:
    """S-RATE-11: tokens of the time that has passed are all given out."""
    bucket = TokenBucket(requests=10, period_s=10.0, at=0.0)
    told(bucket, *(asked(name) for name in "abcd"))
    assert told(bucket, Ticked(), at=2.5) == [*map(_grant, "bc"), WakeAt(at=3.0, waiter="d")]


def test_time_stands_still_when_a_stimulus_is_older_than_the_last() -> None:
    """S-RATE-11: a clock that steps back neither gives nor takes tokens."""
    bucket = TokenBucket(requests=1, period_s=1.0, at=10.0)
    told(bucket, asked("a"), at=10.0)
    assert told(bucket, asked("b"), at=3.0) == [WakeAt(at=11.0, waiter="b")]
    assert told(TokenBucket(requests=1, period_s=1.0, at=10.0), asked("c"), at=3.0) == [Grant(waiter="c")]


# The queue.


def test_waiters_are_served_in_order_of_arrival_when_tokens_come() -> None:
    """S-RATE-13: first come, first served, one by one."""
    bucket = TokenBucket(requests=1, period_s=1.0, at=0.0)
    told(bucket, asked("a"), asked("b"))
    told(bucket, asked("c"), at=0.5)
    told(bucket, asked("d"), at=0.6)
    assert bucket.waiters == ("b", "c", "d")
    order = [told(bucket, Ticked(), at=at)[0] for at in (1.0, 2.0, 3.0)]
    assert order == [_grant(name) for name in "bcd"]


def test_waiter_consumes_nothing_when_cancelled() -> None:
    """S-RATE-13: the next one gets the token that would have been its own."""
    bucket = TokenBucket(requests=1, period_s=1.0, at=0.0)
    told(bucket, asked("a"), asked("b"), asked("c"))
    assert told(bucket, WaiterCancelled(waiter="b"), at=0.5) == [Dismiss(waiter="b"), WakeAt(at=1.0, waiter="c")]
    assert told(bucket, Ticked(), at=1.0) == [Grant(waiter="c")]


def test_nothing_happens_when_somebody_unknown_is_cancelled() -> None:
    """S-RATE-13: a cancellation that crossed the grant changes nothing."""
    bucket = TokenBucket(requests=1, period_s=1.0, at=0.0)
    told(bucket, asked("a"))
    assert told(bucket, WaiterCancelled(waiter="a"), at=0.0) == []


def test_token_goes_to_the_next_when_a_grant_was_not_heard() -> None:
    """S-RATE-13: a refunded permit is a token again, never above the capacity."""
    bucket = TokenBucket(requests=1, period_s=10.0, at=0.0)
    told(bucket, asked("a"), asked("b"))
    assert told(bucket, Refunded(), at=1.0) == [Grant(waiter="b")]
    assert told(bucket, Refunded(), Refunded(), at=1.0) == []
    assert bucket.tokens == 1


def test_waiter_expires_when_its_deadline_comes_first() -> None:
    """S-RATE-12: told at its deadline, and it leaves the queue."""
    bucket = TokenBucket(requests=1, period_s=10.0, at=0.0)
    told(bucket, asked("a"))
    assert told(bucket, asked("b", timeout_s=2.0)) == [WakeAt(at=2.0, waiter="b")]
    assert told(bucket, Ticked(), at=2.0) == [Expire(waiter="b")]
    assert bucket.waiters == ()


def test_later_waiter_expires_first_when_its_deadline_is_earlier() -> None:
    """S-RATE-12: deadlines are kept for everybody in the queue, not for its head alone."""
    bucket = TokenBucket(requests=1, period_s=10.0, at=0.0)
    told(bucket, asked("a"), asked("b", timeout_s=9.0))
    assert told(bucket, asked("c", timeout_s=1.0)) == [WakeAt(at=1.0, waiter="b")]
    assert told(bucket, Ticked(), at=1.0) == [Expire(waiter="c"), WakeAt(at=9.0, waiter="b")]


def test_call_expires_at_once_when_it_may_not_wait() -> None:
    """S-RATE-12: a timeout of zero asks without waiting."""
    bucket = TokenBucket(requests=1, period_s=10.0, at=0.0)
    assert told(bucket, asked("a", timeout_s=0.0)) == [Grant(waiter="a")]
    assert told(bucket, asked("b", timeout_s=0.0)) == [Expire(waiter="b")]


def test_token_wins_when_it_comes_with_the_deadline() -> None:
    """S-RATE-12: nobody is turned away while a token is there."""
    bucket = TokenBucket(requests=1, period_s=2.0, at=0.0)
    told(bucket, asked("a"), asked("b", timeout_s=2.0))
    assert told(bucket, Ticked(), at=2.0) == [Grant(waiter="b")]


def test_machine_refuses_when_a_waiter_asks_twice() -> None:
    """S-RATE-13: one place in the queue per name."""
    bucket = TokenBucket(requests=1, period_s=2.0, at=0.0)
    told(bucket, asked("a"), asked("b"))
    with pytest.raises(IllegalStateError, match="'b' asks again"):
        bucket.handle(asked("b"), at=0.0)


# Leases.


def test_lease_holds_several_when_nobody_waits_and_tokens_abound() -> None:
    """S-SET-36: the lone holder gets what it wants, counted against the tokens."""
    bucket = full_bucket(requests=10)
    assert told(bucket, asked("a", want=4)) == [Grant(waiter="a", permits=4)]
    assert bucket.leases == {"a": 3}
    assert bucket.tokens == 6


def test_lease_is_a_share_when_there_are_several_holders() -> None:
    """S-SET-36: tokens / holders at most, so that one process does not take all."""
    bucket = full_bucket(requests=10)
    told(bucket, asked("a", holder="one"), asked("b", holder="two"))
    assert told(bucket, asked("c", holder="three", want=8)) == [Grant(waiter="c", permits=8 // 3)]


def test_grant_is_single_when_tokens_do_not_exceed_holders() -> None:
    """S-SET-36: with as many holders as tokens there is nothing to lease."""
    bucket = full_bucket(requests=4)
    told(bucket, asked("a", holder="one"), asked("b", holder="two"))
    assert bucket.tokens == 2
    assert told(bucket, asked("c", holder="two", want=8)) == [Grant(waiter="c")]
    assert bucket.leases == {}


def test_grant_is_single_when_its_waiter_had_to_queue() -> None:
    """S-SET-36: leases are for an empty queue only, also for its last waiter."""
    bucket = TokenBucket(requests=10, period_s=10.0, at=0.0)
    told(bucket, asked("a"), asked("b", want=5))
    assert told(bucket, Ticked(), at=4.0) == [Grant(waiter="b")]


def test_share_grows_when_a_holder_has_been_silent() -> None:
    """S-SET-36: holders that went away do not count for ever."""
    bucket = full_bucket(requests=8)
    told(bucket, asked("a", holder="one"))
    assert told(bucket, asked("b", holder="two", want=8), at=60.0) == [Grant(waiter="b", permits=8)]


def test_unused_permits_return_when_the_lease_is_over() -> None:
    """S-SET-36: after 100 ms at the latest, without anybody's help."""
    bucket = full_bucket(requests=10, period_s=1000.0)
    told(bucket, asked("a", want=10))
    assert bucket.tokens == 0
    assert told(bucket, Ticked(), at=LEASE_S) == [Recall(lease="a")]
    assert bucket.tokens == 9


def test_unused_permits_return_when_the_holder_is_gone() -> None:
    """S-SET-36: at its death what it has not reported as used is free, and its waiters leave."""
    bucket = full_bucket(requests=10, period_s=1000.0)
    told(bucket, asked("a", holder="dead", want=10))
    told(bucket, Used(lease="a", used=2), at=0.01)
    assert told(bucket, HolderGone(holder="dead"), at=0.02) == [Recall(lease="a")]
    assert bucket.tokens == 7


def test_waiters_of_a_holder_leave_when_it_is_gone() -> None:
    """S-SET-36: a dead process stands in nobody's way."""
    bucket = TokenBucket(requests=1, period_s=1.0, at=0.0)
    told(bucket, asked("a"), asked("b", holder="dead"), asked("c"))
    assert told(bucket, HolderGone(holder="dead"), at=0.5) == [Dismiss(waiter="b"), WakeAt(at=1.0, waiter="c")]


def test_leases_are_recalled_when_somebody_waits() -> None:
    """S-SET-36: once per lease; what comes back serves the waiter."""
    bucket = full_bucket(requests=4, period_s=1000.0)
    told(bucket, asked("a", want=4))
    assert told(bucket, asked("b"), at=0.01) == [Recall(lease="a"), WakeAt(at=LEASE_S, waiter="b")]
    assert not bucket.is_usable("a")
    assert told(bucket, asked("c"), at=0.02) == [WakeAt(at=LEASE_S, waiter="b")]
    assert told(bucket, Returned(lease="a", used=1), at=0.03) == [_grant("b"), _grant("c")]


def test_lease_ends_when_it_is_used_up() -> None:
    """S-SET-36: nothing is left to return."""
    bucket = full_bucket(requests=4, period_s=1000.0)
    told(bucket, asked("a", want=3))
    assert told(bucket, Used(lease="a", used=2), at=0.01) == [Recall(lease="a")]
    assert bucket.tokens == 1
    assert told(bucket, Returned(lease="a", used=2), at=0.02) == []
    assert bucket.tokens == 1


def test_reports_count_once_when_repeated_or_swapped() -> None:
    """S-SET-36: a report counts from the lease's beginning."""
    bucket = full_bucket(requests=6, period_s=1000.0)
    told(bucket, asked("a", want=6))
    told(bucket, *(Used(lease="a", used=used) for used in (2, 1, 2, 3)), at=0.01)
    assert bucket.leases == {"a": 2}
    told(bucket, Returned(lease="a", used=3), at=0.02)
    assert bucket.tokens == 2


def test_nothing_is_refilled_for_permits_that_are_still_leased() -> None:
    """S-SET-36, S-RATE-11: unused leased permits count as kept tokens, so lease and refill never add up to more."""
    bucket = full_bucket(requests=10, period_s=0.1)
    told(bucket, asked("a", want=10))
    told(bucket, Ticked(), at=0.09)
    assert bucket.tokens == 1
    told(bucket, Used(lease="a", used=9), at=0.09)
    assert bucket.tokens == 1


def test_bucket_goes_into_debt_when_a_use_is_reported_late() -> None:
    """S-RATE-11: permits used although they had been returned are charged to the future."""
    bucket = full_bucket(requests=2, period_s=2.0)
    told(bucket, asked("a", want=2))
    told(bucket, Ticked(), at=0.2)
    assert told(bucket, asked("b"), at=0.2) == [Grant(waiter="b")]
    assert told(bucket, Used(lease="a", used=1), asked("c"), at=0.2) == [WakeAt(at=2.0, waiter="c")]


def test_bucket_is_idle_when_left_alone_with_nothing_open() -> None:
    """S-SET-36: a bucket with waiters or leases is never dropped."""
    bucket = full_bucket(requests=4, period_s=1000.0)
    told(bucket, asked("a", want=2))
    assert not bucket.is_idle(0.05, for_s=0.01)
    assert bucket.is_idle(60.0, for_s=60.0)
    assert not bucket.is_idle(59.0, for_s=60.0)
    for waiter in "bcde":
        told(bucket, asked(waiter), at=100.0)
    assert bucket.waiters == ("e",)
    assert not bucket.is_idle(500.0, for_s=60.0)


def _grant(waiter: str) -> Grant:
    return Grant(waiter=waiter)
