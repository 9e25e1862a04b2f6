"""Agent processes: started, watched, pooled, ended. Used by the scheduler's sessions.

A process that a run has let go of is kept for the next one for a while, when asked; it is bound anew then, which costs
a thousandth of a new process.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ray

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.background_tasks import BackgroundTasks
from ensemble_ray.actors.link.endpoints import EndpointBoard
from ensemble_ray.actors.worker.agent import AgentActor
from ensemble_ray.actors.worker.callable_host import CallableHost
from ensemble_ray.actors.worker.manager import ManagerActor
from ensemble_ray.limits.endpoints import EndpointUpdate
from ensemble_ray.limits.steps import HolderGone
from ensemble_ray.plan.requirements import NOTHING, Node, ResourceRequirements, least_used
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.values.ids import new_object_id

__all__ = ["Process", "ProcessPool", "ProcessType"]

_log = bounded_logger(__name__)
#: How long an unused process is kept, s.
IDLE_S = 120.0
#: For how long others are taken before a node that lost a process, s: Ray may not know yet that the node itself is lost.
_DOUBT_S = 30.0
#: What a process is for; it is never used for anything else.
ProcessType = Literal["agent", "manager", "callables"]
_CLASSES: Mapping[ProcessType, type[object]] = {
    "agent": AgentActor,
    "manager": ManagerActor,
    "callables": CallableHost,
}


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """One agent process."""

    handle: Any
    #: also what it calls itself towards the rate limiter
    name: str
    type: ProcessType = "agent"
    #: where it was started; empty: anywhere
    node_id: str = ""
    #: what it reserves on its node
    requirements: ResourceRequirements = NOTHING
    is_alive: bool = True
    #: whether it has been bound to the current run
    is_ready: bool = False
    #: done when it is ready, or cannot be
    starting: asyncio.Task[None] | None = None
    #: templates of agents of the current run that it was sent, those sent last in the end
    templates: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])
    on_death: Callable[[Process, BaseException], None] | None = None
    timer: asyncio.TimerHandle | None = None


class ProcessPool:
    """All agent processes of this scheduler."""

    def __init__(self, scheduler: str = spawn.SCHEDULER) -> None:
        """Make it without processes; `scheduler` is the name of the one that has it."""
        self._scheduler = scheduler
        self._idle: list[Process] = []
        self._living: set[Process] = set()
        #: id of a node that lost a process -> until when others are taken before it
        self._doubted: dict[str, float] = {}
        self._board = EndpointBoard()
        self._watches = BackgroundTasks()

    def claim(
        self,
        process_type: ProcessType = "agent",
        *,
        requirements: ResourceRequirements = NOTHING,
        nodes: Sequence[Node] = (),
    ) -> Process:
        """Return an idle process of that type, or a fresh one; never waits, since calls queue up until it has started.

        Args:
            process_type: What it is for.
            requirements: What it asks of its node.
            nodes: It should be on that of these which has the fewest, unless it asks for something; none: it does not matter.
        """
        nodes = () if requirements else nodes  # Ray finds one that has it
        wanted = (process_type, requirements, bool(nodes))
        for process in self._idle:
            if (process.type, process.requirements, bool(process.node_id)) == wanted and process.is_alive:
                self._idle.remove(process)
                if process.timer is not None:
                    process.timer.cancel()
                return process
        if requirements:  # what idle ones reserve may be just what it would wait for
            for process in [each for each in self._idle if each.requirements]:
                self._expire(process)
        name = f"{process_type}-{new_object_id()[:8]}"
        node_id = least_used(self._trusted(nodes), Counter(each.node_id for each in self._living)) if nodes else ""
        handle = spawn.disposable(
            _CLASSES[process_type], name, self._scheduler, requirements=requirements, node_id=node_id
        )
        process = Process(handle=handle, name=name, type=process_type, node_id=node_id, requirements=requirements)
        self._living.add(process)
        for update in self._board.current(asyncio.get_running_loop().time()):
            process.handle.on_endpoint_update.remote(update)
        self._watches.start(self._watch(process))
        return process

    def _trusted(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Return the nodes that lost no process lately; all, where each did. Ray knows of a lost node only after some time."""
        now = asyncio.get_running_loop().time()
        return [node for node in nodes if self._doubted.get(node.node_id, 0.0) <= now] or nodes

    def put_back(self, process: Process, *, keep: bool) -> None:
        """Keep it for the next run, or end it."""
        is_placed = process.is_ready or not process.requirements  # else it may wait for a node, for nobody
        process.on_death = None
        process.is_ready = False
        process.templates.clear()
        if keep and process.is_alive and is_placed:
            process.timer = asyncio.get_running_loop().call_later(IDLE_S, self._expire, process)
            self._idle.append(process)
        else:
            self.end(process)

    def evict_idle(self) -> None:
        """End everything idle."""
        for process in list(self._idle):
            self._expire(process)

    def broadcast(self, update: EndpointUpdate, *, source: str) -> None:
        """Send an update to all processes but the one of that name; those that start later are sent the failures."""
        self._board.note(update, asyncio.get_running_loop().time())
        for process in self._living:
            if process.name != source:
                process.handle.on_endpoint_update.remote(update)

    def end(self, process: Process) -> None:
        """End a process now."""
        self._living.discard(process)
        process.is_alive = False
        ray.kill(process.handle)

    def lose(self, process: Process, error: BaseException) -> None:
        """Give up a process that failed a call, and tell whoever has it now; it may only be out of reach, so it is ended.

        Its watch may hear of a death later than this, and tells nobody then.
        """
        if process.is_alive:
            if process in self._idle:
                self._idle.remove(process)
            self.end(process)
            self._doubt(process.node_id)
            if process.on_death is not None:
                process.on_death(process, error)

    def _expire(self, process: Process) -> None:
        if process in self._idle:
            self._idle.remove(process)
            self.end(process)

    async def _watch(self, process: Process) -> None:
        """Notice its death; `watch` never returns while it lives."""
        try:
            await process.handle.watch.remote()
        except Exception as error:  # noqa: BLE001  any end of the watch is the end of the process
            was_alive, process.is_alive = process.is_alive, False
            self._living.discard(process)
            if process in self._idle:
                self._idle.remove(process)
            if was_alive:
                self._doubt(process.node_id)
                if process.on_death is not None:
                    process.on_death(process, error)
            _leave(process.name)

    def _doubt(self, node_id: str) -> None:
        if node_id:
            self._doubted[node_id] = asyncio.get_running_loop().time() + _DOUBT_S


def _leave(name: str) -> None:
    """Free what a dead process held or waited for: its permits, its journals. Who was never asked holds nothing."""
    limiter = spawn.existing("rate_limiter")
    if limiter is not None:
        limiter.receive.remote(HolderGone(holder=name))
    for journal in spawn.existing_journals():
        journal.leave.remote(name)
