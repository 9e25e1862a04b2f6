"""Places of an agent's tasks: who only waits for others has none."""

from __future__ import annotations

import asyncio

import pytest

from ensemble_ray.execute.scope import Slot


async def test_place_is_held_until_the_end_when_nobody_waits() -> None:
    """S-HIER-87."""
    places = asyncio.Semaphore(1)
    async with Slot(places):
        assert places.locked()
    assert not places.locked()


async def test_place_is_given_back_while_all_open_calls_wait() -> None:
    """S-HIER-87, S-DEL-12: a call that works keeps it; the last one that works gives it back."""
    places = asyncio.Semaphore(1)
    async with Slot(places) as slot:
        slot.begin(3)
        async with slot.waiting():
            assert places.locked()  # two others are at work
            slot.end()
            async with slot.waiting():
                assert not places.locked()
            slot.end()
            assert not places.locked()  # one more waits still
        slot.end()
        await slot.acquire()
        assert places.locked()
    assert not places.locked()


async def test_place_is_taken_again_after_another_task_let_go() -> None:
    """S-HIER-87: never more at work than there are places."""
    places = asyncio.Semaphore(1)
    async with Slot(places) as slot:
        slot.begin(1)
        async with slot.waiting(), Slot(places):
            again = asyncio.create_task(slot.acquire())
            await asyncio.sleep(0)
            assert not again.done()
        slot.end()
        await again
        assert places.locked()


async def test_place_of_a_task_that_fails_while_it_waits_is_free() -> None:
    """S-DEL-12: and is not given back twice."""
    places = asyncio.Semaphore(1)

    async def fail() -> None:
        async with Slot(places) as slot:
            slot.begin(1)
            async with slot.waiting():
                raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await fail()
    await places.acquire()
    assert places.locked()


async def test_task_without_a_limit_needs_no_place() -> None:
    """S-HIER-87."""
    async with Slot() as slot:
        slot.begin(1)
        async with slot.waiting():
            pass
        slot.end()
        await slot.acquire()
