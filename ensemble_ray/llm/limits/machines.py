"""One token bucket as a machine. Pure: it is given the time, and touches no clock, loop, lock or log.

In: stimuli with their instant `at` (s, any origin; an earlier `at` than the last one counts as the last one).
Out: instructions. Must never happen: more permits used in a span than capacity + rate x span; a later waiter served
before an earlier one; a token taken by a waiter that left.

Rules:
1. Tokens come continuously, one per interval = period / requests; at most `requests` of them are kept (S-RATE-11).
2. A new bucket holds one token (S-RATE-11).
3. First come, first served; a waiter that leaves takes nothing (S-RATE-13).
4. A waiter whose deadline comes without a token expires; a token that is there at the deadline still counts
   (S-RATE-12).
5. A grant is one permit, used at once. It is a lease of several only for somebody who finds nobody waiting and more
   tokens than holders; everybody's share is tokens / holders (S-SET-36).
6. Leased permits that are not used count toward the capacity, so a lease never widens the limit.
7. A lease ends after 100 ms, at its holder's death, when it is used up or given back; what is unused is a token
   again. As soon as somebody waits, every lease is recalled (S-SET-36).
8. A use reported after the lease's end is charged: the bucket goes into debt.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from ensemble_ray.errors import IllegalStateError


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """Somebody asks for a permit."""

    #: unique over all holders; also the name of the lease, should it become one
    waiter: str
    #: process on whose behalf the waiter asks
    holder: str
    #: how long a permit is wanted
    timeout_s: float
    #: permits the holder could use within a lease's life, its own one included
    want: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WaiterCancelled:
    """A waiter left the queue."""

    waiter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refunded:
    """A granted permit was not used, because its waiter had left by then."""

    permits: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """A holder's report on a lease. `used` counts from the lease's beginning, so reports may be lost or swapped."""

    lease: str
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A holder is done with a lease; `used` as in `Used`."""

    lease: str
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderGone:
    """A holder is dead, or holds nothing any more."""

    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time has passed."""


Stimulus = Requested | WaiterCancelled | Refunded | Used | Returned | HolderGone | Ticked


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Give a waiter its permits; more than one make a lease named like the waiter, whose first permit is used."""

    waiter: str
    permits: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Expire:
    """Tell a waiter that its deadline came first."""

    waiter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """A waiter is out of the queue without an answer: it left, or its holder is gone."""

    waiter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Tell a lease's holder to stop using it; said once per lease, also when it ended by itself."""

    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Say `Ticked` at that instant; the head of the queue is the one to keep the watch."""

    at: float
    waiter: str


Instruction = Grant | Expire | Dismiss | Recall | WakeAt


#: Life of a lease, s (S-SET-36).
LEASE_S = 0.1
#: A holder that has been silent for so long counts no more when tokens are shared out, s.
_HOLDER_MEMORY_S = 10.0
#: How long an ended lease is remembered for late reports, s.
_LATE_REPORTS_S = 10.0
#: What is due within a microsecond is due: float instants and timers are no finer than that, s.
_SLACK_S = 1e-6


@dataclass(slots=True, kw_only=True)
class _Lease:
    holder: str
    #: permits beside the first one
    size: int
    expires_at: float
    used: int = 0
    is_recalled: bool = False

    @property
    def unused(self) -> int:
        return self.size - self.used


class TokenBucket:
    """Tokens, queue and leases of one limit.

    The state of the tokens is one number: the instant at which the next token is, or was, complete. Each token taken
    moves it by one interval; waiting costs nothing and rounding does not pile up.

    Args:
        requests: Tokens per period, and how many are kept at most.
        period_s: Length of the period, s.
        at: Instant of the beginning.
    """

    def __init__(self, *, requests: int, period_s: float, at: float) -> None:
        self._capacity = requests
        self._interval_s = period_s / requests
        self._slack_s = min(_SLACK_S, self._interval_s / 1000)
        self._now = at
        self._ready_at = at
        #: in order of arrival; an OrderedDict, since a dict's front is slow to reach after many removals
        self._queue: OrderedDict[str, Requested] = OrderedDict()
        #: heap of (deadline, waiter); waiters no longer in the queue are skipped
        self._deadlines: list[tuple[float, str]] = []
        #: leases that run, oldest first
        self._leases: OrderedDict[str, _Lease] = OrderedDict()
        #: leases that ended, oldest end first; only to charge late reports
        self._ended: OrderedDict[str, _Lease] = OrderedDict()
        #: holder -> when it was last heard of
        self._holders: dict[str, float] = {}
        self._unused_leased = 0

    # State.

    @property
    def tokens(self) -> int:
        """Whole tokens present as of the last stimulus."""
        return self.tokens_at(self._now)

    def tokens_at(self, at: float) -> int:
        """Return the whole tokens of an instant at or behind the last stimulus, if nothing happens until then."""
        if at < self._ready_at - self._slack_s:
            return 0
        whole = int((at - self._ready_at + self._slack_s) / self._interval_s) + 1
        return min(whole, self._capacity - self._unused_leased)

    @property
    def waiters(self) -> tuple[str, ...]:
        """Who waits, in order."""
        return tuple(self._queue)

    @property
    def holders(self) -> tuple[str, ...]:
        """Who asked, those that were forgotten since left out."""
        return tuple(self._holders)

    @property
    def leases(self) -> Mapping[str, int]:
        """Unused permits of each lease that runs."""
        return {name: lease.unused for name, lease in self._leases.items()}

    def is_usable(self, lease: str) -> bool:
        """Whether that lease runs and has not been recalled."""
        found = self._leases.get(lease)
        return found is not None and not found.is_recalled

    def is_idle(self, at: float, *, for_s: float) -> bool:
        """Whether nobody waits or holds a lease at that instant, and the bucket has been left alone for so long."""
        is_held = any(lease.expires_at > at for lease in self._leases.values())
        return not self._queue and not is_held and at - self._now >= for_s

    def validate(self) -> None:
        """Check what must always hold; for tests and for the curious.

        Raises:
            IllegalStateError: it does not hold.
        """
        problems = {
            "unused leased permits are miscounted": self._unused_leased != sum(self.leases.values()),
            "a lease has a count outside its size": any(not 0 <= one.used <= one.size for one in self._leases.values()),
            "tokens and unused permits exceed the capacity": self.tokens + self._unused_leased > self._capacity,
            "somebody waits although a token is there": bool(self._queue) and self._is_ready,
            "somebody waits and a lease was not recalled": bool(self._queue) and any(map(self.is_usable, self._leases)),
        }
        found = [problem for problem, holds in problems.items() if holds]
        if found:
            msg = f"Token bucket at {self._now}: {'; '.join(found)}"
            raise IllegalStateError(msg)

    # Stimuli.

    def handle(self, *stimuli: Stimulus, at: float) -> list[Instruction]:
        """Take the stimuli of an instant and return what is to be done now, in order.

        Raises:
            IllegalStateError: a waiter asks again while it waits.
        """
        done: list[Instruction] = []
        for stimulus in stimuli:
            self._advance(at, done)
            self._apply(stimulus, done)
            self._serve(done)
        if self._queue:
            self._recall_leases(done)
            done.append(WakeAt(at=self._next_change(), waiter=next(iter(self._queue))))
        return done

    def _apply(self, stimulus: Stimulus, done: list[Instruction]) -> None:
        match stimulus:
            case Requested():
                self._request(stimulus, done)
            case WaiterCancelled():
                if self._queue.pop(stimulus.waiter, None) is not None:
                    done.append(Dismiss(waiter=stimulus.waiter))
            case Refunded():
                self._add_tokens(stimulus.permits)
            case Used():
                self._report(stimulus.lease, stimulus.used, done)
            case Returned():
                self._report(stimulus.lease, stimulus.used, done)
                self._end_lease(stimulus.lease, done)
            case HolderGone():
                self._forget_holder(stimulus.holder, done)
            case Ticked():
                pass
            case _:
                assert_never(stimulus)

    # Time and tokens.

    @property
    def _is_ready(self) -> bool:
        return self._now >= self._ready_at - self._slack_s

    def _advance(self, at: float, done: list[Instruction]) -> None:
        """Let time pass. Leases end first: their permits were free from their end on, whenever that is noticed."""
        for name, lease in list(self._leases.items()):
            if lease.expires_at > at + _SLACK_S:
                break
            self._end_lease(name, done)
        self._now = max(self._now, at)
        self._cap()
        while self._ended and next(iter(self._ended.values())).expires_at + _LATE_REPORTS_S < self._now:
            self._ended.popitem(last=False)

    def _cap(self) -> None:
        free = self._capacity - self._unused_leased
        self._ready_at = max(self._ready_at, self._now - (free - 1) * self._interval_s)

    def _add_tokens(self, permits: int) -> None:
        self._ready_at -= permits * self._interval_s
        self._cap()

    def _next_change(self) -> float:
        """Return the next instant at which something happens by itself while somebody waits."""
        instants = [self._ready_at, self._deadlines[0][0]]
        if self._leases:
            instants.append(next(iter(self._leases.values())).expires_at)
        return min(instants)

    # The queue.

    def _request(self, asked: Requested, done: list[Instruction]) -> None:
        if asked.waiter in self._queue:
            msg = f"Waiter '{asked.waiter}' asks again while it waits"
            raise IllegalStateError(msg)
        self._holders[asked.holder] = self._now
        if not self._queue and self._is_ready:
            self._grant(asked, self._share(asked.want), done)
            return
        self._queue[asked.waiter] = asked
        heapq.heappush(self._deadlines, (self._now + asked.timeout_s, asked.waiter))

    def _serve(self, done: list[Instruction]) -> None:
        while self._queue and self._is_ready:
            self._grant(self._queue.popitem(last=False)[1], 1, done)
        while self._deadlines:
            deadline, waiter = self._deadlines[0]
            if waiter in self._queue:
                if deadline > self._now + _SLACK_S:
                    break
                del self._queue[waiter]
                done.append(Expire(waiter=waiter))
            heapq.heappop(self._deadlines)

    def _grant(self, asked: Requested, permits: int, done: list[Instruction]) -> None:
        self._ready_at += permits * self._interval_s
        if permits > 1:
            expires_at = self._now + LEASE_S
            self._leases[asked.waiter] = _Lease(holder=asked.holder, size=permits - 1, expires_at=expires_at)
            self._unused_leased += permits - 1
        done.append(Grant(waiter=asked.waiter, permits=permits))

    # Holders and leases.

    def _share(self, want: int) -> int:
        """Return how many permits a waiter gets that finds the queue empty (rule 5)."""
        if want <= 1 or self.tokens <= 1:
            return 1
        self._holders = {who: seen for who, seen in self._holders.items() if self._now - seen <= _HOLDER_MEMORY_S}
        return max(1, min(want, self.tokens // len(self._holders)))

    def _recall_leases(self, done: list[Instruction]) -> None:
        for name, lease in self._leases.items():
            if not lease.is_recalled:
                lease.is_recalled = True
                done.append(Recall(lease=name))

    def _report(self, name: str, used: int, done: list[Instruction]) -> None:
        lease = self._leases.get(name)
        if lease is not None:
            more = max(0, min(used, lease.size) - lease.used)
            lease.used += more
            self._unused_leased -= more
            if not lease.unused:
                self._end_lease(name, done)
        elif (ended := self._ended.get(name)) is not None:
            more = max(0, min(used, ended.size) - ended.used)
            ended.used += more
            self._ready_at += more * self._interval_s

    def _end_lease(self, name: str, done: list[Instruction]) -> None:
        lease = self._leases.pop(name, None)
        if lease is None:
            return
        if not lease.is_recalled:
            lease.is_recalled = True
            done.append(Recall(lease=name))
        self._unused_leased -= lease.unused
        self._add_tokens(lease.unused)
        self._ended[name] = lease

    def _forget_holder(self, holder: str, done: list[Instruction]) -> None:
        self._holders.pop(holder, None)
        for waiter in [waiter for waiter, asked in self._queue.items() if asked.holder == holder]:
            del self._queue[waiter]
            done.append(Dismiss(waiter=waiter))
        for name in [name for name, lease in self._leases.items() if lease.holder == holder]:
            self._end_lease(name, done)
