"""Events for listeners, streams and the command line: immutable projections of facts (S-EVT-5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar, Literal, Protocol, runtime_checkable

from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.delegation import DelegationRequest, DelegationResponse
from ensemble_ray.values.memory import TaskReflection
from ensemble_ray.values.messages import ChatMessage, ToolCall
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import RunTracing, TaskTrace, TraceParent, jsonable

__all__ = [
    "EVENT_TYPES", "TRACED_EVENTS", "BatchProgressEvent", "DelegationCompletedEvent", "DelegationFailedEvent", "DelegationStartedEvent",
    "EnsembleCompletedEvent", "EnsembleStartedEvent", "Event", "FileChangedEvent", "GraphStateCompletedEvent",
    "LlmIterationCompletedEvent", "LlmIterationStartedEvent", "LoopIterationCompletedEvent", "RunTracedEvent",
    "RunTracer", "TaskCompleteEvent", "TaskFailedEvent", "TaskInputEvent", "TaskReflectedEvent", "TaskStartEvent",
    "TaskTracedEvent", "TokenEvent", "ToolCallEvent", "ToolCallRequest",
]  # fmt: skip
ToolCallRequest = ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Root of all events."""

    #: listener method that receives it
    method: ClassVar[str] = ""
    run_id: str = ""
    #: such as `facts#0`; empty for events of the run itself
    instance: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-able form: `event` is the listener method without `on_`."""
        fields = {field.name: jsonable(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"event": self.method.removeprefix("on_"), **fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleStartedEvent(Event):
    """The run starts."""

    method: ClassVar[str] = "on_ensemble_started"
    ensemble_id: str
    workflow: str
    total_tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleCompletedEvent(Event):
    """The run ended without failure."""

    method: ClassVar[str] = "on_ensemble_completed"
    ensemble_id: str
    total_duration: timedelta
    exit_reason: ExitReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStartEvent(Event):
    """A task starts. `task_index` is 1-based."""

    method: ClassVar[str] = "on_task_start"
    task_description: str
    agent_role: str
    task_index: int
    total_tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCompleteEvent(Event):
    """A task succeeded."""

    method: ClassVar[str] = "on_task_complete"
    task_description: str
    agent_role: str
    task_index: int
    total_tasks: int
    task_output: TaskOutput
    duration: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailedEvent(Event):
    """A task failed; `cause` is the original error."""

    method: ClassVar[str] = "on_task_failed"
    task_description: str
    agent_role: str
    task_index: int
    total_tasks: int
    cause: BaseException
    duration: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallEvent(Event):
    """A tool was executed. `tool_arguments` is the model's JSON text, `tool_result` the full text."""

    method: ClassVar[str] = "on_tool_call"
    tool_name: str
    tool_arguments: str
    tool_result: str
    structured_result: object = None
    agent_role: str
    duration: timedelta
    task_index: int
    outcome: Literal["success", "failure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInputEvent(Event):
    """Prompts are built, before the first model call."""

    method: ClassVar[str] = "on_task_input"
    task_index: int
    task_description: str
    expected_output: str
    agent_role: str
    agent_goal: str
    agent_background: str | None
    tool_names: Sequence[str]
    assembled_context: str
    #: such as `Writer cut by 1,200 of 2,000 tokens`
    context_cuts: Sequence[str] = ()
    #: references, without contents
    attachments: Sequence[Attachment] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmIterationStartedEvent(Event):
    """A model call starts. `iteration_index` counts from 0."""

    method: ClassVar[str] = "on_llm_iteration_started"
    agent_role: str
    task_description: str
    iteration_index: int
    messages: Sequence[ChatMessage]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmIterationCompletedEvent(Event):
    """A model call ended. Unknown token counts are 0 here."""

    method: ClassVar[str] = "on_llm_iteration_completed"
    agent_role: str
    task_description: str
    iteration_index: int
    response_type: Literal["tool_calls", "final_answer"]
    response_text: str | None
    tool_requests: Sequence[ToolCallRequest]
    input_tokens: int
    output_tokens: int
    latency: timedelta
    #: the provider's word; `length` if the answer was cut off; None: unknown
    finish_reason: str | None = None
    reasoning: str | None = None
    reused: str = ""  # id of the run that the answer was taken from (S-USE-40); empty: the model was asked
    #: part of `input_tokens`, read from the provider's cache
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent(Event):
    """A streamed fragment. `iteration` distinguishes the turns of a tool loop."""

    method: ClassVar[str] = "on_token"
    token: str
    agent_role: str
    task_description: str
    iteration: int = 0
    #: part of the model's reasoning (S-LLM-2)
    is_reasoning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegationStartedEvent(Event):
    """Work is delegated, after guards and policies. `instance` is the delegating task's."""

    method: ClassVar[str] = "on_delegation_started"
    #: `task_id` of the request (S-DEL-50)
    delegation_id: str
    delegating_agent_role: str
    worker_role: str
    task_description: str
    #: 1 for the first (S-DEL-53)
    delegation_depth: int
    request: DelegationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegationCompletedEvent(Event):
    """A worker answered."""

    method: ClassVar[str] = "on_delegation_completed"
    delegation_id: str
    delegating_agent_role: str
    worker_role: str
    response: DelegationResponse
    duration: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegationFailedEvent(Event):
    """A delegation was refused, or its worker failed."""

    method: ClassVar[str] = "on_delegation_failed"
    delegation_id: str
    delegating_agent_role: str
    worker_role: str
    failure_reason: str
    #: None for a refusal (S-DEL-51)
    cause: BaseException | None
    response: DelegationResponse
    duration: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChangedEvent(Event):
    """A file tool wrote a file."""

    method: ClassVar[str] = "on_file_changed"
    agent_role: str
    file_path: str
    change_type: Literal["created", "modified"]
    lines_added: int
    lines_removed: int
    timestamp: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopIterationCompletedEvent(Event):
    """A loop finished an iteration; its predicate has not been evaluated. `instance` is the iteration's."""

    method: ClassVar[str] = "on_loop_iteration_completed"
    loop_name: str
    #: 1-based
    iteration_number: int
    max_iterations: int
    #: by body key, in order
    iteration_outputs: Mapping[str, TaskOutput]
    iteration_duration: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStateCompletedEvent(Event):
    """A graph finished a step and chose the next state. `instance` is the step's."""

    method: ClassVar[str] = "on_graph_state_completed"
    graph_name: str
    state_name: str
    #: 1-based
    step_number: int
    max_steps: int
    output: TaskOutput
    #: `Graph.END` included
    next_state: str
    step_duration: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReflectedEvent(Event):
    """A reflection on an output was stored."""

    method: ClassVar[str] = "on_task_reflected"
    task_description: str
    reflection: TaskReflection
    is_first_reflection: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgressEvent(Event):
    """A batch of map requests has another state, or more answers."""

    method: ClassVar[str] = "on_batch_progress"
    #: its id in the record and in the provider's metadata
    batch: str
    #: `planned`, `uploaded`, `submitted`, `cancelled` by this run, `collected` or `void`
    state: str
    #: the provider's word; empty: the provider does not have it yet
    status: str
    total: int
    answered: int
    failed: int
    #: the provider's id
    provider_batch: str = ""


#: By listener method, in the order of registration (S-EVT-2).
EVENT_TYPES: Mapping[str, type[Event]] = {
    event_type.method: event_type
    for event_type in (
        *(EnsembleStartedEvent, EnsembleCompletedEvent, TaskStartEvent, TaskCompleteEvent, TaskFailedEvent),
        *(ToolCallEvent, TaskInputEvent, LlmIterationStartedEvent, LlmIterationCompletedEvent, TokenEvent),
        *(DelegationStartedEvent, DelegationCompletedEvent, DelegationFailedEvent, FileChangedEvent),
        *(LoopIterationCompletedEvent, GraphStateCompletedEvent, TaskReflectedEvent, BatchProgressEvent),
    )
}


# Built only if a listener traces the run; not in event streams.


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTracedEvent(Event):
    """An execution of a task ended, with any status. Delegated work has its own event."""

    method: ClassVar[str] = "on_task_traced"
    tracing: RunTracing
    trace: TaskTrace
    #: `completed`, `failed`, `exited` or `cancelled`
    status: str
    #: empty if the task did not fail
    error_type: str = ""
    error_message: str = ""
    #: the models' ids, by model call and request
    call_ids: Sequence[Sequence[str]] = ()
    #: executed by a function instead of an agent
    is_handler: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTracedEvent(Event):
    """A run ended, after the events of all tasks. A refused run has none."""

    method: ClassVar[str] = "on_run_traced"
    tracing: RunTracing
    workflow: str
    #: empty if the team has no name
    name: str
    #: Unix time, s, of this beginning of the run
    started_at: float
    ended_at: float
    exit_reason: ExitReason
    error_type: str = ""
    error_message: str = ""


TRACED_EVENTS: Mapping[str, type[Event]] = {each.method: each for each in (TaskTracedEvent, RunTracedEvent)}


@runtime_checkable
class RunTracer(Protocol):
    """A listener that traces runs (S-INT-30)."""

    def samples(self, run_id: str, caller: TraceParent | None, /) -> bool:
        """Return whether to send the spans of a run."""
        ...

    def on_task_traced(self, event: TaskTracedEvent, /) -> object:
        """Receive the end of an execution."""
        ...

    def on_run_traced(self, event: RunTracedEvent, /) -> object:
        """Receive the end of a run."""
        ...
