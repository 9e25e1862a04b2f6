"""Values of a trace: run -> task -> model interaction -> tool call (S-TRC-2). Layer: above metrics.

Only shapes and their JSON form; the folds that make them live in `record` and `execute`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, cast, runtime_checkable

from pydantic import (
    BeforeValidator,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    field_serializer,
)
from pydantic_core import from_json, to_json

from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.metrics import CostEstimate, ExecutionMetrics, TaskMetrics
from ensemble_ray.values.unit_traces import GraphTrace, LoopTrace, PhaseStatus
from ensemble_ray.values.value import FrozenSequence, Instant, Value

__all__ = [
    "AgentSummary",
    "CaptureMode",
    "CapturedMessage",
    "DelegationTrace",
    "ErrorTrace",
    "ExecutionTrace",
    "ExecutionTraceExporter",
    "LlmInteraction",
    "MapReduceLevelSummary",
    "PhaseTrace",
    "TaskPrompts",
    "TaskTrace",
    "ToolCallTrace",
    "jsonable",
]


class CaptureMode(StrEnum):
    """How much a trace keeps: off < standard < full."""

    OFF = "off"
    STANDARD = "standard"
    FULL = "full"

    def is_at_least(self, other: CaptureMode | str) -> bool:
        """Whether this mode keeps at least what the other does."""
        return _LEVELS[self] >= _LEVELS[CaptureMode(other)]


#: How much each keeps.
_LEVELS = {mode: level for level, mode in enumerate(CaptureMode)}


def jsonable(value: object) -> object:
    """Return the JSON form of anything: its own if it has one, else its text; never fail (S-TRC-52)."""
    if value is None or isinstance(value, bool | int):
        return value
    try:
        return _as_data(value)
    except Exception:  # noqa: BLE001  cycles, bytes that are no text, objects whose own serializers or texts fail
        try:
            return _by_hand(value, ())
        except RecursionError:
            return _text_of(value)


def _by_hand(value: object, inside: tuple[int, ...]) -> object:
    """Return the JSON form part by part, so that one part that has none costs no more than itself."""
    if id(value) in inside:
        return _text_of(value)
    deeper = (*inside, id(value))
    if isinstance(value, Mapping):
        return {_text_of(key): _by_hand(each, deeper) for key, each in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_by_hand(each, deeper) for each in cast("Iterable[object]", value)]
    try:
        return _as_data(value)
    except Exception:  # noqa: BLE001  see above
        return _text_of(value)


def _as_data(value: object) -> object:
    """Return the JSON form by its text: only there are `inf` and `nan` texts."""
    return from_json(to_json(value, fallback=str, inf_nan_mode="strings"))


def _text_of(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001  a text of the user's class that fails
        return f"<{type(value).__name__}>"


def _pretty(value: Value) -> str:
    try:
        return value.model_dump_json(indent=2)
    except ValueError:  # half of a surrogate pair: models cut emoji in two
        return json.dumps(whole_data(jsonable(value.model_dump())), indent=2, ensure_ascii=False)


def _prepare_target(path: str | Path) -> Path:
    """Make the folders of a path and return it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _is_none(value: object) -> bool:
    return value is None


def _is_unknown(value: object) -> bool:
    return value == -1


def _is_empty(value: object) -> bool:
    return not value


#: Anything, kept as JSON data, so that a trace read from its JSON equals the one that was written (S-TRC-52).
JsonData = Annotated[Any, BeforeValidator(jsonable)]
JsonObject = Annotated[Mapping[str, Any], BeforeValidator(jsonable)]


class CapturedMessage(Value):
    """A message as it was when captured."""

    role: str
    content: str | None = None
    #: each `{id, name, arguments}` (S-SET-13)
    tool_calls: tuple[Mapping[str, str], ...] = ()
    tool_name: str | None = None


class ToolCallTrace(Value):
    """One tool request and what came of it."""

    tool_name: str
    #: JSON text as the model wrote it
    arguments: str
    #: full text given to the model, before any truncation
    result: str
    #: what the tool gave beside its text, as JSON data
    structured_output: JsonData = None
    started_at: Instant
    completed_at: Instant
    duration: timedelta
    outcome: Literal["success", "failure", "error", "unknown", "skipped_max_iterations"]
    #: what was repaired in the arguments before the call, one short text each (S-LLM-43)
    repairs: tuple[str, ...] = Field(default=(), exclude_if=_is_empty)
    #: the arguments as a dict; capture mode full only
    parsed_input: JsonObject | None = None
    metadata: JsonObject = Field(default_factory=dict[str, Any])


class LlmInteraction(Value):
    """One model call of a task, with the tool calls it asked for."""

    iteration_index: int
    started_at: Instant
    completed_at: Instant
    latency: timedelta
    input_tokens: int = -1
    output_tokens: int = -1
    #: part of `output_tokens` that the model spent on reasoning; -1: unknown
    reasoning_tokens: int = Field(default=-1, exclude_if=_is_unknown)
    response_type: Literal["tool_calls", "final_answer"]
    #: only for final answers
    response_text: str | None = None
    #: what the model thought, apart from its answer
    reasoning: str | None = Field(default=None, exclude_if=_is_none)
    #: why the model stopped, where that is neither ordinary (`stop`, `tool_calls`) nor unknown; `length`: cut off
    finish_reason: str | None = Field(default=None, exclude_if=_is_none)
    #: the model's name, and who provides it, where the model says so
    model: str | None = Field(default=None, exclude_if=_is_none)
    provider: str | None = Field(default=None, exclude_if=_is_none)
    #: how much of the latency, from its beginning, was spent waiting for permits of rate limits; None: nothing
    permit_wait: timedelta | None = Field(default=None, exclude_if=_is_none)
    tool_calls: tuple[ToolCallTrace, ...] = ()
    #: capture mode standard and above
    messages: tuple[CapturedMessage, ...] = ()


class TaskPrompts(Value):
    """Exactly what the first model call was sent."""

    system_prompt: str
    user_prompt: str
    #: what was sent between them: the conversation that the task continues
    history: tuple[CapturedMessage, ...] = Field(default=(), exclude_if=lambda said: not said)


class DelegationTrace(Value):
    """One attempt of a task to hand work to another agent."""

    delegator_role: str
    #: who was asked; the role as the model wrote it where nobody has it
    worker_role: str
    task_description: str
    started_at: Instant
    completed_at: Instant
    duration: timedelta
    #: 0: by a task of the plan; the event's `delegation_depth` says 1 (S-DEL-53)
    depth: int
    #: the text that the delegating model was given
    result: str
    succeeded: bool
    #: what a peer did; None for workers of a manager, whose traces stand beside the manager's (S-TRC-41)
    worker_trace: TaskTrace | None = None
    #: the request as it was when the worker was asked, or refused; its `task_id` is the delegation's id
    request: JsonObject = Field(default_factory=dict[str, Any])
    #: what came of it, under the same id
    response: JsonObject = Field(default_factory=dict[str, Any])


class TaskTrace(Value):
    """All that happened in one task. Durations equal the difference of their instants."""

    task_description: str
    expected_output: str
    agent_role: str
    started_at: Instant
    completed_at: Instant
    duration: timedelta
    prompts: TaskPrompts | None = None
    llm_interactions: tuple[LlmInteraction, ...] = ()
    #: attempts in order, refused ones included
    delegations: tuple[DelegationTrace, ...] = ()
    final_output: str = ""
    parsed_output: Any = None
    metrics: TaskMetrics = TaskMetrics.EMPTY
    #: `map`, `reduce`, `final-reduce` or `direct`; None: no part of a map-reduce
    node_type: str | None = None
    #: 0 for maps and direct tasks; None: no part of a map-reduce
    map_reduce_level: int | None = None
    metadata: JsonObject = Field(default_factory=dict[str, Any])

    @field_serializer("parsed_output", mode="wrap", when_used="json")
    def _as_json(self, value: object, _handler: SerializerFunctionWrapHandler, _info: SerializationInfo) -> object:
        return whole_data(jsonable(value))

    def with_workers(self) -> Iterator[TaskTrace]:
        """Return this trace and those of the peers that worked for it, each once; for sums."""
        yield self
        for delegation in self.delegations:
            if delegation.worker_trace is not None:
                yield from delegation.worker_trace.with_workers()


class AgentSummary(Value):
    """Who took part."""

    role: str
    goal: str
    background: str | None = None
    tool_names: tuple[str, ...] = ()
    allow_delegation: bool = False


class MapReduceLevelSummary(Value):
    """What one level of a map-reduce did."""

    #: 0: the maps, or the direct task
    level: int
    #: tasks that began
    task_count: int
    #: from the first start to the last end
    duration: timedelta
    workflow: str = "parallel"


class PhaseTrace(Value):
    """A phase that ended or was skipped; the reviews of one are an entry of their own."""

    name: str
    #: `phase:draft`
    path: str
    status: PhaseStatus
    #: all executions, those of attempts that were not accepted included, in the order in which they ended
    task_traces: tuple[TaskTrace, ...] = ()
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
    #: line of user code that raised, as tracebacks have it; empty: none did, or it is not known
    place: str = Field(default="", exclude_if=_is_empty)
    occurred_at: Instant


class ExecutionTrace(Value):
    """A run as a tree, made to be read, stored and compared."""

    EMPTY: ClassVar[ExecutionTrace]

    schema_version: str = "1.1"
    capture_mode: CaptureMode = CaptureMode.OFF
    ensemble_id: str
    #: what the team is called; None: it has no name
    ensemble_name: str | None = Field(default=None, exclude_if=_is_none)
    workflow: str
    started_at: Instant
    completed_at: Instant
    total_duration: timedelta
    inputs: Mapping[str, str] = {}
    agents: FrozenSequence[AgentSummary] = ()
    task_traces: FrozenSequence[TaskTrace] = ()
    metrics: ExecutionMetrics = ExecutionMetrics.EMPTY
    total_cost_estimate: CostEstimate | None = None
    #: of a map-reduce, by level
    map_reduce_levels: tuple[MapReduceLevelSummary, ...] = ()
    #: runs of loops, in the order in which they ended
    loop_traces: tuple[LoopTrace, ...] = Field(default=(), exclude_if=_is_empty)
    #: in the order in which they ended
    phases: tuple[PhaseTrace, ...] = Field(default=(), exclude_if=_is_empty)
    graph_trace: GraphTrace | None = Field(default=None, exclude_if=_is_none)
    errors: tuple[ErrorTrace, ...] = ()
    trace_id: str | None = None
    metadata: JsonObject = Field(default_factory=dict[str, Any])

    def to_json(self, path: str | Path | None = None) -> str:
        """Pretty JSON text; with a path it is also written there, parent folders made.

        Raises:
            OSError: the file cannot be written.
        """
        text = _pretty(self)
        if path is not None:
            _prepare_target(path).write_text(text, encoding="utf-8")
        return text

    def write_json(self, path: str | Path) -> None:
        """Write the text of `to_json` task by task, so that a long trace is never in memory whole.

        Raises:
            OSError: the file cannot be written.
        """
        with _prepare_target(path).open("w", encoding="utf-8") as file:
            file.writelines(self._pieces())

    def _pieces(self) -> Iterator[str]:
        # What stands deeper is indented further, and no text in JSON has a line's end of its own.
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
        """Hand this trace to an exporter: a callable or an object with `export`."""
        if isinstance(exporter, ExecutionTraceExporter):
            exporter.export(self)
        else:
            exporter(self)


#: Of a run that never began.
ExecutionTrace.EMPTY = ExecutionTrace(
    ensemble_id="",
    workflow="",
    started_at=datetime.fromtimestamp(0, UTC),
    completed_at=datetime.fromtimestamp(0, UTC),
    total_duration=timedelta(),
)


@runtime_checkable
class ExecutionTraceExporter(Protocol):
    """Takes the trace of each successful run."""

    def export(self, trace: ExecutionTrace) -> None:
        """Take one trace."""
        ...
