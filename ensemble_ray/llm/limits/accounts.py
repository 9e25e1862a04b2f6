"""Accounts of run budgets: of one process, or in the cluster's limiter actor for many processes.

Messages may arrive twice, late or in another order, so each process sends the total of its spending. A restarted service has no totals:
it refuses claims under another `life` until their process has sent its balance (S-BUD-8).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from typing import Protocol, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Struct

from ensemble_ray.errors import BudgetExhaustedError
from ensemble_ray.llm.limits.breaker import Budget, Proceed, Refuse, Verdict
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.metrics import NOTHING, Amount, RunBudget

_log = bounded_logger(__name__)
T = TypeVar("T")

_CLOSED = 1024  # closed accounts that the service remembers, because late messages must not open them
_RETRY_S = 0.1


class LocalAccount:
    def __init__(self, limit: RunBudget) -> None:
        self._queue = _BudgetQueue(limit)
        self._claims = itertools.count()

    @property
    def spent(self) -> Amount:
        return self._queue.budget.spent

    async def reserve(self, estimate: Amount) -> str:
        """Wait until a request may be sent, and return its claim; raise if it will never fit."""
        claim = str(next(self._claims))
        try:
            verdict = await self._queue.ask(claim, estimate)
        except asyncio.CancelledError:
            self.charge(claim)
            raise
        if isinstance(verdict, Refuse):
            raise _exhausted_error(self._queue.budget.limit, self.spent, verdict)
        return claim

    def charge(self, claim: str, spent: Amount = NOTHING) -> None:
        self._queue.change(lambda budget: budget.charge(claim, spent))

    async def settle(self) -> None:
        """Return immediately: no report is due."""

    async def share_spent(self) -> float:
        return self._queue.budget.limit.share_of(self.spent)

    def close(self) -> None:
        """Return immediately: no other process has the account."""


class Balance(Struct, frozen=True, kw_only=True):
    base: Amount  # spent by dead processes, as of the last reply
    claims: Mapping[str, Amount]


class BudgetClaim(Struct, frozen=True, kw_only=True):
    """The reply is `Granted`, `Rejected`, `BalanceRequired`, or None if it was charged meanwhile."""

    budget: RunBudget
    holder: str
    claim: str  # unique over all holders
    amount: Amount
    spent: Amount  # total of the process: a report of it may still be on its way
    life: str  # life of the service that has this process's balance
    balance: Balance | None = None


class Charged(Struct, frozen=True, kw_only=True):
    budget: RunBudget
    holder: str
    claim: str
    spent: Amount  # total of the process, this request included


class SpendingQuestion(Struct, frozen=True, kw_only=True):
    """The reply is `Spent`."""

    budget: RunBudget


class CloseAccount(Struct, frozen=True, kw_only=True):
    account: str


BudgetMessage = BudgetClaim | Charged | SpendingQuestion | CloseAccount


class Granted(Struct, frozen=True, kw_only=True):
    life: str
    base: Amount


class Rejected(Struct, frozen=True, kw_only=True):
    spent: Amount
    refused: Refuse


class BalanceRequired(Struct, frozen=True):
    """The service needs the process's balance first."""


class Spent(Struct, frozen=True):
    """The spending of a run, by all its processes."""

    total: Amount


_ClaimReply: TypeAlias = Granted | Rejected | BalanceRequired | None
BudgetReply = _ClaimReply | Spent


class BudgetService:
    def __init__(self) -> None:
        self._life = new_object_id()
        self._accounts: dict[str, _Account] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    async def receive(self, message: BudgetMessage) -> BudgetReply:
        match message:
            case BudgetClaim():
                return await self._claim(message)
            case Charged():
                if message.budget.account not in self._closed:
                    account = self._account_of(message.budget)
                    new = account.update(message.holder, message.spent)
                    account.queue.change(lambda budget: budget.charge(message.claim, new))
            case SpendingQuestion():
                return Spent(self._account_of(message.budget).queue.budget.spent)
            case CloseAccount():
                self._accounts.pop(message.account, None)
                self._closed[message.account] = None
                while len(self._closed) > _CLOSED:
                    self._closed.popitem(last=False)
        return None

    def detach(self, holder: str) -> None:
        for account in self._accounts.values():
            account.base += account.spent.pop(holder, NOTHING)
            account.queue.change(lambda budget: budget.release(holder))

    async def _claim(self, message: BudgetClaim) -> BudgetReply:
        balance = message.balance
        if balance is None and message.life != self._life:
            return BalanceRequired()
        account = self._account_of(message.budget)
        base, claims = (NOTHING, {}) if balance is None else (balance.base, balance.claims)
        new = account.update(message.holder, message.spent, base)

        def restate(budget: Budget) -> list[Verdict]:
            budget.restate(new, claims, message.holder)
            return []

        account.queue.change(restate)
        verdict = await account.queue.ask(message.claim, message.amount, message.holder)
        match verdict:
            case Proceed():
                return Granted(life=self._life, base=account.base)
            case Refuse():
                return Rejected(spent=account.queue.budget.spent, refused=verdict)
            case None:
                return None

    def _account_of(self, budget: RunBudget) -> _Account:
        found = self._accounts.get(budget.account)
        if found is None:
            found = self._accounts[budget.account] = _Account(_BudgetQueue(budget), budget.spent)
        return found


class RemoteBudgetService(Protocol):
    async def account(self, message: BudgetMessage) -> BudgetReply:
        """Return the reply; raise `ConnectionError` while the service cannot be reached."""
        ...


class RemoteAccount:
    """The account of a run with requests of several processes; `holder` is this process's unique name."""

    def __init__(self, service: RemoteBudgetService, budget: RunBudget, *, holder: str) -> None:
        self._service = service
        self._budget = budget
        self._holder = holder
        self._numbers = itertools.count()
        self._life = ""  # life of the service that has this process's balance, or ""
        self._base = budget.spent
        self._open: dict[str, Amount] = {}
        self._background: set[asyncio.Task[object]] = set()
        self._is_closed = False
        self.spent = NOTHING

    async def reserve(self, estimate: Amount) -> str:
        """Retry without end while the service cannot be reached."""
        while True:
            claim = f"{self._budget.account}/{self._holder}/{next(self._numbers)}"
            call = self._start(self._claim(claim, estimate))
            try:
                # If the caller is cancelled, `_withdraw` needs the reply.
                reply = await asyncio.shield(call)
            except asyncio.CancelledError:
                if not call.cancelling():  # otherwise the loop is ending, and the end of this process is the report
                    self._start(self._withdraw(claim, call))
                raise
            if isinstance(reply, Rejected):
                raise _exhausted_error(self._budget, reply.spent, reply.refused)
            if reply is not None:
                return claim

    def charge(self, claim: str, spent: Amount = NOTHING) -> None:
        self._open.pop(claim, None)
        self.spent += spent
        if not self._is_closed:  # user code may end a request after its run has ended
            self._start(self._send(claim))

    async def settle(self) -> None:
        if not self._is_closed:
            await self._send("")

    async def share_spent(self) -> float:
        await self.settle()  # the service may have been restarted
        reply = await self._deliver(lambda: SpendingQuestion(budget=self._budget))
        return self._budget.share_of(reply.total if isinstance(reply, Spent) else self.spent)

    def close(self) -> None:
        """Stop retrying: the service may be gone for good."""
        self._is_closed = True
        for task in self._background:
            task.cancel()

    async def _claim(self, claim: str, amount: Amount) -> Granted | Rejected | None:
        while True:
            balance = None if self._life else Balance(base=self._base, claims=dict(self._open))
            message = BudgetClaim(
                budget=self._budget,
                holder=self._holder,
                claim=claim,
                amount=amount,
                spent=self.spent,
                life=self._life,
                balance=balance,
            )
            try:
                reply = cast("_ClaimReply", await self._service.account(message))
            except ConnectionError as error:
                _log.debug("Account %s not reached: %s", self._budget.account, error)
                self._life = ""
                await asyncio.sleep(_RETRY_S)
                continue
            if isinstance(reply, BalanceRequired):
                self._life = ""
                continue
            if isinstance(reply, Granted):
                self._life, self._base = reply.life, reply.base.at_least(self._base)
                self._open[claim] = amount
            if balance is not None:  # the reports of requests that ended meanwhile may have arrived before it
                for ended in balance.claims.keys() - self._open.keys():
                    self._start(self._send(ended))
            return reply

    async def _withdraw(self, claim: str, call: asyncio.Task[Granted | Rejected | None]) -> None:
        await self._send(claim)
        if isinstance(await call, Granted):
            self._open.pop(claim, None)
            await self._send(claim)

    async def _send(self, claim: str) -> None:
        """Repeat the report until it arrives: others wait for the reserved amount."""
        await self._deliver(lambda: Charged(budget=self._budget, holder=self._holder, claim=claim, spent=self.spent))

    async def _deliver(self, make: Callable[[], BudgetMessage]) -> BudgetReply:
        """Repeat a message until it arrives, each time with what is spent by then."""
        while True:
            try:
                return await self._service.account(make())
            except ConnectionError:
                await asyncio.sleep(_RETRY_S)

    def _start(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class _BudgetQueue:
    def __init__(self, limit: RunBudget) -> None:
        self.budget = Budget(limit)
        self._waiters: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[Verdict | None]]] = {}
        self._lock = threading.RLock()

    async def ask(self, claim: str, amount: Amount, holder: str = "") -> Verdict | None:
        """Return None if the request was charged while it waited."""
        loop = asyncio.get_running_loop()
        with self._lock:
            waiter = self._waiters.get(claim)
            if waiter is None or waiter[0] is not loop:
                waiter = self._waiters[claim] = (loop, loop.create_future())
            for verdict in self.budget.ask(claim, amount, holder):
                self._answer(verdict.claim, verdict)
        return await asyncio.shield(waiter[1])  # shared by repeated asks: cancelling one leaves the other

    def change(self, action: Callable[[Budget], list[Verdict]]) -> None:
        with self._lock:
            for verdict in action(self.budget):
                self._answer(verdict.claim, verdict)
            waiting = set(self.budget.waiting)
            for claim in [each for each in self._waiters if each not in waiting]:
                self._answer(claim, None)

    def _answer(self, claim: str, verdict: Verdict | None) -> None:
        loop, answer = self._waiters.pop(claim, (None, None))
        if loop is None or answer is None or loop.is_closed():
            return
        loop.call_soon_threadsafe(lambda: None if answer.done() else answer.set_result(verdict))


class _Account(Struct):
    queue: _BudgetQueue
    base: Amount  # spent before the run began and by dead processes
    spent: dict[str, Amount] = msgspec.field(default_factory=dict[str, Amount])  # total by process

    def update(self, holder: str, spent: Amount, base: Amount = NOTHING) -> Amount:
        before, base_before = self.spent.get(holder, NOTHING), self.base
        self.spent[holder] = spent.at_least(before)
        self.base = base.at_least(base_before)
        return (self.spent[holder] - before) + (self.base - base_before)


def _exhausted_error(limit: RunBudget, spent: Amount, refused: Refuse) -> BudgetExhaustedError:
    return BudgetExhaustedError(  # S-BUD-4
        f"Budget exhausted: the limit is {limit.describe_limits()}, {limit.describe(spent)} are spent, "
        f"and the next request would need {limit.describe(refused.needed)}"
    )
