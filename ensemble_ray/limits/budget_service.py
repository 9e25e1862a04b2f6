"""Where accounts of runs are kept for many processes, in the cluster's limiter actor. Room: limits.

In: messages as data; claims are answered when there is something to say. It carries out what `Budget` says. Must never
happen: what a living process says that it spent is forgotten, or counted twice.

Every process tells its own sum, not its steps, so that a message may come twice or late. A desk that was started anew
knows nothing: it refuses claims under another `life` than its own until their process has said what it spent and what it
has in flight, and what it heard of those who are gone (S-BUD-8).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ensemble_ray.limits.account import WaitingRoom
from ensemble_ray.limits.budget import Budget, Go, Refuse, Verdict
from ensemble_ray.values.amounts import NOTHING, Amount, RunBudget
from ensemble_ray.values.ids import new_object_id

__all__ = [
    "BudgetMessage",
    "BudgetReply",
    "BudgetService",
    "Claim",
    "CloseAccount",
    "MayGo",
    "MayNot",
    "NotHeard",
    "Settled",
    "Statement",
]

#: Names of closed accounts that are remembered, so that a late message opens none of them again.
_CLOSED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a process knows of an account."""

    #: what it spent itself
    spent: Amount
    #: what those had spent who were gone when it heard of the account last
    base: Amount
    #: what it has in flight
    claims: Mapping[str, Amount]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A request is about to be sent; answered by `MayGo`, `MayNot`, `NotHeard`, or None when it was settled meanwhile."""

    budget: RunBudget
    holder: str
    #: unique over all holders
    claim: str
    amount: Amount
    #: of the desk that heard this process last
    life: str
    statement: Statement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
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


BudgetMessage = Claim | Settled | CloseAccount


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
class NotHeard:
    """This desk has not heard yet what that process knows."""


BudgetReply = MayGo | MayNot | NotHeard | None


@dataclass(slots=True)
class _Account:
    room: WaitingRoom
    #: what was spent before, and by processes that are gone
    base: Amount
    #: process -> what it said that it spent
    spent: dict[str, Amount] = field(default_factory=dict[str, Amount])

    def hear(self, holder: str, spent: Amount, base: Amount = NOTHING) -> Amount:
        """Note what a process says; gives what is new of it."""
        known = self.spent.get(holder, NOTHING)
        self.spent[holder], before = spent.at_least(known), self.base
        self.base = base.at_least(before)
        return (self.spent[holder] - known) + (self.base - before)


class BudgetService:
    """Keeps any number of accounts; all callers are on one event loop."""

    def __init__(self) -> None:
        self._life = new_object_id()
        self._accounts: dict[str, _Account] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    async def receive(self, message: BudgetMessage) -> BudgetReply:
        """Take a message."""
        match message:
            case Claim():
                return await self._claimed(message)
            case Settled():
                self._settled(message)
            case CloseAccount():
                self._accounts.pop(message.account, None)
                self._closed[message.account] = None
                while len(self._closed) > _CLOSED:
                    self._closed.popitem(last=False)
        return None

    def leave(self, holder: str) -> None:
        """A process is gone: what it has spent stays, what it has in flight is free."""
        for account in self._accounts.values():
            account.base += account.spent.pop(holder, NOTHING)
            account.room.change(lambda budget: budget.leave(holder))

    async def _claimed(self, asked: Claim) -> BudgetReply:
        if asked.statement is None and asked.life != self._life:
            return NotHeard()
        account = self._account_of(asked.budget)
        told = asked.statement
        if told is not None:
            new = account.hear(asked.holder, told.spent, told.base)
            account.room.change(lambda budget: _restated(budget, new, told.claims, asked.holder))
        verdict = await account.room.ask(asked.claim, asked.amount, asked.holder)
        match verdict:
            case Go():
                return MayGo(life=self._life, base=account.base)
            case Refuse():
                return MayNot(spent=account.room.budget.spent, refused=verdict)
            case None:
                return None

    def _settled(self, told: Settled) -> None:
        if told.budget.account not in self._closed:
            account = self._account_of(told.budget)
            new = account.hear(told.holder, told.spent)
            account.room.change(lambda budget: budget.charge(told.claim, new))

    def _account_of(self, budget: RunBudget) -> _Account:
        found = self._accounts.get(budget.account)
        if found is None:
            found = self._accounts[budget.account] = _Account(WaitingRoom(budget), budget.spent)
        return found


def _restated(budget: Budget, spent: Amount, claims: Mapping[str, Amount], holder: str) -> list[Verdict]:
    budget.restate(spent, claims, holder)
    return []
