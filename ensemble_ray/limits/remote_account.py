"""A process's side of an account that is kept elsewhere. Package: limits; `SpendingAccount` port over a `RemoteBudgetService`.

In: callers of this process, all on one event loop. Out: messages to the `BudgetService`. Must never happen: an estimate that
stays reserved when its request is over, whatever became of a message.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Protocol, TypeVar

from ensemble_ray.limits.account import make_exhausted_error
from ensemble_ray.limits.budget_service import Balance, BalanceRequired, BudgetClaim, Charged, MayGo, MayNot
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.values.amounts import NOTHING, Amount, RunBudget

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from ensemble_ray.limits.budget_service import BudgetMessage, BudgetReply

__all__ = ["RemoteAccount", "RemoteBudgetService"]

_log = bounded_logger(__name__)
T = TypeVar("T")
#: Pause before a service that could not be reached is asked again, s.
_RETRY_S = 0.1


class RemoteBudgetService(Protocol):
    """The way to an `BudgetService` of another process."""

    async def account(self, message: BudgetMessage) -> BudgetReply:
        """Deliver a message and give its reply.

        Raises:
            ConnectionError: the service cannot be reached now; it, or its successor, may be later.
        """
        ...


class RemoteAccount:
    """The account of a run of which other processes make requests too.

    Args:
        service: The way to where it is kept.
        budget: The run's budget; it names the account.
        holder: This process's name, unique for its life.
    """

    def __init__(self, service: RemoteBudgetService, budget: RunBudget, *, holder: str) -> None:
        self._service = service
        self._budget = budget
        self._holder = holder
        self._numbers = itertools.count()
        #: of the service that has this process's balance; "": none has
        self._life = ""
        self._base = budget.spent
        self._open: dict[str, Amount] = {}
        self._background: set[asyncio.Task[object]] = set()
        self._is_closed = False
        #: what this process has spent
        self.spent = NOTHING

    async def reserve(self, estimate: Amount) -> str:
        """Wait until a request of that estimate may be sent and return its claim. A cancelled caller takes nothing.

        A service that cannot be reached is asked again until it can.

        Raises:
            BudgetExhaustedError: it never will.
        """
        while True:
            claim = f"{self._budget.account}/{self._holder}/{next(self._numbers)}"
            call = self._start(self._claim(claim, estimate))
            try:
                # Shielded: a claim that is granted to a caller that has left must be heard, so that it can be given back.
                reply = await asyncio.shield(call)
            except asyncio.CancelledError:
                if not call.cancelling():  # else the loop is ending, and the service learns it from this process's end
                    self._start(self._withdraw(claim, call))
                raise
            if isinstance(reply, MayNot):
                raise make_exhausted_error(self._budget, reply.spent, reply.refused)
            if reply is not None:
                return claim

    def charge(self, claim: str, spent: Amount = NOTHING) -> None:
        """End a request; that is sent in the background."""
        self._open.pop(claim, None)
        self.spent += spent
        if not self._is_closed:  # user code that outlives its run may still end a request
            self._start(self._send(claim))

    async def settle(self) -> None:
        """Report what was spent, and return when the report has arrived."""
        if not self._is_closed:
            await self._send("")

    def close(self) -> None:
        """Send nothing more, and end what waits for the service: one that is gone for good would be asked for ever."""
        self._is_closed = True
        for task in self._background:
            task.cancel()

    async def _claim(self, claim: str, amount: Amount) -> MayGo | MayNot | None:
        while True:
            balance = None if self._life else Balance(spent=self.spent, base=self._base, claims=dict(self._open))
            asked = BudgetClaim(
                budget=self._budget, holder=self._holder, claim=claim, amount=amount, life=self._life, balance=balance
            )
            try:
                reply = await self._service.account(asked)
            except ConnectionError as lost:
                _log.debug("Account %s not reached: %s", self._budget.account, lost)
                self._life = ""
                await asyncio.sleep(_RETRY_S)
                continue
            match reply:
                case BalanceRequired():
                    self._life = ""
                    continue
                case MayGo():
                    self._life, self._base = reply.life, reply.base.at_least(self._base)
                    self._open[claim] = amount
                case _:
                    pass
            return reply

    async def _withdraw(self, claim: str, call: asyncio.Task[MayGo | MayNot | None]) -> None:
        await self._send(claim)
        if isinstance(await call, MayGo):
            self._open.pop(claim, None)
            await self._send(claim)

    async def _send(self, claim: str) -> None:
        """Send that a request is over until it has arrived: others wait for what it had reserved."""
        while True:
            try:
                await self._service.account(
                    Charged(budget=self._budget, holder=self._holder, claim=claim, spent=self.spent)
                )
            except ConnectionError:
                await asyncio.sleep(_RETRY_S)
            else:
                return

    def _start(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
