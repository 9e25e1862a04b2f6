"""The processes of clusters as the page shows them: by node, with limits and breakers. Pure.

A visitor without access to the whole cluster sees only processes that work for its runs, and no limits or endpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from ensemble_ray.studio.schemas import (
    Actors,
    BreakerSchema,
    LimiterSchema,
    NodeActors,
    ProcessInfo,
    ProcessRun,
    ProcessTask,
)
from ensemble_ray.values import metrics as descriptions

_RANK = {"closed": 0, "half_open": 1, "open": 2}
_MOST = 200
_NO_NODE = "no node yet"
#: For visitors without access to the whole cluster: notes name actors.
_INCOMPLETE = "Not all of the cluster answered: more processes may work for these runs."
_ORDER = ("driver", "scheduler", "manager", "agent", "callables", "limiter", "events", "journal")


class RunAndOwner(Struct, frozen=True, kw_only=True):
    """An active run, and the process that owns it according to its record."""

    run_id: str
    host: str
    pid: int | None
    name: str  # of the owner
    running: Sequence[ProcessTask] = ()
    more_running: int = 0
    memory_mb: float | None = None


class ActorsQuestion(Struct, frozen=True, kw_only=True):
    visible: Collection[str]  # recorded runs that the visitor may see
    is_all_seen: bool  # also processes of other runs, limits and endpoints
    run_id: str | None = None  # None: all runs
    at: float  # Unix time, s

    def may_tell(self, run_id: str) -> bool:
        return self.is_all_seen or run_id in self.visible


def actors_of(
    clusters: Sequence[descriptions.ClusterDescription], owned: Sequence[RunAndOwner], asked: ActorsQuestion
) -> Actors:
    """Return the processes of clusters, and those that own runs, by node."""
    places = _Places(clusters)
    owners: dict[tuple[str, int | None, str], list[RunAndOwner]] = {}
    for each in owned:
        owners.setdefault((each.host, each.pid, each.name), []).append(each)
    hosted: set[str] = set()
    buckets: list[LimiterSchema] = []
    endpoints: list[descriptions.EndpointDescription] = []
    more = 0
    residents = {
        process.name: [agent for run in process.runs for agent in run.agents]
        for cluster in clusters
        for actor in cluster.actors
        for process in actor.processes
    }
    for actor in (actor for cluster in clusters for actor in cluster.actors):
        scheduler = actor.process.name if actor.process.kind == "scheduler" else None
        has_shown = False
        for process in actor.processes:
            ids = {each.run_id for each in process.runs} | {each.run_id for each in process.tasks}
            is_visible = asked.is_all_seen or any(map(asked.may_tell, ids))
            if not (is_visible if asked.run_id is None else asked.run_id in ids):
                continue
            has_shown = True
            hosted.update(run.run_id for run in process.runs)
            places.add(process.node_id, process.host, _agents_info(process, asked, scheduler))
            endpoints += process.endpoints
        here = [key for key in owners if key[:2] == (actor.process.host, actor.process.pid)]
        for key in here:
            del owners[key]
        # A run shows its scheduler and the limiter that can delay it.
        is_alone = asked.is_all_seen and (asked.run_id is None or actor.process.kind == "limiter")
        if here or has_shown or is_alone:
            places.add(actor.process.node_id, actor.process.host, _shared_info(actor.process, asked))
        if asked.is_all_seen:
            more += actor.more_processes
            buckets += [_limiter(each, residents) for each in actor.buckets]
    for runs in owners.values():
        places.add("", runs[0].host, _owner_info(runs, hosted))
    left_out = f"{more} more processes have less to do and are not shown. " if more else ""
    notes = [note for each in clusters for note in each.notes]
    if notes and not asked.is_all_seen:
        notes = [_INCOMPLETE]
    return Actors(
        nodes=places.nodes(),
        limiters=sorted(buckets, key=lambda each: (-each.queue, each.name)),
        breakers=_breakers(endpoints, asked.at) if asked.is_all_seen else [],
        clusters=[each.address for each in clusters] if asked.is_all_seen else [],
        note=(left_out + " ".join(notes)).strip() or None,
    )


class _Places:
    """Nodes by id, and other hosts by name."""

    def __init__(self, clusters: Iterable[descriptions.ClusterDescription]) -> None:
        self._nodes: dict[str, NodeActors] = {}
        self._by_name: dict[str, NodeActors] = {}
        for cluster in clusters:
            for node in cluster.nodes:
                # Clusters may share a machine.
                made = NodeActors(node=node.name, address=node.address or None, processes=[])
                self._nodes[node.node_id] = self._by_name.setdefault(node.name, made)

    def add(self, node_id: str, host: str, process: ProcessInfo) -> None:
        name = host or _NO_NODE
        node = self._nodes.get(node_id) or self._by_name.get(host)
        if node is None:
            node = self._by_name[name] = NodeActors(node=name, processes=[])
        node.processes.append(process)

    def nodes(self) -> list[NodeActors]:
        found = [each for each in self._by_name.values() if each.processes]
        for node in found:
            node.processes.sort(key=lambda process: (_ORDER.index(process.kind), process.name))
        return sorted(found, key=lambda each: (each.node == _NO_NODE, each.node))


def _agents_info(process: descriptions.ProcessDescription, asked: ActorsQuestion, scheduler: str | None) -> ProcessInfo:
    runs = [each for each in process.runs if asked.may_tell(each.run_id)]
    tasks = [each for each in process.tasks if asked.may_tell(each.run_id) and asked.run_id in {None, each.run_id}]
    is_whole = asked.is_all_seen and asked.run_id is None
    return ProcessInfo(
        pid=process.pid,
        name=process.name,
        kind=process.kind,
        state=process.state,
        runs=[
            ProcessRun(
                run_id=each.run_id,
                known=each.run_id in asked.visible,
                agents=list(each.agents),
                more_agents=each.more_agents,
                replica=each.replica,
                replicas=each.replicas,
            )
            for each in runs
        ],
        more_runs=process.more_runs if asked.is_all_seen else 0,
        queue=process.queue if is_whole else sum(each.began_at is None for each in tasks),
        in_flight=[
            ProcessTask(
                run_id=each.run_id,
                step=each.instance,
                since=None if each.began_at is None else round(each.began_at * 1000),
                deaths=each.deaths,
            )
            for each in tasks
        ],
        more_in_flight=process.more_tasks if is_whole else 0,
        restarts=max((each.lost for each in runs), default=0),
        scheduler=scheduler,
        reserved=process.reserved or None,
        memory_mb=_megabytes(process.memory_bytes),
    )


def _owner_info(runs: Sequence[RunAndOwner], hosted: Collection[str]) -> ProcessInfo:
    """Return a process that owns runs. Known processes of the cluster report their tasks themselves."""
    own = [each for each in runs if each.run_id not in hosted]
    running = [task for each in own for task in each.running]
    return ProcessInfo(
        pid=runs[0].pid,
        name=runs[0].name,
        kind="driver",
        runs=[ProcessRun(run_id=each.run_id) for each in runs[:_MOST]],
        more_runs=max(0, len(runs) - _MOST),
        queue=0,
        in_flight=running[:_MOST],
        more_in_flight=max(0, len(running) - _MOST) + sum(each.more_running for each in own),
        memory_mb=runs[0].memory_mb,
    )


def _shared_info(process: descriptions.ProcessDescription, asked: ActorsQuestion) -> ProcessInfo:
    """Only a view of all runs has the queue of a scheduler: it holds work of all runs."""
    is_whole = asked.is_all_seen and asked.run_id is None
    return ProcessInfo(
        pid=process.pid,
        name=process.name,
        kind=process.kind,
        state=process.state,
        queue=(process.queue if is_whole else 0) if process.kind == "scheduler" else None,
        restarts=process.restarts,
        memory_mb=_megabytes(process.memory_bytes),
        note=(process.note if asked.is_all_seen else "") or None,
    )


def _limiter(bucket: descriptions.BucketDescription, residents: Mapping[str, Sequence[str]]) -> LimiterSchema:
    """With the agents of the processes that request permits, since most limit names are generated."""
    agents = dict.fromkeys(agent for name in bucket.holders for agent in residents.get(name, ()))
    return LimiterSchema(
        name=bucket.name,
        requests=bucket.requests,
        period_s=bucket.period_s,
        queue=bucket.waiting,
        permits=bucket.tokens,
        leased=bucket.leased,
        agents=list(agents)[: descriptions.MOST_AGENTS],
    )


def _breakers(endpoints: Iterable[descriptions.EndpointDescription], at: float) -> list[BreakerSchema]:
    """Return each endpoint once, with the worst state and the sums over all processes."""
    found: dict[str, list[descriptions.EndpointDescription]] = {}
    for each in endpoints:
        found.setdefault(each.name, []).append(each)
    breakers: list[BreakerSchema] = []
    for name, seen in found.items():
        worst = max(seen, key=lambda each: _RANK[each.state])
        probes = [each.probe_in_s for each in seen if each.probe_in_s is not None]
        limits = [each.limit for each in seen if each.limit is not None]
        breakers.append(
            BreakerSchema(
                name=name,
                state=worst.state,
                processes=len(seen),
                open_in=sum(each.state != "closed" for each in seen),
                probe_at=round((at + min(probes)) * 1000) if probes else None,
                last_failure=worst.last_failure or None,
                sent=sum(each.sent for each in seen),
                queue=sum(each.waiting for each in seen),
                limit=sum(limits) if limits else None,
            )
        )
    return sorted(breakers, key=lambda each: (-_RANK[each.state], each.limit is None, each.name))


def _megabytes(size: int | None) -> float | None:
    return None if size is None else round(size / 2**20, 1)
