"""Which processes there are, and what they are doing: the port, and what records alone tell. Package: studio.

In: the runs that go on, and who owns them. Out: the processes that own runs, by host, with the steps that run there or in processes of
theirs. Records do not say which process of a cluster has which agent. On the library's loop.
"""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING, Protocol

import psutil

from ensemble_ray.studio.schemas.actions import Actors, NodeActors, ProcessInfo

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore, RunSummary
    from ensemble_ray.studio.reading import StudioReader
    from ensemble_ray.studio.visitors import Visitor

__all__ = ["OwnerProcesses", "ProcessReader"]

#: As stores describe owners.
_OWNER = re.compile(r"process (?P<pid>\d+) on (?P<host>.+)")
_NOTE = (
    "Told by the records: which process owns each run that goes on. Processes of agents on a cluster are not in them."
)
_NOTHING = "No run goes on: nothing is to be told of processes."
#: Steps that are told of one process.
_MOST_STEPS = 200


class ProcessReader(Protocol):
    """Looks at processes."""

    async def actors(self, visitor: Visitor, run_id: str | None = None) -> Actors:
        """Return the processes that are there now; of a run, those that work for it."""
        ...


class OwnerProcesses:
    """The processes that own runs of a store, as its records tell. Fulfils `ProcessReader`."""

    def __init__(self, store: RunStore, reader: StudioReader) -> None:
        self._store = store
        self._reader = reader

    async def actors(self, visitor: Visitor, run_id: str | None = None) -> Actors:
        """Return the processes that own runs which go on; of a run, its owner.

        Raises:
            StudioRefusal: there is no such run.
            RecordError: the store cannot be read.
        """
        if run_id is not None:
            await self._reader.check_visible(run_id, visitor)
        runs = [
            run
            for run in await self._store.runs()
            if run.owner and run.state.is_going_on and run_id in {None, run.run_id} and visitor.may_see(run)
        ]
        hosts: dict[str, list[ProcessInfo]] = {}
        for run in runs:
            host, process = await self._process(run, visitor)
            hosts.setdefault(host, []).append(process)
        nodes = [NodeActors(node=host, processes=found) for host, found in sorted(hosts.items())]
        return Actors(nodes=nodes, note=_NOTE if nodes else _NOTHING)

    async def _process(self, run: RunSummary, visitor: Visitor) -> tuple[str, ProcessInfo]:
        """Return the owner of a run, and its host."""
        named = _OWNER.fullmatch(run.owner)
        pid, host = (int(named["pid"]), named["host"]) if named else (None, "somewhere")
        steps = (await self._reader.steps(run.run_id, visitor, after=0)).steps
        running = [step.id for step in steps if step.status == "running" and step.kind not in _UNITS]
        process = ProcessInfo(
            pid=pid,
            name=run.owner,
            run_id=run.run_id,
            kind="driver",
            queue=sum(step.status == "ready" for step in steps),
            in_flight=running[:_MOST_STEPS],
            memory_mb=_memory_mb(pid) if pid is not None and host == socket.gethostname() else None,
        )
        return host, process


_UNITS = frozenset({"loop", "iteration", "phase", "attempt", "graph", "state"})


def _memory_mb(pid: int) -> float | None:
    """Return what a process of this machine has in memory; None: it cannot be looked at."""
    try:
        return round(psutil.Process(pid).memory_info().rss / 2**20, 1)
    except psutil.Error:
        return None
