"""One account for many processes: they share it, die, and outlive the service that keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from ensemble_ray.errors import BudgetExhaustedError
from ensemble_ray.llm.limits import accounts
from ensemble_ray.llm.limits.accounts import (
    BudgetClaim,
    BudgetMessage,
    BudgetReply,
    BudgetService,
    Charged,
    CloseAccount,
    RemoteAccount,
)
from ensemble_ray.values.metrics import Amount, RunBudget
from tests.ensemble_ray.llm.limits.settling import settle

BUDGET = RunBudget(max_tokens=100, account="run/1")


class Way:
    """The way to a service that may be replaced, or be out of reach for some messages."""

    def __init__(self) -> None:
        self.service = BudgetService()
        self.messages: list[BudgetMessage] = []
        self.lost = 0
        #: waited for before a message arrives
        self.before: Callable[[BudgetMessage], Awaitable[object]] | None = None

    async def account(self, message: BudgetMessage) -> BudgetReply:
        """Deliver it."""
        self.messages.append(message)
        if self.before is not None:
            await self.before(message)
        if self.lost:
            self.lost -= 1
            raise ConnectionError("gone for a moment")
        return await self.service.receive(message)

    def process(self, name: str) -> RemoteAccount:
        """A process's side."""
        return RemoteAccount(self, BUDGET, holder=name)


async def test_processes_draw_from_one_account() -> None:
    """S-BUD-8, S-BUD-3: one waits for what another has in flight."""
    way = Way()
    one, two = way.process("one"), way.process("two")
    claim = await one.reserve(Amount(80))
    waiting = asyncio.create_task(two.reserve(Amount(50)))
    await settle()
    assert not waiting.done()
    one.charge(claim, Amount(30))
    await waiting
    two.charge(waiting.result(), Amount(40))
    with pytest.raises(BudgetExhaustedError, match="100, 70 tokens are spent, and the next request would need 40"):
        await one.reserve(Amount(40))


async def test_known_process_needs_one_message_per_claim() -> None:
    """S-BUD-8: what it knows is said once."""
    way = Way()
    one = way.process("one")
    for _ in range(3):
        one.charge(await one.reserve(Amount(5)), Amount(5))
    await settle()
    claims = [each for each in way.messages if isinstance(each, BudgetClaim)]
    assert [claim.balance is not None for claim in claims] == [True, False, False]


async def test_late_report_does_not_take_back_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-BUD-8: a report that is repeated because the service was gone says what is spent by then."""
    monkeypatch.setattr(accounts, "_RETRY_S", 0.0)
    way, is_back = Way(), asyncio.Event()

    async def hold(message: BudgetMessage) -> None:
        if isinstance(message, Charged) and message.claim == claim and not is_back.is_set():
            await is_back.wait()
            raise ConnectionError("gone")

    one = way.process("one")
    claim = await one.reserve(Amount(40))
    way.before = hold
    one.charge(claim, Amount(40))
    await settle()
    way.service = BudgetService()
    second = await one.reserve(Amount(40))
    one.charge(second, Amount(40))
    await settle()
    is_back.set()
    await one.settle()
    await settle()
    with pytest.raises(BudgetExhaustedError, match="80 tokens are spent"):
        await one.reserve(Amount(30))


async def test_claim_that_overtakes_a_report_counts_what_it_says() -> None:
    """S-BUD-8: messages to an actor may arrive in another order."""
    way, arrives = Way(), asyncio.Event()
    one = way.process("one")
    claim = await one.reserve(Amount(40))

    async def hold(message: BudgetMessage) -> None:
        if isinstance(message, Charged):
            await arrives.wait()

    way.before = hold
    one.charge(claim, Amount(80))
    waiting = asyncio.create_task(one.reserve(Amount(30)))
    await settle()
    assert not waiting.done()
    arrives.set()
    with pytest.raises(BudgetExhaustedError, match="80 tokens are spent"):
        await waiting


async def test_reservation_ends_when_its_report_overtakes_the_balance_of_its_process() -> None:
    """S-BUD-8: a restarted service would reserve its amount for ever."""
    way, arrives = Way(), asyncio.Event()
    one, two = way.process("one"), way.process("two")
    claim = await one.reserve(Amount(60))
    way.service = BudgetService()

    async def hold(message: BudgetMessage) -> None:
        if isinstance(message, BudgetClaim) and message.balance is not None:
            await arrives.wait()

    way.before = hold
    waiting = asyncio.create_task(one.reserve(Amount(5)))
    await settle()
    one.charge(claim, Amount(10))
    await settle()
    arrives.set()
    await waiting
    await two.reserve(Amount(85))


async def test_dead_process_gives_back_what_it_reserved() -> None:
    """S-BUD-8: what it had spent stays spent."""
    way = Way()
    one, two = way.process("one"), way.process("two")
    one.charge(await one.reserve(Amount(20)), Amount(20))
    await one.reserve(Amount(80))
    waiting = asyncio.create_task(two.reserve(Amount(80)))
    await settle()
    way.service.detach("one")
    await waiting
    two.charge(waiting.result(), Amount(75))
    with pytest.raises(BudgetExhaustedError):
        await two.reserve(Amount(6))


async def test_account_is_rebuilt_when_its_service_died() -> None:
    """S-BUD-8: of what processes say they spent and have in flight, and of what they heard of those who are gone."""
    way = Way()
    gone, one, two = way.process("gone"), way.process("one"), way.process("two")
    gone.charge(await gone.reserve(Amount(10)), Amount(10))
    await settle()
    way.service.detach("gone")
    one.charge(await one.reserve(Amount(20)), Amount(20))
    await two.reserve(Amount(30))
    way.service = BudgetService()
    claim = await two.reserve(Amount(5))
    await settle()
    waiting = asyncio.create_task(one.reserve(Amount(40)))  # 10 + 20 spent, 30 + 5 in flight
    await settle()
    assert not waiting.done()
    two.charge(claim)
    await waiting


async def test_service_that_died_learns_of_a_request_that_ends_then() -> None:
    """S-BUD-8: also of a process that asks for nothing any more."""
    way = Way()
    one, two = way.process("one"), way.process("two")
    claim = await one.reserve(Amount(60))
    way.service = BudgetService()
    one.charge(claim, Amount(60))
    await settle()
    with pytest.raises(BudgetExhaustedError, match="60 tokens are spent"):
        await two.reserve(Amount(50))


async def test_nothing_counts_twice_when_messages_come_again() -> None:
    """S-BUD-8: processes tell sums, not steps."""
    way = Way()
    one = way.process("one")
    one.charge(await one.reserve(Amount(40)), Amount(40))
    await settle()
    for message in list(way.messages):
        await way.service.receive(message)
    await one.reserve(Amount(60))


async def test_service_out_of_reach_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-BUD-8: for a claim and for its end; others wait for both."""
    monkeypatch.setattr("ensemble_ray.llm.limits.accounts._RETRY_S", 0.0)
    way = Way()
    one, two = way.process("one"), way.process("two")
    way.lost = 2
    claim = await one.reserve(Amount(80))
    waiting = asyncio.create_task(two.reserve(Amount(80)))
    await settle()
    way.lost = 2
    one.charge(claim, Amount(10))
    await waiting


async def test_claim_is_given_back_when_its_caller_left_before_it_came() -> None:
    """S-BUD-3: a cancelled caller takes nothing, wherever the answer is."""
    way = Way()
    one, two = way.process("one"), way.process("two")
    arrives = asyncio.Event()

    async def hold(message: BudgetMessage) -> None:
        if isinstance(message, BudgetClaim) and message.holder == "one":
            await arrives.wait()

    way.before = hold
    leaving = asyncio.create_task(one.reserve(Amount(80)))
    await settle()
    leaving.cancel()
    await settle()
    arrives.set()
    await settle()
    await two.reserve(Amount(100))


async def test_waiter_that_is_cancelled_leaves_the_queue() -> None:
    """S-BUD-3."""
    way = Way()
    one, two = way.process("one"), way.process("two")
    await one.reserve(Amount(80))
    large = asyncio.create_task(two.reserve(Amount(50)))
    await settle()
    small = asyncio.create_task(one.reserve(Amount(20)))
    await settle()
    large.cancel()
    await small


async def test_late_message_opens_no_closed_account() -> None:
    """S-BUD-8: the run has ended."""
    service = BudgetService()
    await service.receive(CloseAccount(account=BUDGET.account))
    await service.receive(Charged(budget=BUDGET, holder="one", claim="c", spent=Amount(5)))
    assert not service._accounts


async def test_closed_account_asks_a_service_that_is_gone_no_more() -> None:
    """S-BUD-8: who waits there is let go, and a request that ends later is told to nobody; it is counted here."""
    way = Way()
    one = way.process("one")
    claim = await one.reserve(Amount(80))
    waiting = asyncio.create_task(one.reserve(Amount(50)))
    await settle()
    way.lost = 1_000_000
    one.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    told = len(way.messages)
    one.charge(claim, Amount(30))
    await settle()
    assert len(way.messages) == told
    assert one.spent == Amount(30)


async def test_charge_has_arrived_when_the_account_is_settled() -> None:
    """S-BUD-8, S-MEM-129: the next request of another process sees it, although the service was out of reach at first."""
    way = Way()
    way.lost = 2
    one, two = way.process("one"), way.process("two")
    one.charge("", Amount(100))
    await one.settle()
    with pytest.raises(BudgetExhaustedError):
        await two.reserve(Amount(1))


async def test_each_process_learns_the_share_that_all_have_spent() -> None:
    """S-FBK-21: without a claim, with charges that are still on their way, and from a restarted service."""
    way = Way()
    one, two = way.process("one"), way.process("two")
    one.charge(await one.reserve(Amount(60)), Amount(30))
    assert (await one.share_spent(), await two.share_spent()) == (0.3, 0.3)
    way.service, way.lost = BudgetService(), 2
    assert await one.share_spent() == 0.3
    assert RunBudget(max_tokens=100, max_cost=10).share_of(Amount(50, 8)) == 0.8
