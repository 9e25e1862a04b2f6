"""A circuit breaker, an adaptive concurrency limit and a budget as pure machines; instants `at` are in s."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum, auto
from typing import Literal

from msgspec import Struct

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.values.metrics import NOTHING, Amount, RunBudget

FAILURES_TO_OPEN = 5
SHARE_TO_OPEN = 0.5  # the breaker opens only at this share of failures in the window
WINDOW = 20
FIRST_OPEN_S = 5.0
LONGEST_OPEN_S = 60.0


class CallAdmission(Enum):
    GO = auto()
    PROBE = auto()  # other calls wait for its result
    WAIT = auto()


class Breaker:
    """The circuit breaker of one endpoint (S-DUR-64).

    1. Closed: calls are sent, and consecutive failures are counted. An answer resets the count; an earlier failure
       that is reported later does not count.
    2. It opens at the fifth consecutive failure if at least half of the last 20 calls failed. Calls wait, 5 s at first.
    3. Then one call is sent as a probe. Its answer closes the breaker. Its failure doubles the wait, up to 60 s.
       A probe without a result leaves its place to the next call.
    4. Of calls that were sent before the opening, an answer closes the breaker and a failure has no effect.
    5. A process sends no probe for 60 s after another process sent one: that process may be dead. Processes that learn
       of the opening from an update wait a little longer, so that probes do not coincide.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._window: deque[bool] = deque(maxlen=WINDOW)
        self._answered_at = float("-inf")
        self._open_s: float | None = None  # None: closed
        self._probe_at = 0.0  # the earliest instant of a probe
        self._is_probing = False
        self.last_failure = ""

    @property
    def is_open(self) -> bool:
        return self._open_s is not None

    @property
    def is_calm(self) -> bool:
        return self._open_s is None and not self._failures

    def state(self, at: float) -> Literal["closed", "open", "half_open"]:
        if self._open_s is None:
            return "closed"
        return "half_open" if self._is_probing or at >= self._probe_at else "open"

    def enter(self, at: float) -> CallAdmission:
        if self._open_s is None:
            return CallAdmission.GO
        if self._is_probing or at < self._probe_at:
            return CallAdmission.WAIT
        self._is_probing = True
        return CallAdmission.PROBE

    def wakes_at(self) -> float | None:
        """Return None if a call waits for the end of a probe."""
        return None if self._is_probing else self._probe_at

    def record_failure(self, at: float, what: str, *, is_probe: bool = False, extra_s: float = 0.0) -> None:
        """`at` is the arrival of the failure; `extra_s` is additional waiting time."""
        self.last_failure = what
        if self._open_s is not None:
            if is_probe:
                self._open(at, min(LONGEST_OPEN_S, self._open_s * 2), extra_s)
            return
        self._window.append(True)
        if at < self._answered_at:
            return
        self._failures += 1
        if self._failures >= FAILURES_TO_OPEN and sum(self._window) >= SHARE_TO_OPEN * len(self._window):
            self._open(at, FIRST_OPEN_S, extra_s)

    def record_answer(self, at: float = float("-inf"), count: int = 1) -> None:
        """By default the answers are older than any failure."""
        self._window.extend([False] * min(count, WINDOW))
        self._answered_at = max(self._answered_at, at)
        self._failures = 0
        self._open_s = None
        self._is_probing = False

    def cancel_probe(self) -> None:
        self._is_probing = False

    def record_remote_probe(self, at: float) -> None:
        if self._open_s is not None:
            self._probe_at = max(self._probe_at, at + LONGEST_OPEN_S)

    def _open(self, at: float, open_s: float, extra_s: float) -> None:
        self._open_s = open_s
        self._probe_at = at + open_s + extra_s
        self._is_probing = False


class AdaptiveLimit:
    """Additive increase and multiplicative decrease of an endpoint's calls in flight."""

    def __init__(self) -> None:
        self._answers = 0
        self._is_fresh = False
        self.limit: int | None = None  # None: no limit
        self.generation = 0  # number of decreases; a call stores the number at its start

    def allows(self, sent: int) -> bool:
        return self.limit is None or sent < self.limit

    def record_refusal(self, sent: int, generation: int) -> bool:
        """Lower the limit at the first refusal of a generation; `sent` includes the refused call."""
        if generation != self.generation:
            return False
        self._lower(sent)
        return True

    def record_remote_refusal(self, sent: int) -> None:
        if sent and not self._is_fresh:
            self._lower(sent)

    def record_answer(self, wanted: int) -> None:
        """`wanted` is the number of calls in flight, waiting, or about to be retried."""
        if self.limit is None:
            return
        self._is_fresh = False
        self._answers += 1
        if self._answers < self.limit:
            return
        self._answers = 0
        self.limit += 1
        if self.limit > wanted:
            self.limit = None

    def _lower(self, sent: int) -> None:
        at_most = sent if self.limit is None else min(sent, self.limit)
        self.limit = max(1, at_most // 2)
        self.generation += 1
        self._answers = 0
        self._is_fresh = True


class Proceed(Struct, frozen=True):
    claim: str


class Refuse(Struct, frozen=True):
    claim: str
    needed: Amount


Verdict = Proceed | Refuse


class _Claim(Struct, frozen=True):
    holder: str
    amount: Amount


class Budget:
    """Spent, reserved and requested amounts of one run (S-BUD-2, S-BUD-3).

    1. Requests are served in order of arrival. The first proceeds when its estimate fits into the rest of the limit,
       which is neither spent nor reserved.
    2. If it does not fit and no request is in flight, the budget is exhausted: all requests are refused from then on.
    3. The real cost replaces the estimate. It is 0 for a request that failed, was cancelled, or lost its process.
    """

    def __init__(self, limit: RunBudget) -> None:
        self.limit = limit
        self.spent = limit.spent
        self.reserved = NOTHING
        self.is_exhausted = False
        self._open: dict[str, _Claim] = {}
        self._waiting: dict[str, _Claim] = {}

    @property
    def waiting(self) -> tuple[str, ...]:
        return tuple(self._waiting)

    @property
    def in_flight(self) -> tuple[str, ...]:
        return tuple(self._open)

    def ask(self, claim: str, amount: Amount, holder: str = "") -> list[Verdict]:
        if claim in self._open:
            return [Proceed(claim)]
        self._waiting.setdefault(claim, _Claim(holder, amount))
        return self._serve()

    def charge(self, claim: str, spent: Amount = NOTHING) -> list[Verdict]:
        """End a request, whether or not it was sent."""
        self.spent += spent
        self._drop(claim)
        return self._serve()

    def release(self, holder: str) -> list[Verdict]:
        for claims in (self._open, self._waiting):
            for name in [name for name, claim in claims.items() if claim.holder == holder]:
                self._drop(name)
        return self._serve()

    def restate(self, spent: Amount, claims: Mapping[str, Amount], holder: str) -> None:
        """Add amounts from elsewhere, even if they exceed the limit."""
        self.spent += spent
        for name, amount in claims.items():
            if name not in self._open:
                self._open[name] = _Claim(holder, amount)
                self.reserved += amount

    def validate(self) -> None:
        first = next(iter(self._waiting.values()), None)
        problems = {
            "reserved amounts are miscounted": sum((each.amount for each in self._open.values()), NOTHING)
            != self.reserved,
            "a request waits and none is in flight": first is not None and not self._open,
            "a request waits although it fits": first is not None and self._fits(first),
            "a claim is both open and waiting": bool(self._open.keys() & self._waiting.keys()),
        }
        if found := [problem for problem, holds in problems.items() if holds]:
            raise IllegalStateError(f"Budget: {'; '.join(found)}")

    def _fits(self, claim: _Claim) -> bool:
        return self.limit.covers(self.spent + self.reserved + claim.amount)

    def _drop(self, claim: str) -> None:
        if (found := self._open.pop(claim, None)) is not None:
            self.reserved -= found.amount
        self._waiting.pop(claim, None)

    def _serve(self) -> list[Verdict]:
        verdicts: list[Verdict] = []
        while self._waiting and not self.is_exhausted:
            name, first = next(iter(self._waiting.items()))
            if self._fits(first):
                del self._waiting[name]
                self._open[name] = first
                self.reserved += first.amount
                verdicts.append(Proceed(name))
            elif self._open:
                return verdicts
            else:
                self.is_exhausted = True
        verdicts += [Refuse(name, claim.amount) for name, claim in self._waiting.items()]
        self._waiting.clear()
        return verdicts
