"""What one run may spend, as a machine. Pure: no clock, loop, lock or log.

In: requests that are about to be sent, each with its estimate, and what they really cost. Out: which may go, and which
never will. Must never happen: more spent and reserved than the limit while real counts are within their estimates; a
later request served before an earlier one; a request that waits while nothing is in flight.

Rules:
1. A request goes when its estimate fits into what is neither spent nor reserved, first come first served (S-BUD-3).
2. When the first one that waits does not fit and nothing is in flight, the budget is exhausted: everybody who waits or
   comes later is refused (S-BUD-3). That stays so.
3. What is reserved is replaced by what was spent (S-BUD-2); 0 for a request that failed, was given up, or whose process
   died.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.values.metrics import NOTHING, Amount, RunBudget


@dataclass(frozen=True, slots=True)
class Go:
    """That request may be sent."""

    claim: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """That request will never fit."""

    claim: str
    needed: Amount


Verdict = Go | Refuse


@dataclass(frozen=True, slots=True)
class _Claim:
    holder: str
    amount: Amount


class Budget:
    """What is spent, reserved and wanted of one run's budget.

    Args:
        limit: What may be spent, and what was spent before.
    """

    def __init__(self, limit: RunBudget) -> None:
        self.limit = limit
        self.spent = limit.spent
        self._open: dict[str, _Claim] = {}
        #: in order of arrival
        self._waiting: dict[str, _Claim] = {}
        self._reserved = NOTHING
        self.is_exhausted = False

    @property
    def reserved(self) -> Amount:
        """What the requests in flight may cost."""
        return self._reserved

    @property
    def waiting(self) -> tuple[str, ...]:
        """Who waits, in order."""
        return tuple(self._waiting)

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Whose estimates are reserved."""
        return tuple(self._open)

    def ask(self, claim: str, amount: Amount, holder: str = "") -> list[Verdict]:
        """Ask for a request that is about to be sent; one that was asked for before gets its answer again."""
        if claim in self._open:
            return [Go(claim)]
        self._waiting.setdefault(claim, _Claim(holder, amount))
        return self._serve()

    def charge(self, claim: str, spent: Amount = NOTHING) -> list[Verdict]:
        """End a request, whether it was sent or not, and return what that decides for others."""
        self.spent += spent
        self._drop(claim)
        return self._serve()

    def leave(self, holder: str) -> list[Verdict]:
        """Free what a gone process had reserved, and let it wait for nothing."""
        for claim in [
            name for claims in (self._open, self._waiting) for name, one in claims.items() if one.holder == holder
        ]:
            self._drop(claim)
        return self._serve()

    def restate(self, spent: Amount, claims: Mapping[str, Amount], holder: str) -> None:
        """Take over what was spent and sent elsewhere under this budget, whether or not it fits."""
        self.spent += spent
        for name, amount in claims.items():
            if name not in self._open:
                self._open[name] = _Claim(holder, amount)
                self._reserved += amount

    def validate(self) -> None:
        """Check what must always hold; for tests and for the curious.

        Raises:
            IllegalStateError: it does not hold.
        """
        total = sum((claim.amount for claim in self._open.values()), NOTHING)
        problems = {
            "reserved amounts are miscounted": total != self._reserved,
            "somebody waits although nothing is in flight": bool(self._waiting) and not self._open,
            "somebody waits although its turn has come": bool(self._waiting) and self._fits(self._first()),
            "a claim is both open and waiting": bool(self._open.keys() & self._waiting.keys()),
        }
        found = [problem for problem, holds in problems.items() if holds]
        if found:
            raise IllegalStateError(f"Budget: {'; '.join(found)}")

    def _first(self) -> _Claim:
        return next(iter(self._waiting.values()))

    def _fits(self, claim: _Claim) -> bool:
        return self.limit.covers(self.spent + self._reserved + claim.amount)

    def _drop(self, claim: str) -> None:
        if (found := self._open.pop(claim, None)) is not None:
            self._reserved -= found.amount
        self._waiting.pop(claim, None)

    def _serve(self) -> list[Verdict]:
        verdicts: list[Verdict] = []
        while self._waiting and not self.is_exhausted:
            name, first = next(iter(self._waiting.items()))
            if self._fits(first):
                del self._waiting[name]
                self._open[name] = first
                self._reserved += first.amount
                verdicts.append(Go(name))
            elif self._open:
                return verdicts
            else:
                self.is_exhausted = True
        verdicts += [Refuse(name, claim.amount) for name, claim in self._waiting.items()]
        self._waiting.clear()
        return verdicts
