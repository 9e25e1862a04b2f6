"""A disposable process for agents of one or several runs, with its own tools and model clients."""

from __future__ import annotations

import asyncio
import functools
import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import ray
import ray.exceptions
from ray.util import metrics

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.events import HubSink
from ensemble_ray.actors.link.journal import answers_at, open_journal
from ensemble_ray.actors.link.limiter import RemoteLimiter, remote_memory, remote_reflections, shared_spending
from ensemble_ray.actors.link.packing import pack, unpack
from ensemble_ray.actors.link.reach import refuse
from ensemble_ray.actors.link.wire import Binding, Dispatch, RecordLocation, WireOrder, WireResult
from ensemble_ray.actors.shared.journal import describe_this_process
from ensemble_ray.actors.worker.log_forwarding import LineForwarder
from ensemble_ray.actors.worker.peers import RemotePeers
from ensemble_ray.actors.worker.task_host import (
    RemoteCallables,
    RemoteDriverServices,
    ReportedToolMetrics,
    TaskHost,
    send_reports,
)
from ensemble_ray.definition.fields import Durability
from ensemble_ray.errors import ToolExecutionError
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.execute.scope import Callables
from ensemble_ray.llm.limits.endpoints import EndpointUpdate, process_endpoints
from ensemble_ray.llm.limits.limiter import LeasingLimiter
from ensemble_ray.ports import Limiter, Services
from ensemble_ray.process.concurrency import threads
from ensemble_ray.process.context import freeze_modules
from ensemble_ray.tools import cpu
from ensemble_ray.tools.user_code import NoOpToolMetrics
from ensemble_ray.values.metrics import MOST_TASKS, ActorDescription, TaskDescription, dump_actor
from ensemble_ray.values.value import RateLimit


class AgentActor:
    def __init__(self, name: str, scheduler: str = spawn.SCHEDULER) -> None:
        freeze_modules()
        self._name = name
        self._scheduler = spawn.existing(scheduler)
        self._host = TaskHost(partial(send_reports, self._scheduler, name))

        def share(update: EndpointUpdate) -> None:
            self._scheduler.update_endpoint.remote(name, update)

        process_endpoints().share = share
        self._forwarder = LineForwarder(self._scheduler)
        self._remote_limiter = RemoteLimiter()
        self._limiter = MeasuredLimiter(LeasingLimiter(self._remote_limiter, holder=name))
        self._cpu = RayCpuPool(spawn.cpu_call())
        self._bound: dict[str, asyncio.Future[None]] = {}
        self._remote_callables: dict[str, RemoteCallables] = {}

    async def bind(self, body: bytes, *, hub: Any = None, callables: Any = None) -> None:
        """Prepare for tasks of a run. `hub` has its events, and `callables` is the process of its callables."""
        context, templates, location = unpack(body, Binding)
        bound = self._binding(context.run_id)
        try:
            await self._bind(context, templates, location=location, hub=hub, callables=callables)
        except Exception as error:
            refuse(bound, error)
            raise
        if bound.done():  # the run ended while its journal was opened
            await self._host.release(context.run_id)
        else:
            bound.set_result(None)

    async def _bind(
        self,
        context: RunContext,
        templates: Mapping[str, bytes],
        *,
        location: RecordLocation | None,
        hub: Any,
        callables: Any,
    ) -> None:
        if context.forwards_logs:
            self._forwarder.open(context.run_id)
        journal = await open_journal(
            location, context.run_id, writer=self._name, is_buffered=context.durability == Durability.RUN
        )
        driver = None if hub is None else RemoteDriverServices(hub, context.run_id)
        sink = None if hub is None else HubSink(hub, context.run_id, context.interest)

        async def flush() -> None:
            if sink is not None and driver is not None:
                await sink.flush()
                await driver.flush()
            if context.forwards_logs:
                await self._forwarder.flush()

        self._host.host(
            context,
            templates,
            journal=journal,
            sink=sink or SilentSink(),
            peers=RemotePeers(self._scheduler, context, flush=flush),
            flush=flush,
            callables=self._callables_of(context.run_id, callables),
            services=Services(limiter=self._limiter, cpu=self._cpu, driver=driver),
            tool_metrics=ReportedToolMetrics(driver) if driver and context.has_tool_metrics else NoOpToolMetrics(),
            spending=shared_spending(context, self._remote_limiter, self._name),
            memory=remote_memory(driver) if driver and context.memory else None,
            reflections=remote_reflections(driver) if driver and context.has_reflections else None,
            answers=answers_at(location),
        )

    def _binding(self, run_id: str) -> asyncio.Future[None]:
        """Return a future that completes when this process is bound. Messages may arrive before `bind` does."""
        if run_id not in self._bound:
            self._bound[run_id] = asyncio.get_running_loop().create_future()
        return self._bound[run_id]

    async def accept(self, body: bytes) -> None:
        run_id, orders, templates = unpack(body, Dispatch)
        await asyncio.shield(self._binding(run_id))
        self._host.accept(run_id, orders, templates)

    async def perform(self, body: bytes) -> bytes:
        """Run one task and return its packed report."""
        run_id, (order,), templates = unpack(body, Dispatch)
        await asyncio.shield(self._binding(run_id))
        return pack(await self._perform(run_id, order, templates))

    async def _perform(self, run_id: str, order: WireOrder, templates: Mapping[str, bytes]) -> WireResult:
        return await self._host.perform(run_id, order, templates)

    async def holds(self, run_id: str, instance: str) -> bool:
        """Whether a task is running here, or its call waits for `bind`."""
        await asyncio.wait([self._binding(run_id)])
        return self._host.holds(run_id, instance)

    async def stop(self, run_id: str, instances: Sequence[str]) -> None:
        """Stop tasks. Calls resume in order of arrival, so tasks that wait for `bind` are stopped, too."""
        await asyncio.wait([self._binding(run_id)])
        self._host.stop(run_id, instances)

    async def revoke(self, run_id: str, number: int) -> Sequence[str]:
        """Start no more tasks of continuations up to this number. Return the running tasks of the run."""
        return await self._host.revoke(run_id, number)

    async def release(self, run_id: str) -> bool:
        """Return whether this process may serve another run."""
        self._remote_callables.pop(run_id, None)
        self._forwarder.close(run_id)
        bound = self._bound.pop(run_id, None)
        if bound is not None:
            bound.cancel()
        is_idle = await self._host.release(run_id)
        return is_idle and threads.abandoned == 0

    def _callables_of(self, run_id: str, host: Any) -> Callables:
        remote = self._remote_callables[run_id] = RemoteCallables(host, run_id)
        return remote

    async def move_callables(self, run_id: str, host: Any) -> None:
        await asyncio.wait([self._binding(run_id)])
        remote = self._remote_callables.get(run_id)
        if remote is not None:
            remote.move(host)

    async def on_endpoint_update(self, update: EndpointUpdate) -> None:
        """Apply what another process learned about an endpoint (S-DUR-64, S-DUR-65)."""
        process_endpoints().on_update(update)

    async def answer(self) -> None:
        """Return, unless this process's loop is blocked."""

    async def describe(self) -> bytes:
        """Return the running tasks and the state of endpoints here, packed by `dump_actor` (S-CLU-101)."""
        tasks = list(self._host.activities())
        shown = heapq.nsmallest(MOST_TASKS, tasks, key=lambda each: each[0] or math.inf)
        process = describe_this_process(
            "agent",
            self._name,
            tasks=tuple(TaskDescription(run_id=run, instance=name, began_at=at) for at, run, name in shown),
            more_tasks=len(tasks) - len(shown),
            queue=sum(at is None for at, _, _ in tasks),
            endpoints=tuple(process_endpoints().describe()),
        )
        return dump_actor(ActorDescription(process=process))

    async def watch(self) -> None:
        """Wait forever. The call fails when this process dies."""
        await asyncio.Event().wait()


class ManagerActor(AgentActor):
    """Hosts the manager of a run. Lists of processes show it under this name."""


class SilentSink:
    def wants(self, event_type: object) -> bool:  # noqa: ARG002  no listener
        return False

    def emit(self, event: object) -> None:
        pass


class RayCpuPool:
    """Runs functions as Ray tasks with one CPU each. Implements `CpuPool`."""

    def __init__(self, remote: Any) -> None:
        self._remote = remote

    async def run(
        self,
        function: bytes,
        arguments: Mapping[str, object],
        *,
        timeout_s: float | None,
        may_repeat: bool = True,  # noqa: ARG002  a lost worker's call is never repeated here
    ) -> object:
        """Call a packed function with keyword arguments. Its exception is raised here."""
        reference = self._remote.remote(function, cpu.pack(dict(arguments)))
        try:
            async with asyncio.timeout(timeout_s):
                reply: bytes = await reference
        except ray.exceptions.WorkerCrashedError as error:
            raise ToolExecutionError("the worker that ran it ended unexpectedly") from error
        except (TimeoutError, asyncio.CancelledError):
            ray.cancel(reference, force=True)
            raise
        return cpu.unpack_reply(reply)


_BOUNDARIES_S = [0.001, 0.01, 0.1, 1.0, 10.0, 60.0]


@functools.cache
def _histogram() -> Any:
    # No label: teams choose any number of names for their buckets.
    return cast("Any", metrics).Histogram(
        "ensemble_ray_limiter_wait_seconds",
        description="How long model calls waited for a permit of the cluster's rate limiter",
        boundaries=_BOUNDARIES_S,
    )


class MeasuredLimiter:
    """Reports waits, including waits that ended without a permit."""

    def __init__(self, limiter: Limiter, report: Callable[[float], None] | None = None) -> None:
        self._limiter = limiter
        self._report = report

    async def acquire(self, bucket: str, limit: RateLimit, *, timeout_s: float) -> None:
        began = time.monotonic()
        try:
            await self._limiter.acquire(bucket, limit, timeout_s=timeout_s)
        finally:
            (self._report or _histogram().observe)(time.monotonic() - began)
