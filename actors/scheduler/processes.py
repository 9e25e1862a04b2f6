"""Agent processes for the scheduler's sessions.

A shared or idle process costs a thousandth of a new one. A process never gets another run while a thread or task of an
earlier one is stuck in it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import ray
from msgspec import Struct

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.limiter import EndpointBoard
from ensemble_ray.actors.link.reach import BackgroundTasks
from ensemble_ray.actors.link.wire import Keep
from ensemble_ray.actors.worker.agent import AgentActor, ManagerActor
from ensemble_ray.actors.worker.callable_host import CallableHost
from ensemble_ray.llm.limits.bucket import HolderGone
from ensemble_ray.llm.limits.endpoints import EndpointUpdate
from ensemble_ray.plan.placement import (
    NOTHING,
    ClusterNode,
    ResourceRequirements,
    SharedProcess,
    choose_shared,
    least_used,
)
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.metrics import RunDescription, TaskDescription

_log = bounded_logger(__name__)
KEPT_S: Mapping[Keep, float] = {"briefly": 10.0, "warm": 120.0}
#: How long a node that lost a process is avoided, s: Ray notices a lost node late.
_DOUBT_S = 30.0
ProcessType = Literal["agent", "manager", "callables"]
_CLASSES: Mapping[ProcessType, type[object]] = {"agent": AgentActor, "manager": ManagerActor, "callables": CallableHost}


class ProcessPool:
    def __init__(self, scheduler: str = spawn.SCHEDULER) -> None:
        self._scheduler = scheduler
        self._idle: list[AgentProcess] = []
        self._living: set[AgentProcess] = set()
        #: until when a node that lost a process is avoided
        self._doubted: dict[str, float] = {}
        self._board = EndpointBoard()
        self._watches = BackgroundTasks()

    def claim(
        self,
        run_id: str,
        process_type: ProcessType = "agent",
        *,
        program: str = "",
        requirements: ResourceRequirements = NOTHING,
        nodes: Sequence[ClusterNode] = (),
        share_from: int | None = None,
    ) -> Lease:
        """Lease a process to a run. Never waits: calls queue up until it has started.

        Args:
            requirements: Resources of its node; a process with requirements is never shared.
            nodes: Start it on the node with the fewest processes; empty: any node.
            share_from: How many shared processes its program has before the run joins one; None: it shares none.
        """
        nodes = () if requirements else nodes  # Ray chooses a node that has the resources
        share_from = None if requirements else share_from
        process = self._take_idle((process_type, requirements, bool(nodes)), program)
        if process is None and share_from is not None:
            process = self._find_shared(run_id, process_type, program, share_from)
        if process is None:
            # One process ends that waits briefly for another program, so that a series of short programs does not add up.
            others = (each for each in self._idle if each.keep == "briefly" and each.program != program)
            if (other := next(others, None)) is not None:
                self._expire(other)
            process = self._start(process_type, requirements, nodes)
        if not process.leases:
            process.program, process.is_shareable = program, share_from is not None
        lease = Lease(process=process, run_id=run_id)
        process.leases.append(lease)
        return lease

    def _take_idle(self, wanted: tuple[ProcessType, ResourceRequirements, bool], program: str) -> AgentProcess | None:
        for process in self._idle:
            is_wanted = (process.type, process.requirements, bool(process.node_id)) == wanted
            if is_wanted and process.is_alive and (process.keep == "warm" or process.program == program):
                self._idle.remove(process)
                if process.timer is not None:
                    process.timer.cancel()
                return process
        return None

    def _find_shared(
        self, run_id: str, process_type: ProcessType, program: str, share_from: int
    ) -> AgentProcess | None:
        shared = {
            each.name: each
            for each in self._living
            if (each.type, each.program, each.is_shareable, each.is_retired) == (process_type, program, True, False)
            and each.leases
        }
        candidates = [
            SharedProcess(
                name=each.name, runs=frozenset(lease.run_id for lease in each.leases), tasks=each.count_tasks()
            )
            for each in shared.values()
        ]
        name = choose_shared(run_id, candidates, most=share_from)
        return None if name is None else shared[name]

    def _start(
        self, process_type: ProcessType, requirements: ResourceRequirements, nodes: Sequence[ClusterNode]
    ) -> AgentProcess:
        if requirements:  # it may need just what idle processes reserve
            for process in [each for each in self._idle if each.requirements]:
                self._expire(process)
        name = f"{process_type}-{new_object_id()[:8]}"
        node_id = least_used(self._list_trusted(nodes), Counter(each.node_id for each in self._living)) if nodes else ""
        handle = spawn.disposable(
            _CLASSES[process_type], name, self._scheduler, requirements=requirements, node_id=node_id
        )
        process = AgentProcess(handle=handle, name=name, type=process_type, node_id=node_id, requirements=requirements)
        self._living.add(process)
        for update in self._board.current(asyncio.get_running_loop().time()):
            process.handle.on_endpoint_update.remote(update)
        self._watches.start(self._watch(process))
        return process

    def _list_trusted(self, nodes: Sequence[ClusterNode]) -> Sequence[ClusterNode]:
        """Return the nodes that lost no process recently, or all if each did."""
        now = asyncio.get_running_loop().time()
        return [node for node in nodes if self._doubted.get(node.node_id, 0.0) <= now] or nodes

    def put_back(self, lease: Lease, *, keep: Keep | None, is_clean: bool = True) -> None:
        """The last lease keeps or ends the process; a process that is not clean gets no more runs."""
        process = lease.process
        lease.on_death = lease.describe = None
        process.leases.remove(lease)
        process.is_retired = process.is_retired or not is_clean
        if process.leases:
            return
        is_placed = lease.is_ready or not process.requirements  # otherwise it may still wait for a node
        # A process that reserves resources is not kept briefly: another program may wait for them.
        is_useful = keep == "warm" or (process.program and not process.requirements)
        if keep and is_useful and process.is_alive and is_placed and not process.is_retired:
            process.keep = keep
            process.timer = asyncio.get_running_loop().call_later(KEPT_S[keep], self._expire, process)
            self._idle.append(process)
        else:
            self.end(process)

    def retire(self, process: AgentProcess) -> bool:
        """Assign no more runs to a process with a stuck task. Return False if only one run uses it, which may end it."""
        process.is_retired = True
        return process.is_shared

    @property
    def living(self) -> Sequence[AgentProcess]:
        return tuple(self._living)

    def is_idle(self, process: AgentProcess) -> bool:
        return process in self._idle

    def evict_idle(self) -> None:
        for process in list(self._idle):
            self._expire(process)

    def broadcast(self, update: EndpointUpdate, *, source: str) -> None:
        """Processes that start later receive the failures."""
        self._board.note(update, asyncio.get_running_loop().time())
        for process in self._living:
            if process.name != source:
                process.handle.on_endpoint_update.remote(update)

    def end(self, process: AgentProcess) -> None:
        self._living.discard(process)
        process.is_alive = False
        ray.kill(process.handle)

    def mark_lost(self, process: AgentProcess, error: BaseException) -> None:
        """End a process that failed a call, since it may only be unreachable, and notify the runs that use it."""
        if process.is_alive:
            if process in self._idle:
                self._idle.remove(process)
            self.end(process)
            self._doubt(process.node_id)
            _broadcast_death(process, error)

    def _expire(self, process: AgentProcess) -> None:
        if process in self._idle:
            self._idle.remove(process)
            self.end(process)

    async def _watch(self, process: AgentProcess) -> None:
        try:
            await process.handle.watch.remote()
        except Exception as error:  # noqa: BLE001  `watch` returns only when the process dies
            was_alive, process.is_alive = process.is_alive, False
            self._living.discard(process)
            if process in self._idle:
                self._idle.remove(process)
            if was_alive:
                self._doubt(process.node_id)
                _broadcast_death(process, error)
            if (limiter := spawn.existing("rate_limiter")) is not None:
                limiter.receive.remote(HolderGone(holder=process.name))
            for journal in spawn.existing_journals():
                journal.detach.remote(process.name)

    def _doubt(self, node_id: str) -> None:
        if node_id:
            self._doubted[node_id] = asyncio.get_running_loop().time() + _DOUBT_S


@dataclass(slots=True, kw_only=True, eq=False)
class AgentProcess:
    handle: Any
    name: str
    type: ProcessType = "agent"
    #: empty: any node
    node_id: str = ""
    requirements: ResourceRequirements = NOTHING
    is_alive: bool = True
    program: str = ""
    #: by runs of its program
    is_shareable: bool = False
    leases: list[Lease] = field(default_factory=list["Lease"], repr=False)
    #: whether a task is stuck in it; it ends with its last run
    is_retired: bool = False
    timer: asyncio.TimerHandle | None = None
    keep: Keep | None = None

    @property
    def is_shared(self) -> bool:
        return len(self.leases) > 1

    def count_tasks(self) -> int:
        return sum(lease.count_tasks() for lease in self.leases)


class LeaseDescription(Struct, frozen=True):
    run: RunDescription
    #: at most `MOST_TASKS`
    tasks: Sequence[TaskDescription]


class Lease(Struct, kw_only=True, eq=False):
    process: AgentProcess
    run_id: str
    is_ready: bool = False
    #: done when it is ready, or cannot be
    starting: asyncio.Task[None] | None = None
    #: that it was sent, the latest last
    templates: OrderedDict[str, None] = msgspec.field(default_factory=OrderedDict[str, None])
    on_death: Callable[[Lease, BaseException], None] | None = None
    count_tasks: Callable[[], int] = int
    #: None: it is being put back
    describe: Callable[[], LeaseDescription] | None = None

    @property
    def handle(self) -> Any:
        return self.process.handle

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def requirements(self) -> ResourceRequirements:
        return self.process.requirements

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive


def _broadcast_death(process: AgentProcess, error: BaseException) -> None:
    for lease in list(process.leases):
        if lease.on_death is not None:
            lease.on_death(lease, error)
