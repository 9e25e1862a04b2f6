"""What a run does beside its source: errors reach the run, and nothing is waited for at the end."""

from __future__ import annotations

import asyncio

import pytest

from ensemble_ray import RecordError
from ensemble_ray.runs.coordinator import RunBackgroundTasks, as_error


async def _raise(error: BaseException) -> None:
    raise error


async def _settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("error", [ValueError("a"), RecordError("full"), asyncio.CancelledError(), GeneratorExit()])
async def test_error_reaches_the_run(error: BaseException) -> None:
    """S-MR-106, S-MR-123: also what is meant to end a task or a generator; that comes as an ordinary error."""
    failed: list[BaseException] = []
    RunBackgroundTasks(failed.append).start(_raise(error))
    await _settled()
    (reported,) = failed
    assert reported is error or (isinstance(reported, RuntimeError) and reported.__cause__ is error)


async def test_background_tasks_are_stopped_when_the_run_has_ended() -> None:
    """S-SET-27: what they raise then is nobody's business."""
    failed: list[BaseException] = []
    tasks = RunBackgroundTasks(failed.append)
    is_stopped = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_stopped.set()

    tasks.start(hang())
    await asyncio.sleep(0)
    tasks.detach()
    await asyncio.wait_for(is_stopped.wait(), 60)
    assert failed == []


def test_errors_stay_what_they_are() -> None:
    """S-MR-106: unchanged where a caller can be given them."""
    for error in (ValueError("a"), SystemExit(2), KeyboardInterrupt()):
        assert as_error(error) is error
