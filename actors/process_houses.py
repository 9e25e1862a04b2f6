"""Processes of one run: started, given orders, watched, let go. What happens when one dies stands here.

In: dispatches, each an order with the house that it is for; who lives in which house is the tenant's business. Out:
reports, of the newest dispatch of a task and no other. Must never happen: a task that nobody reports, whatever dies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, Protocol

import cloudpickle
import ray.exceptions

from actors.failures import last_line
from actors.handles import pack_event
from actors.processes import Kind, Process, ProcessPool
from actors.wire import WireOrder, WireReport
from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.epochs import REDISPATCH_STEP
from ensemble_ray.errors import AgentExecutionError, EnsembleError, message_of
from ensemble_ray.events import TaskFailedEvent
from ensemble_ray.execute.orders import RunFrame, TaskResult
from ensemble_ray.execute.reports import Report

__all__ = ["CALLABLES", "MOST_DEATHS", "Dispatch", "ProcessHouses", "Tenant", "report_undone"]

_log = bounded_logger(__name__)
#: Tasks that start together on one process and are sent one call each; more of them share one message, and their
#: reports come back in batches (measured: two messages cost a third more than a call and its reply, one by one; by the
#: hundred a shared message is twenty times cheaper).
MOST_DIRECT = 4
#: A task whose process died so often is not handed out again: it may well be what kills them.
MOST_DEATHS = 3
#: House of handler tasks and guardrails.
CALLABLES = "callables"


@dataclass(frozen=True, slots=True)
class Dispatch:
    """An order on its way to a house."""

    order: WireOrder
    house: str
    #: of its task, for whoever hears that it failed with its process
    description: str


class Tenant(Protocol):
    """The run whose processes these are."""

    @property
    def frame(self) -> RunFrame:
        """What all its tasks share."""
        ...

    @property
    def is_recorded(self) -> bool:
        """Whether a task whose process died can go on elsewhere."""
        ...

    def process_kind(self, house: str) -> Kind:
        """What a house's processes are for."""
        ...

    async def bind(self, house: str, process: Process, callables: Any) -> None:
        """Make a new process of a house ready for the run, which asks that one for its callables."""
        ...

    def kinds_for(self, process: Process, orders: Sequence[WireOrder]) -> Mapping[str, bytes]:
        """Kinds of agents that these orders need and that process was not sent."""
        ...

    async def take(self, reports: Sequence[WireReport]) -> None:
        """Take results."""
        ...


class ProcessHouses:
    """Processes of one run."""

    def __init__(self, tenant: Tenant, pool: ProcessPool, *, hub: Any, is_spread: bool = False) -> None:
        self._tenant = tenant
        self._run_id = tenant.frame.run_id
        self._pool = pool
        self._hub = hub
        self._is_spread = is_spread
        self._processes: dict[str, list[Process]] = {}
        #: where each task runs that has not been reported, and as what it was handed out
        self._where: dict[str, Process] = {}
        self._handed_out: dict[str, Dispatch] = {}
        #: how many processes died with a task
        self._deaths: dict[str, int] = {}
        #: tasks of lost processes that are reported here
        self._given_up: set[str] = set()
        #: tasks that somebody wants to end
        self._stopped: set[str] = set()
        self._jobs: set[asyncio.Task[None]] = set()
        self._callables: Process | None = None
        #: hosts of callables in succession that died before they were ready
        self._stillborn = 0
        self.is_closed = False

    @property
    def callables(self) -> Process | None:
        """The host of the run's callables; None when there is none."""
        return self._callables

    def host_callables(self) -> Process:
        """The host of the run's callables; started when there is none."""
        if self._callables is None:
            self._move_callables()
        assert self._callables is not None  # noqa: S101  it has just been made
        return self._callables

    def start(self, dispatches: Iterable[Dispatch]) -> None:
        """Send each task to the least busy process of its house."""
        batches: dict[int, tuple[Process, list[WireOrder]]] = {}
        for dispatch in dispatches:
            process = self._choose(dispatch.house)
            instance = dispatch.order.instance
            process.busy.add(instance)
            self._where[instance] = process
            self._handed_out[instance] = dispatch
            batches.setdefault(id(process), (process, []))[1].append(dispatch.order)
        for process, orders in batches.values():
            if len(orders) <= MOST_DIRECT:
                for order in orders:
                    self._send(process, self._perform(process, order))
            else:
                kinds = self._tenant.kinds_for(process, orders)
                self._send(process, process.handle.accept.remote(self._run_id, orders, kinds))

    async def _perform(self, process: Process, order: WireOrder) -> None:
        """One call for one task: its report is the reply, which saves a message."""
        kinds = self._tenant.kinds_for(process, (order,))
        report: WireReport = await process.handle.perform.remote(self._run_id, order, kinds)
        await self._tenant.take([report])

    def again(self, report: WireReport) -> None:
        """Hand out once more what a process did not begin, and said so."""
        instance = report.instance
        dispatch = self._handed_out.get(instance)
        if dispatch is not None and dispatch.order.epoch == report.epoch:
            process = self._where[instance]
            process.busy.discard(instance)
            process.kinds.pop(dispatch.order.agent_key or "", None)
            self.start([dispatch])

    def stop(self, instances: Sequence[str]) -> None:
        """Stop running tasks; processes that do not let them go are ended by `end_stuck`."""
        held = [name for name in instances if name in self._where]
        self._stopped.update(held)
        for process in {id(p): p for p in map(self._where.__getitem__, held)}.values():
            self._send(process, process.handle.stop.remote(self._run_id, held))

    def end_stuck(self, instances: Iterable[str] | None = None) -> None:
        """End processes that still hold tasks which were stopped; those tasks are reported by their deaths.

        Args:
            instances: Which tasks; None: all that were stopped.
        """
        names = self._stopped if instances is None else self._stopped.intersection(instances)
        stuck = {id(p): p for name in names if (p := self._where.get(name)) is not None}
        for process in stuck.values():
            self._pool.lose(process, RuntimeError("ended, since it did not stop in time"))

    def holds(self, instance: str) -> bool:
        """Whether that was handed out and has not been reported."""
        return instance in self._handed_out

    def reported(self, reports: Iterable[WireReport]) -> list[WireReport]:
        """Note which tasks are no longer running; reports of earlier dispatches of a task are left out."""
        fresh: list[WireReport] = []
        for report in reports:
            instance = report.instance
            dispatch = self._handed_out.get(instance)
            if dispatch is None or report.epoch != dispatch.order.epoch:
                continue  # of a house that lost the task to another
            del self._handed_out[instance]
            self._where.pop(instance).busy.discard(instance)
            self._deaths.pop(instance, None)
            self._given_up.discard(instance)
            self._stopped.discard(instance)
            fresh.append(report)
        return fresh

    async def close(self, *, keep: bool) -> None:
        """Let all processes go. From here on nothing is started, whatever dies."""
        self.is_closed = True
        await asyncio.gather(*(self.leave(house, keep=keep) for house in list(self._processes)))

    async def leave(self, house: str, *, keep: bool) -> None:
        """Let the processes of a house go."""
        processes = self._processes.pop(house, [])
        for process in processes:
            process.on_death = None
        released = await asyncio.gather(*(self._release(process) for process in processes))
        for process, is_clean in zip(processes, released, strict=True):
            self._pool.give_back(process, keep=keep and is_clean)

    async def _release(self, process: Process) -> bool:
        if not process.is_alive:
            return False
        if not process.is_ready:
            # Still starting, so it never had work; a run does not wait for it.
            self._send(process, process.handle.release.remote(self._run_id))
            return True
        try:
            async with asyncio.timeout(5):
                return bool(await process.handle.release.remote(self._run_id))
        except Exception as error:  # noqa: BLE001  a process that cannot be released is replaced
            _log.warning("An agent process could not be released and is ended: %s", message_of(error))
            return False

    # Processes.

    @property
    def size(self) -> int:
        """How many processes the run has now."""
        return sum(len(self.alive(house)) for house in self._processes)

    def locate(self, house: str, *, lost: str | None = None) -> list[tuple[str, Any]]:
        """Names and handles of a house's processes, for another agent that asks who lives there.

        Args:
            house: Which.
            lost: Name of one that failed a call of the asker.
        """
        for process in self._processes.get(house, []):
            if process.name == lost:
                self._pool.lose(process, RuntimeError("it could not be reached by another agent"))
        alive = self.alive(house) or [self.settle(house)]
        return [(process.name, process.handle) for process in alive]

    def alive(self, house: str) -> list[Process]:
        """The processes of a house."""
        return [process for process in self._processes.get(house, []) if process.is_alive]

    def settle(self, house: str) -> Process:
        """One more process for a house."""
        process = self._pool.take(self._tenant.process_kind(house), is_spread=self._is_spread)
        process.on_death = self._died
        self._processes[house] = [*self.alive(house), process]
        self._send(process, self._bound(house, process))
        return process

    async def _bound(self, house: str, process: Process) -> None:
        await self._tenant.bind(house, process, None if self._callables is None else self._callables.handle)
        process.is_ready = True

    def _choose(self, house: str) -> Process:
        alive = self.alive(house)
        if not alive:
            return self.host_callables() if house == CALLABLES and self._callables is None else self.settle(house)
        return min(alive, key=lambda process: len(process.busy))

    def _send(self, process: Process, work: Awaitable[None]) -> None:
        """Await a call in the background; where it fails, the tasks of that process go on elsewhere, or fail."""

        async def sent() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001  whatever it is, the tasks must be reported
                if isinstance(error, ray.exceptions.RayActorError):
                    self.lose(process, error)
                elif process.is_alive:
                    self._fail(process, list(process.busy), _cause_of(error))

        job = asyncio.get_running_loop().create_task(sent())
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    # Failures.

    def lose(self, process: Process, error: BaseException) -> None:
        """Give up a process that failed a call; what it still does is refused."""
        self._pool.lose(process, error)

    def _died(self, process: Process, error: BaseException) -> None:
        """Its tasks go on elsewhere, as often as that makes sense (S-DUR-31)."""
        # A death is heard of several times: by the watch and by each call that was on its way.
        if process is self._callables:
            self._stillborn = 0 if process.is_ready else self._stillborn + 1
            if self._stillborn < MOST_DEATHS:
                self._move_callables()
        lost = [name for name, where in self._where.items() if where is process and name not in self._given_up]
        if not lost:
            return
        _log.warning("An agent process died with %d tasks: %s", len(lost), last_line(error))
        for name in lost:
            self._deaths[name] = self._deaths.get(name, 0) + 1
        hopeless = {name for name in lost if self._is_hopeless(name)}
        process.busy.clear()
        self.start([_next(self._handed_out[name]) for name in lost if name not in hopeless])
        if hopeless:
            self._fail(process, [name for name in lost if name in hopeless], error)

    def _move_callables(self) -> None:
        """Host the run's callables anew; who asked the lost process asks this one again."""
        self._callables = host = self.settle(CALLABLES)
        for house, group in self._processes.items():
            for process in group if house != CALLABLES else ():
                if process.is_alive:
                    self._send(process, process.handle.move_callables.remote(self._run_id, host.handle))

    def _is_hopeless(self, instance: str) -> bool:
        is_lost = not self._tenant.is_recorded or self._deaths[instance] >= MOST_DEATHS
        return is_lost or instance in self._stopped

    def _fail(self, process: Process, lost: Sequence[str], error: BaseException) -> None:
        """Report tasks of a process: as failed, or as cancelled where somebody wants them to end."""
        lost = [name for name in lost if name not in self._given_up and self._where.get(name) is process]
        self._given_up.update(lost)
        reports: list[WireReport] = []
        events: list[bytes] = []
        for instance in lost:
            dispatch = self._handed_out[instance]
            cause = self._cause(dispatch, error)
            status: Literal["cancelled", "failed"] = "cancelled" if instance in self._stopped else "failed"
            reports.append(report_undone(dispatch.order, status, cause))
            if self._hub is not None and status == "failed":
                events.append(pack_event(self._failed_event(dispatch, cause)))
        process.busy.difference_update(lost)
        if reports:
            self._send(process, self._report(reports, events))

    def _cause(self, dispatch: Dispatch, error: BaseException) -> BaseException:
        """Why a task failed that its own process can report no more."""
        if isinstance(error, EnsembleError):
            return error
        order, deaths = dispatch.order, self._deaths.get(dispatch.order.instance, 0)
        often = "" if deaths < MOST_DEATHS else f" {MOST_DEATHS} times with this task"
        text = f"Agent '{order.agent_role}': its process died{often} ({last_line(error)})"
        return AgentExecutionError(text, order.agent_role, dispatch.description)

    async def _report(self, reports: Sequence[WireReport], events: Sequence[bytes]) -> None:
        """Events first: the run may end with these reports, and its events are read until then (S-PAR-42)."""
        if events and TaskFailedEvent.method in self._tenant.frame.interest:
            try:
                await self._hub.publish.remote(self._run_id, events)
            except ray.exceptions.RayError as error:
                _log.warning("Run %s: the event hub cannot be reached: %s", self._run_id, error)
        await self._tenant.take(reports)

    def _failed_event(self, dispatch: Dispatch, cause: BaseException) -> TaskFailedEvent:
        """The failed event of a task whose own process can send none any more (S-EVT-10)."""
        total = dispatch.order.total_tasks
        return TaskFailedEvent(
            run_id=self._run_id,
            instance=dispatch.order.instance,
            task_description=dispatch.description,
            agent_role=dispatch.order.agent_role,
            task_index=dispatch.order.index,
            total_tasks=self._tenant.frame.total_tasks if total is None else total,
            cause=cause,
            duration=timedelta(),
        )


def _next(dispatch: Dispatch) -> Dispatch:
    """The same task for another process."""
    order = dispatch.order
    return replace(dispatch, order=replace(order, epoch=order.epoch + REDISPATCH_STEP))


def report_undone(order: WireOrder, status: Literal["cancelled", "failed"], cause: BaseException | None) -> WireReport:
    """The report of a task that no process can give."""
    now = time.time()
    result = TaskResult(
        key=order.key,
        instance=order.instance,
        epoch=order.epoch,
        status=status,
        at=now,
        duration_s=0.0,
        error=cause,
    )
    return Report(
        key=order.key,
        status=status,
        at=now,
        epoch=order.epoch,
        instance=order.instance,
        failure=cloudpickle.dumps(result),
        error_type="" if cause is None else type(cause).__name__,
        message="" if cause is None else message_of(cause),
    )


def _cause_of(error: BaseException) -> BaseException:
    """The error behind Ray's wrapper."""
    inner = getattr(error, "cause", None)
    return inner if isinstance(inner, BaseException) else error
