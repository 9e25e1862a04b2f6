"""The manual clock."""

from __future__ import annotations

import asyncio

import pytest

from ensemble_ray.testing import ManualClock


async def test_sleepers_wake_in_order_when_the_clock_is_advanced() -> None:
    """S-RATE-13: waiting on a clock holds no thread; first due, first woken."""
    clock = ManualClock(start=100.0)
    woken: list[str] = []

    async def sleeper(name: str, delay_s: float) -> None:
        await clock.sleep(delay_s)
        woken.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(sleeper("late", 5.0))
        group.create_task(sleeper("soon", 1.0))
        await asyncio.sleep(0)
        assert clock.sleepers == 2
        clock.advance(0.5)
        await asyncio.sleep(0)
        assert woken == []
        clock.advance(5.0)
    assert woken == ["soon", "late"]
    assert clock.now() == 105.5


async def test_sleep_returns_at_once_when_there_is_nothing_to_wait_for() -> None:
    """No delay needs no advance."""
    await ManualClock().sleep(0)


async def test_a_cancelled_sleeper_is_forgotten_when_the_clock_moves() -> None:
    """Cancelling a sleep leaves the clock usable."""
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep(1))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.sleepers == 0
    clock.advance(2)


def test_time_is_refused_when_it_runs_backwards() -> None:
    """A clock goes forward."""
    with pytest.raises(ValueError, match="by_s must be >= 0, got: -1"):
        ManualClock().advance(-1)
