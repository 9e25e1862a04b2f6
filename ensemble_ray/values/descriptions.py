"""Descriptions of a cluster's processes, tasks, limits and endpoints, and reports of its nodes.

They travel as JSON. A reader ignores unknown fields, so that processes of two versions understand each other. An actor
describes a bounded number of things and counts the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, TypeAlias

from pydantic import TypeAdapter

#: Most processes, tasks and runs of a process, agents of a run in it, buckets and endpoints in the description of an actor.
MOST_PROCESSES, MOST_TASKS, MOST_AGENTS, MOST_BUCKETS, MOST_ENDPOINTS = 500, 50, 20, 200, 50
#: Most processes in the description of a bucket.
MOST_HOLDERS = 8

ActorKind: TypeAlias = Literal["scheduler", "agent", "manager", "callables", "journal", "limiter", "events", "driver"]
#: `starting`: has not answered yet, or waits for a node; `silent`: has begun, and does not answer now; `kept`: idle until a
#: next run; `retiring`: blocked, and ends with its last run.
ActorState: TypeAlias = Literal["ready", "starting", "silent", "kept", "retiring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketDescription:
    name: str
    #: permits per period
    requests: int
    period_s: float
    #: available permits
    tokens: int
    #: callers in its queue
    waiting: int
    #: unused permits that processes hold
    leased: int = 0
    #: some of the processes that request permits
    holders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointDescription:
    """A model endpoint, as one process sees it."""

    name: str
    #: `open`: the circuit breaker blocks calls; `half_open`: it allows one probe
    state: Literal["closed", "open", "half_open"]
    #: time until the next probe, s; None: the breaker is closed, or a probe is allowed now
    probe_in_s: float | None = None
    last_failure: str = ""
    #: most concurrent calls, after the endpoint requested fewer; None: no limit
    limit: int | None = None
    #: calls in flight
    sent: int = 0
    #: calls that wait for the breaker or for a slot under the limit
    waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDescription:
    run_id: str
    instance: str
    #: when it began in its process, Unix time in s; None: it waits there, or is in transit
    began_at: float | None = None
    #: how many processes died while they ran it
    deaths: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    run_id: str
    #: roles of the run's agents in the process
    agents: tuple[str, ...] = ()
    more_agents: int = 0
    #: 1-based number of the process among the processes of these agents, and their count
    replica: int = 1
    replicas: int = 1
    #: how many predecessors of this process died
    lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDescription:
    name: str
    kind: ActorKind
    state: ActorState = "ready"
    #: Ray's id of its node; empty: unknown
    node_id: str = ""
    host: str = ""
    pid: int | None = None
    memory_bytes: int | None = None
    #: resources that it reserves on its node
    reserved: str = ""
    #: how often Ray restarted it; None: unknown, or another process replaces it instead
    restarts: int | None = None
    note: str = ""
    runs: tuple[RunDescription, ...] = ()
    more_runs: int = 0
    tasks: tuple[TaskDescription, ...] = ()
    more_tasks: int = 0
    #: all tasks that wait there or are in transit
    queue: int = 0
    endpoints: tuple[EndpointDescription, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorDescription:
    """An actor, the processes that it created, and the limits that it owns."""

    process: ProcessDescription
    processes: tuple[ProcessDescription, ...] = ()
    more_processes: int = 0
    buckets: tuple[BucketDescription, ...] = ()
    more_buckets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescription:
    node_id: str
    #: its host's name, or its address
    name: str
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDescription:
    address: str
    nodes: tuple[NodeDescription, ...] = ()
    actors: tuple[ActorDescription, ...] = ()
    #: actors that did not answer, and advice
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
    #: base URL without a user; empty: the node's own `OPENAI_BASE_URL`
    url: str
    #: whether the model has its key, so that the node needs none
    has_key: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuestion:
    #: names of distributions that must have the same version
    packages: Sequence[str] = ()
    #: pickles that import modules of the user, by the user's name for them: `Agent 'Writer'`
    payloads: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    endpoints: Sequence[EndpointQuestion] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    #: Ray's address of the node
    address: str
    #: Ray's id of the node; two nodes may share an address
    node_id: str = ""
    python: str = ""
    #: versions by distribution; empty: not installed
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    #: why pickles cannot be loaded, by the user's name for them
    unloadable: Mapping[str, str] = field(default_factory=dict[str, str])
    #: why endpoints cannot be used, by shown URL; empty: they can be
    endpoints: Mapping[str, str] = field(default_factory=dict[str, str])
    #: why the node did not answer; empty: it did
    refusal: str = ""
    duration_s: float = 0.0

    def to_dict(self) -> dict[str, object]:
        return {
            "address": self.address,
            "node_id": self.node_id,
            "python": self.python,
            "packages": dict(self.packages),
            "unloadable": dict(self.unloadable),
            "endpoints": dict(self.endpoints),
            "refusal": self.refusal,
            "duration_s": round(self.duration_s, 3),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesReport:
    """The answers of all nodes, and the state of the process that sent the questions."""

    here: NodeReport
    nodes: Sequence[NodeReport]
    #: time until all nodes had answered
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
                connect = (
                    "Check the network and the environment of that node: the agents that live there call the endpoint"
                )
                yield f"{url}: {reason}", connect
