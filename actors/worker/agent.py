"""AgentActor: a disposable house for agents. Its own tools, its own model clients, many tasks at once.

It is bound to agents of runs and can be bound anew; a process that is left with a thread nobody waits for says so when
it is released, and is replaced instead of used again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from actors.link.accounts import shared_spending
from actors.link.endpoints import EndpointLine
from actors.link.handles import DriverLine, HubSink, LimiterLine, RemoteCallables, ReportedToolMetrics, SchedulerCourier
from actors.link.quiet_gc import freeze_modules
from actors.link.wire import RunPlace, WireOrder, WireReport, load_agent
from actors.shared.journal import open_journal
from actors.worker.log_forwarding import LineForwarder
from actors.worker.peers import RemoteColleagues
from actors.worker.task_host import TaskHost
from ensemble_ray.context import Services
from ensemble_ray.definition.durability import Durability
from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.execute.callables import Callables
from ensemble_ray.execute.orders import RunFrame
from ensemble_ray.limits.endpoints import EndpointNews, process_endpoints
from ensemble_ray.limits.lease import LeasingLimiter
from ensemble_ray.threads import threads
from ensemble_ray.tools.tool import NoOpToolMetrics

__all__ = ["AgentActor", "SilentSink", "refuse"]


_NO_KINDS: Mapping[str, bytes] = {}


class SilentSink:
    """An `EventSink` for runs that nobody listens to."""

    def wants(self, kind: object) -> bool:  # noqa: ARG002  nobody wants anything
        """Nothing."""
        return False

    def emit(self, event: object) -> None:
        """Never called, since nothing is wanted."""


class AgentActor:
    """Hosts agents."""

    def __init__(self, house: str) -> None:
        from actors.spawn import cpu_call, existing
        from actors.worker.cpu import RayCpuPool

        freeze_modules()
        self._house = house
        self._scheduler = existing("scheduler")
        self._host = TaskHost(SchedulerCourier(self._scheduler, house))
        process_endpoints().share = EndpointLine(self._scheduler, house).tell
        self._forwarder = LineForwarder(self._scheduler)
        self._limiting = LimiterLine()
        self._limiter = LeasingLimiter(self._limiting, holder=house)
        self._cpu = RayCpuPool(cpu_call())
        self._bound: dict[str, asyncio.Future[None]] = {}
        #: ways to the callables of runs
        self._lines: dict[str, RemoteCallables] = {}

    async def bind(
        self,
        frame: RunFrame,
        agents: Mapping[str, bytes],
        *,
        store: RunPlace | None,
        hub: Any = None,
        callables: Any = None,
    ) -> None:
        """Be ready for tasks of these agents.

        Raises:
            ValidationError: an agent cannot be loaded in this process.
        """
        bound = self._binding(frame.run_id)
        try:
            await self._bind(frame, agents, store=store, hub=hub, callables=callables)
        except Exception as error:
            refuse(bound, error)
            raise
        if bound.done():  # the run ended while its journal was opened
            await self._host.release(frame.run_id)
        else:
            bound.set_result(None)

    async def _bind(
        self, frame: RunFrame, agents: Mapping[str, bytes], *, store: RunPlace | None, hub: Any, callables: Any
    ) -> None:
        if frame.forwards_logs:
            self._forwarder.open(frame.run_id)
        loaded = {key: _loaded(key, body) for key, body in agents.items()}
        journal = await open_journal(
            store, frame.run_id, writer=self._house, is_buffered=frame.durability == Durability.RUN
        )
        line = None if hub is None else DriverLine(hub, frame.run_id)
        sink = None if hub is None else HubSink(hub, frame.run_id, frame.interest)

        async def flush() -> None:
            if sink is not None and line is not None:
                await sink.flushed()
                await line.flushed()
            if frame.forwards_logs:
                await self._forwarder.flushed()

        self._host.host(
            frame,
            loaded,
            journal=journal,
            sink=sink or SilentSink(),
            colleagues=RemoteColleagues(self._scheduler, frame, flush=flush),
            flush=flush,
            callables=self._callables_of(frame.run_id, callables),
            services=Services(limiter=self._limiter, cpu=self._cpu, driver=line),
            tool_metrics=ReportedToolMetrics(line) if line and frame.has_tool_metrics else NoOpToolMetrics(),
            spending=shared_spending(frame, self._limiting, self._house),
        )

    def _binding(self, run_id: str) -> asyncio.Future[None]:
        """Done when this process is ready for that run; messages may come before `bind` does."""
        if run_id not in self._bound:
            self._bound[run_id] = asyncio.get_running_loop().create_future()
        return self._bound[run_id]

    async def accept(self, run_id: str, orders: Sequence[WireOrder], kinds: Mapping[str, bytes] = _NO_KINDS) -> None:
        """Run these tasks; returns when they are under way, not when they are done.

        Args:
            run_id: Whose tasks.
            orders: The tasks.
            kinds: Templates of agents that come with their tasks and were not sent before.

        Raises:
            ValidationError: an agent cannot be loaded in this process.
        """
        await asyncio.shield(self._binding(run_id))
        self._host.accept(run_id, orders, kinds)

    async def perform(self, run_id: str, order: WireOrder, kinds: Mapping[str, bytes] = _NO_KINDS) -> WireReport:
        """Run one task and give its report."""
        await asyncio.shield(self._binding(run_id))
        return await self._host.perform(run_id, order, kinds)

    async def holds(self, run_id: str, instance: str) -> bool:
        """Whether that is at work here, also where what asked for it still waits for `bind`."""
        await asyncio.wait([self._binding(run_id)])
        return self._host.holds(run_id, instance)

    async def stop(self, run_id: str, instances: Sequence[str]) -> None:
        """Stop running tasks, also those that still wait for `bind`: whoever came first goes on first."""
        await asyncio.wait([self._binding(run_id)])
        self._host.stop(run_id, instances)

    async def release(self, run_id: str) -> bool:
        """Forget a run; whether this process may be bound to another."""
        self._lines.pop(run_id, None)
        self._forwarder.close(run_id)
        bound = self._bound.pop(run_id, None)
        if bound is not None:
            bound.cancel()
        is_idle = await self._host.release(run_id)
        return is_idle and threads.abandoned == 0

    def _callables_of(self, run_id: str, host: Any) -> Callables:
        """The run's callables as tasks in this process ask them."""
        line = self._lines[run_id] = RemoteCallables(host, run_id)
        return line

    async def move_callables(self, run_id: str, host: Any) -> None:
        """The run's callables are hosted by another process now."""
        await asyncio.wait([self._binding(run_id)])
        line = self._lines.get(run_id)
        if line is not None:
            line.move(host)

    async def hear(self, news: EndpointNews) -> None:
        """What another process tells of an endpoint (S-DUR-64, S-DUR-65)."""
        process_endpoints().hear(news)

    async def watch(self) -> None:
        """Never returns; its failure tells the scheduler that this process is gone."""
        await asyncio.Event().wait()


def refuse(awaited: asyncio.Future[Any], error: BaseException) -> None:
    """Let everybody who waits for it hear of that error, now and later; that nobody does is no defect."""
    if not awaited.done():  # else nobody waits for it any more
        awaited.set_exception(error)
        awaited.exception()


def _loaded(key: str, body: bytes) -> Any:
    try:
        return load_agent(body)
    except Exception as error:
        raise ValidationError(
            f"Agent '{key}' cannot be loaded in a worker process: {message_of(error)}. "
            "Install the module it comes from on every node, or use runtime='inline'"
        ) from error
