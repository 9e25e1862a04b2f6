"""The processes of one run: started, sent orders, watched and released, and replaced when they die.

Reports count only for the newest dispatch of an order (`DispatchTable`). Every order is reported, whatever dies.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import ray.exceptions
from msgspec.structs import replace

from ensemble_ray.actors.link.events import pack_event
from ensemble_ray.actors.link.packing import make_undone_result, pack, pack_result, unpack
from ensemble_ray.actors.link.reach import BackgroundTasks, last_line
from ensemble_ray.actors.link.wire import Dispatch, Keep, WireOrder, WireResult
from ensemble_ray.actors.scheduler.processes import Lease, LeaseDescription, ProcessPool, ProcessType
from ensemble_ray.errors import AgentExecutionError, EnsembleError, message_of
from ensemble_ray.events import TaskFailedEvent
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.plan.placement import GROWS_ABOVE, MOST_DEATHS, ClusterNode, DispatchTable, ResourceRequirements
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.metrics import MOST_AGENTS, MOST_TASKS, RunDescription, TaskDescription

_log = bounded_logger(__name__)
#: Up to so many tasks are sent as one call each, others as one message. For a single task two messages cost a third more than a
#: call with its reply; for a hundred tasks a shared message is twenty times cheaper.
MOST_DIRECT = 4
CALLABLES = "callables"
#: When and how often the driver is warned that a process waits for a node, s.
_WAITED_S, _WAITS_S = 10.0, 60.0
_RELEASE_S = 5.0
_ANSWER_S = 15.0
_START_S = 60.0


class GroupOwner(Protocol):
    """The session that owns the processes."""

    @property
    def context(self) -> RunContext: ...

    def group_of(self, order: WireOrder) -> str: ...

    def roles_of(self, group: str) -> Sequence[str]: ...

    def process_type(self, group: str) -> ProcessType: ...

    def requirements_of(self, group: str) -> ResourceRequirements: ...

    def may_share(self, group: str) -> bool: ...

    def on_ready(self, group: str) -> None:
        """Handle a started process that had to wait for a node."""
        ...

    def on_wait(self, group: str, waited_s: float) -> None: ...

    async def bind(self, group: str, lease: Lease, callables: Any) -> None:
        """Bind a new process to the run. It calls the handle `callables` for the run's callables."""
        ...

    def templates_for(self, lease: Lease, orders: Sequence[WireOrder]) -> Mapping[str, bytes]:
        """Return the templates that the process was not sent."""
        ...

    async def report(self, reports: Sequence[WireResult]) -> None: ...

    def on_death(self, lease: Lease) -> None:
        """Handle the death of a process, before its tasks are dispatched again."""
        ...


class ProcessGroups:
    """The processes of one run, by group.

    Args:
        nodes: Nodes to spread processes over; empty: any node.
        share_from: How many processes the program has before it shares one; None: it shares none.
    """

    def __init__(
        self,
        owner: GroupOwner,
        pool: ProcessPool,
        *,
        hub: Any,
        is_recorded: bool,
        nodes: Sequence[ClusterNode] = (),
        program: str = "",
        share_from: int | None = None,
    ) -> None:
        self._owner = owner
        self._run_id = owner.context.run_id
        self._pool = pool
        self._hub = hub
        self._nodes = nodes
        self._program = program
        self._share_from = share_from
        self._groups: dict[str, list[Lease]] = {}
        self._by_name: dict[str, Lease] = {}
        self._table = DispatchTable(is_recorded=is_recorded)
        self._orders: dict[str, WireOrder] = {}
        self._tasks = BackgroundTasks()
        self.callables: Lease | None = None
        #: when new orders last found a group with at most `GROWS_ABOVE` tasks
        self._calm_at: dict[str, float] = {}
        self._lost = Counter[str]()
        #: successive hosts of callables that died before they were ready
        self._failed_starts = 0
        self.is_closed = False

    def use_cluster(self, nodes: Sequence[ClusterNode], *, most: int) -> None:
        """Start new processes on these nodes, and share them once the program has `most`."""
        self._nodes = nodes
        if self._share_from is not None:
            self._share_from = most

    def host_callables(self) -> Lease:
        return self.callables or self._move_callables()

    def start(self, orders: Iterable[WireOrder]) -> None:
        batches: dict[str, tuple[Lease, list[WireOrder]]] = {}
        for order in orders:
            group = self._owner.group_of(order)
            if usable := self._usable(group):
                lease = min(usable, key=lambda each: self._table.load(each.name))
            elif group == CALLABLES and self.callables is None:
                lease = self.host_callables()
            else:
                lease = self.start_process(group)
            self._table.record_dispatch(order.instance, order.epoch, lease.name)
            self._orders[order.instance] = order
            batches.setdefault(lease.name, (lease, []))[1].append(replace(order, description=""))
        for lease, batch in batches.values():
            if len(batch) <= MOST_DIRECT and batch[0].continuation is None:
                for order in batch:
                    self._send(lease, self._perform(lease, order))
            else:
                templates = self._owner.templates_for(lease, batch)
                body = pack(Dispatch(self._run_id, batch, templates))
                self._send(lease, lease.handle.accept.remote(body))

    async def _perform(self, lease: Lease, order: WireOrder) -> None:
        templates = self._owner.templates_for(lease, (order,))
        body: bytes = await lease.handle.perform.remote(pack(Dispatch(self._run_id, (order,), templates)))
        await self._owner.report([unpack(body, WireResult)])

    def retry(self, report: WireResult) -> None:
        """Dispatch an order again that a process could not start."""
        if self._table.epoch_of(report.instance) == report.epoch:
            order = self._orders[report.instance]
            lease = self.lease_of(report.instance)
            if lease is not None:
                lease.templates.pop(order.agent_key or "", None)
            self.start([replace(order, continuation=None)])

    def adopt(self, order: WireOrder, lease: Lease) -> None:
        """Add an order that a process started by itself."""
        self._table.record_dispatch(order.instance, order.epoch, lease.name)
        self._orders[order.instance] = order

    def count_death(self, instance: str) -> None:
        self._table.count_death(instance)

    def lease_of(self, instance: str) -> Lease | None:
        return self._by_name.get(self._table.process_of(instance) or "")

    def stop(self, instances: Iterable[str]) -> None:
        """`end_stuck` ends processes that do not stop their tasks."""
        for name, held in self._table.stop(instances).items():
            lease = self._by_name.get(name)
            if lease is not None:
                self._send(lease, lease.handle.stop.remote(self._run_id, held))

    def end_stuck(self, instances: Iterable[str] | None = None) -> None:
        """End processes that still run stopped tasks (None: all of them), which reports those tasks.

        A process that other runs use continues for them if it still answers. This run's tasks are reported in its place.
        """
        stopped = None if instances is None else list(instances)
        for name in self._table.stuck(stopped):
            lease = self._by_name.get(name)
            if lease is None:
                continue
            error = RuntimeError("ended because it did not stop in time")
            if self._pool.retire(lease.process):
                held = [each for each in self._table.orders_of(name) if self._table.is_stopped(each)]
                self._fail(lease, held if stopped is None else set(held).intersection(stopped), error)
                self._tasks.start(self._check_answers(lease))
            else:
                self.mark_lost(lease, error)

    def accept_reports(self, reports: Iterable[WireResult]) -> list[WireResult]:
        """Return the reports that count, and close their orders."""
        fresh = [report for report in reports if self._table.report(report.instance, report.epoch)]
        for report in fresh:
            del self._orders[report.instance]
        return fresh

    async def close(self, *, keep: Keep | None) -> None:
        """After this call no process is started, whatever dies."""
        self.is_closed = True
        await asyncio.gather(*(self.detach(group, keep=keep) for group in list(self._groups)))

    async def detach(self, group: str, *, keep: Keep | None) -> None:
        leases = self._groups.pop(group, [])
        self._calm_at.pop(group, None)
        for lease in leases:
            lease.on_death = None
            self._by_name.pop(lease.name, None)
            self._table.forget_process(lease.name)
        # A starting process never had work, so the run does not wait for it. One that may wait long for a node is ended.
        unready = [each for each in leases if each.is_alive and not each.is_ready]
        starting = [each for each in unready if (keep and not each.requirements) or each.process.is_shared]
        for lease in starting:
            self._tasks.start(self._put_back(lease, keep=keep, after_start=True))
        await asyncio.gather(*(self._put_back(lease, keep=keep) for lease in leases if lease not in starting))

    async def _put_back(self, lease: Lease, *, keep: Keep | None, after_start: bool = False) -> None:
        if after_start and lease.starting is not None:
            # Messages to a starting process overtake each other: this release could remove a resumption of the run.
            await asyncio.wait([lease.starting], timeout=_START_S)
        self._pool.put_back(lease, is_clean=await self._release(lease), keep=keep)

    async def _release(self, lease: Lease) -> bool:
        """Return whether none of the run's work remains there."""
        is_refused = lease.process.is_shared and lease.starting is not None and lease.starting.done()
        if not lease.is_alive or not (lease.is_ready or is_refused):
            return False
        try:
            async with asyncio.timeout(_RELEASE_S):
                return bool(await lease.handle.release.remote(self._run_id))
        except Exception as error:  # noqa: BLE001  a process that cannot be released is replaced
            _log.warning("An agent process could not be released and is ended: %s", message_of(error))
            if lease.process.is_shared:
                self._tasks.start(self._check_answers(lease))
            return False

    async def _check_answers(self, lease: Lease) -> None:
        """End a shared process with a blocked loop."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await lease.handle.answer.remote()
        except (TimeoutError, ray.exceptions.RayError) as error:
            self.mark_lost(lease, RuntimeError(f"it no longer answers: {message_of(error)}"))

    # Processes.

    @property
    def size(self) -> int:
        return sum(len(self.alive(group)) for group in self._groups)

    def locate(self, group: str, *, lost: str | None = None) -> list[tuple[str, Any]]:
        """Return names and handles of a group's processes for an agent that delegates; end the `lost` one."""
        for lease in self._groups.get(group, []):
            if lease.name == lost:
                self.mark_lost(lease, RuntimeError("it could not be reached by another agent"))
        found = self._usable(group) or [self.start_process(group)]
        return [(lease.name, lease.handle) for lease in found]

    def alive(self, group: str) -> list[Lease]:
        return [lease for lease in self._groups.get(group, []) if lease.is_alive]

    def starting(self, group: str) -> int:
        return sum(not lease.is_ready for lease in self.alive(group))

    def _usable(self, group: str) -> list[Lease]:
        """A process that may wait long for a node receives no orders while there are others."""
        alive = self.alive(group)
        ready = [lease for lease in alive if lease.is_ready or not lease.requirements]
        return ready or alive

    def load(self, group: str) -> int:
        return sum(self._table.load(lease.name) for lease in self.alive(group))

    def busy_s(self, group: str) -> float:
        """Return for how long a group has had more than `GROWS_ABOVE` tasks whenever it received orders, s."""
        now = asyncio.get_running_loop().time()
        if group not in self._calm_at or self.load(group) <= GROWS_ABOVE:
            self._calm_at[group] = now
        return now - self._calm_at[group]

    def start_process(self, group: str) -> Lease:
        requirements = self._owner.requirements_of(group)
        lease = self._pool.claim(
            self._run_id,
            self._owner.process_type(group),
            requirements=requirements,
            nodes=self._nodes,
            program=self._program,
            share_from=self._share_from if self._owner.may_share(group) else None,
        )
        lease.on_death, lease.count_tasks = self._on_death, partial(self._table.load, lease.name)
        lease.describe = partial(self._describe, group, lease)
        self._groups[group] = [*self.alive(group), lease]
        self._by_name[lease.name] = lease
        lease.starting = self._send(lease, self._bind(group, lease))
        if requirements:
            self._tasks.start(self._report_wait(group, lease))
        return lease

    def _describe(self, group: str, lease: Lease) -> LeaseDescription:
        alive, roles = self.alive(group), self._owner.roles_of(group)
        run = RunDescription(
            run_id=self._run_id,
            agents=tuple(roles[:MOST_AGENTS]),
            more_agents=max(0, len(roles) - MOST_AGENTS),
            replica=alive.index(lease) + 1 if lease in alive else 1,
            replicas=max(1, len(alive)),
            lost=self._lost[group],
        )
        orders = self._table.orders_of(lease.name, most=MOST_TASKS)
        tasks = tuple(
            TaskDescription(run_id=self._run_id, instance=each, deaths=self._table.deaths_of(each)) for each in orders
        )
        return LeaseDescription(run, tasks)

    async def _bind(self, group: str, lease: Lease) -> None:
        await self._owner.bind(group, lease, None if self.callables is None else self.callables.handle)
        lease.is_ready = True
        if lease.requirements and lease in self._groups.get(group, ()):
            self._owner.on_ready(group)

    async def _report_wait(self, group: str, lease: Lease) -> None:
        waited_s = _WAITED_S
        await asyncio.sleep(_WAITED_S)
        while lease in self._groups.get(group, ()) and lease.is_alive and not lease.is_ready:
            self._owner.on_wait(group, waited_s)
            await asyncio.sleep(_WAITS_S)
            waited_s += _WAITS_S

    def _send(self, lease: Lease, work: Awaitable[None]) -> asyncio.Task[None]:
        """Await a call in the background. If it fails, dispatch the tasks of that process again, or fail them."""

        async def send() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001  the tasks must be reported
                if isinstance(error, ray.exceptions.RayActorError):
                    self.mark_lost(lease, error)
                elif lease.is_alive:
                    cause = getattr(error, "cause", None)
                    why = cause if isinstance(cause, BaseException) else error
                    self._fail(lease, self._table.orders_of(lease.name), why)

        return self._tasks.start(send())

    # Failures.

    def mark_lost(self, lease: Lease, error: BaseException) -> None:
        self._pool.mark_lost(lease.process, error)

    def _on_death(self, lease: Lease, error: BaseException) -> None:
        """Dispatch the tasks of a dead process again, as often as the rules allow (S-DUR-31)."""
        # A death is reported several times: by the watch and by each call in flight.
        self._lost.update(group for group, leases in self._groups.items() if lease in leases)
        self._share_from = None  # the cause may be this run or one that shared it: run apart
        if lease is self.callables:
            self._failed_starts = 0 if lease.is_ready else self._failed_starts + 1
            if self._failed_starts < MOST_DEATHS:
                self._move_callables()
        self._owner.on_death(lease)
        following = self._table.mark_lost(lease.name)
        self._by_name.pop(lease.name, None)
        count = len(following.to_retry) + len(following.hopeless)
        if count:
            _log.warning("An agent process died with %d tasks: %s", count, last_line(error))
        # Without the questions that follow it (`asks`), since they may have killed the process.
        self.start(
            replace(self._orders[name], epoch=self._table.epoch_of(name) or 0, asks=None, continuation=None)
            for name in following.to_retry
        )
        if following.hopeless:
            self._fail(lease, following.hopeless, error)

    def _move_callables(self) -> Lease:
        self.callables = host = self.start_process(CALLABLES)
        for group, leases in self._groups.items():
            for lease in leases if group != CALLABLES else ():
                if lease.is_alive:
                    self._send(lease, lease.handle.move_callables.remote(self._run_id, host.handle))
        return host

    def _fail(self, lease: Lease, instances: Iterable[str], error: BaseException) -> None:
        """Report tasks as failed, or as cancelled if they were stopped."""
        reports: list[WireResult] = []
        events: list[bytes] = []
        for instance in self._table.abandon(lease.name, instances):
            order, deaths = self._orders[instance], self._table.deaths_of(instance)
            is_stopped = self._table.is_stopped(instance)
            reports.append(lost_result(order, error, deaths=deaths, is_stopped=is_stopped))
            if self._hub is not None and not is_stopped:
                events.append(lost_event(order, error, deaths=deaths, context=self._owner.context))
        if reports:
            self._send(lease, self._report(reports, events))

    async def _report(self, reports: Sequence[WireResult], events: Sequence[bytes]) -> None:
        """Publish events first: the run may end with these reports, and its events are read until then (S-PAR-42)."""
        if events and TaskFailedEvent.method in self._owner.context.interest:
            try:
                await self._hub.publish.remote(self._run_id, events)
            except ray.exceptions.RayError as error:
                _log.warning("Run %s: the event hub cannot be reached: %s", self._run_id, error)
        await self._owner.report(reports)


def lost_result(order: WireOrder, error: BaseException, *, deaths: int, is_stopped: bool) -> WireResult:
    return pack_result(
        make_undone_result(order, _failure(order, error, deaths), "cancelled" if is_stopped else "failed")
    )


def lost_event(order: WireOrder, error: BaseException, *, deaths: int, context: RunContext) -> bytes:
    """Its process can no longer send the event (S-EVT-10)."""
    total = order.total_tasks
    event = TaskFailedEvent(
        run_id=context.run_id,
        instance=order.instance,
        task_description=order.description,
        agent_role=order.agent_role,
        task_index=order.index,
        total_tasks=context.total_tasks if total is None else total,
        cause=_failure(order, error, deaths),
        duration=timedelta(),
    )
    return pack_event(event)


def _failure(order: WireOrder, error: BaseException, deaths: int) -> BaseException:
    if isinstance(error, EnsembleError):
        return error
    often = "" if deaths < MOST_DEATHS else f" {MOST_DEATHS} times with this task"
    text = f"Agent '{order.agent_role}': its process died{often} ({last_line(error)})"
    return AgentExecutionError(text, order.agent_role, order.description)
