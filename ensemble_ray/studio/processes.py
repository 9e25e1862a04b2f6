"""Which processes there are, and what they are doing: by the records, and by what clusters say.

In: the runs that go on, and who owns them; clusters that can be asked. Out: processes by node. Records say which process owns a run;
which process of a cluster has which agent is known to its scheduler alone. On the library's loop.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import psutil

from ensemble_ray.errors import EnsembleError, message_of
from ensemble_ray.process.forks import threads
from ensemble_ray.process.private_files import FoundCluster, find_cluster
from ensemble_ray.studio.cluster_process import ClusterProcess
from ensemble_ray.studio.http_server import ANYBODY
from ensemble_ray.studio.reading import StudioReader
from ensemble_ray.studio.schemas import TaskHere
from ensemble_ray.studio.views.actors_view import ActorsQuestion, RunAndOwner, actors_of

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RecordedRun, RunStore
    from ensemble_ray.studio.http_server import Visitor
    from ensemble_ray.studio.schemas import Actors
    from ensemble_ray.values.descriptions import ClusterDescription


_NO_CLUSTER = (
    "Told by the records: which process owns each run that goes on. Which process of a cluster has which agent is known to the cluster; "
    "studio asks it where it is started with --address or RAY_ADDRESS, or a run of this machine belongs to it."
)
_NOTHING = "No run goes on: nothing is to be told of processes."
#: In place of why, which names addresses, for who may not know of the cluster.
_UNASKED = "A cluster cannot be asked: more processes may work for these runs."
_OTHERS = "Shown are the processes that work for runs of this key's teams."
#: Steps that are told of one process.
_MOST_STEPS = 200
_UNITS = frozenset({"loop", "iteration", "phase", "attempt", "graph", "state"})


class ProcessReader(Protocol):
    """Looks at processes."""

    async def actors(self, visitor: Visitor, run_id: str | None = None) -> Actors:
        """Return the processes that are there now; of a run, those that work for it."""
        ...


class Cluster(Protocol):
    """A cluster that can be asked."""

    async def describe(self) -> ClusterDescription:
        """Return what its actors say.

        Raises:
            EnsembleError: it cannot be asked.
        """
        ...


class ClusterList(Protocol):
    """Knows which clusters to ask."""

    async def clusters(self, owners: Sequence[int]) -> Sequence[Cluster]:
        """Return them; `owners` are the processes of this machine that own runs."""
        ...


class RunProcesses:
    """The processes that own runs of a store, and those of the clusters that these are in. Fulfils `ProcessReader`."""

    def __init__(self, store: RunStore, reader: StudioReader, clusters: ClusterList) -> None:
        self._store = store
        self._reader = reader
        self._clusters = clusters

    async def actors(self, visitor: Visitor, run_id: str | None = None) -> Actors:
        """Return the processes that there are; of a run, its owner and those that have its agents.

        Raises:
            StudioRefusal: there is no such run.
            RecordError: the store cannot be read.
        """
        if run_id is not None:
            await self._reader.check_visible(run_id, visitor)
        visible = [run for run in await self._store.runs() if visitor.may_see(run)]
        going_on = [run for run in visible if run.owner and run.state.is_going_on and run_id in {None, run.run_id}]
        owned = [await self._get_owned(run, visitor) for run in going_on]
        here = socket.gethostname()
        own = {run.pid for run in owned if run.pid is not None and run.host == here}
        is_asked = run_id is None or bool(going_on)  # nothing works for a run that is over
        found = await self._clusters.clusters(sorted(own)) if is_asked else ()
        described, failures = await _describe_all(found)
        asked = ActorsQuestion(
            visible=frozenset(run.run_id for run in visible),
            is_all_seen=visitor.sees_cluster,
            run_id=run_id,
            at=time.time(),
        )
        told = actors_of(described, owned, asked)
        if failures and not visitor.sees_cluster:
            failures = [_UNASKED]
        notes = [told.note or "", *failures]
        if not found:
            notes.append(_NO_CLUSTER if told.nodes else _NOTHING)
        if not visitor.sees_cluster:
            notes.append(_OTHERS)
        return told.model_copy(update={"note": " ".join(each for each in notes if each) or None})

    async def _get_owned(self, run: RecordedRun, visitor: Visitor) -> RunAndOwner:
        """Return the owner of a run, and what its steps do."""
        pid, host = run.owner_process or (None, "somewhere")
        steps = (await self._reader.steps(run.run_id, visitor, after=0)).steps
        running = [step for step in steps if step.status == "running" and step.kind not in _UNITS]
        return RunAndOwner(
            run_id=run.run_id,
            host=host,
            pid=pid,
            name=run.owner,
            running=[
                TaskHere(run_id=run.run_id, step=step.id, since=step.started_at) for step in running[:_MOST_STEPS]
            ],
            more_running=max(0, len(running) - _MOST_STEPS),
            memory_mb=_memory_mb(pid) if pid is not None and host == socket.gethostname() else None,
        )


async def _describe_all(clusters: Sequence[Cluster]) -> tuple[list[ClusterDescription], list[str]]:
    """Return what clusters say, and why others say nothing."""
    answers = await asyncio.gather(*(each.describe() for each in clusters), return_exceptions=True)
    described: list[ClusterDescription] = []
    failures: list[str] = []
    for answer in answers:
        if isinstance(answer, EnsembleError):
            failures.append(message_of(answer))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            described.append(answer)
    return described, failures


def _memory_mb(pid: int) -> float | None:
    """Return what a process of this machine has in memory; None: it cannot be looked at."""
    try:
        return round(psutil.Process(pid).memory_info().rss / 2**20, 1)
    except psutil.Error:
        return None


#: What `RAY_ADDRESS` is where programs shall start a cluster of their own.
_LOCAL = "local"
#: Clusters that are asked at a time.
_MOST = 4
#: How long it holds which cluster a process is in, s: one that drives runs may start a cluster later.
_LASTING_S = 10.0


class LocalClusters:
    """Asks clusters, each through a process of its own. Fulfils `ClusterList`."""

    def __init__(self, address: str = "") -> None:
        """Make it; `address` is the cluster that was named, empty: none was."""
        self._named = ClusterProcess(address) if address not in {"", _LOCAL} else None
        self._found: OrderedDict[str, ClusterProcess] = OrderedDict()
        #: by process: until when it holds, and its cluster
        self._owners: dict[int, tuple[float, FoundCluster | None]] = {}

    async def clusters(self, owners: Sequence[int]) -> Sequence[ClusterProcess]:
        """Return the cluster that was named, else those of these processes."""
        if self._named is not None:
            return [self._named]
        now = asyncio.get_running_loop().time()
        self._owners = {pid: held for pid, held in self._owners.items() if held[0] > now}
        found = [each for each in [await self._look(pid) for pid in owners] if each is not None]
        chosen = {each.address: each for each in found[-_MOST:]}
        for address, each in chosen.items():
            if address not in self._found:
                self._found[address] = ClusterProcess(address, dict(each.environment))
            self._found.move_to_end(address)
        while len(self._found) > _MOST:
            await self._found.popitem(last=False)[1].close()
        return [self._found[address] for address in chosen]

    async def close(self) -> None:
        """End the processes that ask."""
        asking = [*self._found.values(), *([self._named] if self._named else [])]
        await asyncio.gather(*(each.close() for each in asking))

    async def _look(self, pid: int) -> FoundCluster | None:
        if pid not in self._owners:
            found = await threads.run(find_cluster, pid)
            self._owners[pid] = (asyncio.get_running_loop().time() + _LASTING_S, found)
        return self._owners[pid][1]


async def look_at_actors(store: RunStore, run_id: str | None = None, *, cluster: str = "") -> Actors:
    """Return the processes of runs of a store that go on, and those of their clusters.

    Args:
        store: Has the records.
        run_id: The run whose processes are asked for; None: all.
        cluster: Address of the cluster to ask; empty: those that runs of this machine are in.

    Raises:
        RecordError: the store cannot be read.
    """
    clusters = LocalClusters(cluster)
    try:
        return await RunProcesses(store, StudioReader(store, can_decide=False), clusters).actors(ANYBODY, run_id)
    finally:
        await clusters.close()
