"""BudgetService: the accounts of runs for many processes, in the cluster's limiter actor.

In: messages as data; claims are answered when there is something to say. It carries out what `Budget` says. Must never
happen: what a living process says that it spent is forgotten, or counted twice.

Every process sends its own sum, not its steps, so that a message may come twice or late. A service that was started
anew knows nothing: it refuses claims under another `life` than its own until their process has sent its balance: what it
spent, what it has in flight, and what it knows of processes that are gone (S-BUD-8).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from ensemble_ray.errors import BudgetExhaustedError
from ensemble_ray.llm.limits.budget import Budget, Go, Refuse, Verdict
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.metrics import NOTHING, Amount, RunBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


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


#: Names of closed accounts that are remembered, so that a late message opens none of them again.
_CLOSED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """What a process knows of an account."""

    #: what it spent itself
    spent: Amount
    #: what gone processes had spent, as of the last reply
    base: Amount
    #: what it has in flight
    claims: Mapping[str, Amount]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetClaim:
    """A request is about to be sent; answered by `MayGo`, `MayNot`, `BalanceRequired`, or None when it was charged meanwhile."""

    budget: RunBudget
    holder: str
    #: unique over all holders
    claim: str
    amount: Amount
    #: of the service that has this process's balance
    life: str
    balance: Balance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Charged:
    """A request is over."""

    budget: RunBudget
    holder: str
    claim: str
    #: what the process spent since it began, this request included
    spent: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseAccount:
    """The run has ended."""

    account: str


BudgetMessage = BudgetClaim | Charged | CloseAccount


@dataclass(frozen=True, slots=True, kw_only=True)
class MayGo:
    """The request may be sent."""

    life: str
    base: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class MayNot:
    """The budget is exhausted."""

    spent: Amount
    refused: Refuse


@dataclass(frozen=True, slots=True)
class BalanceRequired:
    """This service needs the balance of that process first."""


BudgetReply = MayGo | MayNot | BalanceRequired | None


@dataclass(slots=True)
class _Account:
    queue: BudgetQueue
    #: what was spent before, and by processes that are gone
    base: Amount
    #: process -> what it said that it spent
    spent: dict[str, Amount] = field(default_factory=dict[str, Amount])

    def update(self, holder: str, spent: Amount, base: Amount = NOTHING) -> Amount:
        """Take over the sums of a process and return what is new of them."""
        before, base_before = self.spent.get(holder, NOTHING), self.base
        self.spent[holder] = spent.at_least(before)
        self.base = base.at_least(base_before)
        return (self.spent[holder] - before) + (self.base - base_before)


class BudgetService:
    """Keeps any number of accounts; all callers are on one event loop."""

    def __init__(self) -> None:
        self._life = new_object_id()
        self._accounts: dict[str, _Account] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    async def receive(self, message: BudgetMessage) -> BudgetReply:
        """Take a message."""
        match message:
            case BudgetClaim():
                return await self._claim(message)
            case Charged():
                self._charge(message)
            case CloseAccount():
                self._accounts.pop(message.account, None)
                self._closed[message.account] = None
                while len(self._closed) > _CLOSED:
                    self._closed.popitem(last=False)
        return None

    def leave(self, holder: str) -> None:
        """Free what a gone process has in flight; what it has spent stays."""
        for account in self._accounts.values():
            account.base += account.spent.pop(holder, NOTHING)
            account.queue.change(lambda budget: budget.leave(holder))

    async def _claim(self, asked: BudgetClaim) -> BudgetReply:
        if asked.balance is None and asked.life != self._life:
            return BalanceRequired()
        account = self._account_of(asked.budget)
        balance = asked.balance
        if balance is not None:
            new = account.update(asked.holder, balance.spent, balance.base)
            account.queue.change(lambda budget: _restate(budget, new, balance.claims, asked.holder))
        verdict = await account.queue.ask(asked.claim, asked.amount, asked.holder)
        match verdict:
            case Go():
                return MayGo(life=self._life, base=account.base)
            case Refuse():
                return MayNot(spent=account.queue.budget.spent, refused=verdict)
            case None:
                return None

    def _charge(self, message: Charged) -> None:
        if message.budget.account not in self._closed:
            account = self._account_of(message.budget)
            new = account.update(message.holder, message.spent)
            account.queue.change(lambda budget: budget.charge(message.claim, new))

    def _account_of(self, budget: RunBudget) -> _Account:
        found = self._accounts.get(budget.account)
        if found is None:
            found = self._accounts[budget.account] = _Account(BudgetQueue(budget), budget.spent)
        return found


def _restate(budget: Budget, spent: Amount, claims: Mapping[str, Amount], holder: str) -> list[Verdict]:
    budget.restate(spent, claims, holder)
    return []


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
