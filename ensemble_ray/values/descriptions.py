"""What the actors of a cluster say of themselves: processes, tasks, limits, endpoints. Data only.

Each actor describes what it knows, at most so much, and says how much it left out. Descriptions travel as JSON, and fields that a
reader does not know are passed over, so that processes of two versions understand each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, TypeAlias

from pydantic import TypeAdapter

#: How much one actor says at most: processes, tasks and runs of one process, agents of one run in it, buckets, endpoints.
MOST_PROCESSES, MOST_TASKS, MOST_AGENTS, MOST_BUCKETS, MOST_ENDPOINTS = 500, 50, 20, 200, 50
#: Processes that one bucket names.
MOST_HOLDERS = 8

ActorKind: TypeAlias = Literal["scheduler", "agent", "manager", "callables", "journal", "limiter", "events", "driver"]
#: `starting`: it has not answered yet, or waits for a node; `silent`: it has begun, and does not answer now; `kept`: for a next run;
#: `retiring`: something is stuck in it, and it ends with its last run.
ActorState: TypeAlias = Literal["ready", "starting", "silent", "kept", "retiring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketDescription:
    """A limit of requests that several share."""

    name: str
    #: permits a period
    requests: int
    period_s: float
    #: permits that are there now
    tokens: int
    #: callers in its queue
    waiting: int
    #: permits that processes hold, and have not used
    leased: int = 0
    #: processes that asked for permits, some of them
    holders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointDescription:
    """An endpoint of models, as one process sees it."""

    name: str
    #: whether it is asked; `half_open`: one call goes as a probe, or may
    state: Literal["closed", "open", "half_open"]
    #: how long until a probe may go, s; None: the breaker is closed, or a probe may go now
    probe_in_s: float | None = None
    last_failure: str = ""
    #: calls that may be on their way at once, since it asked for fewer; None: any number
    limit: int | None = None
    #: calls on their way
    sent: int = 0
    #: calls that wait for the breaker or for a place under the limit
    waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDescription:
    """An execution of a task that is not reported."""

    run_id: str
    instance: str
    #: when it began in its process, Unix time in s; None: it waits there, or is on its way there
    began_at: float | None = None
    #: how many processes died with it
    deaths: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """A run's part of a process."""

    run_id: str
    #: roles of the agents of the run that live there
    agents: tuple[str, ...] = ()
    #: how many more there are
    more_agents: int = 0
    #: which of the processes of these agents it is, from 1, and how many there are
    replica: int = 1
    replicas: int = 1
    #: how many processes died in this one's place
    lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDescription:
    """A process of the cluster."""

    name: str
    kind: ActorKind
    state: ActorState = "ready"
    #: Ray's id of its node; empty: not known
    node_id: str = ""
    host: str = ""
    pid: int | None = None
    memory_bytes: int | None = None
    #: what it reserves on its node; empty: nothing
    reserved: str = ""
    #: how often Ray started it again; None: not known, or it is replaced instead
    restarts: int | None = None
    #: what else there is to say of it
    note: str = ""
    runs: tuple[RunDescription, ...] = ()
    more_runs: int = 0
    tasks: tuple[TaskDescription, ...] = ()
    more_tasks: int = 0
    #: tasks that wait there, or are on their way there, those that are left out counted
    queue: int = 0
    endpoints: tuple[EndpointDescription, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorDescription:
    """What one actor says: of itself, of the processes that it made, of the limits that it keeps."""

    process: ProcessDescription
    processes: tuple[ProcessDescription, ...] = ()
    more_processes: int = 0
    buckets: tuple[BucketDescription, ...] = ()
    more_buckets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescription:
    """A living node."""

    node_id: str
    #: its host's name, or its address
    name: str
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDescription:
    """What the actors of a cluster said."""

    address: str
    nodes: tuple[NodeDescription, ...] = ()
    actors: tuple[ActorDescription, ...] = ()
    #: who did not answer, and what to do
    notes: tuple[str, ...] = ()


@cache
def _actor() -> TypeAdapter[ActorDescription]:
    return TypeAdapter(ActorDescription)


@cache
def _cluster() -> TypeAdapter[ClusterDescription]:
    return TypeAdapter(ClusterDescription)


def dump_actor(described: ActorDescription) -> bytes:
    """Return a description as JSON."""
    return _actor().dump_json(described)


def load_actor(body: bytes) -> ActorDescription:
    """Return the description that `dump_actor` made; a pydantic `ValidationError` where it is none."""
    return _actor().validate_json(body)


def dump_cluster(described: ClusterDescription) -> bytes:
    """Return a description as JSON, in one line."""
    return _cluster().dump_json(described)


def load_cluster(body: bytes) -> ClusterDescription:
    """Return the description that `dump_cluster` made; a pydantic `ValidationError` where it is none."""
    return _cluster().validate_json(body)


_INSTALL = "Install the same version on all nodes, or ship it: ensemble-ray submit --pip"
_SHIP = "Ship it: ensemble-ray submit --working-dir DIRECTORY, or install it on that node"
_REACH = "Check the network and the environment of that node: the agents that live there call the endpoint"
_ANSWER = "Look at the node: ray list nodes; or take it out of the cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointQuestion:
    """A model's endpoint that a node shall reach."""

    #: base URL without a user; empty: what the node's own `OPENAI_BASE_URL` says
    url: str
    #: whether the model brings its key, so that the node needs none
    has_key: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuestion:
    """What a run needs on each node."""

    #: names of distributions whose versions count
    packages: Sequence[str] = ()
    #: pickles that name modules of the user's, by what the user calls them: `Agent 'Writer'`
    payloads: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    endpoints: Sequence[EndpointQuestion] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one node says of itself."""

    #: address of the node, as Ray has it
    address: str
    #: Ray's id of it; tells nodes of one address apart
    node_id: str = ""
    python: str = ""
    #: versions by distribution; empty: it is not installed
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    #: why pickles cannot be loaded, by what the user calls them
    unloadable: Mapping[str, str] = field(default_factory=dict[str, str])
    #: why endpoints cannot be used, by shown URL; empty: they can be
    endpoints: Mapping[str, str] = field(default_factory=dict[str, str])
    #: why it could not be asked; empty: it was
    refusal: str = ""
    duration_s: float = 0.0

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON data."""
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
    """What all nodes say, beside the process that asks."""

    #: of the process that asks
    here: NodeReport
    nodes: Sequence[NodeReport]
    #: how long it took to ask all of them
    duration_s: float = 0.0

    @property
    def is_fine(self) -> bool:
        """Whether a run can be begun."""
        return all(not self.problems(node) for node in self.nodes)

    def problems(self, node: NodeReport) -> Sequence[tuple[str, str]]:
        """Return what is wrong with a node, each with what to do about it."""
        if node.refusal:
            return ((node.refusal, _ANSWER),)
        return (*self._differences(node), *_failures(node))

    def _differences(self, node: NodeReport) -> Iterator[tuple[str, str]]:
        if node.python != self.here.python:
            yield f"Python {node.python}, here {self.here.python}", "Use the same Python on all nodes"
        for name, version in self.here.packages.items():
            there = node.packages.get(name, "")
            if there == version:
                continue
            shown = f"{name} {there}" if there else f"{name} is missing"
            yield f"{shown}, here {version or 'missing'}", _INSTALL


def _failures(node: NodeReport) -> Iterator[tuple[str, str]]:
    for name, reason in node.unloadable.items():
        yield f"{name} cannot be loaded: {reason}", _SHIP
    for url, reason in node.endpoints.items():
        if reason:
            yield f"{url}: {reason}", _REACH
