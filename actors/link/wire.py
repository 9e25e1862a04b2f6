"""What crosses processes inside a living cluster. Values only: data of ours travels as it is, user objects as bytes.

A scheduler passes bytes on and never loads them, so it runs no user code. What many orders share (the template of an
agent, a guardrail) is sent once under a name; whoever lacks it does not begin the order, says so, and is sent it. Nothing of
this is written to disk.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from ensemble_ray.execute.orders import RunContext, RunOutcome, TaskOrder, TaskResult
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import NO_REASON, PlanRecorded, RecordedError
from ensemble_ray.plan.placement import NOTHING, PlacementRequest, ResourceRequirements
from ensemble_ray.plan.plan import Plan
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.runs.ports import SubmissionReason
from ensemble_ray.text.foreign_text import one_line

#: Logger of what the scheduler tells a run's driver of the cluster.
CLUSTER_LOGGER = "ensemble_ray.cluster"
#: Lines that one process forwards in a second.
LINES_PER_S = 20
#: Lines of a run that are kept until its driver takes them; the oldest are dropped.
_KEPT_LINES = 1000
#: Runs whose lines are kept though no driver asks for them just now.
_KEPT_RUNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line that a process of a run says."""

    text: str
    #: empty where it is not said in a task
    agent_role: str
    #: name of the logger; empty: it was printed
    logger: str = ""
    level: int = 0
    #: the message before its arguments were put in, by which a command knows what it tells in its own words
    template: str = ""
    #: frames of user code, of an error that was logged
    traceback: str = ""


def scheduler_line(text: str, logger: str, level: int = logging.WARNING) -> LogLine:
    """Return a line of the scheduler's own; people read their driver's log, and not the scheduler's."""
    return LogLine(text=str(one_line(text)), agent_role="", logger=logger, level=level)


class LineBudget:
    """How many lines may still be said in this second."""

    def __init__(self, lines_per_s: int = LINES_PER_S) -> None:
        self._lines_per_s = lines_per_s
        self._second = -math.inf
        self._admitted = 0
        self._left_out = 0

    def admit(self, at_s: float) -> bool:
        """Return whether a line may be said at that time; one that may not is counted."""
        if at_s - self._second >= 1.0:
            self._second, self._admitted = at_s, 0
        self._admitted += 1
        if self._admitted <= self._lines_per_s:
            return True
        self._left_out += 1
        return False

    def reset_left_out(self) -> int:
        """Return how many were left out since this was asked last."""
        count, self._left_out = self._left_out, 0
        return count


@dataclass(slots=True)
class _Box:
    lines: deque[LogLine] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: calls that wait for lines
    waiting: int = 0
    #: whether its last lines were taken
    is_drained: bool = False


class LineService:
    """Keeps lines until drivers take them; a part of the scheduler, which needs no further process for it."""

    def __init__(self) -> None:
        self._boxes: OrderedDict[str, _Box] = OrderedDict()

    async def put_lines(self, run_id: str, lines: Sequence[LogLine]) -> None:
        """Take lines of a run; returning is the acknowledgement."""
        self.add_lines(run_id, lines)

    def add_lines(self, run_id: str, lines: Sequence[LogLine]) -> None:
        """Take lines that this process itself has for a run's driver."""
        box = self._box(run_id)
        box.lines.extend(lines)
        box.changed.set()

    def is_listening(self, run_id: str) -> bool:
        """Return whether a call waits for lines of that run, which `drain_lines` then ends."""
        box = self._boxes.get(run_id)
        return box is not None and box.waiting > 0

    async def collect_lines(self, run_id: str, wait_s: float) -> Sequence[LogLine] | None:
        """Return what was said since the last call, None where others took the last lines; waits up to that long for something to come."""
        box = self._box(run_id)
        if not box.lines and wait_s > 0:
            box.changed.clear()
            box.waiting += 1
            try:
                await asyncio.wait_for(box.changed.wait(), wait_s)
            except TimeoutError:
                return None if box.is_drained else ()
            finally:
                box.waiting -= 1
        if box.is_drained:
            return None
        lines = tuple(box.lines)
        box.lines.clear()
        return lines

    async def drain_lines(self, run_id: str) -> Sequence[LogLine]:
        """Return what was said last; who still waits for lines hears that there are none, and none are kept from now on."""
        box = self._boxes.pop(run_id, None)
        if box is None:
            return ()
        lines = tuple(box.lines)
        box.lines.clear()
        box.is_drained = True
        box.changed.set()
        return lines

    def _box(self, run_id: str) -> _Box:
        if run_id not in self._boxes:
            self._boxes[run_id] = _Box()
        self._boxes.move_to_end(run_id)
        if len(self._boxes) > _KEPT_RUNS:
            # Those that drivers listen to stay, however many: a driver would only ask anew, and drop another's.
            left = [name for name, box in self._boxes.items() if not box.waiting and name != run_id]
            for name in left[: max(0, len(left) + 1 - _KEPT_RUNS)]:
                del self._boxes[name]
        return self._boxes[run_id]


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
