"""Values that processes of a living cluster send to each other. User objects are bytes, which a scheduler never loads.

Shared parts of orders are sent once under a name. A process without such a part returns the order and receives it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from ensemble_ray.execute.orders import RunContext, RunOutcome, TaskOrder, TaskResult
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import NO_REASON, PlanRecorded, RecordedError
from ensemble_ray.plan.placement import NOTHING, PlacementRequest, ResourceRequirements
from ensemble_ray.plan.plan import Plan
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.runs.ports import SubmissionReason
from ensemble_ray.text.foreign_text import one_line

#: Logger of messages about the cluster in a run's driver.
CLUSTER_LOGGER = "ensemble_ray.cluster"
LINES_PER_S = 20
#: Per run; the oldest are dropped.
_KEPT_LINES = 1000
#: Among runs without a waiting driver.
_KEPT_RUNS = 64


class LogLine(Struct, frozen=True, kw_only=True):
    text: str
    agent_role: str
    #: empty: it was printed
    logger: str = ""
    level: int = 0
    #: the message without its arguments, which a command recognizes
    template: str = ""
    traceback: str = ""


def scheduler_line(text: str, logger: str, level: int = logging.WARNING) -> LogLine:
    return LogLine(text=str(one_line(text)), agent_role="", logger=logger, level=level)


class LineBudget:
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


class _Box(Struct):
    lines: deque[LogLine] = msgspec.field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    waiting: int = 0
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


class WireFailure(Struct, frozen=True, kw_only=True):
    body: bytes
    error_type: str = ""
    message: str = ""
    reason: RecordedError = NO_REASON
    newer_epoch: int = 0
    interrupts_run: bool = False


#: How long a process stays after its last run: for a run of the same program, or longer for a run of any program.
Keep: TypeAlias = Literal["briefly", "warm"]
WireOrder: TypeAlias = TaskOrder[bytes, bytes, bytes]
WireResult: TypeAlias = TaskResult[bytes, WireFailure]
WireOutcome: TypeAlias = RunOutcome[bytes, WireFailure]


class AgentTemplate(Struct, frozen=True, kw_only=True):
    """A pickled agent, with the fields that placement needs."""

    key: str
    body: bytes
    category: str
    isolation: str | None = None
    replicas: int | None = 1
    #: unused; stored submissions may contain it
    is_declared: bool = True
    #: for messages
    role: str = ""
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
    #: agents that may receive delegated work; others arrive with their orders
    templates: Mapping[str, bytes]
    location: RecordLocation | None


class Dispatch(NamedTuple):
    run_id: str
    orders: Sequence[WireOrder]
    #: agents that the process was not sent
    templates: Mapping[str, bytes]


class CallableRef(NamedTuple):
    """The location of a callable in a bundle, a pickle that is sent once."""

    bundle: str
    #: in a bundle of several, which preserves shared objects
    position: int | None = None


class TaskCallables(Struct, frozen=True, kw_only=True):
    handler: CallableRef | None = None
    input_guardrails: tuple[CallableRef, ...] = ()
    output_guardrails: tuple[CallableRef, ...] = ()

    @property
    def bundles(self) -> Iterator[str]:
        if self.handler is not None:
            yield self.handler.bundle
        for ref in (*self.input_guardrails, *self.output_guardrails):
            yield ref.bundle


class CallablesUpdate(Struct, frozen=True, kw_only=True):
    """New and finished callables for their host. Finished ones are dropped first."""

    bundles: Mapping[str, bytes]
    tasks: Mapping[str, TaskCallables]
    policies: Sequence[CallableRef] = ()
    #: by path: `loop:refine/until/0`
    predicates: Mapping[str, CallableRef] = msgspec.field(default_factory=dict[str, CallableRef])
    done_tasks: Sequence[str] = ()
    done_bundles: Sequence[str] = ()
    #: if true, one that cannot be loaded fails the run
    is_complete: bool = False


class RecordLocation(Struct, frozen=True):
    """The store of a run's record, and the node with its files."""

    address: StoreAddress
    node_id: str


class SessionOpening(Struct, frozen=True, kw_only=True):
    run_id: str
    #: the driver's id, and a number
    session: str = ""
    context: RunContext
    #: the process that started it, its runs may share processes of the cluster; empty: they are not shared
    program: str = ""
    location: RecordLocation | None = None
    templates: Sequence[AgentTemplate] = ()
    callables: CallablesUpdate | None = None
    #: whether the driver receives events or requests to its services
    is_connected: bool = False
    is_resubmission: bool = False


def driver_of(session: str) -> str:
    """Return the id of a session's driver. It is never used again."""
    return session.partition("/")[0]


class Submission(Struct, frozen=True, kw_only=True):
    run_id: str
    plan: Plan
    context: RunContext
    header: PlanRecorded
    preamble: Sequence[Fact] = ()
    templates: Sequence[AgentTemplate]
    #: by key, without context tasks, agent, handler and guardrails
    tasks: Mapping[str, bytes]
    callables: CallablesUpdate | None = None
    #: seen from the cluster's nodes; None: it is not recorded
    store: StoreAddress | None = None
    reason: SubmissionReason = SubmissionReason.FIRST
    #: whether the driver receives events or requests to its services
    is_connected: bool = False
    goes_on_alone: bool = False
    keep: Keep = "briefly"
    #: the process that started it, its runs may share processes of the cluster; empty: they are not shared
    program: str = ""
    #: of attachments; a submission of an earlier version lacks the field
    contents: Sequence[bytes] = ()


class OrderBatch(Struct, frozen=True, kw_only=True):
    """Orders that share a message, with the parts that were not sent before."""

    #: from 1 in a session; a repeated batch counts once
    number: int
    orders: Sequence[WireOrder]
    callables: Mapping[str, TaskCallables] = msgspec.field(default_factory=dict[str, TaskCallables])
    templates: Sequence[AgentTemplate] = ()
    bundles: Mapping[str, bytes] = msgspec.field(default_factory=dict[str, bytes])

    def list_payloads(self) -> dict[str, bytes]:
        templates = {f"An agent of kind '{template.key}'": template.body for template in self.templates}
        return {**templates, **{f"A handler or guardrail ({name})": body for name, body in self.bundles.items()}}


class ReportPage(Struct, frozen=True, kw_only=True):
    #: number of entries in this session so far, which the driver acknowledges with it
    cursor: int
    results: Sequence[WireResult]
    #: returned orders, of which a shared part is missing here
    unknown: Sequence[str] = ()


class EndPage(Struct, frozen=True, kw_only=True):
    end_id: str
    #: number of entries so far
    cursor: int
    is_last: bool
    end: WireOutcome
    #: None: the driver must request them
    lines: Sequence[LogLine] | None = None
