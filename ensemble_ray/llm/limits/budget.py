"""The budget of one run as a pure machine: which requests may be sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.values.metrics import NOTHING, Amount, RunBudget


@dataclass(frozen=True, slots=True)
class Proceed:
    claim: str


@dataclass(frozen=True, slots=True)
class Refuse:
    claim: str
    needed: Amount


Verdict = Proceed | Refuse


@dataclass(frozen=True, slots=True)
class _Claim:
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
