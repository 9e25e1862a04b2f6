"""A token bucket as a pure machine; instants `at` are in s."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping
from typing import assert_never

from msgspec import Struct

from ensemble_ray.errors import IllegalStateError

LEASE_S = 0.1  # S-SET-36
_HOLDER_MEMORY_S = 10.0  # a holder that was silent for longer gets no share
_LATE_REPORTS_S = 10.0
_SLACK_S = 1e-6  # resolution of instants and timers


class Requested(Struct, frozen=True, kw_only=True):
    waiter: str  # unique over all holders; also the name of its lease
    holder: str
    timeout_s: float
    want: int = 1  # permits that the holder could use within a lease's life, including this one


class WaiterCancelled(Struct, frozen=True, kw_only=True):
    waiter: str


class Refunded(Struct, frozen=True, kw_only=True):
    """The waiters of granted permits had left."""

    permits: int = 1


class Used(Struct, frozen=True, kw_only=True):
    """`used` counts from the start of the lease, so reports may be lost or swapped."""

    lease: str
    used: int


class Returned(Struct, frozen=True, kw_only=True):
    lease: str
    used: int


class HolderGone(Struct, frozen=True, kw_only=True):
    """A holder is dead or has closed its limiter."""

    holder: str


class Ticked(Struct, frozen=True, kw_only=True):
    """Time has passed."""


Stimulus = Requested | WaiterCancelled | Refunded | Used | Returned | HolderGone | Ticked


class Grant(Struct, frozen=True, kw_only=True):
    """Several permits are a lease named like the waiter, with its first permit used."""

    waiter: str
    permits: int = 1


class Expire(Struct, frozen=True, kw_only=True):
    waiter: str


class Dismiss(Struct, frozen=True, kw_only=True):
    """Remove a waiter that left, or with a holder that is gone."""

    waiter: str


class Recall(Struct, frozen=True, kw_only=True):
    """The lease has ended; sent once per lease."""

    lease: str


class WakeAt(Struct, frozen=True, kw_only=True):
    """The waiter at the head of the queue sends `Ticked` then."""

    at: float
    waiter: str


Instruction = Grant | Expire | Dismiss | Recall | WakeAt


class TokenBucket:
    """Tokens, queue and leases of one limit.

    1. One token arrives per interval = period / requests. A new bucket has one token, and a bucket has at most
       `requests` of them (S-RATE-11).
    2. Waiters are served in order of arrival. One that leaves uses no token (S-RATE-13).
    3. A waiter expires if no token arrives before its deadline or at it (S-RATE-12).
    4. A grant is one permit for immediate use, or a lease of several if no waiter is in the queue and there are more
       tokens than holders. The share of a holder is tokens / holders (S-SET-36).
    5. Unused leased permits count toward the capacity, so a lease never raises the limit.
    6. A lease ends after 100 ms, when its holder dies, or when it is used up or returned. Its unused permits become
       tokens again. All leases are recalled when a waiter enters the queue (S-SET-36).
    7. A use that is reported after the end of its lease is charged: the bucket goes into debt.

    All tokens are one number, the instant of the next complete token, which each use moves by one interval. So waiting
    has no cost, and rounding errors do not add up. The latest `at` counts.
    """

    def __init__(self, *, requests: int, period_s: float, at: float) -> None:
        self._capacity = requests
        self._interval_s = period_s / requests
        self._slack_s = min(_SLACK_S, self._interval_s / 1000)
        self._now = at
        self._ready_at = at
        #: in order of arrival; the front of a dict is slow to reach after many removals
        self._queue: OrderedDict[str, Requested] = OrderedDict()
        #: heap of (deadline, waiter), with waiters that have left the queue
        self._deadlines: list[tuple[float, str]] = []
        self._leases: OrderedDict[str, _Lease] = OrderedDict()  # oldest first
        self._ended: OrderedDict[str, _Lease] = OrderedDict()  # in order of their ends, for late reports
        self._holders: dict[str, float] = {}  # holder -> its last request
        self._unused_leased = 0

    @property
    def tokens(self) -> int:
        return self.tokens_at(self._now)

    def tokens_at(self, at: float) -> int:
        """Return the whole tokens if no stimulus arrives until then."""
        if at < self._ready_at - self._slack_s:
            return 0
        whole = int((at - self._ready_at + self._slack_s) / self._interval_s) + 1
        return min(whole, self._capacity - self._unused_leased)

    @property
    def waiters(self) -> tuple[str, ...]:
        return tuple(self._queue)

    @property
    def holders(self) -> tuple[str, ...]:
        return tuple(self._holders)

    @property
    def leases(self) -> Mapping[str, int]:
        return {name: lease.unused for name, lease in self._leases.items()}

    def is_usable(self, lease: str) -> bool:
        found = self._leases.get(lease)
        return found is not None and not found.is_recalled

    def is_idle(self, at: float, *, for_s: float) -> bool:
        """Whether the bucket has no waiters, no leases, and no stimulus for so long."""
        is_held = any(lease.expires_at > at for lease in self._leases.values())
        return not self._queue and not is_held and at - self._now >= for_s

    def validate(self) -> None:
        problems = {
            "unused leased permits are miscounted": self._unused_leased != sum(self.leases.values()),
            "a lease has a count outside its size": any(not 0 <= one.used <= one.size for one in self._leases.values()),
            "tokens and unused permits exceed the capacity": self.tokens + self._unused_leased > self._capacity,
            "a waiter is in the queue although there is a token": bool(self._queue) and self._is_ready,
            "a waiter is in the queue and a lease was not recalled": bool(self._queue)
            and any(map(self.is_usable, self._leases)),
        }
        if found := [problem for problem, holds in problems.items() if holds]:
            raise IllegalStateError(f"Token bucket at {self._now}: {'; '.join(found)}")

    def handle(self, *stimuli: Stimulus, at: float) -> list[Instruction]:
        done: list[Instruction] = []
        for stimulus in stimuli:
            self._advance(at, done)
            self._apply(stimulus, done)
            self._serve(done)
        if self._queue:
            for name, lease in self._leases.items():
                _recall(name, lease, done)
            instants = [self._ready_at, self._deadlines[0][0]]
            if self._leases:
                instants.append(next(iter(self._leases.values())).expires_at)
            done.append(WakeAt(at=min(instants), waiter=next(iter(self._queue))))
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
                self._remove_holder(stimulus.holder, done)
            case Ticked():
                pass
            case _:
                assert_never(stimulus)

    def _remove_holder(self, holder: str, done: list[Instruction]) -> None:
        self._holders.pop(holder, None)
        for waiter in [waiter for waiter, request in self._queue.items() if request.holder == holder]:
            del self._queue[waiter]
            done.append(Dismiss(waiter=waiter))
        for name in [name for name, lease in self._leases.items() if lease.holder == holder]:
            self._end_lease(name, done)

    @property
    def _is_ready(self) -> bool:
        return self._now >= self._ready_at - self._slack_s

    def _advance(self, at: float, done: list[Instruction]) -> None:
        # Permits of a lease are free from its end on, however late that is noticed.
        for name, lease in list(self._leases.items()):
            if lease.expires_at > at + _SLACK_S:
                break
            self._end_lease(name, done)
        self._now = max(self._now, at)
        self._add_tokens(0)
        while self._ended and next(iter(self._ended.values())).expires_at + _LATE_REPORTS_S < self._now:
            self._ended.popitem(last=False)

    def _add_tokens(self, permits: int) -> None:
        """Time may have exceeded the capacity too."""
        free = self._capacity - self._unused_leased
        self._ready_at -= permits * self._interval_s
        self._ready_at = max(self._ready_at, self._now - (free - 1) * self._interval_s)

    def _request(self, request: Requested, done: list[Instruction]) -> None:
        if request.waiter in self._queue:
            raise IllegalStateError(f"Waiter '{request.waiter}' asks again while it waits")
        self._holders[request.holder] = self._now
        if not self._queue and self._is_ready:
            permits = 1
            if request.want > 1 and self.tokens > 1:
                recent = {name: at for name, at in self._holders.items() if self._now - at <= _HOLDER_MEMORY_S}
                self._holders = recent
                permits = max(1, min(request.want, self.tokens // len(recent)))
            self._grant(request, permits, done)
            return
        self._queue[request.waiter] = request
        heapq.heappush(self._deadlines, (self._now + request.timeout_s, request.waiter))

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

    def _grant(self, request: Requested, permits: int, done: list[Instruction]) -> None:
        self._ready_at += permits * self._interval_s
        if permits > 1:
            expires_at = self._now + LEASE_S
            self._leases[request.waiter] = _Lease(holder=request.holder, size=permits - 1, expires_at=expires_at)
            self._unused_leased += permits - 1
        done.append(Grant(waiter=request.waiter, permits=permits))

    def _report(self, name: str, used: int, done: list[Instruction]) -> None:
        lease = self._leases.get(name) or self._ended.get(name)
        if lease is None:
            return
        more = max(0, min(used, lease.size) - lease.used)
        lease.used += more
        if name not in self._leases:
            self._ready_at += more * self._interval_s
            return
        self._unused_leased -= more
        if not lease.unused:
            self._end_lease(name, done)

    def _end_lease(self, name: str, done: list[Instruction]) -> None:
        lease = self._leases.pop(name, None)
        if lease is not None:
            _recall(name, lease, done)
            self._unused_leased -= lease.unused
            self._add_tokens(lease.unused)
            self._ended[name] = lease


class _Lease(Struct, kw_only=True):
    holder: str
    size: int  # permits beside the first one
    expires_at: float
    used: int = 0
    is_recalled: bool = False

    @property
    def unused(self) -> int:
        return self.size - self.used


def _recall(name: str, lease: _Lease, done: list[Instruction]) -> None:
    if not lease.is_recalled:
        lease.is_recalled = True
        done.append(Recall(lease=name))
