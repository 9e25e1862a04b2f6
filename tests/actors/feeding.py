"""A driver of dynamic runs for tests: it makes orders, and keeps each result, once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from ensemble_ray import Agent, ChatMessage, ChatResponse, NoOpToolMetrics, OnUnknown, RayRuntime, Task
from ensemble_ray.actors import spawn
from ensemble_ray.actors.driver.remote_executor import RemoteExecutor
from ensemble_ray.actors.scheduler.scheduler import SchedulerActor
from ensemble_ray.execute.local_executor import AgentTemplates
from ensemble_ray.execute.orders import RunContext, TaskOrder, TaskResult
from ensemble_ray.ports import RunEventSink
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.runs.ports import RunRequest
from ensemble_ray.testing import RecordingSink
from ensemble_ray.values.ids import instance_of, new_object_id
from tests.scenarios.teams import PATIENCE_S, Marks, until


class Placed:
    """A model that tells which process and which object answers."""

    async def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        return ChatResponse(text=f"{os.getpid()}/{id(self)}")


class Waiting:
    """A model that tells its process, and answers when all is over."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    async def chat(self, messages: Sequence[ChatMessage], tools: object = ()) -> ChatResponse:
        self._marks.add(os.getpid())
        await asyncio.to_thread(self._marks.wait, "over")
        return ChatResponse(text="done")


class Driver:
    """The caller of a dynamic run."""

    def __init__(
        self,
        runtime: RayRuntime,
        *,
        run_id: str = "",
        store: StoreAddress | None = None,
        events: RunEventSink | None = None,
        interest: frozenset[str] = frozenset(),
    ) -> None:
        self.run_id = run_id or f"dynamic-{new_object_id()[:8]}"
        self.results: dict[str, TaskResult] = {}
        self.kinds = AgentTemplates()
        self._runtime = runtime
        self._changed = asyncio.Event()
        context = RunContext(
            run_id=self.run_id,
            workflow="map",
            total_tasks=0,
            interest=interest,
            durability="off" if store is None else "effects",
        )
        self.request = RunRequest(
            run_id=self.run_id,
            context=context,
            events=events or RecordingSink(()),
            tool_metrics=NoOpToolMetrics(),
            on_unknown=OnUnknown.TELL_MODEL,
            store=store,
        )

    async def __aenter__(self) -> Self:
        self.executor: RemoteExecutor = await self._runtime.open_session(
            self.request, journal=MemoryJournal(self.run_id), deliver=self._deliver
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.executor.close()

    def _deliver(self, results: Sequence[TaskResult]) -> None:
        for result in results:
            assert result.key not in self.results, "delivered twice"
            self.results[result.key] = result
        self._changed.set()

    def order(self, key: str, by: Agent | None = None, *, occurrence: int = 0, **fields: Any) -> TaskOrder:
        """An order of a task that is named by its key."""
        task = Task(description=f"do {key}", expected_output="a text", agent=by, **fields)
        return TaskOrder(
            run_id=self.run_id,
            key=key,
            instance=instance_of(key, occurrence=occurrence),
            epoch=0,
            index=1,
            task=task,
            agent_key=None if by is None else self.kinds.name_of(by),
            agent_role="(deterministic)" if by is None else by.role,
            agent=by,
            input_guardrails=len(task.input_guardrails),
            output_guardrails=len(task.output_guardrails),
        )

    async def until(self, count: int) -> list[TaskResult]:
        """All results, as soon as there are so many."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.results) < count:
                self._changed.clear()
                await self._changed.wait()
        return list(self.results.values())

    async def in_run(self, look: Any) -> Any:
        """What a function finds in the scheduler's session of this run, whatever else the cluster does."""
        run_id = self.run_id
        return await in_scheduler(lambda scheduler: look(scheduler._dynamic[run_id]._session))

    async def processes(self) -> list[Any]:
        """Handles of the run's processes."""
        found: list[Any] = await self.in_run(
            lambda session: [each.handle for group in session._groups._groups for each in session._groups.alive(group)]
        )
        return found

    def texts(self) -> dict[str, str]:
        """What each task gave; a task that gave nothing fails the test."""
        found: dict[str, str] = {}
        for key, result in self.results.items():
            assert result.output is not None, result.error
            found[key] = result.output.raw
        return found


async def in_scheduler(look: Any) -> Any:
    """What a function finds in the scheduler's process."""
    return await spawn.scheduler(SchedulerActor).__ray_call__.remote(look)


async def at_work(marks: Marks, count: int) -> list[int]:
    """The processes of so many calls."""
    lines = await asyncio.to_thread(until, lambda: marks.lines if len(marks.lines) >= count else [], "the calls")
    return [int(line) for line in lines]
