"""The trace of a run: run -> task -> model interaction -> tool call (S-TRC-2), and its JSON form."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from operator import not_
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, cast, runtime_checkable

from msgspec import Struct
from pydantic import BeforeValidator, Field, SerializationInfo, SerializerFunctionWrapHandler, field_serializer
from pydantic_core import from_json, to_json

from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.metrics import CostEstimate, ExecutionMetrics, TaskMetrics
from ensemble_ray.values.value import FrozenSequence, Instant, Value


class PhaseStatus(StrEnum):
    """The outcome of a phase."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"


class LoopTrace(Value):
    """One run of a loop."""

    loop_name: str
    path: str  # `loop:refine`, or `graph:triage#3/loop:refine` inside a graph
    iterations_run: int
    max_iterations: int
    #: `predicate`, `max_iterations`, `budget_exhausted`, `exit_early`; None: none of these
    termination_reason: str | None
    on_max_iterations: str
    output_mode: str
    memory_mode: str
    iterations: tuple[tuple[str, ...], ...] = ()  # body keys of completed tasks, by iteration


class GraphTraceStep(Value):
    """A step of a graph."""

    path: str  # `graph:triage#4`
    state_name: str
    step_number: int  # 1-based
    next_state: str | None  # or `__END__`; None: not routed


class GraphTrace(Value):
    """The run of a graph."""

    graph_name: str
    path: str
    start_state: str
    termination_reason: str | None  # `terminal`, `max_steps`; None: none of these
    steps_run: int
    max_steps: int
    steps: tuple[GraphTraceStep, ...] = ()


class CaptureMode(StrEnum):
    """The level of detail of a trace: off < standard < full."""

    OFF = "off"
    STANDARD = "standard"
    FULL = "full"

    def is_at_least(self, other: CaptureMode | str) -> bool:
        """Whether this mode captures at least as much as the other."""
        modes = list(CaptureMode)
        return modes.index(self) >= modes.index(CaptureMode(other))


def jsonable(value: object) -> object:
    """Return a value as JSON data, at worst as text. It never fails (S-TRC-52)."""
    if value is None or isinstance(value, bool | int):
        return value
    try:
        return _as_data(value)
    except Exception:  # noqa: BLE001  cycles, bytes that are no text, failing serializers
        try:
            return _by_hand(value, ())
        except RecursionError:
            return _text_of(value)


def _by_hand(value: object, inside: tuple[int, ...]) -> object:
    """Convert each part, so that a part without a JSON form does not affect the others."""
    if id(value) in inside:
        return _text_of(value)
    deeper = (*inside, id(value))
    if isinstance(value, Mapping):
        return {_text_of(key): _by_hand(each, deeper) for key, each in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_by_hand(each, deeper) for each in cast("Iterable[object]", value)]
    try:
        return _as_data(value)
    except Exception:  # noqa: BLE001  as above
        return _text_of(value)


def _as_data(value: object) -> object:
    """Convert through JSON text: only there can `inf` and `nan` be strings."""
    return from_json(to_json(value, fallback=str, inf_nan_mode="strings"))


def _text_of(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001  the class is the user's
        return f"<{type(value).__name__}>"


def _pretty(value: Value) -> str:
    try:
        return value.model_dump_json(indent=2)
    except ValueError:  # half of a surrogate pair: models split emoji
        return json.dumps(whole_data(jsonable(value.model_dump())), indent=2, ensure_ascii=False)


def _prepare_target(path: str | Path) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _is_none(value: object) -> bool:
    return value is None


#: Stored as JSON data, so that a trace equals its copy from JSON (S-TRC-52).
JsonData = Annotated[Any, BeforeValidator(jsonable)]
JsonObject = Annotated[Mapping[str, Any], BeforeValidator(jsonable)]


class CapturedMessage(Value):
    """A message to or from a model."""

    role: str
    content: str | None = None
    tool_calls: tuple[Mapping[str, str], ...] = ()  # `{id, name, arguments}` (S-SET-13)
    tool_name: str | None = None
    attachments: tuple[JsonObject, ...] = Field(default=(), exclude_if=not_)  # references (S-ATT-30)


class ToolCallTrace(Value):
    """A tool call and its result."""

    tool_name: str
    arguments: str
    result: str  # before any truncation
    structured_output: JsonData = None  # data beside the text
    started_at: Instant
    completed_at: Instant
    duration: timedelta
    outcome: Literal["success", "failure", "error", "unknown", "skipped_max_iterations"]
    repairs: tuple[str, ...] = Field(default=(), exclude_if=not_)  # of the arguments, as short texts (S-LLM-43)
    log: tuple[str, ...] = Field(default=(), exclude_if=not_)  # lines that it logged and printed (S-TOOL-35)
    attachments: tuple[JsonObject, ...] = Field(default=(), exclude_if=not_)  # references (S-ATT-63)
    parsed_input: JsonObject | None = None  # capture mode full only
    metadata: JsonObject = Field(default_factory=dict[str, Any])


_is_unknown = (-1).__eq__  # a method of C: it is called for each interaction of every task


class LlmInteraction(Value):
    """A model call of a task, with the tool calls that the model requested."""

    iteration_index: int
    started_at: Instant
    completed_at: Instant
    latency: timedelta
    input_tokens: int = -1
    output_tokens: int = -1
    reasoning_tokens: int = Field(default=-1, exclude_if=_is_unknown)  # part of `output_tokens`
    cached_tokens: int = Field(default=-1, exclude_if=_is_unknown)  # part of `input_tokens`
    cache_write_tokens: int = Field(default=-1, exclude_if=_is_unknown)  # part of `input_tokens`
    response_type: Literal["tool_calls", "final_answer"]
    response_text: str | None = None  # of final answers
    reasoning: str | None = Field(default=None, exclude_if=_is_none)  # not part of the answer
    #: unless ordinary (`stop`, `tool_calls`) or unknown
    finish_reason: str | None = Field(default=None, exclude_if=_is_none)
    model: str | None = Field(default=None, exclude_if=_is_none)
    provider: str | None = Field(default=None, exclude_if=_is_none)
    #: part of the latency: the wait for rate limits
    permit_wait: timedelta | None = Field(default=None, exclude_if=_is_none)
    #: failed attempts before it, and other waits, as short texts (S-DUR-66)
    waits: tuple[str, ...] = Field(default=(), exclude_if=not_)
    #: id of the run that the answer was taken from (S-USE-40); its tokens are then 0
    reused: str = Field(default="", exclude_if=not_)
    reused_tokens: int = Field(default=0, exclude_if=not_)  # input and output that it had there
    tool_calls: tuple[ToolCallTrace, ...] = ()
    messages: tuple[CapturedMessage, ...] = ()  # capture mode standard or full


class TaskPrompts(Value):
    """The exact prompts of the first model call."""

    system_prompt: str
    user_prompt: str
    history: tuple[CapturedMessage, ...] = Field(default=(), exclude_if=lambda said: not said)  # messages between them
    attachments: tuple[JsonObject, ...] = Field(default=(), exclude_if=not_)  # references, in the user prompt's order


class DelegationTrace(Value):
    """One attempt of a task to delegate work."""

    delegator_role: str
    worker_role: str  # as the model wrote it, if unknown
    task_description: str
    started_at: Instant
    completed_at: Instant
    duration: timedelta
    depth: int  # 0: by a task of the plan; `delegation_depth` of the event is 1 (S-DEL-53)
    result: str  # for the delegating model
    succeeded: bool
    worker_trace: TaskTrace | None = None  # of a peer; a manager's workers have their own traces (S-TRC-41)
    request: JsonObject = Field(default_factory=dict[str, Any])  # at the start of the worker, or at the rejection
    response: JsonObject = Field(default_factory=dict[str, Any])


class TaskTrace(Value):
    """The execution of one task. Durations equal the difference of their instants."""

    task_description: str
    expected_output: str
    agent_role: str
    started_at: Instant
    completed_at: Instant
    duration: timedelta
    prompts: TaskPrompts | None = None
    llm_interactions: tuple[LlmInteraction, ...] = ()
    delegations: tuple[DelegationTrace, ...] = ()  # rejected ones too
    final_output: str = ""
    parsed_output: Any = None
    metrics: TaskMetrics = TaskMetrics.EMPTY
    node_type: str | None = None  # `map`, `reduce`, `final-reduce`, `direct`
    map_reduce_level: int | None = None  # 0: maps and direct tasks
    metadata: JsonObject = Field(default_factory=dict[str, Any])

    @field_serializer("parsed_output", mode="wrap", when_used="json")
    def _as_json(self, value: object, _handler: SerializerFunctionWrapHandler, _info: SerializationInfo) -> object:
        return whole_data(jsonable(value))

    def with_workers(self) -> Iterator[TaskTrace]:
        """Yield this trace and the traces of all peers that worked for it."""
        yield self
        for delegation in self.delegations:
            if delegation.worker_trace is not None:
                yield from delegation.worker_trace.with_workers()


class AgentSummary(Value):
    """An agent of the run."""

    role: str
    goal: str
    background: str | None = None
    tool_names: tuple[str, ...] = ()
    allow_delegation: bool = False


class MapReduceLevelSummary(Value):
    """One level of a map-reduce."""

    level: int  # 0: maps, or the direct task
    task_count: int
    duration: timedelta
    workflow: str = "parallel"


class PhaseTrace(Value):
    """A phase that ended or was skipped. The reviews of a phase have a separate entry."""

    name: str
    path: str  # `phase:draft`
    status: PhaseStatus
    task_traces: tuple[TaskTrace, ...] = ()  # all executions in the order of their ends, rejected attempts too
    started_at: Instant
    completed_at: Instant
    duration: timedelta
    attempts: int


class ErrorTrace(Value):
    """A failure during the run."""

    agent_role: str
    task_description: str
    error_type: str
    message: str
    stack_trace: str = ""
    place: str = Field(default="", exclude_if=not_)  # line of user code, as in a traceback
    occurred_at: Instant


class ExecutionTrace(Value):
    """A run as a tree, for reading, storing and comparing."""

    EMPTY: ClassVar[ExecutionTrace]

    schema_version: str = "1.1"
    capture_mode: CaptureMode = CaptureMode.OFF
    ensemble_id: str
    ensemble_name: str | None = Field(default=None, exclude_if=_is_none)  # of the team
    workflow: str
    started_at: Instant
    completed_at: Instant
    total_duration: timedelta
    inputs: Mapping[str, str] = {}
    agents: FrozenSequence[AgentSummary] = ()
    task_traces: FrozenSequence[TaskTrace] = ()
    metrics: ExecutionMetrics = ExecutionMetrics.EMPTY
    total_cost_estimate: CostEstimate | None = None
    map_reduce_levels: tuple[MapReduceLevelSummary, ...] = ()
    loop_traces: tuple[LoopTrace, ...] = Field(default=(), exclude_if=not_)  # in the order of their ends
    phases: tuple[PhaseTrace, ...] = Field(default=(), exclude_if=not_)  # in the order of their ends
    graph_trace: GraphTrace | None = Field(default=None, exclude_if=_is_none)
    errors: tuple[ErrorTrace, ...] = ()
    trace_id: str | None = None
    metadata: JsonObject = Field(default_factory=dict[str, Any])

    def to_json(self, path: str | Path | None = None) -> str:
        """Return indented JSON; with a path, also write it there and create missing folders.

        Raises:
            OSError: The file cannot be written.
        """
        text = _pretty(self)
        if path is not None:
            _prepare_target(path).write_text(text, encoding="utf-8")
        return text

    def write_json(self, path: str | Path) -> None:
        """Write the text of `to_json` task by task: memory never holds the text of a whole long trace.

        Raises:
            OSError: The file cannot be written.
        """
        with _prepare_target(path).open("w", encoding="utf-8") as file:
            file.writelines(self._pieces())

    def _pieces(self) -> Iterator[str]:
        # JSON strings contain no line breaks.
        name = '\n  "task_traces": ['
        head, _, tail = _pretty(self.model_copy(update={"task_traces": ()})).partition(f"{name}]")
        yield f"{head}{name}"
        separator = ""
        for each in self.task_traces:
            text = _pretty(each).replace("\n", "\n    ")
            yield f"{separator}\n    {text}"
            separator = ","
        yield f"\n  ]{tail}" if separator else f"]{tail}"

    def export(self, exporter: ExecutionTraceExporter | Callable[[ExecutionTrace], object]) -> None:
        """Pass this trace to an exporter: a callable or an object with `export`."""
        if isinstance(exporter, ExecutionTraceExporter):
            exporter.export(self)
        else:
            exporter(self)


ExecutionTrace.EMPTY = ExecutionTrace.unchecked(
    ensemble_id="",
    workflow="",
    started_at=datetime.fromtimestamp(0, UTC),
    completed_at=datetime.fromtimestamp(0, UTC),
    total_duration=timedelta(),
    inputs={},
    metadata={},
)


@runtime_checkable
class ExecutionTraceExporter(Protocol):
    """Receives the trace of each successful run."""

    def export(self, trace: ExecutionTrace) -> None:
        """Receive one trace."""
        ...


_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACE_DIGITS, _SPAN_DIGITS = 32, 16
_FIRST_VERSION, _NO_VERSION = "00", "ff"  # the first version has no further fields; the other is invalid


class TraceParent(NamedTuple):
    """A span in the form of W3C's `traceparent` header: 32 and 16 hexadecimal digits."""

    trace_id: str
    span_id: str
    is_sampled: bool = True

    def __str__(self) -> str:
        return f"{_FIRST_VERSION}-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


def parse_traceparent(text: str) -> TraceParent | None:
    """Return the span of a `traceparent`; None if it is invalid.

    Examples:
        >>> parse_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").span_id
        'b7ad6b7169203331'
    """
    found = _TRACEPARENT.fullmatch(text.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == _NO_VERSION or (version == _FIRST_VERSION and rest):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceParent(trace_id, span_id, is_sampled=bool(int(flags, 16) & 1))


def _id_of(name: str, digits: int) -> str:
    # An id of zeros would be invalid; its probability is 2**-64.
    return hashlib.sha256(name.encode()).hexdigest()[:digits]


class RunTracing(Struct, frozen=True, kw_only=True):
    """The common data of all spans of a run."""

    run_id: str
    caller: TraceParent | None = None  # it requested the run; None: a new trace
    is_sampled: bool = True
    beginning: int = 0  # number of resumes
    reported_until: float = 0.0  # Unix time, s: spans until then are reported

    @property
    def trace_id(self) -> str:
        return _id_of(f"trace {self.run_id}", _TRACE_DIGITS) if self.caller is None else self.caller.trace_id

    def run_span(self, beginning: int | None = None) -> str:
        """Return the id of the run's span, which differs after each resume."""
        number = self.beginning if beginning is None else beginning
        return _id_of(f"run {self.run_id} {number}", _SPAN_DIGITS)

    def execution_span(self, instance: str) -> str:
        return _id_of(f"execution {self.run_id} {self.beginning} {instance}", _SPAN_DIGITS)

    def effect_span(self, name: str) -> str:
        return _id_of(f"effect {self.run_id} {name}", _SPAN_DIGITS)

    def traceparent(self, span_id: str) -> str:
        return str(TraceParent(self.trace_id, span_id, self.is_sampled))
