"""Agent processes: started, watched, pooled, ended. Used by the scheduler actor.

A process that a run has let go of is kept for the next one for a while, when asked; it is bound anew then, which costs
a thousandth of a new process.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import ray

from actors import spawn
from actors.link.endpoints import EndpointBoard
from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.ids import new_object_id
from ensemble_ray.limits.desk import Leave
from ensemble_ray.limits.endpoints import EndpointNews

__all__ = ["Kind", "Process", "ProcessPool"]

_log = bounded_logger(__name__)
#: How long an unused process is kept, s.
IDLE_S = 120.0
#: What a process is for; it is never used for anything else.
Kind = Literal["agent", "manager", "callables"]


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """One agent process."""

    handle: Any
    #: also what it calls itself towards the rate limiter
    name: str
    kind: Kind = "agent"
    #: whether it was placed where few others are, and not where there is room
    is_spread: bool = False
    #: instances it runs for the current run
    busy: set[str] = field(default_factory=set[str])
    is_alive: bool = True
    #: whether it has been bound to the current run
    is_ready: bool = False
    #: kinds of agents of the current run that it was sent, those sent last in the end
    kinds: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])
    on_death: Callable[[Process, BaseException], None] | None = None
    timer: asyncio.TimerHandle | None = None


class ProcessPool:
    """All agent processes of this scheduler."""

    def __init__(self) -> None:
        self._idle: list[Process] = []
        self._living: set[Process] = set()
        self._board = EndpointBoard()
        self._watches: set[asyncio.Task[None]] = set()

    def take(self, kind: Kind = "agent", *, is_spread: bool = False) -> Process:
        """An idle process of that kind, or a fresh one; never waits, since calls queue up until it has started.

        Args:
            kind: What it is for.
            is_spread: Whether it should be on a node that has few others.
        """
        for process in self._idle:
            if process.kind == kind and process.is_spread == is_spread and process.is_alive:
                self._idle.remove(process)
                if process.timer is not None:
                    process.timer.cancel()
                return process
        name = f"{kind}-{new_object_id()[:8]}"
        process = Process(handle=_begun(kind, name, is_spread=is_spread), name=name, kind=kind, is_spread=is_spread)
        self._living.add(process)
        for news in self._board.current(asyncio.get_running_loop().time()):
            process.handle.hear.remote(news)
        watch = asyncio.get_running_loop().create_task(self._watch(process))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return process

    def give_back(self, process: Process, *, keep: bool) -> None:
        """Keep it for the next run, or end it."""
        process.on_death = None
        process.is_ready = False
        process.busy.clear()
        process.kinds.clear()
        if keep and process.is_alive:
            process.timer = asyncio.get_running_loop().call_later(IDLE_S, self._expire, process)
            self._idle.append(process)
        else:
            self.end(process)

    def cool(self) -> None:
        """End everything idle."""
        for process in list(self._idle):
            self._expire(process)

    def tell(self, news: EndpointNews, *, source: str) -> None:
        """Let all processes but the one of that name hear news; those that start later hear of failures."""
        self._board.note(news, asyncio.get_running_loop().time())
        for process in self._living:
            if process.name != source:
                process.handle.hear.remote(news)

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
            if process.on_death is not None:
                process.on_death(process, error)

    def _expire(self, process: Process) -> None:
        if process in self._idle:
            self._idle.remove(process)
            self.end(process)

    async def _watch(self, process: Process) -> None:
        """Hear of its death; `watch` never returns while it lives."""
        try:
            await process.handle.watch.remote()
        except Exception as error:  # noqa: BLE001  any end of the watch is the end of the process
            was_alive, process.is_alive = process.is_alive, False
            self._living.discard(process)
            if process in self._idle:
                self._idle.remove(process)
            if was_alive and process.on_death is not None:
                process.on_death(process, error)
            _leave(process.name)


def _begun(kind: Kind, name: str, *, is_spread: bool) -> Any:
    match kind:
        case "agent":
            return spawn.agent_actor(name, is_spread=is_spread)
        case "manager":
            return spawn.manager_actor(name)
        case "callables":
            return spawn.callable_host(name)


def _leave(name: str) -> None:
    """Free what a dead process held or waited for: its permits, its journals. Who was never asked holds nothing."""
    limiter = spawn.existing("rate_limiter")
    if limiter is not None:
        limiter.receive.remote(Leave(holder=name))
    for journal in spawn.existing_journals():
        journal.leave.remote(name)
