"""The bucket machine played with at random: limit and order hold whatever comes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray.llm.limits.bucket import (
    LEASE_S,
    Dismiss,
    Expire,
    Grant,
    HolderGone,
    Recall,
    Returned,
    Stimulus,
    Ticked,
    TokenBucket,
    Used,
    WaiterCancelled,
    WakeAt,
)
from tests.ensemble_ray.llm.limits.test_bucket import asked, full_bucket, told

#: Seeded and without a store of examples, so that a run gives the same everywhere.
SEEDED = settings(max_examples=60)


@dataclass(kw_only=True)
class Play:
    """Runs a bucket as an obedient host would, and keeps what happened."""

    bucket: TokenBucket
    now: float = 0.0
    wake_at: float | None = None
    granted: list[tuple[float, str]] = field(default_factory=list)
    expired: list[tuple[float, str]] = field(default_factory=list)
    #: instants at which a permit was really used
    uses: list[float] = field(default_factory=list)
    #: lease -> (unused, used, end)
    leases: dict[str, tuple[int, int, float]] = field(default_factory=dict)

    def tell(self, *stimuli: Stimulus) -> None:
        self.wake_at = None
        for instruction in told(self.bucket, *stimuli, at=self.now):
            match instruction:
                case Grant(waiter=waiter, permits=permits):
                    self.granted.append((self.now, waiter))
                    self.uses.append(self.now)
                    if permits > 1:
                        self.leases[waiter] = (permits - 1, 0, self.now + LEASE_S)
                case Expire(waiter=waiter):
                    self.expired.append((self.now, waiter))
                case Recall(lease=lease):
                    self.leases.pop(lease, None)
                case WakeAt(at=at):
                    assert at > self.now, "a wake-up that is due already would spin"
                    self.wake_at = at
                case Dismiss():
                    pass

    def pass_to(self, at: float) -> None:
        while self.wake_at is not None and self.wake_at <= at:
            self.now = self.wake_at
            self.tell(Ticked())
        self.now = at

    def use(self, lease: str, times: int) -> None:
        unused, used, end = self.leases[lease]
        times = min(times, unused) if self.now < end else 0
        self.leases[lease] = (unused - times, used + times, end)
        self.uses += [self.now] * times
        self.tell(Used(lease=lease, used=used + times))


def assert_within_limit(uses: Sequence[float], *, requests: int, period_s: float) -> None:
    """In no span more than the capacity and what the span refills."""
    for first, start in enumerate(uses):
        for count, end in enumerate(uses[first:], start=1):
            assert count <= requests + (end - start + 1e-5) * requests / period_s + 1e-6


steps_s = st.sampled_from([0.0, 0.001, 0.05, 0.1, 0.5, 1.0, 7.0])


@pytest.mark.heavy
@SEEDED
@given(
    requests=st.integers(1, 7),
    period_s=st.sampled_from([0.1, 1.0, 3.0]),
    start=st.sampled_from([0.0, 1_700_000_000.0]),
    calls=st.lists(st.tuples(steps_s, st.sampled_from([0.0, 0.4, 2.0, 100.0]), st.booleans()), max_size=40),
)
def test_limit_and_order_hold_whatever_comes(
    requests: int, period_s: float, start: float, calls: list[tuple[float, float, bool]]
) -> None:
    """S-RATE-11, S-RATE-12, S-RATE-13: rate, deadlines and order, with waiters that leave; nobody is forgotten."""
    play = Play(bucket=TokenBucket(requests=requests, period_s=period_s, at=start), now=start)
    deadlines: dict[str, float] = {}
    left: set[str] = set()
    for number, (pause_s, timeout_s, leaves) in enumerate(calls):
        play.pass_to(play.now + pause_s)
        waiter = f"{number:03}"
        deadlines[waiter] = play.now + timeout_s
        play.tell(asked(waiter, timeout_s=timeout_s))
        if leaves and waiter in play.bucket.waiters:
            left.add(waiter)
            play.tell(WaiterCancelled(waiter=waiter))
    play.pass_to(play.now + 1000.0)

    served, refused = [who for _, who in play.granted], [who for _, who in play.expired]
    assert served == sorted(served)
    assert sorted([*served, *refused, *left]) == sorted(deadlines)
    assert all(at == pytest.approx(deadlines[who], abs=1e-5) for at, who in play.expired)
    assert all(at <= deadlines[who] + 1e-5 for at, who in play.granted)
    assert_within_limit(play.uses, requests=requests, period_s=period_s)


actions = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from("xyz"), st.integers(1, 12)),
    st.tuples(st.just("burst"), st.sampled_from("xyz"), st.integers(1, 12)),
    st.tuples(st.just("use"), st.integers(0, 3), st.integers(1, 12)),
    st.tuples(st.just("return"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("die"), st.sampled_from("xyz"), st.just(0)),
)


@pytest.mark.heavy
@SEEDED
@given(
    requests=st.integers(1, 20),
    period_s=st.sampled_from([0.1, 1.0, 30.0]),
    plays=st.lists(st.tuples(steps_s, actions), max_size=60),
)
def test_limit_holds_when_permits_are_leased(
    requests: int, period_s: float, plays: list[tuple[float, tuple[str, str | int, int]]]
) -> None:
    """S-SET-36, S-RATE-11: leases widen nothing, however they are used, returned, outlived or lost."""
    play = Play(bucket=full_bucket(requests=requests, period_s=period_s))
    for number, (pause_s, (what, who, want)) in enumerate(plays):
        play.pass_to(play.now + pause_s)
        leases = sorted(play.leases)
        if what == "ask":
            play.tell(asked(f"{number:03}", holder=str(who), want=want))
        elif what == "burst":
            play.tell(*(asked(f"{number:03}/{each}", holder=str(who)) for each in range(want)))
        elif what == "die":
            play.tell(HolderGone(holder=str(who)))
        elif leases:
            lease = leases[int(who) % len(leases)]
            if what == "use":
                play.use(lease, want)
            else:
                play.tell(Returned(lease=lease, used=play.leases.pop(lease)[1]))
    assert_within_limit(play.uses, requests=requests, period_s=period_s)
    play.pass_to(play.now + 1000.0)
    assert play.bucket.waiters == ()
    play.tell(Ticked())
    assert play.bucket.tokens == requests
