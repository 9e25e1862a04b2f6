"""Houses of one run on the cluster: which process gets which task, and what happens when a process dies.

The rule who lives where is `plan.housing`; here it is carried out. Fulfils the conductor's `Houses`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import cloudpickle
import ray.exceptions

from actors.failures import last_line
from actors.handles import pack_event
from actors.processes import Process, ProcessPool
from actors.wire import RunPackage, WireOrder, WireReport, wire_order
from ensemble_ray.errors import AgentExecutionError, EnsembleError, message_of
from ensemble_ray.events import TaskFailedEvent
from ensemble_ray.execute.conductor import Assignment, Report
from ensemble_ray.execute.orders import TaskResult
from ensemble_ray.ids import instance_of
from ensemble_ray.plan.housing import Lodger, assign_houses
from ensemble_ray.plan.plan import Node

__all__ = ["CALLABLES", "RunHouses"]

_log = logging.getLogger(__name__)
#: Tasks that start together on one process and are sent one call each; more of them share one message, and their
#: reports come back in batches (measured: two messages cost a third more than a call and its reply, one by one; by the
#: hundred a shared message is twenty times cheaper).
MOST_DIRECT = 4
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
        self._where: dict[str, Process] = {}
        #: tasks of lost processes that were reported here
        self._given_up: set[str] = set()
        self._jobs: set[asyncio.Task[None]] = set()
        self._is_cancelled = False

    def open(self) -> None:
        """Start all processes of the run at the same time; nobody waits for one that is not its own."""
        if self._package.callables is not None:
            self._settle(CALLABLES)
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
            process_is_alive, process.is_alive = process.is_alive, False
            if process_is_alive:
                self._pool.end(process)
                self._died(process, RuntimeError("ended, since it did not stop in time"))

    def reported(self, reports: Sequence[WireReport]) -> list[WireReport]:
        """Note which tasks are no longer running; a report of a task that was given up is left out."""
        fresh: list[WireReport] = []
        for report in reports:
            process = self._where.pop(instance_of(report.key), None)
            if process is not None:
                process.busy.discard(instance_of(report.key))
                fresh.append(report)
        return fresh

    async def close(self, *, keep: bool) -> None:
        """Let all processes go."""
        processes = [process for group in self._processes.values() for process in group]
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

    def _settle(self, house: str) -> Process:
        process = self._pool.take(is_callable_host=house == CALLABLES)
        process.on_death = self._died
        self._processes.setdefault(house, []).append(process)
        self._send(process, self._bound(house, process))
        return process

    async def _bound(self, house: str, process: Process) -> None:
        package = self._package
        callables = None
        if house == CALLABLES:
            agents: Mapping[str, bytes] = {}
            await process.handle.hold.remote(package.run_id, package.callables)
        else:
            agents = {key: self._agents[key].body for key, home in self._housing.house_of.items() if home == house}
            if any(counts != (0, 0) for counts in package.guardrails.values()):
                callables = self._processes[CALLABLES][-1].handle  # a lost one was replaced by a later one
        await process.handle.bind.remote(package.frame, agents, home=package.home, hub=self._hub, callables=callables)
        process.is_ready = True

    def _choose(self, assignment: Assignment[bytes]) -> Process:
        key = assignment.node.agent_key
        house = CALLABLES if key is None else self._housing.house_of[key]
        alive = [process for process in self._processes.get(house, []) if process.is_alive]
        if not alive:
            return self._settle(house)
        return min(alive, key=lambda process: len(process.busy))

    def _send(self, process: Process, work: Awaitable[None]) -> None:
        """Await a call in the background; its failure fails the tasks of that process."""

        async def sent() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001  whatever it is, the tasks must be reported
                if process.is_alive:
                    # Its watch may hear of a death later than this; until then no task must be sent there.
                    process.is_alive = not isinstance(error, ray.exceptions.RayActorError)
                    self._fail(process, _cause_of(error))

        job = asyncio.get_running_loop().create_task(sent())
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    # Failures.

    def _died(self, process: Process, error: BaseException) -> None:
        _log.warning("An agent process died with %d tasks: %s", len(process.busy), message_of(error))
        self._fail(process, error)

    def _fail(self, process: Process, error: BaseException) -> None:
        """Report all tasks of a process: as failed, or as cancelled in a run that is being cancelled."""
        # A death is heard of several times: by the watch and by each call that was on its way.
        lost = [name for name, where in self._where.items() if where is process and name not in self._given_up]
        self._given_up.update(lost)
        nodes = {instance_of(node.key): node for node in self._package.plan.nodes if instance_of(node.key) in lost}
        reports: list[WireReport] = []
        events: list[bytes] = []
        for instance in lost:
            node = nodes[instance]
            text = f"Agent '{node.agent_role}' failed: its process died ({last_line(error)})"
            cause = (
                error
                if isinstance(error, EnsembleError)
                else AgentExecutionError(text, node.agent_role, node.description)
            )
            now = time.time()
            status: Literal["cancelled", "failed"] = "cancelled" if self._is_cancelled else "failed"
            result = TaskResult(key=node.key, instance=instance, status=status, at=now, duration_s=0.0, error=cause)
            reports.append(
                Report(
                    key=node.key,
                    status=status,
                    at=now,
                    failure=cloudpickle.dumps(result),
                    error_type=type(cause).__name__,
                    message=message_of(cause),
                )
            )
            if self._hub is not None and status == "failed":
                events.append(pack_event(self._failed_event(instance, node, cause)))
        process.busy.clear()
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
