"""What the page may do, what it is told before, and which processes there are. Package: studio. Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ensemble_ray.studio.schemas.wire import Text, Wire

__all__ = [
    "AcceptedAction",
    "Actors",
    "Breaker",
    "Decision",
    "Limiter",
    "NewFork",
    "NodeActors",
    "PreviewedCall",
    "PreviewedStep",
    "ProcessInfo",
    "RunPreview",
]


class Decision(Wire):
    """Body of `POST api/studio/reviews/RUN/GATE`.

    Attributes:
        text: Of an edit: what takes the place of the old text; it may be empty.
    """

    decision: Literal["approve", "edit", "exit"]
    text: str | None = None
    comment: str = ""


class NewFork(Wire):
    """Body of `POST api/studio/runs/ID/fork`.

    Attributes:
        from_: The step to do again, as `fork_spec` of a step says it.
        run_id: Name of the new run; null: it gets one.
    """

    from_: str = Field(validation_alias="from", min_length=1, max_length=1000)
    run_id: str | None = Field(default=None, max_length=128)


class AcceptedAction(Wire):
    """Answer 202: the run that goes on, ends or begins."""

    run_id: str


class PreviewedStep(Wire):
    """A step of a run that would go on."""

    step: str
    title: Text


class PreviewedCall(Wire):
    """A call of which nobody knows whether it was done."""

    step: str
    tool: Text
    arguments: Text


class RunPreview(Wire):
    """What a resumed or forked run would take from the record, and what it would do again.

    Attributes:
        reused: Steps whose outputs come from the record.
        asked_again: Steps that were begun, and are done again or to their end; of a fork, all from its step on.
        unknown_effects: Calls that a person has to decide of before.
        blocked: Why it cannot be done; null: it can.
    """

    reused: list[PreviewedStep] = Field(default_factory=list[PreviewedStep])
    asked_again: list[PreviewedStep] = Field(default_factory=list[PreviewedStep])
    unknown_effects: list[PreviewedCall] = Field(default_factory=list[PreviewedCall])
    blocked: Text | None = None


class ProcessInfo(Wire):
    """A process of a cluster.

    Attributes:
        queue: Work that waits there; null: nobody knows.
        in_flight: Steps that it is doing.
    """

    pid: int | None = None
    name: str
    agent: Text | None = None
    run_id: str | None = None
    kind: Literal["scheduler", "agent", "manager", "callables", "journal", "limiter", "events", "driver"]
    queue: int | None = None
    in_flight: list[str] = Field(default_factory=list)
    restarts: int | None = None
    alive: bool = True
    memory_mb: float | None = None


class NodeActors(Wire):
    """A node of a cluster, and the processes on it."""

    node: str
    address: str | None = None
    processes: list[ProcessInfo]


class Limiter(Wire):
    """A limit of requests.

    Attributes:
        queue: Requests that wait for a permit.
        permits: Permits that are there just now; null: nobody knows.
    """

    name: str
    queue: int
    permits: float | None = None


class Breaker(Wire):
    """Whether an endpoint of models is asked."""

    name: str
    state: str


class Actors(Wire):
    """Answer to `GET api/studio/actors`.

    Attributes:
        note: Why nothing, or not all, is known.
    """

    nodes: list[NodeActors] = Field(default_factory=list[NodeActors])
    limiters: list[Limiter] = Field(default_factory=list[Limiter])
    breakers: list[Breaker] = Field(default_factory=list[Breaker])
    note: str | None = None
