"""TaskHost: what an actor that runs tasks is made of; a plain class. It holds runners of runs, nothing else.

Work comes by `accept`, results leave through `Courier` in batches: what finishes while a report is on its way goes with
the next one, so no result waits for a slow neighbour and many short tasks share a message.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from actors.wire import UNKNOWN_KIND, WireOrder, WireReport, load_agent, pack_result, unpack_order
from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.execute.kinds import Shelf, overlaid
from ensemble_ray.execute.local_executor import LocalExecutor
from ensemble_ray.execute.orders import TaskOrder, TaskResult
from ensemble_ray.execute.reports import Report
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import RunnerPorts
from ensemble_ray.process.clock import SystemClock
from ensemble_ray.runs.ownership import GRACE_S

if TYPE_CHECKING:
    from ensemble_ray.context import Services
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.execute.callables import Callables
    from ensemble_ray.execute.delegations import Colleagues
    from ensemble_ray.execute.orders import RunFrame
    from ensemble_ray.execute.spending import Spending
    from ensemble_ray.ports import EventSink, Journal, ToolMetrics

__all__ = ["Courier", "TaskHost"]

_log = bounded_logger(__name__)
_NO_KINDS: Mapping[str, bytes] = {}


class KindUnknownError(Exception):
    """A task's agent is of a kind that is not known here."""


class Courier(Protocol):
    """Brings reports to the scheduler."""

    async def report(self, run_id: str, reports: Sequence[WireReport]) -> None:
        """Return when the scheduler has them."""
        ...


@dataclass(slots=True, kw_only=True)
class _HostedRun:
    houses: LocalExecutor
    journal: Journal
    flush: Callable[[], Awaitable[None]]
    #: templates of the agents that came with their tasks, by kind
    kinds: Shelf[Agent]
    #: instance -> the kind of its agent
    kind_of: dict[str, str] = field(default_factory=dict[str, str])
    outbox: list[WireReport] = field(default_factory=list["WireReport"])
    sender: asyncio.Task[None] | None = None

    def load(self, run_id: str, order: WireOrder, kinds: Mapping[str, bytes]) -> TaskOrder:
        """The order with its user objects.

        Raises:
            KindUnknownError: the kind of its agent was not sent, or is kept no longer.
        """
        kind = order.agent_key
        if kind is None or order.overlay is None:
            return unpack_order(run_id, order)
        if kind in kinds and kind not in self.kinds:
            self.kinds.put(kind, load_agent(kinds[kind]))
        template = self.kinds.get(kind)
        if template is None:
            raise KindUnknownError(kind)
        overlay = cast("Mapping[str, object]", pickle.loads(order.overlay))  # noqa: S301  bytes of our own driver
        loaded = unpack_order(run_id, order, overlaid(template, overlay))
        if order.instance not in self.kind_of:
            self.kinds.use(kind)
            self.kind_of[order.instance] = kind
        return loaded

    def done(self, instance: str) -> None:
        """A task is over; its agent's kind is needed for it no longer."""
        kind = self.kind_of.pop(instance, None)
        if kind is not None:
            self.kinds.done(kind)


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
        spending: Spending | None = None,
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
            spending: What model calls of this process may spend; None: as much as they like.
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
            spending=spending,
        )
        run_id = frame.run_id

        def deliver(results: Sequence[TaskResult]) -> None:
            self._deliver(run_id, results)

        houses = LocalExecutor(TaskRunner(frame, ports, agents, colleagues), agents, deliver, grace_s=GRACE_S)
        kinds: Shelf[Agent] = Shelf(on_drop=lambda kind, _: houses.forget(kind))
        self._runs[run_id] = _HostedRun(houses=houses, journal=journal, flush=flush, kinds=kinds)

    def accept(self, run_id: str, orders: Sequence[WireOrder], kinds: Mapping[str, bytes] = _NO_KINDS) -> None:
        """Run these tasks; never waits. A task that cannot be loaded here is reported as failed.

        Args:
            run_id: Whose tasks.
            orders: The tasks.
            kinds: Templates of agents that were not sent before.
        """
        hosted, loaded = self._runs[run_id], list[TaskOrder]()
        for order in orders:
            try:
                loaded.append(hosted.load(run_id, order, kinds))
            except KindUnknownError:
                self._post(run_id, hosted, [_not_begun(order)])
            except Exception as error:  # noqa: BLE001  whatever loading raised, the task must still be reported
                self._deliver(run_id, [_not_loaded(order, error)])
        hosted.kinds.trim()
        hosted.houses.start(loaded)

    async def perform(self, run_id: str, order: WireOrder, kinds: Mapping[str, bytes] = _NO_KINDS) -> WireReport:
        """Run one task and give its report instead of sending it.

        Who asks for what is at work here already, since the one who asked first was replaced, gets the report of that.
        """
        hosted = self._runs[run_id]
        try:
            loaded = hosted.load(run_id, order, kinds)
        except KindUnknownError:
            return _not_begun(order)
        except Exception as error:  # noqa: BLE001  whatever loading raised, the task must still be reported
            result = _not_loaded(order, error)
        else:
            try:
                result = await hosted.houses.perform(loaded)
            finally:
                hosted.done(order.instance)
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
        for result in results:
            hosted.done(result.instance)
        self._post(run_id, hosted, [pack_result(result) for result in results])

    def _post(self, run_id: str, hosted: _HostedRun, reports: Sequence[WireReport]) -> None:
        hosted.outbox.extend(reports)
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


def _not_begun(order: WireOrder) -> WireReport:
    return Report(
        key=order.key, status=UNKNOWN_KIND, at=SystemClock().now(), epoch=order.epoch, instance=order.instance
    )


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
