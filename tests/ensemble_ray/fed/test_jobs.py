"""What a fed run does beside its machine: errors reach whoever minds them, and nothing is waited for at the end."""

from __future__ import annotations

import asyncio

import pytest

from ensemble_ray.errors import RecordError
from ensemble_ray.fed.jobs import Jobs, as_error


async def _raise(error: BaseException) -> None:
    raise error


async def _settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("error", [ValueError("a"), asyncio.CancelledError(), GeneratorExit()])
async def test_error_of_the_user_reaches_the_run(error: BaseException) -> None:
    """S-MR-106: also what is meant to end a task or a generator; that comes as an ordinary error."""
    failed: list[BaseException] = []
    Jobs(failed.append, failed.append).do(_raise(error))
    await _settled()
    (told,) = failed
    assert told is error or (isinstance(told, RuntimeError) and told.__cause__ is error)


async def test_record_that_cannot_be_written_breaks_the_run_off() -> None:
    """S-MR-123: it is nobody's failure of a task."""
    failed: list[BaseException] = []
    broken: list[BaseException] = []
    error = RecordError("full")
    Jobs(failed.append, broken.append).do(_raise(error))
    await _settled()
    assert (failed, broken) == ([], [error])


async def test_jobs_are_stopped_when_the_run_has_ended() -> None:
    """S-SET-27: what they raise then is nobody's business."""
    failed: list[BaseException] = []
    jobs = Jobs(failed.append, failed.append)
    is_stopped = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_stopped.set()

    jobs.do(hang())
    await asyncio.sleep(0)
    jobs.leave()
    await asyncio.wait_for(is_stopped.wait(), 60)
    assert failed == []


def test_errors_stay_what_they_are() -> None:
    """S-MR-106: unchanged where a caller can be given them."""
    for error in (ValueError("a"), SystemExit(2), KeyboardInterrupt()):
        assert as_error(error) is error
