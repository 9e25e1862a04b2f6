"""Tasks of one process: batches, limits per agent, stopping."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import pytest

from ensemble_ray import IllegalStateError
from ensemble_ray.execute.local_executor import LocalExecutor
from ensemble_ray.execute.orders import TaskResult
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.ensemble_ray.execute.running import Bench, writer
from tests.ensemble_ray.virtual_time import run_in_virtual_time

GRACE_S = 3.0


class Gate:
    """User code that waits until it is let go; keeps what came to it."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.free = asyncio.Event()
        self.now = 0
        self.most = 0

    async def answer(self, request: ScriptedCall) -> str:
        """As a model's answer."""
        await self._pass(request.text)
        return "Done"

    async def handle(self, context: object) -> str:
        """As a handler."""
        await self._pass(str(context))
        return "Done"

    async def hold_on(self, context: object) -> str:
        """As a handler that does not let itself be cancelled."""
        await self.begun.put(str(context))
        while not self.free.is_set():
            try:
                await self.free.wait()
            except asyncio.CancelledError:
                continue
        return "Late"

    async def _pass(self, what: str) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await self.begun.put(what)
        try:
            await self.free.wait()
        finally:
            self.now -= 1


class Street:
    """Houses with their runner; keeps what they deliver, batch by batch."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.batches: list[list[TaskResult]] = []
        self._came = asyncio.Event()
        self.executor = LocalExecutor(bench.runner, bench.agents, self._take, grace_s=GRACE_S)

    def _take(self, results: Sequence[TaskResult]) -> None:
        self.batches.append(list(results))
        self._came.set()

    async def results(self, count: int) -> dict[str, TaskResult]:
        """Wait for so many; by key."""
        while sum(map(len, self.batches)) < count:
            self._came.clear()
            await self._came.wait()
        return {result.key: result for batch in self.batches for result in batch}

    def start(self, *keys: str, agent_key: str | None = None) -> None:
        """Start these tasks."""
        self.executor.start([self.bench.order(key, agent_key=agent_key) for key in keys])


def handling(handler: Callable[[object], object], *keys: str) -> Street:
    """Tasks with that handler."""
    return Street(Bench(handlers=dict.fromkeys(keys, handler)))


async def test_tasks_that_end_together_are_delivered_together() -> None:
    """The design: one message for all that finish in one turn of the loop; later ones in a later message."""
    gate, last = Gate(), Gate()
    street = Street(Bench(handlers={"a": gate.handle, "b": gate.handle, "c": last.handle}))
    street.start("a", "b", "c")
    for _ in range(2):
        await gate.begun.get()
    gate.free.set()
    await street.results(2)
    last.free.set()
    await street.results(3)
    assert [[result.key for result in batch] for batch in street.batches] == [["a", "b"], ["c"]]


async def test_running_tasks_are_those_that_were_not_reported() -> None:
    """What a runtime has to stop when conducting itself broke."""
    gate = Gate()
    street = handling(gate.handle, "a", "b")
    assert street.executor.running == ()
    street.start("a", "b")
    assert street.executor.running == ("a#0", "b#0")
    gate.free.set()
    await street.results(2)
    assert street.executor.running == ()


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (2, 2), (None, 3)])
async def test_agent_works_on_as_many_tasks_as_it_may(limit: int | None, most: int) -> None:
    """S-SET-41: `max_concurrency`; the others wait and are run afterwards."""
    gate = Gate()
    agent = writer(ScriptedModel(otherwise=gate.answer), max_concurrency=limit)
    street = Street(Bench(agents={"writer": agent}))
    street.start("a", "b", "c", agent_key="writer")
    for _ in range(most):
        await gate.begun.get()
    gate.free.set()
    results = await street.results(3)
    assert {result.status for result in results.values()} == {"completed"}
    assert gate.most == most


async def test_limit_of_one_agent_does_not_hold_another() -> None:
    """S-SET-41: the other's task is done while the first agent's tasks wait."""
    gate = Gate()
    agents = {
        "slow": writer(ScriptedModel(otherwise=gate.answer), max_concurrency=1),
        "quick": writer(ScriptedModel("Done"), max_concurrency=1),
    }
    street = Street(Bench(agents=agents))
    street.start("a", "b", agent_key="slow")
    street.start("c", agent_key="quick")
    assert list(await street.results(1)) == ["c"]
    gate.free.set()
    await street.results(3)


# Stopping.


async def test_stopped_task_is_reported_with_what_it_did() -> None:
    """S-SET-27: cancelled, not failed; others go on."""
    gate = Gate()
    street = handling(gate.handle, "a", "b")
    street.start("a", "b")
    for _ in range(2):
        await gate.begun.get()
    street.executor.stop(["a#0"])
    results = await street.results(1)
    assert (results["a"].status, results["a"].error) == ("cancelled", None)
    assert results["a"].trace is not None
    gate.free.set()
    assert (await street.results(2))["b"].status == "completed"


async def test_task_that_waits_for_its_agent_is_stopped_at_once() -> None:
    """S-SET-27: it never began; the place it waited for is not lost."""
    gate = Gate()
    agent = writer(ScriptedModel(otherwise=gate.answer), max_concurrency=1)
    street = Street(Bench(agents={"writer": agent}))
    street.start("a", "b", agent_key="writer")
    await gate.begun.get()
    street.executor.stop(["b#0"])
    results = await street.results(1)
    assert (results["b"].status, results["b"].trace) == ("cancelled", None)
    street.start("c", agent_key="writer")
    gate.free.set()
    results = await street.results(3)
    assert (results["a"].status, results["c"].status) == ("completed", "completed")


async def test_task_that_has_not_begun_is_stopped() -> None:
    """S-SET-27: stopped in the turn in which it was started."""
    street = handling(Gate().handle, "a")
    street.start("a")
    street.executor.stop(["a#0"])
    assert (await street.results(1))["a"].status == "cancelled"
    assert street.bench.sink.events == ()


async def test_unknown_and_ended_tasks_are_not_stopped() -> None:
    """S-PAR-12: nothing is reported twice."""
    street = handling(lambda _: "Done", "a")
    street.start("a")
    await street.results(1)
    street.executor.stop(["a#0", "nobody#0"])
    await asyncio.sleep(0)
    assert [[result.status for result in batch] for batch in street.batches] == [["completed"]]


def test_task_that_does_not_stop_is_left_behind_after_the_grace(caplog: pytest.LogCaptureFixture) -> None:
    """S-SET-27, S-SET-48: the run's end does not wait for it; what it gives later is not reported."""

    async def scenario() -> tuple[list[str], int]:
        gate = Gate()
        street = handling(gate.hold_on, "a")
        street.start("a")
        await gate.begun.get()
        street.executor.stop(["a#0"])
        await street.results(1)
        (task,) = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        gate.free.set()
        await task
        await asyncio.sleep(0)
        return [result.status for batch in street.batches for result in batch], len(street.batches)

    with caplog.at_level(logging.WARNING, logger="ensemble_ray"):
        outcome, passed_s = run_in_virtual_time(scenario())
    assert outcome == (["cancelled"], 1)
    assert passed_s == pytest.approx(GRACE_S)
    assert caplog.messages == ["Task 'a' did not stop within 3 s and is left behind"]


def test_nobody_is_left_behind_when_all_stop_in_time(caplog: pytest.LogCaptureFixture) -> None:
    """S-SET-27: no warning when the grace is over."""

    async def scenario() -> None:
        gate = Gate()
        street = handling(gate.handle, "a")
        street.start("a")
        await gate.begun.get()
        street.executor.stop(["a#0"])
        await street.results(1)
        await asyncio.sleep(2 * GRACE_S)

    run_in_virtual_time(scenario())
    assert not caplog.records


@pytest.mark.parametrize("lets_go", [True, False])
def test_work_that_is_asked_for_again_is_not_taken_for_what_was_stopped(*, lets_go: bool) -> None:
    """S-DUR-31, S-SET-27: neither the grace of what was stopped ends its successor, nor is its late result the successor's."""

    async def scenario() -> tuple[str, str]:
        gate = Gate()
        street = handling(gate.handle if lets_go else gate.hold_on, "a")
        before = asyncio.ensure_future(street.executor.perform(street.bench.order("a")))
        await gate.begun.get()
        (old,) = street.executor._tasks.values()
        street.executor.stop(["a#0"])
        stopped = await before
        after = asyncio.ensure_future(street.executor.perform(street.bench.order("a")))
        await gate.begun.get()
        (new,) = street.executor._tasks.values()
        await asyncio.sleep(2 * GRACE_S)
        street.executor._report(*old, street.executor._empty(old[0], "failed"))
        gate.free.set()
        await asyncio.wait([old[1], new[1]])
        return stopped.status, (await after).status

    (statuses, _) = run_in_virtual_time(scenario())
    assert statuses == ("cancelled", "completed")


async def test_defect_in_a_runner_is_a_failed_task() -> None:
    """Nothing leaves the run waiting: the error of a journal that takes no facts is the task's."""
    street = Street(Bench(agents={"a": writer(ScriptedModel("Done"))}))
    await street.bench.journal.close()
    street.start("a")
    result = (await street.results(1))["a"]
    assert result.status == "failed"
    assert isinstance(result.error, IllegalStateError)
