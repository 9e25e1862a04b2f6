"""RunQueue: runs of a team one after the other, first come, first served."""

from __future__ import annotations

import asyncio
from typing import cast

from ensemble_ray.serve.catalog import ServedTeam
from ensemble_ray.serve.driving.ledger import LedgerEntry
from ensemble_ray.serve.driving.run_driver import ActiveRun, RunQueue
from ensemble_ray.serve.schemas import NewRun


def run() -> ActiveRun:
    """One that was accepted; nobody looks at what it does."""
    return ActiveRun(entry=cast("LedgerEntry", None), team=cast("ServedTeam", None), asked=NewRun())


async def test_runs_have_their_turns_in_the_order_in_which_they_came() -> None:
    """S-SRV-50: so many at a time; what stands is told whenever it changes."""
    stood: list[tuple[int, int]] = []
    turns = RunQueue(2, lambda each: stood.append((each.running, each.queued)))
    taking = [asyncio.ensure_future(turns.acquire(run())) for _ in range(5)]
    await asyncio.sleep(0)
    assert (turns.running, turns.queued) == (2, 3)
    turns.release()
    await asyncio.sleep(0)
    assert [each.done() for each in taking] == [True, True, True, False, False]
    turns.release()
    turns.release()
    assert all(await asyncio.gather(*taking))
    turns.release()
    turns.release()
    assert stood[-1] == (turns.running, turns.queued) == (0, 0)


async def test_run_that_is_cancelled_while_it_waits_takes_no_turn() -> None:
    """S-SRV-24: nor does one that was cancelled before, and the next one has it."""
    turns = RunQueue(1, lambda _: None)
    assert await turns.acquire(run())
    waiting, cancelled, late = run(), run(), run()
    taking = {each: asyncio.ensure_future(turns.acquire(each)) for each in (cancelled, waiting)}
    await asyncio.sleep(0)
    turns.cancel(cancelled)
    turns.cancel(late)
    assert not await taking[cancelled]
    assert not await turns.acquire(late)
    turns.release()
    assert await taking[waiting]
    assert (turns.running, turns.queued) == (1, 0)


async def test_turn_is_not_lost_when_who_waits_for_it_is_ended() -> None:
    """S-SRV-50: neither while it waits, nor just when it is called."""
    turns = RunQueue(1, lambda _: None)
    await turns.acquire(run())
    first, second, third = (asyncio.ensure_future(turns.acquire(run())) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    turns.release()
    second.cancel()
    await asyncio.wait([first, second])
    assert await asyncio.wait_for(third, 10)
    assert (turns.running, turns.queued) == (1, 0)
