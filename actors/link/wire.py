"""What crosses processes inside a living cluster. Values only: data of ours travels as it is, user objects as bytes.

A scheduler passes bytes on and never loads them, so it runs no user code. What many orders share (the template of an
agent, a guardrail) is sent once under a name; whoever lacks it does not begin the order, says so, and is sent it. Nothing of
this is written to disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from ensemble_ray.actors.link.log_lines import LogLine
from ensemble_ray.execute.orders import RunContext, TaskOrder, TaskResult
from ensemble_ray.execute.outcomes import RunOutcome
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import NO_REASON, PlanRecorded, RecordedError
from ensemble_ray.plan.placement import PlacementRequest
from ensemble_ray.plan.plan import Plan
from ensemble_ray.plan.requirements import NOTHING, ResourceRequirements
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.runs.submission import SubmissionReason

__all__ = [
    "AgentTemplate",
    "Binding",
    "CallableRef",
    "CallablesUpdate",
    "Dispatch",
    "EndPage",
    "Keep",
    "OrderBatch",
    "RecordLocation",
    "ReportPage",
    "SessionOpening",
    "Submission",
    "TaskCallables",
    "WireFailure",
    "WireOrder",
    "WireOutcome",
    "WireResult",
    "driver_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFailure:
    """A failure as bytes, with what its scheduler needs to know of it."""

    body: bytes
    error_type: str = ""
    message: str = ""
    reason: RecordedError = NO_REASON
    newer_epoch: int = 0
    is_out_of_credit: bool = False


#: How a process is kept when its last run lets it go: some seconds for the next run of the same program, or longer for the next
#: run of any. None: it ends.
Keep: TypeAlias = Literal["briefly", "warm"]
#: What a coordinator, or an agent that delegates, sends to a process, and what comes back.
WireOrder: TypeAlias = TaskOrder[bytes, bytes, bytes]
WireResult: TypeAlias = TaskResult[bytes, WireFailure]
WireOutcome: TypeAlias = RunOutcome[bytes, WireFailure]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTemplate:
    """An agent on its way: its bytes, and what placement needs to know. Orders may carry data in which theirs differ."""

    key: str
    body: bytes
    #: agents of one category may share processes: same tools, same model
    category: str
    isolation: str | None = None
    #: None: nobody said
    replicas: int | None = 1
    #: whether the user declared it, and did not leave it to be made for a task
    is_declared: bool = True
    #: for messages; where orders differ in their agents' roles, that of the first
    role: str = ""
    #: what each of its processes asks of its node
    requirements: ResourceRequirements = NOTHING

    @property
    def placement(self) -> PlacementRequest:
        """What it asks of placement."""
        return PlacementRequest(
            key=self.key,
            category=self.category,
            isolation=self.isolation,
            replicas=self.replicas,
            is_declared=self.is_declared,
            requirements=self.requirements,
        )


class Binding(NamedTuple):
    """What a process is told of a run before its first order."""

    context: RunContext
    #: agents that other agents' work may be for, by key; others come with their orders
    templates: Mapping[str, bytes]
    #: where the run is recorded; None: nowhere
    location: RecordLocation | None


class Dispatch(NamedTuple):
    """What a process is sent to do."""

    run_id: str
    orders: Sequence[WireOrder]
    #: agents that the orders need and that the process was not sent before, by key
    templates: Mapping[str, bytes]


class CallableRef(NamedTuple):
    """Where a callable is found: in a pickle that is sent once."""

    bundle: str
    #: its position in a bundle of several, which travel together so that what they share stays shared; None: it is alone
    position: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCallables:
    """The callables of a task."""

    handler: CallableRef | None = None
    input_guardrails: tuple[CallableRef, ...] = ()
    output_guardrails: tuple[CallableRef, ...] = ()

    @property
    def bundles(self) -> Iterator[str]:
        """The bundles that they are in."""
        if self.handler is not None:
            yield self.handler.bundle
        for ref in (*self.input_guardrails, *self.output_guardrails):
            yield ref.bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class CallablesUpdate:
    """What the host of a run's callables is told: first what it needs no longer, then what is new."""

    #: bundle -> its bytes
    bundles: Mapping[str, bytes]
    #: task key -> its callables
    tasks: Mapping[str, TaskCallables]
    #: asked in order about each delegation
    policies: Sequence[CallableRef] = ()
    #: predicates of loops and conditions of edges, by path: `loop:refine/until/0`
    predicates: Mapping[str, CallableRef] = field(default_factory=dict[str, CallableRef])
    done_tasks: Sequence[str] = ()
    done_bundles: Sequence[str] = ()
    #: whether these are all that the run has, which is refused as a whole where some of it cannot be loaded
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """Where a run is recorded, and which node its files lie on."""

    address: StoreAddress
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpening:
    """What the scheduler is told of a run before its first order, by whoever coordinates it."""

    run_id: str
    #: which opening this is: the driver's id, and a number; the next one takes its place
    session: str = ""
    context: RunContext
    #: which process began it: its runs may share processes of the cluster; empty: with no other run
    program: str = ""
    #: None: it is recorded nowhere
    location: RecordLocation | None = None
    #: agents that are known from the beginning; others come with the orders that need them
    templates: Sequence[AgentTemplate] = ()
    #: callables that are known from the beginning
    callables: CallablesUpdate | None = None
    #: whether the driver listens: for events, or for requests to its services
    is_connected: bool = False
    #: whether the run goes on, since an earlier session of its driver was lost
    is_resubmission: bool = False


def driver_of(session: str) -> str:
    """Return whose session it is; a driver that dies has no successor of that id."""
    return session.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A planned run on its way from the driver to the scheduler."""

    run_id: str
    plan: Plan
    context: RunContext
    header: PlanRecorded
    #: effects of before scheduling
    preamble: Sequence[Fact] = ()
    templates: Sequence[AgentTemplate]
    #: task key -> the task's bytes, without context tasks, agent, handler and guardrails
    tasks: Mapping[str, bytes]
    #: None: nothing is asked
    callables: CallablesUpdate | None = None
    #: where the run is recorded, seen from the cluster's nodes; None: nowhere
    store: StoreAddress | None = None
    reason: SubmissionReason = SubmissionReason.FIRST
    #: whether the driver listens: for events, or for requests to its services
    is_connected: bool = False
    #: whether it goes on without the driver when somebody has decided at a gate that it waits for
    goes_on_alone: bool = False
    #: how agent processes are kept for the next run
    keep: Keep = "briefly"
    #: which process began it: its runs may share processes of the cluster; empty: with no other run
    program: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderBatch:
    """Orders that share a message, and what they need that was not sent before."""

    #: of the session, from 1; a batch that comes twice counts once
    number: int
    orders: Sequence[WireOrder]
    #: instance -> its callables, of tasks that have any
    callables: Mapping[str, TaskCallables] = field(default_factory=dict[str, TaskCallables])
    templates: Sequence[AgentTemplate] = ()
    #: bundle -> the bytes of the callable in it
    bundles: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    def list_payloads(self) -> dict[str, bytes]:
        """Return the pickles that orders share, by what people call them."""
        templates = {f"An agent of kind '{template.key}'": template.body for template in self.templates}
        return {**templates, **{f"A handler or guardrail ({name})": body for name, body in self.bundles.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPage:
    """What a session has for its driver."""

    #: how many entries were returned in this session, these included; told back, they are kept no longer
    cursor: int
    results: Sequence[WireResult]
    #: instances that were not begun: something that they need is not known here
    unknown: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPage:
    """What the driver of a planned run gets at a time of how it ended."""

    #: which end this is; that of a later run of the same id is another
    end_id: str
    #: how many entries came, these included; the next page begins there
    cursor: int
    is_last: bool
    #: how the run ended, with the entries of this page
    end: WireOutcome
    #: what the run's processes said last; None: the driver has to ask for it
    lines: Sequence[LogLine] | None = None
