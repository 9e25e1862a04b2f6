"""What crosses processes for runs whose tasks are made while they go on. Data of ours as it is, user objects as bytes.

A scheduler passes the bytes on and never loads them. Objects that many tasks share (a kind's template, a guardrail) are
sent once under a name; an order says which it needs, and whoever does not have one says so and is sent it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from actors.link.wire import RunPlace, WireOrder, WireReport
from ensemble_ray.execute.orders import RunFrame

__all__ = [
    "FedBatch",
    "FedKind",
    "FedOrder",
    "FedPackage",
    "FedPage",
    "MoreCallables",
    "TaskCallables",
    "driver_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FedPackage:
    """A fed run on its way from the driver to the scheduler."""

    run_id: str
    #: which opening this is: the driver's id, and a number; the next one takes its place
    session: str
    frame: RunFrame
    #: where the run is recorded, and on which node its files lie; None: nowhere
    place: RunPlace | None = None
    #: whether the driver listens: for events, or for requests to its services
    is_attended: bool = False
    #: whether the run goes on, since an earlier session of its driver was lost
    is_again: bool = False


def driver_of(session: str) -> str:
    """Whose session it is; a driver that dies has no successor of that id."""
    return session.partition("/")[0]


@dataclass(frozen=True, slots=True)
class FedKind:
    """The template of a kind of agents, and what housing needs to know of the kind."""

    body: bytes
    isolation: str | None
    #: None: nobody said
    replicas: int | None


@dataclass(frozen=True, slots=True)
class TaskCallables:
    """Names of a task's callables."""

    handler: str = ""
    input_guardrails: tuple[str, ...] = ()
    output_guardrails: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[str]:
        """All names."""
        if self.handler:
            yield self.handler
        yield from self.input_guardrails
        yield from self.output_guardrails


@dataclass(frozen=True, slots=True)
class FedOrder:
    """One task on its way from the driver; the key of its agent is that of the agent's kind."""

    order: WireOrder
    #: of the task, for whoever hears that it failed with its process
    description: str
    #: None: it has none
    callables: TaskCallables | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FedBatch:
    """Orders that share a message, and what they need that was not sent before."""

    #: of the session, from 1; a batch that comes twice counts once
    number: int
    orders: Sequence[FedOrder]
    kinds: Mapping[str, FedKind] = field(default_factory=dict[str, FedKind])
    #: name -> bytes of a callable
    callables: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    def bodies(self) -> dict[str, bytes]:
        """Pickles that orders share, by what people call them."""
        kinds = {f"An agent of kind '{name}'": kind.body for name, kind in self.kinds.items()}
        return {**kinds, **{f"A handler or guardrail ({name})": body for name, body in self.callables.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class FedPage:
    """What a fed run has for its driver."""

    #: how many entries were given in this session, these included; told back, they are kept no longer
    cursor: int
    reports: Sequence[WireReport]
    #: instances that were not begun: something that they need is not known here
    unknown: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreCallables:
    """What the host of a fed run's callables is told: first what it needs no longer, then what is new."""

    bodies: Mapping[str, bytes]
    #: task key -> its callables
    tasks: Mapping[str, TaskCallables]
    done_tasks: Sequence[str] = ()
    done_bodies: Sequence[str] = ()
