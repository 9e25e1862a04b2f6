"""Which processes there are, what they do, and which limits hold them up. Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ensemble_ray.studio.schemas.wire import Millis, StudioSchema, Text


class TaskHere(StudioSchema):
    """A step that a process has.

    Attributes:
        since: When it began there; null: it waits there, or is on its way there.
        deaths: How many processes died with it.
    """

    run_id: str
    step: str
    since: Millis | None = None
    deaths: int = 0


class RunHere(StudioSchema):
    """A run that has a process.

    Attributes:
        known: Whether it is recorded here.
        agents: Roles of its agents that live there.
        replica: Which of the processes of these agents it is, of so many.
    """

    run_id: str
    known: bool = True
    agents: list[Text] = Field(default_factory=list[str])
    more_agents: int = 0
    replica: int = 1
    replicas: int = 1


class ProcessInfo(StudioSchema):
    """A process of a cluster, or one that owns a run.

    Attributes:
        state: `silent`: it does not answer; `kept`: for a next run; `retiring`: it ends with the runs that it has.
        queue: Work that waits there; null: nobody knows.
        in_flight: Steps that it has, those that began first, and how many more there are.
        restarts: How many processes died in its place; null: nobody knows.
        reserved: What it reserves on its node.
    """

    pid: int | None = None
    name: str
    kind: Literal["scheduler", "agent", "manager", "callables", "journal", "limiter", "events", "driver"]
    state: Literal["ready", "starting", "silent", "kept", "retiring"] = "ready"
    runs: list[RunHere] = Field(default_factory=list[RunHere])
    more_runs: int = 0
    queue: int | None = None
    in_flight: list[TaskHere] = Field(default_factory=list[TaskHere])
    more_in_flight: int = 0
    restarts: int | None = None
    scheduler: str | None = None
    reserved: Text | None = None
    memory_mb: float | None = None
    note: Text | None = None


class NodeActors(StudioSchema):
    """A node of a cluster, and the processes on it."""

    node: str
    address: str | None = None
    processes: list[ProcessInfo]


class LimiterSchema(StudioSchema):
    """A limit of requests.

    Attributes:
        queue: Requests that wait for a permit.
        permits: Permits that are there just now.
        leased: Permits that processes hold and have not used.
        agents: Who lives in the processes that asked for permits.
    """

    name: str
    requests: int
    period_s: float
    queue: int
    permits: int
    leased: int = 0
    agents: list[Text] = Field(default_factory=list[str])


class BreakerSchema(StudioSchema):
    """Whether an endpoint of models is asked, by all processes together.

    Attributes:
        state: Of the process in which it is worst.
        open_in: In how many of the processes it is not closed.
        probe_at: When the next call may try it; null: nobody waits for that.
        sent: Calls on their way.
        queue: Calls that wait.
        limit: Calls that may be on their way at once, since it asked for fewer; null: any number.
    """

    name: str
    state: Literal["closed", "open", "half_open"]
    processes: int
    open_in: int = 0
    probe_at: Millis | None = None
    last_failure: Text | None = None
    sent: int = 0
    queue: int = 0
    limit: int | None = None


class Actors(StudioSchema):
    """Answer to `GET api/studio/actors`.

    Attributes:
        clusters: Addresses of the clusters that were asked.
        note: Why nothing, or not all, is known.
    """

    nodes: list[NodeActors] = Field(default_factory=list[NodeActors])
    limiters: list[LimiterSchema] = Field(default_factory=list[LimiterSchema])
    breakers: list[BreakerSchema] = Field(default_factory=list[BreakerSchema])
    clusters: list[str] = Field(default_factory=list[str])
    note: Text | None = None
