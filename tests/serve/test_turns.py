"""RunQueue: runs of a team one after the other, by priority and waiting time."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray.serve.catalog import ServedTeam
from ensemble_ray.serve.driving.ledger import LedgerEntry
from ensemble_ray.serve.driving.queue import RunQueue, TurnOrder, estimate_start, rank
from ensemble_ray.serve.driving.run_driver import ActiveRun
from ensemble_ray.serve.schemas import NewRun, QueuePlace, RunPriority, RunStatus
from ensemble_ray.testing import ManualClock

NOW = datetime(2026, 1, 1, tzinfo=UTC)
STEP_S = 600.0


def run(priority: RunPriority | None = None, *, after_s: float = 0.0) -> ActiveRun:
    """One that was accepted so long after the first one; nobody looks at what it does."""
    asked = NewRun(priority=priority)
    entry = LedgerEntry(
        run_id="r",
        key=None,
        digest="d",
        ensemble="team",
        request=asked,
        tags={},
        tasks=1,
        workflow="sequential",
        status=RunStatus.ACCEPTED,
        created_at=NOW + timedelta(seconds=after_s),
    )
    return ActiveRun(entry=entry, team=cast("ServedTeam", None), asked=asked)


async def test_runs_have_their_turns_in_the_order_in_which_they_came() -> None:
    """S-SRV-50: so many at a time; what stands is told whenever it changes."""
    stood: list[tuple[int, int]] = []
    turns = RunQueue(2, lambda each: stood.append((each.running, each.queued)), step_s=STEP_S)
    runs = [run() for _ in range(5)]
    taking = [asyncio.ensure_future(turns.acquire(each)) for each in runs]
    await asyncio.sleep(0)
    assert (turns.running, turns.queued) == (2, 3)
    turns.release(runs[0])
    await asyncio.sleep(0)
    assert [each.done() for each in taking] == [True, True, True, False, False]
    turns.release(runs[1])
    turns.release(runs[2])
    assert all(await asyncio.gather(*taking))
    turns.release(runs[3])
    turns.release(runs[4])
    assert stood[-1] == (turns.running, turns.queued) == (0, 0)


async def test_run_that_is_cancelled_while_it_waits_takes_no_turn() -> None:
    """S-SRV-24: nor does one that was cancelled before, and the next one has it."""
    turns = RunQueue(1, lambda _: None, step_s=STEP_S)
    first, waiting, cancelled, late = run(), run(), run(), run()
    assert await turns.acquire(first)
    taking = {each: asyncio.ensure_future(turns.acquire(each)) for each in (cancelled, waiting)}
    await asyncio.sleep(0)
    turns.cancel(cancelled)
    turns.cancel(late)
    assert not await taking[cancelled]
    assert not await turns.acquire(late)
    turns.release(first)
    assert await taking[waiting]
    assert (turns.running, turns.queued) == (1, 0)


async def test_turn_is_not_lost_when_who_waits_for_it_is_ended() -> None:
    """S-SRV-50: neither while it waits, nor just when it is called."""
    turns = RunQueue(1, lambda _: None, step_s=STEP_S)
    begun = run()
    await turns.acquire(begun)
    first, second, third = (asyncio.ensure_future(turns.acquire(run())) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    turns.release(begun)
    second.cancel()
    await asyncio.wait([first, second])
    assert await asyncio.wait_for(third, 10)
    assert (turns.running, turns.queued) == (1, 0)


async def test_a_higher_priority_is_next_unless_others_wait_for_long() -> None:
    """S-HOK-30, S-HOK-31: a step is worth so much waiting time; runs of one rank keep their order."""
    turns = RunQueue(1, lambda _: None, step_s=STEP_S)
    begun = run()
    await turns.acquire(begun)
    waiting = {
        "low": run(RunPriority.LOW),
        "normal": run(after_s=STEP_S - 1),
        "late normal": run(after_s=STEP_S + 1),
        "high": run(RunPriority.HIGH, after_s=2 * STEP_S - 2),
        "late high": run(RunPriority.HIGH, after_s=2 * STEP_S + 2),
    }
    names = {active: name for name, active in waiting.items()}
    turned: list[ActiveRun] = [begun]

    async def take(active: ActiveRun) -> None:
        await turns.acquire(active)
        turned.append(active)

    taking = [asyncio.ensure_future(take(each)) for each in waiting.values()]
    await asyncio.sleep(0)
    positions = sorted((place.position, names[each]) for each in names if (place := turns.place(each)) is not None)
    for _ in waiting:
        turns.release(turned[-1])
        await asyncio.sleep(0)
    await asyncio.gather(*taking)
    order = [names[each] for each in turned[1:]]
    assert order == ["high", "normal", "low", "late normal", "late high"]
    assert positions == list(enumerate(order, 1))


PRIORITIES = st.sampled_from(list(RunPriority))
STEPS = {RunPriority.LOW: -1, RunPriority.NORMAL: 0, RunPriority.HIGH: 1}


@given(st.lists(st.tuples(PRIORITIES, st.integers(0, 10_000)), max_size=20), st.integers(10_000, 20_000))
def test_the_order_is_that_of_urgencies_that_grow_while_runs_wait(
    runs: list[tuple[RunPriority, int]], now: int
) -> None:
    """S-HOK-31: at any time, whatever was added in whichever order."""
    order = TurnOrder[int]()
    for number, (priority, since) in enumerate(runs):
        order.add(number, rank(priority, since, step_s=STEP_S))
    urgencies = [STEPS[priority] + (now - since) / STEP_S for priority, since in runs]
    popped: list[int] = []
    while len(order):
        popped.append(order.pop())
        assert order.position(popped[-1]) is None
    expected = sorted(range(len(runs)), key=lambda each: (-round(urgencies[each], 9), each))
    assert popped == expected


def test_a_value_that_is_discarded_is_in_the_order_no_more() -> None:
    """S-HOK-30: the others move up; an unknown one is not there."""
    order = TurnOrder[str]()
    for name in ("a", "b", "c"):
        order.add(name, 1.0)
    assert order.discard("a")
    assert not order.discard("a")
    assert [order.position(each) for each in ("a", "b", "c")] == [None, 1, 2]


@pytest.mark.parametrize(
    ("position", "places", "running_for_s", "durations_s", "expected"),
    [
        (1, 1, [4.0], [], None),
        (1, 1, [4.0], [10.0], 6.0),
        (1, 1, [40.0], [10.0], 0.0),
        (2, 1, [4.0], [5.0, 15.0], 16.0),
        (1, 2, [4.0, 8.0], [10.0], 2.0),
        (2, 2, [4.0, 8.0], [10.0], 6.0),
        (4, 2, [4.0, 8.0], [10.0], 16.0),
        (1, 2, [4.0], [10.0], 0.0),
    ],
)
def test_a_start_is_estimated_from_recent_turns(
    position: int, places: int, running_for_s: list[float], durations_s: list[float], expected: float | None
) -> None:
    """S-HOK-33: each place is free when its run has taken the mean, and then after each further mean."""
    assert estimate_start(position, places=places, running_for_s=running_for_s, durations_s=durations_s) == expected


async def test_a_place_has_an_estimate_when_a_turn_has_ended() -> None:
    """S-HOK-33: before that it is unknown; a run that has its turn has no place."""
    clock = ManualClock()
    turns = RunQueue(1, lambda _: None, step_s=STEP_S, clock=clock)
    first, second, third = run(), run(), run(RunPriority.LOW)
    taking = [asyncio.ensure_future(turns.acquire(each)) for each in (first, second, third)]
    await asyncio.sleep(0)
    assert turns.place(first) is None
    assert turns.place(second) == QueuePlace(priority=RunPriority.NORMAL, position=1, estimated_start_s=None)
    clock.advance(10)
    turns.release(first)
    clock.advance(4)
    assert turns.place(third) == QueuePlace(priority=RunPriority.LOW, position=1, estimated_start_s=6.0)
    turns.release(second)
    await asyncio.gather(*taking)
