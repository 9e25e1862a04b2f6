"""TaskHost: what an actor that runs tasks is made of; a plain class. It holds runners of runs, nothing else.

Work comes by `accept`, results leave through `Courier` in batches: what finishes while a report is on its way goes with
the next one, so no result waits for a slow neighbour and many short tasks share a message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from actors.wire import WireOrder, WireReport, pack_result, unpack_order
from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.execute.local_houses import LocalHouses
from ensemble_ray.execute.orders import TaskOrder, TaskResult
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import RunnerPorts
from ensemble_ray.inline import GRACE_S, SystemClock

if TYPE_CHECKING:
    from ensemble_ray.context import Services
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.execute.callables import Callables
    from ensemble_ray.execute.delegations import Colleagues
    from ensemble_ray.execute.orders import RunFrame
    from ensemble_ray.ports import EventSink, Journal, ToolMetrics

__all__ = ["Courier", "TaskHost"]

_log = logging.getLogger(__name__)


class Courier(Protocol):
    """Brings reports to the scheduler."""

    async def report(self, run_id: str, reports: Sequence[WireReport]) -> None:
        """Return when the scheduler has them."""
        ...


@dataclass(slots=True, kw_only=True)
class _HostedRun:
    houses: LocalHouses
    journal: Journal
    flush: Callable[[], Awaitable[None]]
    outbox: list[WireReport] = field(default_factory=list["WireReport"])
    sender: asyncio.Task[None] | None = None


class TaskHost:
    """Runs the tasks of any number of runs in this process."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._runs: dict[str, _HostedRun] = {}

    def host(
        self,
        frame: RunFrame,
        agents: Mapping[str, Agent],
        *,
        journal: Journal,
        sink: EventSink,
        callables: Callables,
        services: Services,
        tool_metrics: ToolMetrics,
        colleagues: Colleagues | None = None,
        flush: Callable[[], Awaitable[None]],
    ) -> None:
        """Be ready for tasks of that run.

        Args:
            frame: What all its tasks share.
            agents: Who lives here.
            journal: Where facts go.
            sink: Where events go.
            callables: The run's own.
            services: What tools and models of this process use.
            tool_metrics: Counts calls.
            colleagues: Do what tasks of this process delegate; None: the agents that live here.
            flush: Returns when all that was published and told has arrived.
        """
        ports = RunnerPorts(
            clock=SystemClock(),
            journal=journal,
            events=sink,
            callables=callables,
            services=services,
            tool_metrics=tool_metrics,
        )
        run_id = frame.run_id

        def deliver(results: Sequence[TaskResult]) -> None:
            self._deliver(run_id, results)

        houses = LocalHouses(TaskRunner(frame, ports, agents, colleagues), agents, deliver, grace_s=GRACE_S)
        self._runs[run_id] = _HostedRun(houses=houses, journal=journal, flush=flush)

    def accept(self, run_id: str, orders: Sequence[WireOrder]) -> None:
        """Run these tasks; never waits. A task that cannot be loaded here is reported as failed."""
        loaded: list[TaskOrder] = []
        for order in orders:
            try:
                loaded.append(unpack_order(run_id, order))
            except Exception as error:  # noqa: BLE001  whatever loading raised, the task must still be reported
                self._deliver(run_id, [_not_loaded(order, error)])
        self._runs[run_id].houses.start(loaded)

    async def perform(self, run_id: str, order: WireOrder) -> WireReport:
        """Run one task and give its report instead of sending it.

        Who asks for what is at work here already, since the one who asked first was replaced, gets the report of that.
        """
        hosted = self._runs[run_id]
        try:
            loaded = unpack_order(run_id, order)
        except Exception as error:  # noqa: BLE001  whatever loading raised, the task must still be reported
            result = _not_loaded(order, error)
        else:
            result = await hosted.houses.perform(loaded)
        await hosted.flush()
        return pack_result(result)

    def holds(self, run_id: str, instance: str) -> bool:
        """Whether that is at work here."""
        return run_id in self._runs and instance in self._runs[run_id].houses.running

    def stop(self, run_id: str, instances: Sequence[str]) -> None:
        """Stop running tasks of a run."""
        if run_id in self._runs:
            self._runs[run_id].houses.stop(instances)

    async def release(self, run_id: str) -> bool:
        """Forget a run, its journal flushed; whether nothing of it is still at work here.

        What still runs, such as work for an agent whose process died, is stopped: nobody waits for it any more.
        """
        hosted = self._runs.pop(run_id, None)
        if hosted is None:
            return True
        await hosted.houses.end()
        await hosted.journal.close()
        return hosted.houses.left_behind == 0

    def _deliver(self, run_id: str, results: Sequence[TaskResult]) -> None:
        hosted = self._runs.get(run_id)
        if hosted is None:
            return
        hosted.outbox.extend(pack_result(result) for result in results)
        if hosted.sender is None:
            hosted.sender = asyncio.get_running_loop().create_task(self._send(run_id, hosted))

    async def _send(self, run_id: str, hosted: _HostedRun) -> None:
        """Events first, then the reports they belong to: a dependent's start can't overtake them (S-PAR-41)."""
        try:
            while hosted.outbox:
                batch, hosted.outbox = hosted.outbox, []
                await hosted.flush()
                await self._courier.report(run_id, batch)
        finally:
            hosted.sender = None


def _not_loaded(order: WireOrder, error: Exception) -> TaskResult:
    text = (
        f"Task '{order.key}' cannot be loaded in a worker process: {message_of(error)}. "
        "Install the module it comes from on every node, or use runtime='inline'"
    )
    refusal = ValidationError(text)
    refusal.__cause__ = error
    now = SystemClock().now()
    return TaskResult(
        key=order.key,
        instance=order.instance,
        epoch=order.epoch,
        status="failed",
        at=now,
        duration_s=0.0,
        error=refusal,
    )
