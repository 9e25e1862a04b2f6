"""What a run on the cluster asks of its driver: each service by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import cloudpickle
import pytest
from msgspec import structs

from ensemble_ray import (
    EnsembleMemory,
    IllegalStateError,
    InMemoryReflectionStore,
    MemoryEntry,
    MemoryScope,
    MemoryStore,
    NoOpToolMetrics,
    ReflectionConfig,
    ReflectionInput,
    Task,
    TaskOutput,
    TaskReflection,
)
from ensemble_ray.actors.driver.cluster import ClusterHeartbeat
from ensemble_ray.actors.driver.driver_connection import DriverConnection, driver_services
from ensemble_ray.actors.link.events import EventHub
from ensemble_ray.actors.link.limiter import MEMORY_SERVICE, RemoteMemoryResets, remote_memory, remote_reflections
from ensemble_ray.actors.worker.task_host import RemoteDriverServices, ReportedToolMetrics
from ensemble_ray.execute.memory import LocalRunReflections
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.memory.tools import LocalRunMemory
from ensemble_ray.plan.plan import LoopUnit
from ensemble_ray.process.concurrency import threads
from ensemble_ray.runs.ports import RunRequest
from ensemble_ray.testing import RecordingSink
from ensemble_ray.values.memory import MemoryQuery
from tests.ensemble_ray.memory.test_run_memory import Refusing, note

REQUEST = RunRequest(
    run_id="run",
    context=RunContext(run_id="run", workflow="sequential", total_tasks=1),
    events=RecordingSink(),
    tool_metrics=NoOpToolMetrics(),
)


class Driver:
    """The way to a driver's services, without a hub between."""

    def __init__(self, request: RunRequest) -> None:
        self._services = driver_services(request)

    async def ask(self, name: str, payload: Mapping[str, object]) -> object:
        """Ask; the answer is what is left of it after its way."""
        return cloudpickle.loads(cloudpickle.dumps(await self._services[name](payload)))

    def notify(self, name: str, payload: Mapping[str, object]) -> None:
        """Nobody does."""
        raise AssertionError(name)


async def test_tasks_reach_the_memory_of_the_driver() -> None:
    """S-MEM-69, S-MEM-114: what is asked and answered travels; the objects of the user stay."""
    store = MemoryStore.in_memory()
    store.store("a", MemoryEntry(content="before"))
    local = LocalRunMemory(EnsembleMemory(short_term=True), store)
    memory = remote_memory(Driver(structs.replace(REQUEST, memory=local)))
    assert (await memory.remember(note("one", uses_ensemble=True, scopes=(MemoryScope.of("a"),)))).taken_by == (
        "short_term",
    )
    found = await memory.recall(MemoryQuery(scopes=("a",), text="x", uses_ensemble=True))
    assert found.scopes == (("a", ("before", "one")),)
    assert found.short_term == (("Writer", "Write", "one"),)
    assert [entry.content for entry in store.retrieve("a", "", 9)] == ["before", "one"]


async def test_loops_reach_the_memory_of_the_driver() -> None:
    """S-LOOP-91, S-LOOP-92, S-LOOP-93, S-LOOP-187: clear, cut, and the refusal of a store that cannot."""
    store = MemoryStore.in_memory()
    for content in "abc":
        store.store("a", MemoryEntry(content=content))
    memory = RemoteMemoryResets(Driver(structs.replace(REQUEST, memory=LocalRunMemory(None, store))))
    window = LoopUnit(
        key="loop:l",
        name="l",
        body=("t",),
        body_names=("t",),
        max_iterations=2,
        memory_mode="window",
        memory_window_size=2,
        memory_scopes=("a",),
    )
    assert await memory.reset(window) is None
    assert [entry.content for entry in store.retrieve("a", "", 9)] == ["b", "c"]
    fresh = replace(window, memory_mode="fresh_per_iteration", memory_window_size=0)
    assert await memory.reset(fresh) is None
    assert list(store.retrieve("a", "", 9)) == []
    refusing = LocalRunMemory(None, Refusing())  # type: ignore[arg-type]  by its shape
    failed = await RemoteMemoryResets(Driver(structs.replace(REQUEST, memory=refusing))).reset(fresh)
    assert failed is not None
    assert (failed.error_type, type(failed.error)) == ("NotImplementedError", bytes)
    assert failed.message.startswith("Loop 'l' has memory_mode=fresh_per_iteration")
    nobody = await RemoteMemoryResets(Driver(REQUEST)).reset(fresh)
    assert nobody is not None
    assert nobody.message == "Run run has no memory"


async def test_a_run_without_memory_has_no_such_service() -> None:
    """S-MEM-114: a defect is told, and not taken for an empty memory."""
    with pytest.raises(IllegalStateError, match="Run run has no memory"):
        await remote_memory(Driver(REQUEST)).recall(MemoryQuery(text="x"))
    assert MEMORY_SERVICE in driver_services(REQUEST)


async def test_tasks_reach_the_reflections_of_the_driver() -> None:
    """S-REFL-31: the store and the strategy are the user's own objects; what goes wrong there is raised to whoever asked."""
    store = InMemoryReflectionStore()
    store.store("k", TaskReflection(refined_description="Old", refined_expected_output="x"))
    reflections = remote_reflections(Driver(structs.replace(REQUEST, reflections=LocalRunReflections(store))))
    found = await reflections.recall("k")
    assert found is not None
    made = found.replace(refined_description="New")
    await reflections.store("k", made)
    assert store.retrieve("k") == made
    assert (await reflections.find_prior("k"), await reflections.recall("k")) == (made, found)
    task = Task(description="d", expected_output="e", reflection_config=ReflectionConfig(strategy=lambda _: made))
    output = TaskOutput(
        raw="r", task_description="d", agent_role="R", completed_at=made.reflected_at, duration=timedelta()
    )
    asked = ReflectionInput(task=task, task_output=output)
    assert await reflections.ask_strategy(asked) == made
    plain = asked.replace(task=Task(description="d", expected_output="e", reflection_config=True))
    with pytest.raises(IllegalStateError, match="the strategy is not in this process"):
        await reflections.ask_strategy(plain)


async def test_a_run_without_reflections_says_so() -> None:
    """S-REFL-31."""
    with pytest.raises(IllegalStateError, match=r"^Run run has no store of reflections$"):
        await remote_reflections(Driver(REQUEST)).recall("k")


class Notified:
    """A hub that takes notifications when it may."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.came, self.may = asyncio.Event(), asyncio.Event()
        self.notify = self

    async def remote(self, run_id: str, requests: Sequence[tuple[str, Mapping[str, object]]]) -> None:
        """Take a batch."""
        assert run_id == "run"
        self.batches.append([str(payload["arguments"][0]) for _, payload in requests])  # type: ignore[index]  a tuple
        self.came.set()
        await self.may.wait()


async def test_counts_of_tools_leave_in_their_order() -> None:
    """S-MET-35: one batch is on its way at a time; what comes meanwhile goes with the next."""
    hub = Notified()
    services = RemoteDriverServices(hub, "run")
    metrics = ReportedToolMetrics(services)
    metrics.increment_counter("one", "probe")
    await hub.came.wait()
    metrics.increment_counter("two", "probe")
    metrics.increment_counter("three", "probe")
    flushed = asyncio.ensure_future(services.flush())
    for _ in range(10):
        await asyncio.sleep(0)
    assert (hub.batches, flushed.done()) == ([["one"]], False)
    hub.may.set()
    await flushed
    assert hub.batches == [["one"], ["two", "three"]]


class Seen(NoOpToolMetrics):
    """Metrics that keep the names of counts."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def increment_counter(self, metric: str, tool_name: str, tags: Mapping[str, str] | None = None) -> None:
        """Keep it."""
        self.names.append(metric)


class Remote:
    """A hub in this process, called as an actor."""

    def __init__(self, hub: EventHub) -> None:
        self._hub = hub

    def __getattr__(self, name: str) -> object:
        method = getattr(self._hub, name)
        return type("Method", (), {"remote": staticmethod(method)})


async def test_counts_of_tools_reach_the_users_object_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MET-35: a slow one is waited for, though the next ones came on the same page."""
    metrics, hub = Seen(), Remote(EventHub())
    began, came, may = list[object](), asyncio.Event(), asyncio.Event()
    run = threads.run

    async def held(function: Callable[..., None], *arguments: object) -> None:
        began.append(arguments[2])
        came.set()
        await may.wait()
        await run(function, *arguments)

    monkeypatch.setattr(threads, "run", held)
    services = RemoteDriverServices(hub, "run")
    for each in ("one", "two", "three"):
        ReportedToolMetrics(services).increment_counter(each, "probe")
    await services.flush()
    connection = DriverConnection(structs.replace(REQUEST, tool_metrics=metrics), ClusterHeartbeat("run", ""), None)
    connection.begin(hub)
    await came.wait()
    assert began == ["one"]
    may.set()
    await connection.detach()
    assert metrics.names == ["one", "two", "three"]
