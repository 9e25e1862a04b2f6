"""Houses of one run on the cluster: which process gets which task, and what happens when a process dies.

The rule who lives where is `plan.housing`; here it is carried out. Fulfils the conductor's `Houses`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import cloudpickle
import ray
import ray.exceptions

from actors.failures import last_line
from actors.handles import pack_event
from actors.processes import Kind, Process, ProcessPool
from actors.wire import RunPackage, RunPlace, WireOrder, WireReport, wire_order
from ensemble_ray.epochs import REDISPATCH_STEP
from ensemble_ray.errors import AgentExecutionError, EnsembleError, message_of
from ensemble_ray.events import TaskFailedEvent
from ensemble_ray.execute.conductor import Assignment, Report
from ensemble_ray.execute.orders import TaskResult
from ensemble_ray.ids import instance_of
from ensemble_ray.plan.housing import Lodger, assign_houses
from ensemble_ray.plan.plan import MANAGER_KEY, Node

__all__ = ["CALLABLES", "RunHouses"]

_log = logging.getLogger(__name__)
#: Tasks that start together on one process and are sent one call each; more of them share one message, and their
#: reports come back in batches (measured: two messages cost a third more than a call and its reply, one by one; by the
#: hundred a shared message is twenty times cheaper).
MOST_DIRECT = 4
#: A task whose process died so often is not handed out again: it may well be what kills them.
MOST_DEATHS = 3
#: House of handler tasks and guardrails.
CALLABLES = "callables"


class RunHouses:
    """Processes of one run."""

    def __init__(
        self,
        package: RunPackage,
        pool: ProcessPool,
        *,
        max_own: int,
        hub: Any,
        take: Callable[[Sequence[WireReport]], Awaitable[None]],
    ) -> None:
        self._package = package
        self._pool = pool
        self._hub = hub
        self._take = take
        node_id = str(ray.get_runtime_context().get_node_id())
        self._store = None if package.store is None else RunPlace(package.store, node_id)
        self._agents = {cargo.key: cargo for cargo in package.agents}
        lodgers = [
            Lodger(
                key=cargo.key,
                kind=cargo.kind,
                isolation=cargo.isolation,
                replicas=cargo.replicas,
                is_synthesized=cargo.is_synthesized,
            )
            for cargo in package.agents
        ]
        self._housing = assign_houses(lodgers, max_own=max_own)
        self._processes: dict[str, list[Process]] = {}
        #: where each task runs that has not been reported, and as what it was handed out
        self._where: dict[str, Process] = {}
        self._assigned: dict[str, Assignment[bytes]] = {}
        #: how many processes died with a task
        self._deaths: dict[str, int] = {}
        #: tasks of lost processes that were reported here
        self._given_up: set[str] = set()
        self._jobs: set[asyncio.Task[None]] = set()
        self._callables: Process | None = None
        #: hosts of callables in succession that died before they were ready
        self._stillborn = 0
        self._is_cancelled = False
        self._is_closed = False

    def open(self) -> None:
        """Start all processes of the run at the same time; nobody waits for one that is not its own."""
        if self._package.callables is not None:
            self._callables = self._settle(CALLABLES)
        for house, replicas in self._housing.replicas.items():
            for _ in range(replicas):
                self._settle(house)

    def start(self, assignments: Sequence[Assignment[bytes]]) -> None:
        """Send each task to the least busy process of its house."""
        batches: dict[int, tuple[Process, list[Assignment[bytes]]]] = {}
        for assignment in assignments:
            process = self._choose(assignment)
            process.busy.add(assignment.instance)
            self._where[assignment.instance] = process
            self._assigned[assignment.instance] = assignment
            batches.setdefault(id(process), (process, []))[1].append(assignment)
        for process, batch in batches.values():
            orders = [wire_order(assignment, self._package) for assignment in batch]
            if len(orders) <= MOST_DIRECT:
                for order in orders:
                    self._send(process, self._perform(process, order))
            else:
                self._send(process, process.handle.accept.remote(self._package.run_id, orders))

    async def _perform(self, process: Process, order: WireOrder) -> None:
        """One call for one task: its report is the reply, which saves a message."""
        report: WireReport = await process.handle.perform.remote(self._package.run_id, order)
        await self._take([report])

    def stop(self, instances: Sequence[str]) -> None:
        """Stop running tasks; processes that do not let them go are ended."""
        self._is_cancelled = True
        concerned = {id(p): p for name in instances if (p := self._where.get(name)) is not None}
        for process in concerned.values():
            self._send(process, process.handle.stop.remote(self._package.run_id, list(instances)))

    def end_stuck(self) -> None:
        """End processes that still hold tasks; their tasks are reported by their deaths."""
        for process in {id(p): p for p in self._where.values()}.values():
            self._pool.lose(process, RuntimeError("ended, since it did not stop in time"))

    def reported(self, reports: Sequence[WireReport]) -> list[WireReport]:
        """Note which tasks are no longer running; reports of earlier dispatches of a task are left out."""
        fresh: list[WireReport] = []
        for report in reports:
            instance = instance_of(report.key)
            assigned = self._assigned.get(instance)
            if assigned is None or report.epoch != assigned.epoch:
                continue  # of a house that lost the task to another
            del self._assigned[instance]
            self._where.pop(instance).busy.discard(instance)
            fresh.append(report)
        return fresh

    async def close(self, *, keep: bool) -> None:
        """Let all processes go. From here on nothing is started, whatever dies."""
        self._is_closed = True
        processes = [process for group in self._processes.values() for process in group]
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
            self._send(process, process.handle.release.remote(self._package.run_id))
            return True
        try:
            async with asyncio.timeout(5):
                return bool(await process.handle.release.remote(self._package.run_id))
        except Exception as error:  # noqa: BLE001  a process that cannot be released is replaced
            _log.warning("An agent process could not be released and is ended: %s", message_of(error))
            return False

    # Processes.

    def locate(self, agent_key: str, *, lost: str | None = None) -> list[tuple[str, Any]]:
        """Names and handles of the processes of an agent, for another agent that asks it; none when the run has ended.

        Args:
            agent_key: Whose.
            lost: Name of one that failed a call of the asker.
        """
        if self._is_closed:
            return []
        house = self._housing.house_of[agent_key]
        for process in self._processes.get(house, []):
            if process.name == lost:
                self._pool.lose(process, RuntimeError("it could not be reached by another agent"))
        alive = self._alive(house) or [self._settle(house)]
        return [(process.name, process.handle) for process in alive]

    def _alive(self, house: str) -> list[Process]:
        return [process for process in self._processes.get(house, []) if process.is_alive]

    def _settle(self, house: str) -> Process:
        process = self._pool.take(self._kind_of(house))
        process.on_death = self._died
        self._processes.setdefault(house, []).append(process)
        self._send(process, self._bound(house, process))
        return process

    def _kind_of(self, house: str) -> Kind:
        if house == CALLABLES:
            return "callables"
        is_managed = self._package.plan.hierarchy is not None
        return "manager" if is_managed and house == self._housing.house_of.get(MANAGER_KEY) else "agent"

    async def _bound(self, house: str, process: Process) -> None:
        package = self._package
        callables = None
        if house == CALLABLES:
            agents: Mapping[str, bytes] = {}
            await process.handle.hold.remote(package.run_id, package.callables)
            if self._is_closed:
                return  # it was released, and is not to have the run for ever
        else:
            agents = {key: self._agents[key].body for key, home in self._housing.house_of.items() if home == house}
            if self._callables is not None:
                callables = self._callables.handle
        await process.handle.bind.remote(package.frame, agents, store=self._store, hub=self._hub, callables=callables)
        process.is_ready = True

    def _choose(self, assignment: Assignment[bytes]) -> Process:
        key = assignment.node.agent_key
        house = CALLABLES if key is None else self._housing.house_of[key]
        alive = self._alive(house)
        if not alive:
            return self._settle(house)
        return min(alive, key=lambda process: len(process.busy))

    def _send(self, process: Process, work: Awaitable[None]) -> None:
        """Await a call in the background; where it fails, the tasks of that process go on elsewhere, or fail."""

        async def sent() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001  whatever it is, the tasks must be reported
                if isinstance(error, ray.exceptions.RayActorError):
                    self._pool.lose(process, error)  # what it still does is refused
                elif process.is_alive:
                    self._fail(process, list(process.busy), _cause_of(error))

        job = asyncio.get_running_loop().create_task(sent())
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    # Failures.

    def _died(self, process: Process, error: BaseException) -> None:
        """Its tasks go on elsewhere, as often as that makes sense (S-DUR-31)."""
        # A death is heard of several times: by the watch and by each call that was on its way.
        if process is self._callables:
            self._stillborn = 0 if process.is_ready else self._stillborn + 1
            if self._stillborn < MOST_DEATHS:
                self._replace_callables()
        lost = [name for name, where in self._where.items() if where is process and name not in self._given_up]
        if not lost:
            return
        _log.warning("An agent process died with %d tasks: %s", len(lost), last_line(error))
        for name in lost:
            self._deaths[name] = self._deaths.get(name, 0) + 1
        hopeless = [name for name in lost if self._is_hopeless(name)]
        again = [self._assigned[name] for name in lost if name not in hopeless]
        process.busy.clear()
        if again:
            self.start([replace(assignment, epoch=assignment.epoch + REDISPATCH_STEP) for assignment in again])
        if hopeless:
            self._fail(process, hopeless, error)

    def _replace_callables(self) -> None:
        """Host the run's callables anew; who asked the lost process asks this one again."""
        self._callables = host = self._settle(CALLABLES)
        for house, group in self._processes.items():
            for process in group if house != CALLABLES else ():
                if process.is_alive:
                    self._send(process, process.handle.move_callables.remote(self._package.run_id, host.handle))

    def _is_hopeless(self, instance: str) -> bool:
        is_recorded = self._package.store is not None
        return self._is_cancelled or not is_recorded or self._deaths[instance] >= MOST_DEATHS

    def _fail(self, process: Process, lost: Sequence[str], error: BaseException) -> None:
        """Report tasks of a process: as failed, or as cancelled in a run that is being cancelled."""
        lost = [name for name in lost if name not in self._given_up and self._where.get(name) is process]
        self._given_up.update(lost)
        nodes = {instance_of(node.key): node for node in self._package.plan.nodes if instance_of(node.key) in lost}
        reports: list[WireReport] = []
        events: list[bytes] = []
        for instance in lost:
            node = nodes[instance]
            often = "" if self._deaths.get(instance, 0) < MOST_DEATHS else f" {MOST_DEATHS} times with this task"
            text = f"Agent '{node.agent_role}' failed: its process died{often} ({last_line(error)})"
            cause = (
                error
                if isinstance(error, EnsembleError)
                else AgentExecutionError(text, node.agent_role, node.description)
            )
            now = time.time()
            status: Literal["cancelled", "failed"] = "cancelled" if self._is_cancelled else "failed"
            epoch = self._assigned[instance].epoch
            result = TaskResult(
                key=node.key, instance=instance, epoch=epoch, status=status, at=now, duration_s=0.0, error=cause
            )
            reports.append(
                Report(
                    key=node.key,
                    status=status,
                    at=now,
                    epoch=epoch,
                    failure=cloudpickle.dumps(result),
                    error_type=type(cause).__name__,
                    message=message_of(cause),
                )
            )
            if self._hub is not None and status == "failed":
                events.append(pack_event(self._failed_event(instance, node, cause)))
        process.busy.difference_update(lost)
        if reports:
            self._send(process, self._report(reports, events))

    async def _report(self, reports: Sequence[WireReport], events: Sequence[bytes]) -> None:
        """Events first: the run may end with these reports, and its events are read until then (S-PAR-42)."""
        if events and TaskFailedEvent.method in self._package.frame.interest:
            try:
                await self._hub.publish.remote(self._package.run_id, events)
            except ray.exceptions.RayError as error:
                _log.warning("Run %s: the event hub cannot be reached: %s", self._package.run_id, error)
        await self._take(reports)

    def _failed_event(self, instance: str, node: Node, cause: BaseException) -> TaskFailedEvent:
        """The failed event of a task whose own process can send none any more (S-EVT-10)."""
        return TaskFailedEvent(
            run_id=self._package.run_id,
            instance=instance,
            task_description=node.description,
            agent_role=node.agent_role,
            task_index=node.index,
            total_tasks=self._package.frame.total_tasks,
            cause=cause,
            duration=timedelta(),
        )


def _cause_of(error: BaseException) -> BaseException:
    """The error behind Ray's wrapper."""
    inner = getattr(error, "cause", None)
    return inner if isinstance(inner, BaseException) else error
