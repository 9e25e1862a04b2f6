"""RemoteExecutor on a real cluster: every order has its result, once, whatever dies; kinds of agents share processes."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from ensemble_ray import (
    Agent,
    AgentExecutionError,
    EnsembleError,
    RayRuntime,
    RunExistsError,
    RunState,
    TaskCompleteEvent,
    ValidationError,
)
from ensemble_ray.actors import spawn
from ensemble_ray.actors.driver import cluster as connection
from ensemble_ray.actors.driver.remote_executor import RemoteExecutor
from ensemble_ray.actors.link import reach
from ensemble_ray.actors.scheduler.scheduler import SchedulerActor
from ensemble_ray.execute.orders import TaskOrder
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.testing import RecordingSink
from ensemble_ray.values.ids import REDISPATCH_STEP, instance_of
from tests.actors.feeding import Driver, Placed, Waiting, at_work, in_scheduler
from tests.builders import agent
from tests.scenarios.teams import Marks


@pytest.fixture
def runtime(ray_runtime: RayRuntime) -> RayRuntime:
    """The shared one; its processes stay warm from test to test."""
    return ray_runtime


async def test_each_order_has_its_result_once_when_there_are_thousands(runtime: RayRuntime) -> None:
    """S-MR-142, S-MR-141: agents that differ by data share two processes, and one model in each; each keeps its data."""
    model = Placed()
    async with Driver(runtime) as driver:
        assert driver.executor.most_processes == 2
        for start in range(0, 2000, 500):
            driver.executor.start(
                [driver.order(f"map-{n}", agent(model, f"Worker {n}", replicas=2)) for n in range(start, start + 500)]
            )
        results = await driver.until(2000)
    assert {result.status for result in results} == {"completed"}
    assert {(key, result.instance) for key, result in driver.results.items()} == {
        (f"map-{n}", instance_of(f"map-{n}")) for n in range(2000)
    }
    for key, result in driver.results.items():
        assert result.output is not None
        assert result.output.agent_role == f"Worker {key.removeprefix('map-')}"
        assert result.output.task_description == f"do {key}"
    places = {text.partition("/")[0] for text in driver.texts().values()}
    assert (len(places), len(set(driver.texts().values()))) == (2, 2)
    run_id = driver.run_id
    assert not await in_scheduler(lambda self: run_id in self._dynamic)


async def test_agents_that_say_nothing_get_more_processes_when_many_tasks_stay_in_flight(
    runtime: RayRuntime, tmp_path: Path
) -> None:
    """S-MR-141: as many as the cluster has CPUs; who says one has one."""
    marks = Marks(tmp_path / "marks")
    model = Waiting(marks)

    def find_busy_for_long(session: Any) -> None:
        session._groups._calm_at = dict.fromkeys(session._groups._calm_at, -math.inf)

    async with Driver(runtime) as driver:

        async def add(by: Agent) -> list[int]:
            before = len(marks.lines)
            driver.executor.start([driver.order(f"{before}-{n}", by) for n in range(140)])
            return (await at_work(marks, before + 140))[before:]

        first = await add(agent(model))
        await driver.in_run(find_busy_for_long)
        assert [len(set(first)), len({*first, *await add(agent(model))})] == [1, 2]
        one = await add(agent(model, replicas=1))
        await driver.in_run(find_busy_for_long)
        assert len({*one, *await add(agent(model, replicas=1))}) == 1
        marks.add("over")
        await driver.until(4 * 140)


async def test_tasks_of_a_dead_process_go_on_in_another(runtime: RayRuntime, tmp_path: Path) -> None:
    """S-MR-164, S-DUR-31: under a higher epoch, told once; those of the other process are not disturbed."""
    marks, address = Marks(tmp_path / "marks"), StoreAddress(home=str(tmp_path))
    driver = Driver(runtime, store=address)
    owned = await store_at(address).begin(driver.run_id)
    async with driver:
        worker = agent(Waiting(marks), replicas=2)
        driver.executor.start([driver.order(f"map-{n}", worker) for n in range(20)])
        victim = (await at_work(marks, 20))[0]
        count = len([line for line in marks.lines if line == str(victim)])
        os.kill(victim, signal.SIGKILL)
        await at_work(marks, 20 + count)
        marks.add("over")
        await driver.until(20)
    await owned.close(RunState.COMPLETED)
    assert set(driver.texts().values()) == {"done"}
    assert sorted(result.epoch for result in driver.results.values()) == [0] * (20 - count) + [REDISPATCH_STEP] * count


async def test_tasks_fail_with_their_process_when_nothing_is_recorded(runtime: RayRuntime, tmp_path: Path) -> None:
    """S-DUR-31, S-PAR-34: none begins anew what it may have done; the run goes on, and the next task in a new process."""
    marks = Marks(tmp_path / "marks")
    async with Driver(runtime) as driver:
        worker = agent(Waiting(marks), replicas=1)
        driver.executor.start([driver.order(f"map-{n}", worker) for n in range(6)])
        os.kill((await at_work(marks, 6))[0], signal.SIGKILL)
        for result in await driver.until(6):
            assert result.status == "failed"
            assert type(result.error) is AgentExecutionError
            assert "its process died" in str(result.error)
        marks.add("over")
        driver.executor.start([driver.order("after", worker)])
        await driver.until(7)
    assert driver.results["after"].status == "completed"


async def test_what_is_in_flight_is_sent_again_when_the_scheduler_died(runtime: RayRuntime, tmp_path: Path) -> None:
    """S-MR-164, S-DUR-16: with durability off too; what was done before is not done again, what comes after is done."""
    marks = Marks(tmp_path / "marks")
    async with Driver(runtime) as driver:
        placed, waiting = agent(Placed(), replicas=1), agent(Waiting(marks), replicas=1)
        driver.executor.start([driver.order("before", placed, occurrence=2)])
        await driver.until(1)
        driver.executor.start([driver.order(f"map-{n}", waiting) for n in range(12)])
        await at_work(marks, 12)
        os.kill(await in_scheduler(lambda _: os.getpid()), signal.SIGKILL)
        driver.executor.start([driver.order("meanwhile", placed)])
        await at_work(marks, 24)
        marks.add("over")
        await driver.until(14)
        driver.executor.start([driver.order("after", placed)])
        await driver.until(15)
        assert not driver.executor.failed.done()
    assert driver.results["before"].instance == "before#2"
    assert {driver.results[f"map-{n}"].epoch for n in range(12)} == {3 * REDISPATCH_STEP}
    assert len(driver.texts()) == 15


async def test_stopped_tasks_are_delivered_as_cancelled(runtime: RayRuntime, tmp_path: Path) -> None:
    """S-MR-150: at work, on their way, or not sent at all; others are not disturbed."""
    marks = Marks(tmp_path / "marks")
    async with Driver(runtime) as driver:
        worker = agent(Waiting(marks), replicas=1)
        driver.executor.start([driver.order(f"map-{n}", worker) for n in range(4)])
        await at_work(marks, 4)
        driver.executor.stop([instance_of("map-1")])
        await driver.until(1)
        driver.executor.start([driver.order("sent", worker)])
        await asyncio.sleep(0)  # its message is made in the next turn of the loop
        driver.executor.start([driver.order("queued", worker)])
        driver.executor.stop([instance_of("sent"), instance_of("queued"), instance_of("map-1"), "nobody"])
        await driver.until(3)
        marks.add("over")
        await driver.until(6)
    assert {key for key, result in driver.results.items() if result.status == "cancelled"} == {
        "map-1",
        "sent",
        "queued",
    }


async def test_stops_of_one_turn_share_a_message(runtime: RayRuntime, tmp_path: Path) -> None:
    """S-MR-150, S-MR-142: a run that ends stops each of its tasks by itself, and may have thousands of them."""
    marks = Marks(tmp_path / "marks")
    async with Driver(runtime) as driver:
        driver.executor.start([driver.order(f"map-{n}", agent(Waiting(marks), replicas=1)) for n in range(50)])
        await at_work(marks, 50)
        for number in range(50):
            driver.executor.stop([instance_of(f"map-{number}")])
        await asyncio.sleep(0)
        assert len(driver.executor._background) == 1
        results = await driver.until(50)
    assert {result.status for result in results} == {"cancelled"}
    marks.add("over")


async def test_stopped_task_is_not_sent_again_when_it_could_not_be_begun(runtime: RayRuntime, tmp_path: Path) -> None:
    """S-MR-150, S-MR-142: its kind was not known to the scheduler, which so has nothing to stop."""
    marks = Marks(tmp_path / "marks")
    async with Driver(runtime) as driver:
        order = driver.order("map-0", agent(Waiting(marks)))
        driver.executor._sent[f"{order.agent_key}.1"] = None  # as if it had been sent, and forgotten there
        driver.executor.start([order])
        await asyncio.sleep(0)  # its message is made in the next turn of the loop
        driver.executor.stop([order.instance])
        (result,) = await driver.until(1)
    assert result.status == "cancelled"
    assert marks.lines == []


class Locked(Placed):
    """A model that cannot travel."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (lambda driver: driver.order("bad", agent(Locked())), "Agent 'Writer' -> llm -> lock"),
        (lambda driver: driver.order("bad", handler=closing(threading.Lock())), "Task 'bad' -> handler -> closure"),
    ],
    ids=["agent", "handler"],
)
async def test_task_is_delivered_as_failed_when_something_of_it_cannot_travel(
    runtime: RayRuntime, make: Callable[[Driver], TaskOrder], culprit: str
) -> None:
    """S-MR-106, S-SET-38, S-CONV-34: the path to it; whoever starts it is not disturbed, and nothing of it is kept."""
    async with Driver(runtime) as driver:
        driver.executor.start([make(driver), driver.order("good", agent(Placed()))])
        await driver.until(2)
    error = driver.results["bad"].error
    assert type(error) is ValidationError
    assert culprit in str(error)
    assert driver.results["good"].status == "completed"


def closing(value: object) -> Callable[[object], str]:
    """A handler that carries that."""
    return lambda _: str(value)


async def test_events_of_what_was_delivered_are_handed_on_before_close_returns(runtime: RayRuntime) -> None:
    """S-MR-95, S-PAR-42: all of them, also while the run goes on."""
    sink = RecordingSink()
    async with Driver(runtime, events=sink, interest=frozenset({TaskCompleteEvent.method})) as driver:
        driver.executor.start([driver.order(f"map-{n}", agent(Placed())) for n in range(40)])
        await driver.until(40)
    assert sorted(event.instance for event in sink.of(TaskCompleteEvent)) == sorted(
        instance_of(f"map-{n}") for n in range(40)
    )


async def test_first_driver_stops_when_another_takes_its_run_over(runtime: RayRuntime, tmp_path: Path) -> None:
    """S-DUR-17, S-SET-39: a recorded run; one of that id that is not recorded is refused, since nobody knows whose it is."""
    address = StoreAddress(home=str(tmp_path))
    owned = await store_at(address).begin("taken")
    async with Driver(runtime, run_id="taken", store=address) as first:
        with pytest.raises(RunExistsError, match="Run 'taken' is running"):
            async with Driver(RayRuntime(), run_id="taken"):
                pass
        async with Driver(runtime, run_id="taken", store=address) as second:
            second.executor.start([second.order("map-0", agent(Placed()))])
            await second.until(1)
            with pytest.raises(EnsembleError, match="Run taken was taken over"):
                await first.executor.failed
            assert "taken" in await spawn.scheduler(SchedulerActor).states.remote()
        assert second.results["map-0"].status == "completed"
    await owned.close(RunState.COMPLETED)


class Gone:
    """A scheduler whose calls fail at once, as they do when its host refuses connections."""

    def __getattr__(self, name: str) -> Gone:
        return self

    async def remote(self, *_: object, **__: object) -> None:
        """Call it."""
        raise ActorUnavailableError("out of reach", None)


async def test_executor_fails_when_the_cluster_is_gone(
    runtime: RayRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-DUR-34, S-CONV-32: within seconds, with what to do; nothing is delivered any more, and closing returns."""

    async def answers() -> bool:
        return False

    driver = Driver(runtime)
    async with driver:
        monkeypatch.setattr(connection, "_answers", answers)
        monkeypatch.setattr(reach, "_PATIENT_PAUSES_S", (0.0,))
        lost = RemoteExecutor(driver.request, Gone(), is_connected=False, keep="briefly", most_processes=1)
        lost._collecting = asyncio.ensure_future(lost._collect())
        with pytest.raises(EnsembleError, match=r"the cluster is gone.*ensemble_ray\.resume\('"):
            await lost.failed
        lost.start([driver.order("late", agent(Placed()))])
        await lost.close()
        monkeypatch.undo()
    assert driver.results == {}
    assert [each.message for each in caplog.records if "scheduler's process died" in each.message] != []


class New:
    """A scheduler that was started anew, again and again, and takes what it is given."""

    def __getattr__(self, name: str) -> New:
        return self

    async def remote(self, *_: object, **__: object) -> None:
        """Call it."""


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "off"])
async def test_run_ends_when_schedulers_die_with_the_same_tasks(runtime: RayRuntime, *, is_recorded: bool) -> None:
    """S-MR-164, S-DUR-16: their epochs have room for no more; where nothing is recorded, nothing is held to that."""
    driver = Driver(runtime, store=StoreAddress(home="/nowhere") if is_recorded else None)
    executor = RemoteExecutor(driver.request, New(), is_connected=False, keep="briefly", most_processes=1)
    executor._is_open = True
    executor.start([driver.order("map-0", agent(Placed()))])
    epochs: list[int] = []
    for _ in range(2):
        await asyncio.sleep(0)  # what was started is sent
        await executor._resubmit()
        epochs += [packed.order.epoch for packed in executor._in_flight.values()]
    assert epochs == [3 * REDISPATCH_STEP, 6 * REDISPATCH_STEP]
    if is_recorded:
        with pytest.raises(EnsembleError, match=rf"ensemble_ray\.resume\('{driver.run_id}', ensemble\)"):
            await executor._resubmit()
    else:
        await executor._resubmit()
    await executor.close()
