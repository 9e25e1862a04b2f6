"""Effects of one task, and the fold that makes its trace and metrics of them. Package: execute. Pure.

The runner notes each effect when it is done; nothing else is needed for the trace, so a record of the same effects
gives the same trace.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, cast

from ensemble_ray.execute.memory_use import MemoryUse
from ensemble_ray.facts.directives import DirectivesShown
from ensemble_ray.facts.memory import MemoryRecalled, MemoryStored
from ensemble_ray.ports.memory import MemoryOperationListener
from ensemble_ray.values.delegation import DelegationRequest, DelegationResponse, DelegationStatus
from ensemble_ray.values.ids import is_inside_unit
from ensemble_ray.values.messages import ChatMessage, ChatResponse, ToolCall, incomplete_reason, unusual_finish_reason
from ensemble_ray.values.metrics import (
    UNKNOWN_TOKENS,
    CostConfiguration,
    MemoryOperationCounts,
    TaskMetrics,
    add_tokens,
)
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import (
    CapturedMessage,
    CaptureMode,
    DelegationTrace,
    LlmInteraction,
    TaskPrompts,
    TaskTrace,
    ToolCallTrace,
)
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import FactData
    from ensemble_ray.facts.sampling import SamplingAnswered

__all__ = [
    "CallOutcome",
    "DelegationEffect",
    "ModelEffect",
    "TaskEffects",
    "ToolEffect",
    "capture_messages",
    "is_doing",
]

#: What came of a tool request (S-TRC-31, S-DUR-26).
CallOutcome = Literal["success", "failure", "error", "unknown", "skipped_max_iterations"]


@dataclass(slots=True, kw_only=True)
class ToolEffect:
    """One tool request and what came of it."""

    call: ToolCall
    outcome: CallOutcome
    text: str
    started_at: float
    duration_s: float
    structured_output: object = None
    #: whether the tool asked the model to try again
    asks_again: bool = False

    def __post_init__(self) -> None:
        self.duration_s = max(0.0, self.duration_s)  # a record may have another one, of a clock that was set back


@dataclass(slots=True, kw_only=True)
class ModelEffect:
    """One model call, and the tool requests of its answer."""

    started_at: float
    latency_s: float
    response: ChatResponse
    is_final: bool
    #: why each attempt before the answered one failed (S-DUR-66)
    attempts_failed: tuple[str, ...] = ()
    #: how much of `latency_s`, from its beginning, it waited for permits of rate limits
    waited_s: float = 0.0
    #: input and output tokens that its run's budget counted in place of what the provider did not count (S-BUD-2)
    estimated: tuple[int, int] | None = None
    tools: list[ToolEffect] = field(default_factory=list[ToolEffect])
    messages: tuple[CapturedMessage, ...] = ()
    #: the model's name, and who provides it, where it says so
    model: str | None = None
    provider: str | None = None

    def __post_init__(self) -> None:
        self.latency_s = max(0.0, self.latency_s)  # as for tools
        self.waited_s = min(self.waited_s, self.latency_s)

    @property
    def retries(self) -> int:
        """How often the request was sent again."""
        return len(self.attempts_failed)


@dataclass(slots=True, kw_only=True)
class DelegationEffect:
    """One attempt to hand work on, refused ones included, and what came of it."""

    request: DelegationRequest
    response: DelegationResponse
    #: role of who was asked; as the model wrote it where nobody has it
    worker_role: str
    #: 0: by a task of the plan
    depth: int
    started_at: float
    #: turn and index of the call
    position: tuple[int, int] = (0, 0)
    #: what the model was told
    text: str
    #: whether a worker began with it
    is_started: bool = False
    #: instance of the worker's task
    instance: str = ""
    output: TaskOutput | None = None
    #: what the worker did, whether or not it gave an output
    trace: TaskTrace | None = None

    @property
    def is_success(self) -> bool:
        """Whether the worker gave a result."""
        return self.response.status is DelegationStatus.SUCCESS

    def as_trace(self, delegator_role: str, *, is_nested: bool) -> DelegationTrace:
        """As it stands in the task's trace, with the worker's trace if those are nested (S-TRC-41)."""
        started = utc_of(self.started_at)
        return DelegationTrace(
            delegator_role=delegator_role,
            worker_role=self.worker_role,
            task_description=self.request.task_description,
            started_at=started,
            completed_at=started + self.response.duration,
            duration=self.response.duration,
            depth=self.depth,
            result=self.text,
            succeeded=self.is_success,
            worker_trace=self.trace if is_nested else None,
            request=self.request.model_dump(mode="json"),
            response=self.response.model_dump(mode="json"),
        )


def capture_messages(messages: Sequence[ChatMessage]) -> tuple[CapturedMessage, ...]:
    """Copy live messages, so that later changes do not reach the copies (S-CAP-12, S-CAP-13)."""
    return tuple(
        CapturedMessage(
            role=message.role,
            content=message.content,
            tool_calls=tuple(
                {"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls
            ),
            tool_name=message.name if message.role == "tool" else None,
        )
        for message in messages
    )


def _parsed_input(arguments: str) -> dict[str, object] | None:
    """Parse the arguments as a dict; None when they are not a JSON object (S-CAP-14)."""
    try:
        parsed: object = json.loads(arguments)
    except (ValueError, RecursionError):  # the latter: nested beyond the stack
        return None
    return cast("dict[str, object]", parsed) if isinstance(parsed, dict) else None


def is_doing(data: FactData) -> bool:
    """Whether a fact tells of something that a task did; what it remembered or was told stands in its prompts."""
    return data.IS_EFFECT and not isinstance(data, MemoryRecalled | MemoryStored | DirectivesShown)


@dataclass(slots=True, kw_only=True)
class TaskEffects:
    """Everything one task did so far."""

    task_description: str
    expected_output: str
    agent_role: str
    started_at: float
    capture_mode: CaptureMode = CaptureMode.OFF
    prompts: TaskPrompts | None = None
    prompt_build_s: float = 0.0
    #: (input tokens, output tokens, latency s) of calls that are no interaction of the loop: structured retries
    models: list[ModelEffect] = field(default_factory=list[ModelEffect])
    tool_call_count: int = 0
    #: attempts to hand work on, in request order
    delegations: list[DelegationEffect] = field(default_factory=list[DelegationEffect])
    #: whether its workers' traces stand beside its own, and not in it
    is_manager: bool = False
    #: model calls that were made again; also those that were never answered
    retry_count: int = 0
    #: requests of the newest model call, the first one included (S-MR-152)
    attempts: int = 0
    is_handler: bool = False
    #: whether nobody knows what came of the handler (S-DUR-26)
    is_outcome_unknown: bool = False
    #: path of the execution
    instance: str = ""
    #: whether the record has anything that it did
    is_recorded: bool = False
    #: what a context budget cut, request by request where that changed (S-MEM-136)
    context_cuts: list[Mapping[str, object]] = field(default_factory=list[Mapping[str, object]])
    #: tokens that an endpoint of embeddings read for its memory (S-MEM-128)
    embedding_tokens: int = 0
    #: what its model answered servers of its tools, by the effect's name
    sampled: list[tuple[str, SamplingAnswered]] = field(default_factory=list["tuple[str, SamplingAnswered]"])
    #: what it did with memory; None: nobody counts that
    memory: MemoryUse | None = None
    #: hears of what it does with memory while it is at work (S-MEM-100)
    memory_listener: MemoryOperationListener | None = None
    #: the call that asked for the end of the run, by its effect's name, and what it said (S-DUR-138)
    leaving: tuple[str, str] = ("", "")
    #: its review gates in the order in which they were asked, as a trace shows them
    reviews: list[Mapping[str, object]] = field(default_factory=list[Mapping[str, object]])

    def metrics(self, cost: CostConfiguration | None) -> TaskMetrics:
        """Return the sums (S-MET-10 to S-MET-16)."""
        inputs: list[int] = []
        outputs: list[int] = []
        llm_s = tools_s = 0.0
        incomplete = reasoning = 0
        for model in self.models:  # once: this is done for every task of every run
            usage = model.response.usage
            inputs.append(UNKNOWN_TOKENS if usage is None else usage.input_tokens)
            outputs.append(UNKNOWN_TOKENS if usage is None else usage.output_tokens)
            reasoning += 0 if usage is None else max(0, usage.reasoning_tokens)
            llm_s += model.latency_s
            incomplete += incomplete_reason(model.response) is not None
            for tool in model.tools:
                tools_s += tool.duration_s
        if self.is_handler:
            inputs, outputs = [], []
        if self.embedding_tokens:
            inputs.append(self.embedding_tokens)
        for _, answer in self.sampled:
            inputs.append(answer.input_tokens)
            outputs.append(answer.output_tokens)
            llm_s += answer.latency_s
        input_tokens, output_tokens = add_tokens(inputs), add_tokens(outputs)
        return TaskMetrics(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            total_tokens=add_tokens((input_tokens, output_tokens)),
            reasoning_tokens=reasoning,
            llm_latency=timedelta(seconds=llm_s),
            tool_execution_time=timedelta(seconds=tools_s),
            prompt_build_time=timedelta(seconds=self.prompt_build_s),
            llm_call_count=len(self.models) + len(self.sampled),
            tool_call_count=self.tool_call_count,
            retry_count=self.retry_count,
            incomplete_answers=incomplete,
            delegation_count=sum([each.is_started for each in self.delegations]),
            cost_estimate=None if cost is None else cost.estimate(input_tokens, output_tokens),
            memory_retrieval_time=timedelta() if self.memory is None else self.memory.reading_time,
            memory_operations=MemoryOperationCounts.ZERO if self.memory is None else self.memory.counts,
        )

    def trace(
        self, *, completed_at: float, final_output: str, parsed_output: object, metrics: TaskMetrics
    ) -> TaskTrace:
        """Return the tree of this task (S-TRC-10)."""
        # The process that ends a task may have another clock than the one that began it.
        started, completed = utc_of(self.started_at), utc_of(max(completed_at, self.started_at))
        return TaskTrace(
            task_description=self.task_description,
            expected_output=self.expected_output,
            agent_role=self.agent_role,
            started_at=started,
            completed_at=completed,
            duration=completed - started,
            prompts=self.prompts,
            llm_interactions=tuple([self._interaction(index, model) for index, model in enumerate(self.models)]),
            delegations=tuple(
                [each.as_trace(self.agent_role, is_nested=not self.is_manager) for each in self.delegations]
            ),
            final_output=final_output,
            parsed_output=parsed_output,
            metrics=metrics,
            metadata=self.metadata,
        )

    @property
    def call_ids(self) -> tuple[tuple[str, ...], ...]:
        """The models' own ids of their tool requests, by model call and request."""
        return tuple([tuple([tool.call.id for tool in model.tools]) for model in self.models])

    def make_stopped_trace(self, trace: TaskTrace) -> TaskTrace | None:
        """Return the trace of a task that was stopped; None inside a unit where its record tells of nothing (S-DUR-138)."""
        if is_inside_unit(self.instance) and not self.is_recorded:
            return None
        return trace.replace(metadata={**trace.metadata, "state": "cancelled"})

    @property
    def metadata(self) -> dict[str, object]:
        """Return what the trace tells beside its fields."""
        data: dict[str, object] = {"outcome": "unknown"} if self.is_outcome_unknown else {}
        if is_inside_unit(self.instance):
            data["instance"] = self.instance
        if self.embedding_tokens:
            data["embedding_tokens"] = str(self.embedding_tokens)
        if self.context_cuts:
            data["context"] = list(self.context_cuts)
        if self.sampled:
            data["sampling"] = [
                {
                    "call": name,
                    "text": each.text,
                    "input_tokens": each.input_tokens,
                    "output_tokens": each.output_tokens,
                }
                for name, each in self.sampled
            ]
        return {**data, "reviews": list(self.reviews)} if self.reviews else data

    def _interaction(self, index: int, model: ModelEffect) -> LlmInteraction:
        started, completed = utc_of(model.started_at), utc_of(model.started_at + model.latency_s)
        usage = model.response.usage
        return LlmInteraction(
            iteration_index=index,
            started_at=started,
            completed_at=completed,
            latency=completed - started,
            input_tokens=UNKNOWN_TOKENS if usage is None else usage.input_tokens,
            output_tokens=UNKNOWN_TOKENS if usage is None else usage.output_tokens,
            reasoning_tokens=UNKNOWN_TOKENS if usage is None else usage.reasoning_tokens,
            response_type="final_answer" if model.is_final else "tool_calls",
            response_text=model.response.text if model.is_final else None,
            reasoning=model.response.reasoning,
            finish_reason=unusual_finish_reason(model.response),
            model=model.model,
            provider=model.provider,
            permit_wait=timedelta(seconds=model.waited_s) if model.waited_s else None,
            tool_calls=tuple([self._tool(tool) for tool in model.tools]),
            messages=model.messages,
        )

    def _tool(self, tool: ToolEffect) -> ToolCallTrace:
        started, completed = utc_of(tool.started_at), utc_of(tool.started_at + tool.duration_s)
        return ToolCallTrace(
            tool_name=tool.call.name,
            arguments=tool.call.arguments,
            result=tool.text,
            structured_output=tool.structured_output,
            started_at=started,
            completed_at=completed,
            duration=completed - started,
            outcome=tool.outcome,
            parsed_input=_parsed_input(tool.call.arguments) if self.capture_mode is CaptureMode.FULL else None,
        )
