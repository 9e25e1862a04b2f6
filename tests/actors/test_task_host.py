"""TaskHost on an event loop: one task's report as a reply, work that is met again, what a release leaves."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from ensemble_ray import Agent, ChatResponse, NoOpToolMetrics, Task
from ensemble_ray.actors.link.packing import pack_order, unpack_result
from ensemble_ray.actors.link.wire import WireOrder, WireResult
from ensemble_ray.actors.worker.task_host import TaskHost
from ensemble_ray.execute.callables import LocalCallables
from ensemble_ray.execute.orders import Continuation, OutputOf, RunContext, TaskOrder
from ensemble_ray.llm.limits.limiter import process_limiter
from ensemble_ray.ports import Services
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.testing import RecordingSink
from ensemble_ray.tools.cpu import LokyCpuPool
from tests.actors.feeding import Placed

PLACED = Placed()
ORDER = TaskOrder(
    run_id="run",
    key="a#0/0/call-0/delegate",
    instance="a#0/0/call-0/delegate#0",
    epoch=0,
    index=0,
    task=Task(description="dig", expected_output="gold"),
    agent_key="digger",
    agent_role="Digger",
    depth=1,
)


class Gated:
    """A model that answers when it may, counts its calls, and tells when it was stopped."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may = asyncio.Event()
        self.is_stopped = False
        self.count = 0

    async def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        self.count += 1
        self.asked.set()
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.is_stopped = True
            raise
        return ChatResponse(text="gold")


class Sent:
    """A target that keeps what it is given."""

    def __init__(self) -> None:
        self.reports: list[WireResult] = []
        self.changed = asyncio.Event()

    async def report(self, run_id: str, reports: Sequence[WireResult]) -> None:
        self.reports.extend(reports)
        self.changed.set()


class Bench:
    """A host with one agent, and what left it."""

    def __init__(self) -> None:
        self.model, self.target, self.journal = Gated(), Sent(), MemoryJournal("run")
        self.flushed = 0
        self.host = TaskHost(self.target.report)
        self.host.host(
            RunContext(run_id="run", workflow="hierarchical", total_tasks=1),
            {},
            journal=self.journal,
            sink=RecordingSink(),
            callables=LocalCallables({}),
            services=Services(limiter=process_limiter(), cpu=LokyCpuPool()),  # neither is asked
            tool_metrics=NoOpToolMetrics(),
            flush=self._flush,
        )
        # loaded, since the gate of its model cannot be pickled
        templates = self.host._runs["run"].templates
        templates.put("digger", Agent(role="Digger", goal="dig", llm=self.model))
        templates.use("digger")

    async def _flush(self) -> None:
        self.flushed += 1


@pytest.fixture
async def bench() -> Bench:
    """One on this loop."""
    return Bench()


def wire(**changes: object) -> WireOrder:
    """The order on its way."""
    return pack_order(replace(ORDER, **changes))  # type: ignore[arg-type]  # fields of an order


async def test_report_is_the_reply_and_events_come_before_it(bench: Bench) -> None:
    """S-PAR-41: nothing is sent to the scheduler for work that an agent asked for."""
    bench.model.may.set()
    report = await bench.host.perform("run", wire())
    result = unpack_result(report)
    assert result.output is not None
    assert (result.output.raw, bench.flushed, bench.target.reports) == ("gold", 1, [])


async def test_work_is_not_begun_again_when_its_asker_was_replaced(bench: Bench) -> None:
    """S-DUR-31, S-DUR-37: who asks under a higher epoch for what is at work gets the result of that."""
    first = asyncio.ensure_future(bench.host.perform("run", wire()))
    await bench.model.asked.wait()
    held = [
        bench.host.holds(run, instance) for run, instance in (("run", ORDER.instance), ("run", "x"), ("other", "x"))
    ]
    assert held == [True, False, False]
    second = asyncio.ensure_future(bench.host.perform("run", wire(epoch=1000)))
    await asyncio.sleep(0)
    bench.model.may.set()
    reports = await asyncio.gather(first, second)
    assert not bench.host.holds("run", ORDER.instance)
    assert [(report.status, report.epoch) for report in reports] == [("completed", 0)] * 2
    assert bench.model.count == 1


async def test_work_is_stopped_when_its_run_is_released(bench: Bench) -> None:
    """S-PAR-34: an asker that died stops nothing; the process may be used again, since all of it let go."""
    asking = asyncio.ensure_future(bench.host.perform("run", wire()))
    await bench.model.asked.wait()
    assert await bench.host.release("run")
    assert bench.model.is_stopped
    assert (await asking).status == "cancelled"
    assert bench.target.reports == []


async def test_process_is_not_used_again_when_released_work_does_not_let_go(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-PAR-34, S-SET-42."""
    holding = asyncio.Event()

    async def hold(_messages: object, _tools: object = ()) -> ChatResponse:
        while not holding.is_set():
            try:
                bench.model.asked.set()
                await holding.wait()
            except asyncio.CancelledError:
                continue
        return ChatResponse(text="late")

    monkeypatch.setattr(bench.model, "chat", hold)
    monkeypatch.setattr(bench.host._runs["run"].executor, "_grace_s", 0.05)
    asking = asyncio.ensure_future(bench.host.perform("run", wire()))
    await bench.model.asked.wait()
    assert not await bench.host.release("run")
    holding.set()
    assert (await asking).status == "cancelled"


async def test_task_that_cannot_be_loaded_is_a_failed_report(bench: Bench) -> None:
    """S-CONV-34: never a hang, and what to do is said."""
    report = await bench.host.perform("run", replace(wire(), task=b"no pickle"))
    assert report.failure is not None
    assert (report.status, report.failure.error_type) == ("failed", "ValidationError")
    assert "cannot be loaded in a worker process" in report.failure.message


async def test_agent_that_comes_with_its_task_is_its_kinds_template_and_what_differs(bench: Bench) -> None:
    """S-MR-142: one model object for all of a kind; a task of a kind that was not sent is not begun, and says so."""
    bench.model.may.set()
    template = pickle.dumps(Agent(role="Digger", goal="dig", llm=PLACED))
    order = replace(wire(), depth=0, agent_key="kind.1", agent=pickle.dumps({"role": "Miner"}))
    unknown = await bench.host.perform("run", order)
    assert (unknown.status, unknown.epoch) == ("unknown_template", 0)
    bench.host.accept("run", [order])
    told = await bench.host.perform("run", order, {"kind.1": template})
    first = unpack_result(told).output
    assert first is not None
    other = replace(order, instance="b#0", key="b", agent=pickle.dumps({}))
    second = unpack_result(await bench.host.perform("run", other)).output
    assert second is not None
    assert first.raw == second.raw
    assert [report.status for report in bench.target.reports] == ["unknown_template"]
    assert bench.host._runs["run"].template_of == {}


async def test_task_whose_agent_cannot_be_loaded_is_a_failed_report(bench: Bench) -> None:
    """S-CONV-34, S-MR-106: the same each time, so nobody sends it again for ever."""
    order = replace(wire(), agent_key="kind.1", agent=pickle.dumps({}))
    for _ in range(2):
        report = await bench.host.perform("run", order, {"kind.1": b"no pickle"})
        assert report.failure is not None
        assert (report.status, report.failure.error_type) == ("failed", "ValidationError")


def continued(*instances: str) -> WireOrder:
    """A task, and others that each have the output of the one before as context."""
    first, *rest = instances
    orders = [
        replace(wire(instance=each, key=each, depth=0), context=(OutputOf(before),))  # type: ignore[arg-type]  stands for bytes
        for before, each in zip(instances, rest, strict=False)
    ]
    return replace(wire(instance=first, key=first, depth=0), continuation=Continuation(1, tuple(orders)))


async def reported(bench: Bench, count: int) -> list[tuple[str, str]]:
    while len(bench.target.reports) < count:
        bench.target.changed.clear()
        await bench.target.changed.wait()
    return [(report.instance, report.status) for report in bench.target.reports]


async def test_tasks_of_a_continuation_run_in_turn_and_are_all_reported(bench: Bench) -> None:
    """S-DUR-156."""
    bench.model.may.set()
    bench.host.accept("run", [continued("a", "b", "c")])
    assert await reported(bench, 3) == [("a", "completed"), ("b", "completed"), ("c", "completed")]
    assert bench.model.count == 3


async def test_continuation_ends_when_a_task_does_not_complete(bench: Bench) -> None:
    """S-DUR-156, S-ENG-13."""
    order = continued("a", "b", "c")
    assert order.continuation is not None
    broken = (replace(order.continuation.orders[0], task=b"no pickle"), *order.continuation.orders[1:])
    bench.model.may.set()
    bench.host.accept("run", [replace(order, continuation=Continuation(1, broken))])
    assert await reported(bench, 2) == [("a", "completed"), ("b", "failed")]
    assert await bench.host.revoke("run", 1) == []
    assert bench.model.count == 1


async def test_revoked_continuation_starts_no_further_task(bench: Bench) -> None:
    """S-DUR-156: what had begun goes on and is told; an order that arrives later is alone."""
    bench.host.accept("run", [continued("a", "b", "c")])
    await bench.model.asked.wait()
    assert await bench.host.revoke("run", 1) == ["a"]
    bench.model.may.set()
    assert await reported(bench, 1) == [("a", "completed")]
    bench.host.accept("run", [continued("x", "y")])
    assert await reported(bench, 2) == [("a", "completed"), ("x", "completed")]
    assert bench.model.count == 2
    assert await bench.host.revoke("other", 1) == ()


async def test_stopped_task_of_a_continuation_is_the_last_one(bench: Bench) -> None:
    """S-DUR-156, S-SET-27."""
    bench.host.accept("run", [continued("a", "b")])
    await bench.model.asked.wait()
    bench.host.stop("run", ["a"])
    assert await reported(bench, 1) == [("a", "cancelled")]
    assert bench.model.count == 1
