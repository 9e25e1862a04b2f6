"""Processes of one run: started, given orders, watched, let go. What is done when one dies stands here.

In: orders, each for a group of processes; who lives in which group is its owner's business. Out: reports, of the newest
dispatch of an order and no other: the rules are `plan.redispatch`. Must never happen: an order that nobody reports, whatever
dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import ray.exceptions

from ensemble_ray.actors.link.background_tasks import BackgroundTasks
from ensemble_ray.actors.link.events import pack_event
from ensemble_ray.actors.link.failures import last_line
from ensemble_ray.actors.link.packing import pack_dispatch, pack_result, unpack_report
from ensemble_ray.actors.link.undone import undone
from ensemble_ray.actors.link.wire import WireOrder, WireResult
from ensemble_ray.actors.scheduler.processes import Process, ProcessPool, ProcessType
from ensemble_ray.errors import AgentExecutionError, EnsembleError, message_of
from ensemble_ray.events import TaskFailedEvent
from ensemble_ray.execute.orders import RunContext, TaskStatus
from ensemble_ray.plan.redispatch import MOST_DEATHS, DispatchTable
from ensemble_ray.plan.requirements import Node, ResourceRequirements
from ensemble_ray.process.bounded_log import bounded_logger

__all__ = ["CALLABLES", "GroupOwner", "ProcessGroups"]

_log = bounded_logger(__name__)
#: Tasks that start together on one process and are sent one call each; more of them share one message, and their
#: reports come back in batches (measured: two messages cost a third more than a call and its reply, one by one; by the
#: hundred a shared message is twenty times cheaper).
MOST_DIRECT = 4
#: Group of handler tasks and guardrails.
CALLABLES = "callables"
#: After how long the driver hears that a process still waits for a node, s, and how often from then on.
_WAITED_S, _WAITS_S = 10.0, 60.0
#: How long a process may take to let a run go, s.
_RELEASE_S = 5.0
#: How long a process that a run left while it started may go on starting, s.
_START_S = 60.0


class GroupOwner(Protocol):
    """The session whose processes these are."""

    @property
    def context(self) -> RunContext:
        """What all its tasks share."""
        ...

    def group_of(self, order: WireOrder) -> str:
        """Return which group does that order."""
        ...

    def process_type(self, group: str) -> ProcessType:
        """Return what a group's processes are for."""
        ...

    def requirements_of(self, group: str) -> ResourceRequirements:
        """Return what a group's processes ask of their nodes."""
        ...

    def on_ready(self, group: str) -> None:
        """Start the next process of a group, since one has started that had to wait for a node."""
        ...

    def on_wait(self, group: str, waited_s: float) -> None:
        """Tell people that a process waits for a node, and for how long it has."""
        ...

    async def bind(self, group: str, process: Process, callables: Any) -> None:
        """Make a new process of a group ready for the run, which asks that handle for its callables."""
        ...

    def templates_for(self, process: Process, orders: Sequence[WireOrder]) -> Mapping[str, bytes]:
        """Return the templates of agents that these orders need and that process was not sent."""
        ...

    async def report(self, reports: Sequence[WireResult]) -> None:
        """Take results."""
        ...


class ProcessGroups:
    """Processes of one run."""

    def __init__(
        self, owner: GroupOwner, pool: ProcessPool, *, hub: Any, is_recorded: bool, nodes: Sequence[Node] = ()
    ) -> None:
        self._owner = owner
        self._run_id = owner.context.run_id
        self._pool = pool
        self._hub = hub
        #: what new processes are spread over; none: it does not matter where they are
        self.nodes = nodes
        self._groups: dict[str, list[Process]] = {}
        self._by_name: dict[str, Process] = {}
        self._table = DispatchTable(is_recorded=is_recorded)
        #: orders that are not reported, as they were handed out
        self._orders: dict[str, WireOrder] = {}
        self._tasks = BackgroundTasks()
        self._callables: Process | None = None
        #: hosts of callables in succession that died before they were ready
        self._failed_starts = 0
        self.is_closed = False

    @property
    def callables(self) -> Process | None:
        """The host of the run's callables; None when there is none."""
        return self._callables

    def host_callables(self) -> Process:
        """Return the host of the run's callables; it is started when there is none."""
        return self._callables or self._move_callables()

    def start(self, orders: Iterable[WireOrder]) -> None:
        """Send each order to the least busy process of its group."""
        batches: dict[str, tuple[Process, list[WireOrder]]] = {}
        for order in orders:
            process = self._choose(self._owner.group_of(order))
            self._table.hand_out(order.instance, order.epoch, process.name)
            self._orders[order.instance] = order
            batches.setdefault(process.name, (process, []))[1].append(replace(order, description=""))
        for process, batch in batches.values():
            if len(batch) <= MOST_DIRECT:
                for order in batch:
                    self._send(process, self._perform(process, order))
            else:
                templates = self._owner.templates_for(process, batch)
                body = pack_dispatch(self._run_id, batch, templates)
                self._send(process, process.handle.accept.remote(body))

    async def _perform(self, process: Process, order: WireOrder) -> None:
        """Make one call for one order: its report is the reply, which saves a message."""
        templates = self._owner.templates_for(process, (order,))
        body: bytes = await process.handle.perform.remote(pack_dispatch(self._run_id, (order,), templates))
        await self._owner.report([unpack_report(body)])

    def retry(self, report: WireResult) -> None:
        """Hand out once more what a process did not begin, and said so."""
        if self._table.epoch_of(report.instance) == report.epoch:
            order = self._orders[report.instance]
            process = self._by_name.get(self._table.process_of(report.instance) or "")
            if process is not None:
                process.templates.pop(order.agent_key or "", None)
            self.start([order])

    def stop(self, instances: Iterable[str]) -> None:
        """Stop running tasks; processes that do not let them go are ended by `end_stuck`."""
        for name, held in self._table.stop(instances).items():
            process = self._by_name.get(name)
            if process is not None:
                self._send(process, process.handle.stop.remote(self._run_id, held))

    def end_stuck(self, instances: Iterable[str] | None = None) -> None:
        """End processes that still hold tasks which were stopped; those tasks are reported by their deaths.

        Args:
            instances: Which tasks; None: all that were stopped.
        """
        for name in self._table.stuck(instances):
            if name in self._by_name:
                self.lose(self._by_name[name], RuntimeError("ended, since it did not stop in time"))

    def accept_reports(self, reports: Iterable[WireResult]) -> list[WireResult]:
        """Return the reports that count; their orders are over."""
        fresh = [report for report in reports if self._table.report(report.instance, report.epoch)]
        for report in fresh:
            del self._orders[report.instance]
        return fresh

    async def close(self, *, keep: bool) -> None:
        """Let all processes go. From here on nothing is started, whatever dies."""
        self.is_closed = True
        await asyncio.gather(*(self.leave(group, keep=keep) for group in list(self._groups)))

    async def leave(self, group: str, *, keep: bool) -> None:
        """Let the processes of a group go."""
        processes = self._groups.pop(group, [])
        for process in processes:
            process.on_death = None
            self._forget(process)
        # One that still starts never had work; a run does not wait for it. One that may wait long for a node is ended.
        unready = [each for each in processes if each.is_alive and not each.is_ready]
        starting = [process for process in unready if keep and not process.requirements]
        for process in starting:
            self._tasks.start(self._put_back_started(process))
        await asyncio.gather(*(self._put_back(process, keep=keep) for process in processes if process not in starting))

    async def _put_back_started(self, process: Process) -> None:
        """Put a process back when it has started; one that does not is ended.

        Messages to one that starts overtake each other: a run that is gone on with at once would be bound there under its
        own id, and be released as the one that left.
        """
        if process.starting is not None:
            await asyncio.wait([process.starting], timeout=_START_S)
        await self._put_back(process, keep=True)

    async def _put_back(self, process: Process, *, keep: bool) -> None:
        self._pool.put_back(process, keep=await self._release(process) and keep)

    async def _release(self, process: Process) -> bool:
        if not process.is_alive or not process.is_ready:
            return False
        try:
            async with asyncio.timeout(_RELEASE_S):
                return bool(await process.handle.release.remote(self._run_id))
        except Exception as error:  # noqa: BLE001  a process that cannot be released is replaced
            _log.warning("An agent process could not be released and is ended: %s", message_of(error))
            return False

    # Processes.

    @property
    def size(self) -> int:
        """How many processes the run has now."""
        return sum(len(self.alive(group)) for group in self._groups)

    def locate(self, group: str, *, lost: str | None = None) -> list[tuple[str, Any]]:
        """Return names and handles of a group's processes, for another agent that asks who lives there.

        Args:
            group: Which.
            lost: Name of one that failed a call of the asker.
        """
        for process in self._groups.get(group, []):
            if process.name == lost:
                self.lose(process, RuntimeError("it could not be reached by another agent"))
        found = self._usable(group) or [self.start_process(group)]
        return [(process.name, process.handle) for process in found]

    def alive(self, group: str) -> list[Process]:
        """Return the processes of a group."""
        return [process for process in self._groups.get(group, []) if process.is_alive]

    def starting(self, group: str) -> int:
        """Return how many processes of a group have not started yet."""
        return sum(not process.is_ready for process in self.alive(group))

    def _usable(self, group: str) -> list[Process]:
        """Return those that orders go to: not those that may wait long for a node, while there are others."""
        alive = self.alive(group)
        ready = [process for process in alive if process.is_ready or not process.requirements]
        return ready or alive

    def load(self, group: str) -> int:
        """Return how many orders a group is at work on."""
        return sum(self._table.load(process.name) for process in self.alive(group))

    def start_process(self, group: str) -> Process:
        """Start one more process for a group."""
        requirements = self._owner.requirements_of(group)
        process = self._pool.claim(self._owner.process_type(group), requirements=requirements, nodes=self.nodes)
        process.on_death = self._on_death
        self._groups[group] = [*self.alive(group), process]
        self._by_name[process.name] = process
        process.starting = self._send(process, self._bind(group, process))
        if requirements:
            self._tasks.start(self._tell_of_wait(group, process))
        return process

    async def _bind(self, group: str, process: Process) -> None:
        await self._owner.bind(group, process, None if self._callables is None else self._callables.handle)
        process.is_ready = True
        if process.requirements and process in self._groups.get(group, ()):
            self._owner.on_ready(group)

    async def _tell_of_wait(self, group: str, process: Process) -> None:
        """Tell people now and then, as long as it waits."""
        waited_s = _WAITED_S
        await asyncio.sleep(_WAITED_S)
        while process in self._groups.get(group, ()) and process.is_alive and not process.is_ready:
            self._owner.on_wait(group, waited_s)
            await asyncio.sleep(_WAITS_S)
            waited_s += _WAITS_S

    def _choose(self, group: str) -> Process:
        usable = self._usable(group)
        if not usable:
            return (
                self.host_callables() if group == CALLABLES and self._callables is None else self.start_process(group)
            )
        return min(usable, key=lambda process: self._table.load(process.name))

    def _forget(self, process: Process) -> None:
        self._by_name.pop(process.name, None)
        self._table.forget_process(process.name)

    def _send(self, process: Process, work: Awaitable[None]) -> asyncio.Task[None]:
        """Await a call in the background; where it fails, the tasks of that process go on elsewhere, or fail."""

        async def send() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001  whatever it is, the tasks must be reported
                if isinstance(error, ray.exceptions.RayActorError):
                    self.lose(process, error)
                elif process.is_alive:
                    self._fail(process, self._table.orders_of(process.name), _cause_of(error))

        return self._tasks.start(send())

    # Failures.

    def lose(self, process: Process, error: BaseException) -> None:
        """Give up a process that failed a call; what it still does is refused."""
        self._pool.lose(process, error)

    def _on_death(self, process: Process, error: BaseException) -> None:
        """Hand its tasks out elsewhere, as often as that makes sense (S-DUR-31)."""
        # A death is heard of several times: by the watch and by each call that was on its way.
        if process is self._callables:
            self._failed_starts = 0 if process.is_ready else self._failed_starts + 1
            if self._failed_starts < MOST_DEATHS:
                self._move_callables()
        following = self._table.lose(process.name)
        self._by_name.pop(process.name, None)
        count = len(following.to_retry) + len(following.hopeless)
        if count:
            _log.warning("An agent process died with %d tasks: %s", count, last_line(error))
        self.start([self._renewed(name) for name in following.to_retry])
        if following.hopeless:
            self._fail(process, following.hopeless, error)

    def _renewed(self, instance: str) -> WireOrder:
        """Return an order under the epoch that it is handed out with next; what follows it may be what killed its process."""
        return replace(self._orders[instance], epoch=self._table.epoch_of(instance) or 0, asks=None)

    def _move_callables(self) -> Process:
        """Host the run's callables anew; who asked the lost process asks this one again."""
        self._callables = host = self.start_process(CALLABLES)
        for group, processes in self._groups.items():
            for process in processes if group != CALLABLES else ():
                if process.is_alive:
                    self._send(process, process.handle.move_callables.remote(self._run_id, host.handle))
        return host

    def _fail(self, process: Process, instances: Iterable[str], error: BaseException) -> None:
        """Report tasks of a process: as failed, or as cancelled where somebody wants them to end."""
        reports: list[WireResult] = []
        events: list[bytes] = []
        for instance in self._table.give_up(process.name, instances):
            order = self._orders[instance]
            cause = self._cause(order, error)
            status: TaskStatus = "cancelled" if self._table.is_stopped(instance) else "failed"
            reports.append(pack_result(undone(order, cause, status)))
            if self._hub is not None and status == "failed":
                events.append(pack_event(self._failed_event(order, cause)))
        if reports:
            self._send(process, self._report(reports, events))

    def _cause(self, order: WireOrder, error: BaseException) -> BaseException:
        """Return why a task failed that its own process can report no more."""
        if isinstance(error, EnsembleError):
            return error
        deaths = self._table.deaths_of(order.instance)
        often = "" if deaths < MOST_DEATHS else f" {MOST_DEATHS} times with this task"
        text = f"Agent '{order.agent_role}': its process died{often} ({last_line(error)})"
        return AgentExecutionError(text, order.agent_role, order.description)

    async def _report(self, reports: Sequence[WireResult], events: Sequence[bytes]) -> None:
        """Publish events first: the run may end with these reports, and its events are read until then (S-PAR-42)."""
        if events and TaskFailedEvent.method in self._owner.context.interest:
            try:
                await self._hub.publish.remote(self._run_id, events)
            except ray.exceptions.RayError as error:
                _log.warning("Run %s: the event hub cannot be reached: %s", self._run_id, error)
        await self._owner.report(reports)

    def _failed_event(self, order: WireOrder, cause: BaseException) -> TaskFailedEvent:
        """Return the failed event of a task whose own process can send none any more (S-EVT-10)."""
        total = order.total_tasks
        return TaskFailedEvent(
            run_id=self._run_id,
            instance=order.instance,
            task_description=order.description,
            agent_role=order.agent_role,
            task_index=order.index,
            total_tasks=self._owner.context.total_tasks if total is None else total,
            cause=cause,
            duration=timedelta(),
        )


def _cause_of(error: BaseException) -> BaseException:
    """Return the error behind Ray's wrapper."""
    inner = getattr(error, "cause", None)
    return inner if isinstance(inner, BaseException) else error
