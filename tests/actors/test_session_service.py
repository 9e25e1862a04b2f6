"""SessionService over real processes, without a scheduler: pages, batches that come twice, a driver that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from ensemble_ray import ChatResponse, Task
from ensemble_ray.actors import spawn
from ensemble_ray.actors.driver.packing import Packer
from ensemble_ray.actors.link.wire import LogLine, OrderBatch, SessionOpening, WireResult
from ensemble_ray.actors.scheduler import dynamic_run
from ensemble_ray.actors.scheduler.dynamic_run import DynamicRun, SessionService
from ensemble_ray.actors.scheduler.processes import ProcessPool
from ensemble_ray.actors.scheduler.scheduler import SchedulerActor
from ensemble_ray.actors.scheduler.session import SessionLimits
from ensemble_ray.execute.orders import RunContext, TaskOrder, TaskResult
from ensemble_ray.values.ids import instance_of
from tests.builders import agent
from tests.scenarios.teams import PATIENCE_S

OPENING = SessionOpening(
    run_id="fed", session="driver/1", context=RunContext(run_id="fed", workflow="map", total_tasks=0, durability="off")
)


class Silent:
    """A model that never answers: what is reported of its tasks, the test says."""

    async def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        await asyncio.Event().wait()
        raise AssertionError


class Bench:
    """A scheduler's dynamic runs in this process, and what a driver packs for them."""

    def __init__(self) -> None:
        self.pool = ProcessPool()
        self.said: list[LogLine] = []
        self.service = SessionService(
            self.pool, lambda: SessionLimits(max_own=4, most_replicas=2), lambda _, lines: self.said.extend(lines)
        )
        self.packer = Packer()
        self.worker = agent(Silent())

    def batch(self, number: int, *keys: str, **fields: Any) -> OrderBatch:
        """Orders of those keys; by an agent, unless a handler does them."""
        by = None if "handler" in fields else self.worker
        orders = [
            self.packer.pack(
                TaskOrder(
                    run_id="fed",
                    key=key,
                    instance=instance_of(key),
                    epoch=0,
                    index=1,
                    task=Task(description=f"do {key}", expected_output="text", **fields),
                    agent_key=None if by is None else "kind",
                    agent_role="Writer",
                    agent=by,
                )
            )
            for key in keys
        ]
        named = {packed.instance: packed.names for packed in orders if packed.names is not None}
        templates = [found for order in orders if (found := self.packer.template_of(order)) is not None]
        bundles = {name: body for order in orders for name, body in self.packer.bundles_of(order).items()}
        return OrderBatch(
            number=number,
            orders=[packed.order for packed in orders],
            callables=named,
            templates=templates,
            bundles=bundles,
        )

    @property
    def run(self) -> DynamicRun:
        """The one run."""
        return self.service._dynamic["fed"]


@pytest.fixture
async def bench(ray_cluster: str) -> AsyncIterator[Bench]:
    """One on this loop, its run opened."""
    spawn.scheduler(SchedulerActor)  # agents know whom to report to
    made = Bench()
    assert await made.service.open_session(OPENING) is None
    yield made
    await made.service.close_session("fed", made.run.session if "fed" in made.service._dynamic else "", keep=None)
    assert made.pool._living == set()


def report(key: str, *, epoch: int = 0, body: bytes = b"x") -> WireResult:
    """What a process reports."""
    return TaskResult(key=key, status="completed", at=1.0, epoch=epoch, instance=instance_of(key), output=body)


async def test_entries_are_kept_until_the_driver_has_them(bench: Bench) -> None:
    """S-MR-164: a page whose answer was lost comes again; what is acknowledged is gone; late reports are not heard."""
    await bench.service.submit_orders("fed", "driver/1", bench.batch(1, "a", "b"))
    await bench.run.report([report("a"), report("a"), report("b", epoch=7)])
    pages = [await bench.service.collect("fed", "driver/1", 0, 0.0) for _ in range(2)]
    assert [(page.cursor, [each.key for each in page.results]) for page in pages if page] == [(1, ["a"])] * 2
    await bench.run.report([report("b")])
    page = await bench.service.collect("fed", "driver/1", 1, 0.0)
    assert page is not None
    assert (page.cursor, [each.key for each in page.results]) == (2, ["b"])
    assert (await bench.service.collect("fed", "driver/1", 2, 0.0), bench.run._outbox) == (
        replace(page, results=[]),
        [],
    )
    assert (bench.run._session._in_flight, bench.run._session._groups._orders) == ({}, {})


async def test_large_reports_make_small_pages(bench: Bench) -> None:
    """S-MR-132: a message of some 1 MB, however large the outputs are."""
    await bench.service.submit_orders("fed", "driver/1", bench.batch(1, *"abc"))
    await bench.run.report([report(key, body=bytes(700_000)) for key in "abc"])
    page = await bench.service.collect("fed", "driver/1", 0, 0.0)
    assert page is not None
    assert [each.key for each in page.results] == ["a", "b"]


async def test_batch_counts_once_when_it_comes_twice(bench: Bench) -> None:
    """S-MR-164: its answer was lost; batches may overtake each other."""
    batches = [bench.batch(number, f"t{number}") for number in (1, 2)]
    for batch in (batches[1], batches[1], batches[0], batches[0], batches[1]):
        assert await bench.service.submit_orders("fed", "driver/1", batch)
    assert set(bench.run._session._in_flight) == {"t1#0", "t2#0"}
    await bench.run.report([report("t1"), report("t2")])
    for batch in batches:
        await bench.service.submit_orders("fed", "driver/1", batch)
    assert (bench.run._session._in_flight, bench.run._early) == ({}, set())


async def test_order_is_given_back_when_something_that_it_needs_is_not_known(bench: Bench) -> None:
    """S-MR-142: the driver is told which, and sends it again with what it needs."""
    by_agent, by_handler = bench.batch(1, "a"), bench.batch(2, "h", handler=str)
    await bench.service.submit_orders("fed", "driver/1", replace(by_agent, templates=[]))
    await bench.service.submit_orders("fed", "driver/1", replace(by_handler, bundles={}))
    page = await bench.service.collect("fed", "driver/1", 0, 0.0)
    assert page is not None
    assert (page.cursor, page.results, page.unknown) == (2, [], ["a#0", "h#0"])
    assert (bench.run._session._in_flight, bench.pool._living) == ({}, set())


async def test_task_that_waits_for_its_callables_is_stopped(bench: Bench) -> None:
    """S-MR-150: it is reported as cancelled, and never handed out."""
    await bench.service.submit_orders("fed", "driver/1", bench.batch(1, "h", handler=str))
    await bench.service.stop_orders("fed", "driver/1", ["h#0"])
    page = await bench.service.collect("fed", "driver/1", 0, PATIENCE_S)
    assert page is not None
    (told,) = page.results
    assert (told.status, told.failure) == ("cancelled", None)
    assert (bench.run._session._in_flight, bench.run._session._callables._tasks) == ({}, {})


async def test_processes_are_ended_when_the_driver_is_gone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MR-164: whoever comes back later is told that nothing is known, and opens the run again."""
    monkeypatch.setattr(dynamic_run, "MOST_SILENT_S", 0.3)
    assert await bench.service.open_session(replace(OPENING, session="driver/2", is_resubmission=True)) is None
    await bench.service.submit_orders("fed", "driver/2", bench.batch(1, "a"))
    (process,), watch = bench.pool._living, bench.service._watches["driver/2"]
    asked = asyncio.ensure_future(bench.service.collect("fed", "driver/2", 0, PATIENCE_S))
    async with asyncio.timeout(PATIENCE_S):
        assert await bench.service.collect("fed", "driver/1", 0, PATIENCE_S) is None
        assert await asked is None
        await watch
    assert not process.is_alive
    assert "fed" not in bench.service._dynamic
    assert not await bench.service.submit_orders("fed", "driver/2", bench.batch(2, "b"))
