"""Values that processes of a living cluster send to each other. User objects are bytes, which a scheduler never loads.

Shared parts of orders, such as an agent's template or a guardrail, are sent once under a name. A process without such a
part returns the order and receives the part. None of this is written to disk.
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

#: Logger of the scheduler's messages about the cluster in a run's driver.
CLUSTER_LOGGER = "ensemble_ray.cluster"
#: Lines that one process forwards per second.
LINES_PER_S = 20
#: Stored lines of a run; the oldest are dropped.
_KEPT_LINES = 1000
#: Number of runs with stored lines but without a waiting driver.
_KEPT_RUNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One log line of a run's process."""

    text: str
    #: empty outside of tasks
    agent_role: str
    #: name of the logger; empty: it was printed
    logger: str = ""
    level: int = 0
    #: the message without its arguments; a command recognizes messages by it and words them itself
    template: str = ""
    #: frames of user code of a logged error
    traceback: str = ""


def scheduler_line(text: str, logger: str, level: int = logging.WARNING) -> LogLine:
    return LogLine(text=str(one_line(text)), agent_role="", logger=logger, level=level)


class LineBudget:
    """Limits the number of lines per second."""

    def __init__(self, lines_per_s: int = LINES_PER_S) -> None:
        self._lines_per_s = lines_per_s
        self._second = -math.inf
        self._admitted = 0
        self._left_out = 0

    def admit(self, at_s: float) -> bool:
        """Whether a line may be sent at this time. A rejected line is counted."""
        if at_s - self._second >= 1.0:
            self._second, self._admitted = at_s, 0
        self._admitted += 1
        if self._admitted <= self._lines_per_s:
            return True
        self._left_out += 1
        return False

    def reset_left_out(self) -> int:
        count, self._left_out = self._left_out, 0
        return count


@dataclass(slots=True)
class _Box:
    lines: deque[LogLine] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: calls that wait for lines
    waiting: int = 0
    #: whether its last lines were returned
    is_drained: bool = False


class LineService:
    """The part of the scheduler that stores lines until drivers collect them."""

    def __init__(self) -> None:
        self._boxes: OrderedDict[str, _Box] = OrderedDict()

    async def put_lines(self, run_id: str, lines: Sequence[LogLine]) -> None:
        self.add_lines(run_id, lines)

    def add_lines(self, run_id: str, lines: Sequence[LogLine]) -> None:
        box = self._box(run_id)
        box.lines.extend(lines)
        box.changed.set()

    def is_listening(self, run_id: str) -> bool:
        """Whether a call waits for lines of this run. `drain_lines` ends it."""
        box = self._boxes.get(run_id)
        return box is not None and box.waiting > 0

    async def collect_lines(self, run_id: str, wait_s: float) -> Sequence[LogLine] | None:
        """Return new lines; wait up to `wait_s` if there are none. Return None if `drain_lines` returned the last ones."""
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
        """Return the last lines and end waiting calls."""
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
            # Runs with a waiting driver stay: it would only ask again and evict another run.
            left = [name for name, box in self._boxes.items() if not box.waiting and name != run_id]
            for name in left[: max(0, len(left) + 1 - _KEPT_RUNS)]:
                del self._boxes[name]
        return self._boxes[run_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFailure:
    """A pickled failure, with the fields that the scheduler needs."""

    body: bytes
    error_type: str = ""
    message: str = ""
    reason: RecordedError = NO_REASON
    newer_epoch: int = 0
    is_out_of_credit: bool = False


#: How long a process stays after its last run: some seconds for a run of the same program, or longer for a run of any program.
#: None: it ends.
Keep: TypeAlias = Literal["briefly", "warm"]
#: The order of a coordinator or a delegating agent, and its result.
WireOrder: TypeAlias = TaskOrder[bytes, bytes, bytes]
WireResult: TypeAlias = TaskResult[bytes, WireFailure]
WireOutcome: TypeAlias = RunOutcome[bytes, WireFailure]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTemplate:
    """A pickled agent, with the fields that placement needs. An order may contain values that differ from its template's."""

    key: str
    body: bytes
    #: agents of one category share processes: no tools, or the same tools and model
    category: str
    isolation: str | None = None
    #: None: not set
    replicas: int | None = 1
    #: without use; submissions that a restarted scheduler finds may contain it
    is_declared: bool = True
    #: for messages; if the roles of orders differ, the role of the first
    role: str = ""
    #: requirements of every process of it
    requirements: ResourceRequirements = NOTHING

    @property
    def placement(self) -> PlacementRequest:
        return PlacementRequest(
            key=self.key,
            category=self.category,
            isolation=self.isolation,
            replicas=self.replicas,
            requirements=self.requirements,
        )


class Binding(NamedTuple):
    """The part of a run that a process receives before its first order."""

    context: RunContext
    #: agents that may receive delegated work, by key; other agents arrive with their orders
    templates: Mapping[str, bytes]
    #: store of the run's record; None: it is not recorded
    location: RecordLocation | None


class Dispatch(NamedTuple):
    """Orders for a process."""

    run_id: str
    orders: Sequence[WireOrder]
    #: agents that the orders need and the process was not sent, by key
    templates: Mapping[str, bytes]


class CallableRef(NamedTuple):
    """The location of a callable: in a bundle, a pickle that is sent once."""

    bundle: str
    #: its position in a bundle of several, which preserves shared objects; None: the bundle is the callable
    position: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCallables:
    handler: CallableRef | None = None
    input_guardrails: tuple[CallableRef, ...] = ()
    output_guardrails: tuple[CallableRef, ...] = ()

    @property
    def bundles(self) -> Iterator[str]:
        if self.handler is not None:
            yield self.handler.bundle
        for ref in (*self.input_guardrails, *self.output_guardrails):
            yield ref.bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class CallablesUpdate:
    """New and finished callables for their host. Finished ones are dropped first."""

    #: bundle -> its bytes
    bundles: Mapping[str, bytes]
    #: task key -> its callables
    tasks: Mapping[str, TaskCallables]
    #: called in order for each delegation
    policies: Sequence[CallableRef] = ()
    #: predicates of loops and conditions of edges, by path: `loop:refine/until/0`
    predicates: Mapping[str, CallableRef] = field(default_factory=dict[str, CallableRef])
    done_tasks: Sequence[str] = ()
    done_bundles: Sequence[str] = ()
    #: whether these are all callables of the run; one that cannot be loaded then fails the run
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """The store of a run's record, and the node with its files."""

    address: StoreAddress
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpening:
    """The part of a run that the scheduler receives before its first order."""

    run_id: str
    #: the driver's id, and a number; the next session replaces this one
    session: str = ""
    context: RunContext
    #: the process that started it, its runs may share processes of the cluster; empty: they are not shared
    program: str = ""
    #: None: it is not recorded
    location: RecordLocation | None = None
    #: agents that are known from the start; other agents arrive with their orders
    templates: Sequence[AgentTemplate] = ()
    #: callables that are known from the start
    callables: CallablesUpdate | None = None
    #: whether the driver receives events or requests to its services
    is_connected: bool = False
    #: whether an earlier session of its driver was lost
    is_resubmission: bool = False


def driver_of(session: str) -> str:
    """Return the id of a session's driver. It is never used again."""
    return session.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A planned run for the scheduler."""

    run_id: str
    plan: Plan
    context: RunContext
    header: PlanRecorded
    #: facts from before scheduling
    preamble: Sequence[Fact] = ()
    templates: Sequence[AgentTemplate]
    #: task key -> the task's bytes, without context tasks, agent, handler and guardrails
    tasks: Mapping[str, bytes]
    #: None: the run has none
    callables: CallablesUpdate | None = None
    #: store of the run's record, seen from the cluster's nodes; None: it is not recorded
    store: StoreAddress | None = None
    reason: SubmissionReason = SubmissionReason.FIRST
    #: whether the driver receives events or requests to its services
    is_connected: bool = False
    #: whether a decision at its gate resumes it without the driver
    goes_on_alone: bool = False
    #: how long agent processes stay for the next run
    keep: Keep = "briefly"
    #: the process that started it, its runs may share processes of the cluster; empty: they are not shared
    program: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderBatch:
    """Orders that share a message, with the parts that were not sent before."""

    #: number in the session, from 1; a repeated batch counts once
    number: int
    orders: Sequence[WireOrder]
    #: instance -> its callables, if it has any
    callables: Mapping[str, TaskCallables] = field(default_factory=dict[str, TaskCallables])
    templates: Sequence[AgentTemplate] = ()
    #: bundle -> the bytes of the callable in it
    bundles: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    def list_payloads(self) -> dict[str, bytes]:
        """Return the batch's pickles by the names that users know."""
        templates = {f"An agent of kind '{template.key}'": template.body for template in self.templates}
        return {**templates, **{f"A handler or guardrail ({name})": body for name, body in self.bundles.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPage:
    """Reports of a session for its driver."""

    #: number of entries returned in this session, including these; the driver acknowledges them with it
    cursor: int
    results: Sequence[WireResult]
    #: returned orders: a shared part that they need is missing here
    unknown: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPage:
    """One page of the end of a planned run."""

    #: differs from the end of a later run with the same id
    end_id: str
    #: number of entries so far, including these; the next page starts there
    cursor: int
    is_last: bool
    #: how the run ended, with the entries of this page
    end: WireOutcome
    #: the last lines of the run's processes; None: the driver must request them
    lines: Sequence[LogLine] | None = None
