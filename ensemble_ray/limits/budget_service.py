"""BudgetService: the accounts of runs for many processes, in the cluster's limiter actor. Package: limits.

In: messages as data; claims are answered when there is something to say. It carries out what `Budget` says. Must never
happen: what a living process says that it spent is forgotten, or counted twice.

Every process sends its own sum, not its steps, so that a message may come twice or late. A service that was started
anew knows nothing: it refuses claims under another `life` than its own until their process has sent its balance: what it
spent, what it has in flight, and what it knows of processes that are gone (S-BUD-8).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ensemble_ray.limits.account import BudgetQueue
from ensemble_ray.limits.budget import Budget, Go, Refuse, Verdict
from ensemble_ray.values.amounts import NOTHING, Amount, RunBudget
from ensemble_ray.values.ids import new_object_id

__all__ = [
    "Balance",
    "BalanceRequired",
    "BudgetClaim",
    "BudgetMessage",
    "BudgetReply",
    "BudgetService",
    "Charged",
    "CloseAccount",
    "MayGo",
    "MayNot",
]

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
