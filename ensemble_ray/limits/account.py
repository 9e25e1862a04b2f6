"""One run's account in this process: requests that wait for their turn to spend. Room: limits; `SpendingAccount` port.

In: callers on any event loop. Out: claims, or the end of the budget. It carries out what `Budget` says and decides
nothing itself. Must never happen: a caller that is left waiting when the budget has decided.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import TYPE_CHECKING

from ensemble_ray.errors import BudgetExhaustedError
from ensemble_ray.limits.budget import Budget, Refuse
from ensemble_ray.values.amounts import NOTHING, Amount, RunBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    from ensemble_ray.limits.budget import Verdict

__all__ = ["LocalAccount", "WaitingRoom", "exhausted"]


def exhausted(limit: RunBudget, spent: Amount, refused: Refuse) -> BudgetExhaustedError:
    """The end of a budget; whoever asked for the run hears of it once (S-BUD-4)."""
    return BudgetExhaustedError(
        f"Budget exhausted: the limit is {limit.limits_told()}, {limit.told(spent)} are spent, "
        f"and the next request would need {limit.told(refused.needed)}"
    )


class WaitingRoom:
    """A budget and those who wait for it."""

    def __init__(self, limit: RunBudget) -> None:
        self.budget = Budget(limit)
        self._seats: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[Verdict | None]]] = {}
        self._lock = threading.RLock()

    async def ask(self, claim: str, amount: Amount, holder: str = "") -> Verdict | None:
        """The verdict on a request; None when it was settled while it waited."""
        loop = asyncio.get_running_loop()
        with self._lock:
            known = self._seats.get(claim)
            if known is None or known[0] is not loop:
                known = self._seats[claim] = (loop, loop.create_future())
            self._told(self.budget.ask(claim, amount, holder))
        return await asyncio.shield(known[1])  # who asks twice is answered twice, whichever of them is cancelled

    def charge(self, claim: str, spent: Amount = NOTHING) -> None:
        """A request is over."""
        self.change(lambda budget: budget.charge(claim, spent))

    def change(self, what: Callable[[Budget], list[Verdict]]) -> None:
        """Change the budget, and tell everybody whom it concerns; those who wait no more are dismissed."""
        with self._lock:
            self._told(what(self.budget))
            waiting = set(self.budget.waiting)
            for claim in [each for each in self._seats if each not in waiting]:
                self._answer(claim, None)

    def _told(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            self._answer(verdict.claim, verdict)

    def _answer(self, claim: str, verdict: Verdict | None) -> None:
        seat = self._seats.pop(claim, None)
        if seat is not None and not seat[0].is_closed():
            seat[0].call_soon_threadsafe(_give, seat[1], verdict)


def _give(answer: asyncio.Future[Verdict | None], verdict: Verdict | None) -> None:
    if not answer.done():
        answer.set_result(verdict)


class LocalAccount:
    """The account of a run whose requests are all made by this process."""

    def __init__(self, limit: RunBudget) -> None:
        self._room = WaitingRoom(limit)
        self._claims = itertools.count()

    @property
    def spent(self) -> Amount:
        """What was spent so far."""
        return self._room.budget.spent

    async def reserve(self, estimate: Amount) -> str:
        """Wait until a request of that estimate may be sent; gives its claim. A cancelled caller takes nothing.

        Raises:
            BudgetExhaustedError: it never will.
        """
        claim = str(next(self._claims))
        try:
            verdict = await self._room.ask(claim, estimate)
        except asyncio.CancelledError:
            self._room.charge(claim)
            raise
        if isinstance(verdict, Refuse):
            raise exhausted(self._room.budget.limit, self.spent, verdict)
        return claim

    def charge(self, claim: str, spent: Amount = NOTHING) -> None:
        """A request is over."""
        self._room.charge(claim, spent)

    def close(self) -> None:
        """Nobody else has to hear anything."""
