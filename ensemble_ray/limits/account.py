"""One run's account in this process: requests that wait for their turn to spend. Package: limits; `SpendingAccount` port.

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

__all__ = ["BudgetQueue", "LocalAccount", "make_exhausted_error"]


def make_exhausted_error(limit: RunBudget, spent: Amount, refused: Refuse) -> BudgetExhaustedError:
    """Return the error that ends a run whose budget is exhausted (S-BUD-4)."""
    return BudgetExhaustedError(
        f"Budget exhausted: the limit is {limit.describe_limits()}, {limit.describe(spent)} are spent, "
        f"and the next request would need {limit.describe(refused.needed)}"
    )


class BudgetQueue:
    """A budget and the requests that wait for it."""

    def __init__(self, limit: RunBudget) -> None:
        self.budget = Budget(limit)
        self._waiters: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[Verdict | None]]] = {}
        self._lock = threading.RLock()

    async def ask(self, claim: str, amount: Amount, holder: str = "") -> Verdict | None:
        """Return the verdict on a request; None when it was charged while it waited."""
        loop = asyncio.get_running_loop()
        with self._lock:
            waiter = self._waiters.get(claim)
            if waiter is None or waiter[0] is not loop:
                waiter = self._waiters[claim] = (loop, loop.create_future())
            self._answer_all(self.budget.ask(claim, amount, holder))
        return await asyncio.shield(waiter[1])  # who asks twice is answered twice, whichever of them is cancelled

    def charge(self, claim: str, spent: Amount = NOTHING) -> None:
        """End a request and count what it cost."""
        self.change(lambda budget: budget.charge(claim, spent))

    def change(self, what: Callable[[Budget], list[Verdict]]) -> None:
        """Change the budget and answer the requests that this decides; those that wait no more are dismissed."""
        with self._lock:
            self._answer_all(what(self.budget))
            waiting = set(self.budget.waiting)
            for claim in [each for each in self._waiters if each not in waiting]:
                self._answer(claim, None)

    def _answer_all(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            self._answer(verdict.claim, verdict)

    def _answer(self, claim: str, verdict: Verdict | None) -> None:
        waiter = self._waiters.pop(claim, None)
        if waiter is not None and not waiter[0].is_closed():
            waiter[0].call_soon_threadsafe(_resolve, waiter[1], verdict)


def _resolve(answer: asyncio.Future[Verdict | None], verdict: Verdict | None) -> None:
    if not answer.done():
        answer.set_result(verdict)


class LocalAccount:
    """The account of a run whose requests are all made by this process."""

    def __init__(self, limit: RunBudget) -> None:
        self._queue = BudgetQueue(limit)
        self._claims = itertools.count()

    @property
    def spent(self) -> Amount:
        """What was spent so far."""
        return self._queue.budget.spent

    async def reserve(self, estimate: Amount) -> str:
        """Wait until a request of that estimate may be sent and return its claim. A cancelled caller takes nothing.

        Raises:
            BudgetExhaustedError: it never will.
        """
        claim = str(next(self._claims))
        try:
            verdict = await self._queue.ask(claim, estimate)
        except asyncio.CancelledError:
            self._queue.charge(claim)
            raise
        if isinstance(verdict, Refuse):
            raise make_exhausted_error(self._queue.budget.limit, self.spent, verdict)
        return claim

    def charge(self, claim: str, spent: Amount = NOTHING) -> None:
        """End a request and count what it cost."""
        self._queue.charge(claim, spent)

    async def settle(self) -> None:
        """Return: the account is kept here."""

    def close(self) -> None:
        """Do nothing: no other process has to learn anything."""
