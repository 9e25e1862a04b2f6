"""An account in one process: waiting for one's turn, giving up, the end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ensemble_ray.errors import BudgetExhaustedError
from ensemble_ray.llm.limits.accounts import LocalAccount
from ensemble_ray.values.metrics import Amount, RunBudget
from tests.ensemble_ray.llm.limits.settling import settle


def account_of(max_tokens: int) -> LocalAccount:
    """An account of tokens."""
    return LocalAccount(RunBudget(max_tokens=max_tokens))


async def test_request_waits_until_what_is_in_flight_was_counted() -> None:
    """S-BUD-3."""
    account = account_of(100)
    first = await account.reserve(Amount(80))
    second = asyncio.create_task(account.reserve(Amount(50)))
    await settle()
    assert not second.done()
    account.charge(first, Amount(40))
    await second
    assert account.spent == Amount(40)


async def test_everybody_who_waits_is_refused_when_the_budget_is_exhausted() -> None:
    """S-BUD-4: the error names the limit, what was spent and what was needed."""
    account = account_of(100)
    first = await account.reserve(Amount(80))
    waiting = [asyncio.create_task(account.reserve(Amount(50))) for _ in range(3)]
    await settle()
    account.charge(first, Amount(80))
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert {str(each) for each in ended} == {
        "Budget exhausted: the limit is max_tokens 100, 80 tokens are spent, and the next request would need 50 tokens"
    }
    with pytest.raises(BudgetExhaustedError):
        await account.reserve(Amount(1))


async def test_cancelled_caller_takes_nothing() -> None:
    """S-BUD-3: and stands in nobody's way."""
    account = account_of(100)
    first = await account.reserve(Amount(80))
    large, small = asyncio.create_task(account.reserve(Amount(90))), asyncio.create_task(account.reserve(Amount(20)))
    await settle()
    large.cancel()
    await small
    account.charge(first)
    assert account.spent == Amount(0)


async def test_caller_of_another_loop_is_woken() -> None:
    """S-BUD-2: a synthesizer of the user's may have a loop of its own."""
    account = account_of(100)
    first = await account.reserve(Amount(80))
    began = threading.Event()

    async def ask() -> None:
        began.set()
        account.charge(await account.reserve(Amount(50)), Amount(7))

    thread = threading.Thread(target=lambda: asyncio.run(ask()))
    thread.start()
    await asyncio.to_thread(began.wait)
    account.charge(first, Amount(40))
    await asyncio.to_thread(thread.join)
    assert account.spent == Amount(47)
