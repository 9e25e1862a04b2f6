"""The processes of active runs, from their records and from their clusters. Runs on the library's loop.

Only the scheduler of a cluster can map agents to processes. A helper process queries it, so that studio survives the death
of the cluster (S-STU-34).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol, cast

import psutil

from ensemble_ray.errors import EnsembleError, message_of
from ensemble_ray.process.concurrency import threads
from ensemble_ray.process.private_files import FoundCluster, find_cluster
from ensemble_ray.record.stores import RecordedRun, RunStore
from ensemble_ray.studio.http_server import ANYBODY, Visitor
from ensemble_ray.studio.reading import StudioReader
from ensemble_ray.studio.schemas import Actors, NodeActors, ProcessRun, ProcessTask
from ensemble_ray.studio.views.actors_view import ActorsQuestion, RunAndOwner, actors_of
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.values.metrics import ClusterDescription, load_cluster

_NO_CLUSTER = (
    "Without a Ray cluster, only the processes that own active runs are known. "
    "To see agents, start Studio with --address ADDRESS of their cluster."
)
_NOTHING = "No run is active, so there are no processes."
#: For visitors without access to the cluster: errors name addresses.
_UNASKED = "A cluster cannot be asked: more processes may work for these runs."
_OTHERS = "Shown are the processes that work for runs of this key's teams."
_MOST_STEPS = 200


class Cluster(Protocol):
    async def describe(self) -> ClusterDescription:
        """Return the description of the cluster. An EnsembleError: the query failed."""
        ...


class ClusterList(Protocol):
    """Selects the clusters to query."""

    async def clusters(self, owners: Sequence[int]) -> Sequence[Cluster]:
        """`owners` are the processes of this machine that own runs."""
        ...


class RunProcesses:
    """The processes that own runs of a store, and the processes of their clusters."""

    def __init__(self, store: RunStore, reader: StudioReader, clusters: ClusterList) -> None:
        self._store = store
        self._reader = reader
        self._clusters = clusters

    async def actors(self, visitor: Visitor, run_id: str | None = None) -> Actors:
        """Return the current processes. For one run: its owner and the processes with its agents."""
        if run_id is not None:
            await self._reader.check_visible(run_id, visitor)
        visible = [run for run in await self._store.runs() if visitor.may_see(run)]
        going_on = [run for run in visible if run.owner and run.state.is_active and run_id in {None, run.run_id}]
        owned = [await self._get_owned(run, visitor) for run in going_on]
        here = socket.gethostname()
        own = {run.pid for run in owned if run.pid is not None and run.host == here}
        is_asked = run_id is None or bool(going_on)  # no process works for an ended run
        found = await self._clusters.clusters(sorted(own)) if is_asked else ()
        answers = await asyncio.gather(*(each.describe() for each in found), return_exceptions=True)
        described = [each for each in answers if isinstance(each, ClusterDescription)]
        failures = [message_of(each) for each in answers if isinstance(each, EnsembleError)]
        for each in answers:
            if not isinstance(each, ClusterDescription | EnsembleError):
                raise each
        asked = ActorsQuestion(
            visible=frozenset(run.run_id for run in visible),
            is_all_seen=visitor.sees_cluster,
            run_id=run_id,
            at=time.time(),
        )
        told = actors_of(described, owned, asked)
        if failures and not visitor.sees_cluster:
            failures = [_UNASKED]
        nodes = await self._name_runs(told.nodes, visitor)
        notes = [told.note or "", *failures]
        if not found:
            notes.append(_NO_CLUSTER if told.nodes else _NOTHING)
        if not visitor.sees_cluster:
            notes.append(_OTHERS)
        return told.model_copy(update={"nodes": nodes, "note": " ".join(each for each in notes if each) or None})

    async def _name_runs(self, nodes: Sequence[NodeActors], visitor: Visitor) -> list[NodeActors]:
        """Add the names and subjects of the recorded runs."""
        ids = [run.run_id for node in nodes for process in node.processes for run in process.runs]
        rows = await self._reader.rows_of(ids, visitor)

        def name(run: ProcessRun) -> ProcessRun:
            row = rows.get(run.run_id)
            change = {} if row is None else {"ensemble": row.ensemble, "subject": row.subject}
            return run.model_copy(update=change)

        return [
            node.model_copy(
                update={
                    "processes": [
                        process.model_copy(update={"runs": [name(run) for run in process.runs]})
                        for process in node.processes
                    ]
                }
            )
            for node in nodes
        ]

    async def _get_owned(self, run: RecordedRun, visitor: Visitor) -> RunAndOwner:
        pid, host = run.owner_process or (None, "somewhere")
        steps = (await self._reader.steps(run.run_id, visitor, after=0)).steps
        running = [step for step in steps if step.status == "running" and not step.is_unit]
        shown = running[:_MOST_STEPS]
        memory_mb: float | None = None
        if pid is not None and host == socket.gethostname():
            with suppress(psutil.Error):
                memory_mb = round(psutil.Process(pid).memory_info().rss / 2**20, 1)
        return RunAndOwner(
            run_id=run.run_id,
            host=host,
            pid=pid,
            name=run.owner,
            running=[ProcessTask(run_id=run.run_id, step=step.id, since=step.started_at) for step in shown],
            more_running=max(0, len(running) - _MOST_STEPS),
            memory_mb=memory_mb,
        )


_LOCAL = "local"  # with this `RAY_ADDRESS` each program starts its cluster
_MOST = 4
_LASTING_S = 10.0  # a driver may start a cluster later


class LocalClusters:
    """Queries clusters, each through a separate process."""

    def __init__(self, address: str = "") -> None:
        self._named = ClusterProcess(address) if address not in {"", _LOCAL} else None
        self._found: OrderedDict[str, ClusterProcess] = OrderedDict()
        self._owners: dict[int, tuple[float, FoundCluster | None]] = {}  # by process id: end of validity and cluster

    async def clusters(self, owners: Sequence[int]) -> Sequence[ClusterProcess]:
        """Return the cluster with the given address, or else the clusters of these processes."""
        if self._named is not None:
            return [self._named]
        now = asyncio.get_running_loop().time()
        self._owners = {pid: held for pid, held in self._owners.items() if held[0] > now}
        found: list[FoundCluster] = []
        for pid in owners:
            if pid not in self._owners:
                looked = await threads.run(find_cluster, pid)
                self._owners[pid] = (asyncio.get_running_loop().time() + _LASTING_S, looked)
            if (each := self._owners[pid][1]) is not None:
                found.append(each)
        chosen = {each.address: each for each in found[-_MOST:]}
        for address, each in chosen.items():
            if address not in self._found:
                self._found[address] = ClusterProcess(address, dict(each.environment))
            self._found.move_to_end(address)
        while len(self._found) > _MOST:
            await self._found.popitem(last=False)[1].close()
        return [self._found[address] for address in chosen]

    async def close(self) -> None:
        asking = [*self._found.values(), *([self._named] if self._named else [])]
        await asyncio.gather(*(each.close() for each in asking))


async def look_at_actors(store: RunStore, run_id: str | None = None, *, cluster: str = "") -> Actors:
    """Return the processes of active runs of a store, and the processes of their clusters."""
    clusters = LocalClusters(cluster)
    try:
        return await RunProcesses(store, StudioReader(store, can_decide=False), clusters).actors(ANYBODY, run_id)
    finally:
        await clusters.close()


_MODULE = "ensemble_ray.actors.driver.cluster_probe"
_FIRST_S, _NEXT_S = 40.0, 20.0  # the first answer imports Ray and joins the cluster
_IDLE_S = 60.0
_PAUSE_S = 10.0  # between a failure and the next query
_MOST_BYTES = 64 * 2**20
_TOLD = 500
_start_process = asyncio.create_subprocess_exec


class ClusterProcess:
    """Queries one cluster. A failed query blocks further queries for a pause."""

    def __init__(self, address: str, environment: Mapping[str, str] | None = None) -> None:
        self._address = address
        self._environment = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None
        self._asking: asyncio.Task[ClusterDescription] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._failure: tuple[float, str] | None = None

    async def describe(self) -> ClusterDescription:
        """Concurrent calls share one query."""
        loop = asyncio.get_running_loop()
        if self._failure is not None and loop.time() < self._failure[0]:
            raise EnsembleError(self._failure[1])
        if self._asking is None or self._asking.done():
            self._asking = loop.create_task(self._ask())
        asking = self._asking
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not asking.cancelled() or (task is not None and task.cancelling()):
                raise
            raise EnsembleError(f"The cluster at {self._address} is not asked any more") from None

    async def close(self) -> None:
        """Cancel the current query and end the process. The next query starts a new one."""
        if self._idle is not None:
            self._idle.cancel()
        while self._asking is not None and not self._asking.done():
            self._asking.cancel()
            await asyncio.wait([self._asking])
        await self._end_process()
        if self._ending is not None:
            await self._ending

    async def _ask(self) -> ClusterDescription:
        loop = asyncio.get_running_loop()
        if self._idle is not None:
            self._idle.cancel()
        try:
            described = await self._exchange()
        except (OSError, ValueError, TimeoutError, EnsembleError) as error:
            await self._end_process()
            why = "it did not answer in time" if isinstance(error, TimeoutError) else one_line(str(error), _TOLD)
            text = f"The cluster at {self._address} cannot be asked: {why}"
            text = str(error) if isinstance(error, EnsembleError) else text
            self._failure = (loop.time() + _PAUSE_S, text)
            raise EnsembleError(text) from error
        self._failure = None
        self._idle = loop.call_later(_IDLE_S, self._end_if_idle)
        return described

    def _end_if_idle(self) -> None:
        if self._asking is None or self._asking.done():
            self._ending = asyncio.get_running_loop().create_task(self._end_process())

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _exchange(self) -> ClusterDescription:
        is_first = self._process is None or self._process.returncode is not None
        if is_first:
            starting = asyncio.create_task(self._start())
            try:
                await asyncio.shield(starting)
            except asyncio.CancelledError:
                await starting  # the cancelled query ends the process, so `_process` must be set
                raise
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None, "just made"  # noqa: S101, PT018  for the type
        async with asyncio.timeout(_FIRST_S if is_first else _NEXT_S):
            process.stdin.write(b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        if not line:
            raise EnsembleError(f"The cluster at {self._address} is gone, or cannot be joined")
        found: object = json.loads(line)
        said = cast("dict[str, object]", found) if isinstance(found, dict) else {}
        if "error" in said:
            shown = one_line(str(said["error"]), _TOLD)
            raise EnsembleError(f"The cluster at {self._address} cannot be asked: {shown}")
        return load_cluster(json.dumps(said.get("description")).encode())

    async def _start(self) -> None:
        self._process = await _start_process(
            sys.executable,
            "-m",
            _MODULE,
            self._address,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **self._environment},
            limit=_MOST_BYTES,
        )
