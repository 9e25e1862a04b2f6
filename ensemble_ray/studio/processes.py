"""The processes of active runs, from their records and from their clusters. Runs on the library's loop.

A record contains the owner of a run. Only the scheduler of a cluster can map agents to processes.
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
    "Told by the records: which process owns each active run. Only a cluster can report which process has which agent. Studio queries a "
    "cluster if you start it with --address or RAY_ADDRESS, or if a run of this machine belongs to the cluster."
)
_NOTHING = "No run goes on, so there are no processes."
#: Replaces errors, which name addresses, for visitors without access to the cluster.
_UNASKED = "A cluster cannot be asked: more processes may work for these runs."
_OTHERS = "Shown are the processes that work for runs of this key's teams."
#: Most steps in the answer for one process.
_MOST_STEPS = 200
_UNITS = frozenset({"loop", "iteration", "phase", "attempt", "graph", "state"})


class ProcessReader(Protocol):
    """Reads the current processes."""

    async def actors(self, visitor: Visitor, run_id: str | None = None) -> Actors:
        """Return the current processes: of one run, or of all runs that the visitor may see."""
        ...


class Cluster(Protocol):
    """A cluster that answers queries."""

    async def describe(self) -> ClusterDescription:
        """Return the description of the cluster from its actors.

        Raises:
            EnsembleError: the query failed.
        """
        ...


class ClusterList(Protocol):
    """Selects the clusters to query."""

    async def clusters(self, owners: Sequence[int]) -> Sequence[Cluster]:
        """Return the clusters; `owners` are the processes of this machine that own runs."""
        ...


class RunProcesses:
    """The processes that own runs of a store, and the processes of their clusters. Implements `ProcessReader`."""

    def __init__(self, store: RunStore, reader: StudioReader, clusters: ClusterList) -> None:
        self._store = store
        self._reader = reader
        self._clusters = clusters

    async def actors(self, visitor: Visitor, run_id: str | None = None) -> Actors:
        """Return the current processes. For one run: its owner and the processes with its agents.

        Raises:
            StudioRefusal: there is no such run.
            RecordError: the store cannot be read.
        """
        if run_id is not None:
            await self._reader.check_visible(run_id, visitor)
        visible = [run for run in await self._store.runs() if visitor.may_see(run)]
        going_on = [run for run in visible if run.owner and run.state.is_active and run_id in {None, run.run_id}]
        owned = [await self._get_owned(run, visitor) for run in going_on]
        here = socket.gethostname()
        own = {run.pid for run in owned if run.pid is not None and run.host == here}
        is_asked = run_id is None or bool(going_on)  # no process works for an ended run
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
        """Return the owner of a run, with its running steps."""
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
    """Return the descriptions of clusters, and the errors of the others."""
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
    """Return the resident memory of a process of this machine; None: it cannot be read."""
    try:
        return round(psutil.Process(pid).memory_info().rss / 2**20, 1)
    except psutil.Error:
        return None


#: Value of `RAY_ADDRESS` that makes each program start its cluster.
_LOCAL = "local"
#: Most clusters in one query.
_MOST = 4
#: How long the cluster of a process stays cached, s: a driver may start a cluster later.
_LASTING_S = 10.0


class LocalClusters:
    """Queries clusters, each through a separate process. Implements `ClusterList`."""

    def __init__(self, address: str = "") -> None:
        """Store the address.

        Args:
            address: Address of the cluster; empty: use the clusters of local runs.
        """
        self._named = ClusterProcess(address) if address not in {"", _LOCAL} else None
        self._found: OrderedDict[str, ClusterProcess] = OrderedDict()
        #: by process id: end of validity and cluster
        self._owners: dict[int, tuple[float, FoundCluster | None]] = {}

    async def clusters(self, owners: Sequence[int]) -> Sequence[ClusterProcess]:
        """Return the cluster with the given address, or else the clusters of these processes."""
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
        """End the query processes."""
        asking = [*self._found.values(), *([self._named] if self._named else [])]
        await asyncio.gather(*(each.close() for each in asking))

    async def _look(self, pid: int) -> FoundCluster | None:
        if pid not in self._owners:
            found = await threads.run(find_cluster, pid)
            self._owners[pid] = (asyncio.get_running_loop().time() + _LASTING_S, found)
        return self._owners[pid][1]


async def look_at_actors(store: RunStore, run_id: str | None = None, *, cluster: str = "") -> Actors:
    """Return the processes of active runs of a store, and the processes of their clusters.

    Args:
        store: Contains the records.
        run_id: Only the processes of this run; None: of all runs.
        cluster: Address of the cluster to query; empty: the clusters of runs of this machine.

    Raises:
        RecordError: the store cannot be read.
    """
    clusters = LocalClusters(cluster)
    try:
        return await RunProcesses(store, StudioReader(store, can_decide=False), clusters).actors(ANYBODY, run_id)
    finally:
        await clusters.close()
