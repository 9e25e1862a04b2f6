"""RunEndBuffer: the end of a planned run in pages, each as often as it is asked for."""

from __future__ import annotations

import asyncio
from typing import Any

from ensemble_ray import ExitReason, RunState
from ensemble_ray.actors.link.wire import EndPage, WireFailure, WireOutcome
from ensemble_ray.actors.scheduler import planned_run as run_end
from ensemble_ray.actors.scheduler.planned_run import RunEndBuffer
from ensemble_ray.execute.orders import FailedTask, RunOutcome
from ensemble_ray.runs.outputs import ListedOutputs, SpooledOutputs
from ensemble_ray.schedule.instructions import LoopResult

LARGE = 400_000


def an_end(*, outputs: int = 0, size: int = 1, **others: Any) -> WireOutcome:
    """How a run ended with that many outputs of that size."""
    store = SpooledOutputs()
    names = [f"t{number}#0" for number in range(outputs)]
    for name in names:
        store.put(name, name.encode().ljust(size))
    return RunOutcome(
        state=RunState.COMPLETED,
        exit_reason=ExitReason.COMPLETED,
        started_at=1.0,
        completed_at=2.0,
        completed=ListedOutputs(store, names),
        **others,
    )


async def pages_of(end: RunEndBuffer) -> list[EndPage]:
    """All pages, as a driver asks for them."""
    pages = [await end.page(0)]
    while not pages[-1].is_last:
        pages.append(await end.page(pages[-1].cursor))
    return pages


async def test_end_without_entries_is_one_page() -> None:
    """Nothing more is asked for."""
    end = RunEndBuffer()
    end.result.set_result(an_end())
    (page,) = await pages_of(end)
    assert (page.end.state, list(page.end.completed), page.cursor) == (RunState.COMPLETED, [], 0)


async def test_every_entry_comes_once_and_pages_are_bounded() -> None:
    """Outputs, outputs of workers, failures and what was not finished, in their order; pages of some megabyte."""
    failed = [FailedTask(instance=f"f{number}", at=1.0, failure=WireFailure(body=b"f" * LARGE)) for number in range(4)]
    given = [(f"d{number}", b"d" * LARGE) for number in range(4)]
    left = [(f"u{number}", WireFailure(body=b"u" * LARGE)) for number in range(4)]
    raised = [("loop:refine", WireFailure(body=b"r" * LARGE))]
    units = (LoopResult(unit="loop:refine", iterations=(), termination_reason=None),)
    whole = an_end(outputs=4, size=LARGE, delegated=given, failures=failed, unfinished=left, raised=raised, units=units)
    end = RunEndBuffer()
    end.result.set_result(whole)
    pages = await pages_of(end)
    assert [page.cursor for page in pages] == [3, 6, 9, 12, 15, 17]
    assert [each for page in pages for each in page.end.completed] == list(whole.completed)
    assert [each for page in pages for each in page.end.delegated] == given
    assert [each for page in pages for each in page.end.failures] == failed
    assert [each for page in pages for each in page.end.unfinished] == left
    assert [each for page in pages for each in page.end.raised] == raised
    assert [each for page in pages for each in page.end.units] == list(units)
    assert {page.end_id for page in pages} == {end.id}


async def test_page_holds_so_many_entries_at_most() -> None:
    """However small they are."""
    end = RunEndBuffer()
    end.result.set_result(an_end(outputs=2_500))
    assert [len(page.end.completed) for page in await pages_of(end)] == [1000, 1000, 500]


async def test_page_comes_again_when_it_was_lost_on_its_way() -> None:
    """S-DUR-32: and a driver that begins anew misses nothing."""
    end = RunEndBuffer()
    end.result.set_result(an_end(outputs=6, size=LARGE))
    first = await pages_of(end)
    assert await end.page(first[0].cursor) == first[1]
    assert await pages_of(end) == first


async def test_end_is_read_while_its_driver_asks(monkeypatch: Any) -> None:
    """It is not dropped for later ends between two pages; one that nobody asks for is."""
    end = RunEndBuffer()
    assert not end.is_read
    waiting = asyncio.ensure_future(end.page(0))
    await asyncio.sleep(0)
    assert end.is_read
    end.result.set_result(an_end(outputs=6, size=LARGE))
    await waiting
    assert end.is_read
    monkeypatch.setattr(run_end, "_READ_S", 0.0)
    assert not end.is_read
