"""Descriptions of a cluster's processes, tasks, limits and endpoints, and reports of its nodes, as JSON.

Readers ignore unknown fields, for other versions. An actor describes a bounded number of things and counts the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Literal, TypeAlias

from pydantic import TypeAdapter

#: Limits of a description: processes of an actor, tasks and runs of a process, agents of a run, buckets, endpoints.
MOST_PROCESSES, MOST_TASKS, MOST_AGENTS, MOST_BUCKETS, MOST_ENDPOINTS = 500, 50, 20, 200, 50
MOST_HOLDERS = 8

ActorKind: TypeAlias = Literal["scheduler", "agent", "manager", "callables", "journal", "limiter", "events", "driver"]
#: `starting`: has not answered yet, or waits for a node; `silent`: does not answer now; `kept`: idle, for a next run;
#: `retiring`: ends with its last run.
ActorState: TypeAlias = Literal["ready", "starting", "silent", "kept", "retiring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketDescription:
    name: str
    requests: int
    period_s: float
    tokens: int  # available
    waiting: int
    leased: int = 0  # held by processes, unused
    holders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointDescription:
    """A model endpoint, as one process sees it."""

    name: str
    state: Literal["closed", "open", "half_open"]  # `open`: the breaker blocks calls; `half_open`: it allows one probe
    probe_in_s: float | None = None  # None: closed, or a probe is allowed now
    last_failure: str = ""
    limit: int | None = None  # of concurrent calls, if the endpoint requested one
    sent: int = 0
    waiting: int = 0  # for the breaker or a slot


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDescription:
    run_id: str
    instance: str
    began_at: float | None = None  # Unix time, s; None: it waits there, or is in transit
    deaths: int = 0  # of processes that ran it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    run_id: str
    agents: tuple[str, ...] = ()  # roles
    more_agents: int = 0
    replica: int = 1  # 1-based, among the processes of these agents
    replicas: int = 1
    lost: int = 0  # predecessors that died


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDescription:
    name: str
    kind: ActorKind
    state: ActorState = "ready"
    node_id: str = ""  # empty: unknown
    host: str = ""
    pid: int | None = None
    memory_bytes: int | None = None
    reserved: str = ""
    restarts: int | None = None  # by Ray; None: unknown, or another process replaces it
    note: str = ""
    runs: tuple[RunDescription, ...] = ()
    more_runs: int = 0
    tasks: tuple[TaskDescription, ...] = ()
    more_tasks: int = 0
    queue: int = 0  # tasks that wait or are in transit
    endpoints: tuple[EndpointDescription, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorDescription:
    """An actor, the processes that it created, and its limits."""

    process: ProcessDescription
    processes: tuple[ProcessDescription, ...] = ()
    more_processes: int = 0
    buckets: tuple[BucketDescription, ...] = ()
    more_buckets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescription:
    node_id: str
    name: str  # host, or address
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDescription:
    address: str
    nodes: tuple[NodeDescription, ...] = ()
    actors: tuple[ActorDescription, ...] = ()
    notes: tuple[str, ...] = ()


@cache
def _actor() -> TypeAdapter[ActorDescription]:
    return TypeAdapter(ActorDescription)


@cache
def _cluster() -> TypeAdapter[ClusterDescription]:
    return TypeAdapter(ClusterDescription)


def dump_actor(described: ActorDescription) -> bytes:
    return _actor().dump_json(described)


def load_actor(body: bytes) -> ActorDescription:
    return _actor().validate_json(body)


def dump_cluster(described: ClusterDescription) -> bytes:
    return _cluster().dump_json(described)


def load_cluster(body: bytes) -> ClusterDescription:
    return _cluster().validate_json(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointQuestion:
    url: str  # without a user; empty: `OPENAI_BASE_URL` of the node
    has_key: bool = True  # else the node needs one


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuestion:
    packages: Sequence[str] = ()
    #: pickles with modules of the user, by a name such as `Agent 'Writer'`
    payloads: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    endpoints: Sequence[EndpointQuestion] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    address: str
    node_id: str = ""  # two nodes may share an address
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict[str, str])  # versions; empty: not installed
    unloadable: Mapping[str, str] = field(default_factory=dict[str, str])  # reasons, by the name of the payload
    endpoints: Mapping[str, str] = field(default_factory=dict[str, str])  # reasons, by URL; empty: it can be used
    refusal: str = ""  # empty: it answered
    duration_s: float = 0.0

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "duration_s": round(self.duration_s, 3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesReport:
    """The answers of all nodes, and the state of the asking process."""

    here: NodeReport
    nodes: Sequence[NodeReport]
    duration_s: float = 0.0

    @property
    def is_fine(self) -> bool:
        return all(not self.problems(node) for node in self.nodes)

    def problems(self, node: NodeReport) -> Sequence[tuple[str, str]]:
        if node.refusal:
            return ((node.refusal, "Look at the node: ray list nodes; or take it out of the cluster"),)
        return tuple(self._find_problems(node))

    def _find_problems(self, node: NodeReport) -> Iterator[tuple[str, str]]:
        if node.python != self.here.python:
            yield f"Python {node.python}, here {self.here.python}", "Use the same Python on all nodes"
        for name, version in self.here.packages.items():
            there = node.packages.get(name, "")
            if there != version:
                shown = f"{name} {there}" if there else f"{name} is missing"
                install = "Install the same version on all nodes, or ship it: ensemble-ray submit --pip"
                yield f"{shown}, here {version or 'missing'}", install
        for name, reason in node.unloadable.items():
            ship = "Ship it: ensemble-ray submit --working-dir DIRECTORY, or install it on that node"
            yield f"{name} cannot be loaded: {reason}", ship
        for url, reason in node.endpoints.items():
            if reason:
                check = (
                    "Check the network and the environment of that node: the agents that live there call the endpoint"
                )
                yield f"{url}: {reason}", check
