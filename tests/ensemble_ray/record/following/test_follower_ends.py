"""A reader hears of the end when it is there, and nothing is kept of runs that were read."""

from __future__ import annotations

import asyncio

import pytest

from ensemble_ray.events.messages import LAST_TYPE
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record import following as follower
from ensemble_ray.record.following import LiveEvents, RunFollower, SharedRecordReader
from tests.ensemble_ray.record.following.test_shared_ends import CountedStore


def test_end_is_told_at_once_when_nothing_happens_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SRV-39: and not when the record is looked at the next time; until there is an end, it is waited for."""
    monkeypatch.setattr(follower, "POLL_S", 1000.0)
    run_blocking(_end_is_told())


async def _end_is_told() -> None:
    """On the library's loop, as followers are: what happens wakes no other."""
    live, has_ended = LiveEvents(), asyncio.Event()

    async def outcome() -> str | None:
        return "completed" if has_ended.is_set() else None

    reader = RunFollower(CountedStore(), "run", live=live, outcome=outcome)
    reading = asyncio.ensure_future(reader.read(1000.0))
    await asyncio.sleep(0)
    assert not reading.done()
    has_ended.set()
    live.close()
    (last,) = await asyncio.wait_for(reading, 30)
    assert (last.type, reader.is_over) == (LAST_TYPE, True)


async def test_nothing_is_kept_of_runs_that_nobody_reads_any_more() -> None:
    """S-SRV-36: also where they were read after their end."""
    shared = SharedRecordReader(CountedStore(), lasting_s=0.0)
    for number in range(100):
        assert [page async for page in shared.read(f"run-{number}")] == []
        await asyncio.sleep(0.001)
    assert len(shared._ends) < 10
