"""Effects of one task, and the trace and metrics that follow from them.

The same effects always produce the same trace, so a recorded task has the trace of the live one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any, Literal, cast

from ensemble_ray.errors import RecordError
from ensemble_ray.errors.texts import brief
from ensemble_ray.execute.agent.structured import parse_output, restore_output
from ensemble_ray.facts.effects import (
    DelegationDecided,
    MemoryRecalled,
    MemoryStored,
    ModelAnswered,
    SamplingAnswered,
    ToolReturned,
    is_making_agent,
)
from ensemble_ray.facts.fact import Fact, FactData, find_fact
from ensemble_ray.facts.runs import DirectivesShown, FailureRecorded, OutputRecorded, read_output, read_trace
from ensemble_ray.ports import Journal, MemoryOperationListener
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.delegation import DelegationRequest, DelegationResponse, DelegationStatus
from ensemble_ray.values.ids import delegated_instance, is_inside_unit
from ensemble_ray.values.messages import ChatMessage, ChatResponse, ToolCall, incomplete_reason, unusual_finish_reason
from ensemble_ray.values.metrics import (
    UNKNOWN_TOKENS,
    CostConfiguration,
    MemoryOperationCounts,
    TaskMetrics,
    add_tokens,
)
from ensemble_ray.values.task_output import OutputType, TaskOutput, type_name
from ensemble_ray.values.trace import (
    CapturedMessage,
    CaptureMode,
    DelegationTrace,
    LlmInteraction,
    TaskPrompts,
    TaskTrace,
    ToolCallTrace,
    jsonable,
)
from ensemble_ray.values.value import utc_of

_log = bounded_logger(__name__)

#: Outcome of a tool call (S-TRC-31, S-DUR-26).
CallOutcome = Literal["success", "failure", "error", "unknown", "skipped_max_iterations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEffect:
    """A call that was started, with an unknown outcome. Argument of `on_unknown`."""

    run_id: str
    #: key of the task: its name, or its position
    task: str
    agent_role: str
    #: `handler` for a handler task
    tool_name: str
    #: JSON text as the model wrote it; empty for a handler
    arguments: str
    #: name of the effect in the record: `INSTANCE/TURN/CALL`
    effect: str
    #: key of the call; a repeated call has the same key
    idempotency_key: str
    begun_at: datetime
    #: whether the part of the record is lost that would contain the call. The call may not have been started then, and
    #: `begun_at` is the time at which the loss was accepted
    is_lost: bool = False

    def to_dict(self) -> dict[str, object]:
        """Return the fields as data for another process."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> UnknownEffect:
        """Build the effect from data of `to_dict`."""
        return cls(**cast("dict[str, Any]", dict(data)))


@dataclass(slots=True, kw_only=True)
class ToolEffect:
    call: ToolCall
    outcome: CallOutcome
    text: str
    started_at: float
    duration_s: float
    structured_output: object = None
    #: the tool asked the model to try again
    asks_again: bool = False
    #: repairs of the arguments before the call
    repairs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.duration_s = max(0.0, self.duration_s)  # recorded durations are negative if the clock was set back

    def as_trace(self, *, has_parsed_input: bool) -> ToolCallTrace:
        started, completed = utc_of(self.started_at), utc_of(self.started_at + self.duration_s)
        return ToolCallTrace.unchecked(
            tool_name=self.call.name,
            arguments=self.call.arguments,
            result=self.text,
            structured_output=jsonable(self.structured_output),
            started_at=started,
            completed_at=completed,
            duration=completed - started,
            outcome=self.outcome,
            repairs=self.repairs,
            parsed_input=jsonable(_parse_object(self.call.arguments)) if has_parsed_input else None,
            metadata={},
        )


def _parse_object(arguments: str) -> dict[str, object] | None:
    """Return a JSON object as a dict; None for other texts (S-CAP-14)."""
    try:
        parsed: object = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, object]", parsed) if isinstance(parsed, dict) else None


@dataclass(slots=True, kw_only=True)
class ModelEffect:
    """One model call, and the tool calls of its answer."""

    started_at: float
    latency_s: float
    response: ChatResponse
    is_final: bool
    #: reasons of the failed attempts before the answer (S-DUR-66)
    attempts_failed: tuple[str, ...] = ()
    #: time at the start of `latency_s` that the call waited for permits of rate limits
    waited_s: float = 0.0
    #: (input, output) tokens that the run's budget counted because the provider did not (S-BUD-2)
    estimated: tuple[int, int] | None = None
    tools: list[ToolEffect] = field(default_factory=list[ToolEffect])
    messages: tuple[CapturedMessage, ...] = ()
    #: names of the model and its provider, if the model has them
    model: str | None = None
    provider: str | None = None

    def __post_init__(self) -> None:
        self.latency_s = max(0.0, self.latency_s)
        self.waited_s = min(self.waited_s, self.latency_s)

    @property
    def retries(self) -> int:
        return len(self.attempts_failed)

    def as_trace(self, index: int, *, has_parsed_inputs: bool) -> LlmInteraction:
        started, completed = utc_of(self.started_at), utc_of(self.started_at + self.latency_s)
        usage = self.response.usage
        return LlmInteraction.unchecked(
            iteration_index=index,
            started_at=started,
            completed_at=completed,
            latency=completed - started,
            input_tokens=UNKNOWN_TOKENS if usage is None else usage.input_tokens,
            output_tokens=UNKNOWN_TOKENS if usage is None else usage.output_tokens,
            reasoning_tokens=UNKNOWN_TOKENS if usage is None else usage.reasoning_tokens,
            response_type="final_answer" if self.is_final else "tool_calls",
            response_text=self.response.text if self.is_final else None,
            reasoning=self.response.reasoning,
            finish_reason=unusual_finish_reason(self.response),
            model=self.model,
            provider=self.provider,
            permit_wait=timedelta(seconds=self.waited_s) if self.waited_s else None,
            tool_calls=tuple([tool.as_trace(has_parsed_input=has_parsed_inputs) for tool in self.tools]),
            messages=self.messages,
        )


def capture_messages(messages: Sequence[ChatMessage]) -> tuple[CapturedMessage, ...]:
    """Copy messages; later changes of the conversation do not affect the copies (S-CAP-12, S-CAP-13)."""
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


@dataclass(slots=True, kw_only=True)
class DelegationEffect:
    """One attempt to delegate work, perhaps refused, and its result."""

    request: DelegationRequest
    response: DelegationResponse
    #: role of the worker; if no agent has the role, the model's spelling
    worker_role: str
    #: 0: delegated by a task of the plan
    depth: int
    started_at: float
    #: turn and index of the call
    position: tuple[int, int] = (0, 0)
    #: text for the model
    text: str
    #: the worker started
    is_started: bool = False
    #: instance of the worker's task
    instance: str = ""
    output: TaskOutput | None = None
    #: trace of the worker, with or without an output
    trace: TaskTrace | None = None

    @property
    def is_success(self) -> bool:
        return self.response.status is DelegationStatus.SUCCESS

    def as_trace(self, delegator_role: str, *, is_nested: bool) -> DelegationTrace:
        """Return the trace; `is_nested` includes the worker's trace (S-TRC-41)."""
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


@dataclass(slots=True)
class MemoryUse:
    """Counts the memory operations of one task (S-MEM-101). Implements `MemoryOperationListener`."""

    short_term_entries_written: int = 0
    long_term_stores: int = 0
    long_term_retrievals: int = 0
    entity_lookups: int = 0
    #: time of retrievals and lookups
    reading_s: float = 0.0

    def on_stm_write(self) -> None:
        self.short_term_entries_written += 1

    def on_ltm_store(self) -> None:
        self.long_term_stores += 1

    def on_ltm_retrieval(self, duration: float) -> None:
        self.long_term_retrievals += 1
        self.reading_s += max(0.0, duration)

    def on_entity_lookup(self, duration: float) -> None:
        self.entity_lookups += 1
        self.reading_s += max(0.0, duration)

    @property
    def counts(self) -> MemoryOperationCounts:
        return MemoryOperationCounts(
            short_term_entries_written=self.short_term_entries_written,
            long_term_stores=self.long_term_stores,
            long_term_retrievals=self.long_term_retrievals,
            entity_lookups=self.entity_lookups,
        )


@dataclass(slots=True, kw_only=True)
class TaskEffects:
    """All effects of one task so far."""

    task_description: str
    expected_output: str
    agent_role: str
    started_at: float
    capture_mode: CaptureMode = CaptureMode.OFF
    prompts: TaskPrompts | None = None
    prompt_build_s: float = 0.0
    models: list[ModelEffect] = field(default_factory=list[ModelEffect])
    tool_call_count: int = 0
    #: in request order
    delegations: list[DelegationEffect] = field(default_factory=list[DelegationEffect])
    #: a manager's trace does not contain its workers' traces
    is_manager: bool = False
    #: repeated model calls, including those without an answer
    retry_count: int = 0
    #: requests of the newest model call (S-MR-152)
    attempts: int = 0
    is_handler: bool = False
    #: the handler or runner has an unknown outcome (S-DUR-26)
    is_outcome_unknown: bool = False
    #: path of the execution
    instance: str = ""
    #: the record contains work of the task
    is_recorded: bool = False
    #: cuts of the context budget, for each request with new ones (S-MEM-136)
    context_cuts: list[Mapping[str, object]] = field(default_factory=list[Mapping[str, object]])
    #: tokens that an embedding endpoint read for the task's memory (S-MEM-128)
    embedding_tokens: int = 0
    #: (effect name, answer) of the model calls that tool servers requested
    sampled: list[tuple[str, SamplingAnswered]] = field(default_factory=list["tuple[str, SamplingAnswered]"])
    #: None: the task uses no memory
    memory: MemoryUse | None = None
    #: set while the task runs (S-MEM-100)
    memory_listener: MemoryOperationListener | None = None
    #: the intent of a call with an effect on the world is on the disk
    has_effect: bool = False
    #: (effect name, message) of the call that ended the run early (S-DUR-138)
    early_exit: tuple[str, str] = ("", "")
    #: trace entries of its review gates, in order
    reviews: list[Mapping[str, object]] = field(default_factory=list[Mapping[str, object]])

    @property
    def call_ids(self) -> tuple[tuple[str, ...], ...]:
        return tuple([tuple([tool.call.id for tool in model.tools]) for model in self.models])

    @property
    def metadata(self) -> dict[str, object]:
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

    def metrics(self, cost: CostConfiguration | None) -> TaskMetrics:
        """Return the metrics of the task (S-MET-10 to S-MET-16)."""
        inputs: list[int] = []
        outputs: list[int] = []
        llm_s = tools_s = 0.0
        incomplete = reasoning = 0
        for model in self.models:  # one pass: this runs for every task of every run
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
        return TaskMetrics.unchecked(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            total_tokens=UNKNOWN_TOKENS if input_tokens < 0 or output_tokens < 0 else input_tokens + output_tokens,
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
            memory_retrieval_time=timedelta(seconds=0 if self.memory is None else self.memory.reading_s),
            memory_operations=MemoryOperationCounts.ZERO if self.memory is None else self.memory.counts,
        )

    def trace(
        self, *, completed_at: float, final_output: str, parsed_output: object, metrics: TaskMetrics
    ) -> TaskTrace:
        """Return the trace of the task (S-TRC-10)."""
        # The clock of the process that ends a task may be behind the clock of the process that started it.
        started, completed = utc_of(self.started_at), utc_of(max(completed_at, self.started_at))
        is_full = self.capture_mode is CaptureMode.FULL
        return TaskTrace.unchecked(
            task_description=self.task_description,
            expected_output=self.expected_output,
            agent_role=self.agent_role,
            started_at=started,
            completed_at=completed,
            duration=completed - started,
            prompts=self.prompts,
            llm_interactions=tuple(
                [model.as_trace(index, has_parsed_inputs=is_full) for index, model in enumerate(self.models)]
            ),
            delegations=tuple(
                [each.as_trace(self.agent_role, is_nested=not self.is_manager) for each in self.delegations]
            ),
            final_output=final_output,
            parsed_output=parsed_output,
            metrics=metrics,
            metadata=jsonable(metadata) if (metadata := self.metadata) else metadata,
        )

    def cancelled_trace(self, trace: TaskTrace) -> TaskTrace | None:
        """Return the trace of a cancelled task; None for a task inside a unit that recorded no work (S-DUR-138)."""
        if is_inside_unit(self.instance) and not self.is_recorded:
            return None
        return trace.replace(metadata={**trace.metadata, "state": "cancelled"})


# Recorded effects.


def is_work(data: FactData) -> bool:
    """Whether a fact is work of a task; memory and directives are input of its prompts."""
    return data.IS_EFFECT and not isinstance(data, MemoryRecalled | MemoryStored | DirectivesShown)


def answers_before(facts: Iterable[Fact]) -> dict[str, list[Fact[ModelAnswered]]]:
    """Return the answers of model calls that built agents before the run started, by effect name (S-SET-46)."""
    found: dict[str, list[Fact[ModelAnswered]]] = {}
    for fact in facts:
        if isinstance(fact.data, ModelAnswered) and is_making_agent(fact):
            found.setdefault(fact.name, []).append(cast("Fact[ModelAnswered]", fact))
    return found


async def recorded_workers(
    journal: Journal, recorded: Mapping[tuple[str, str], Fact]
) -> tuple[tuple[tuple[str, TaskOutput], ...], tuple[TaskTrace, ...]]:
    """Return (role, output) of a task's workers in completion order, and the traces of workers without an output.

    `recorded` are the facts of the delegating task.
    """
    outputs: list[tuple[str, TaskOutput]] = []
    failed: list[TaskTrace] = []
    for name, fact_kind in recorded:
        result = find_fact(recorded, name, ToolReturned)
        if fact_kind != DelegationDecided.KIND or result is None:
            continue
        instance = delegated_instance(name)
        of_worker = await journal.lookup_recorded(instance)
        output = recorded_output(of_worker, instance)
        if output is not None and result.data.is_success:
            outputs.append((output.agent_role, output))
        elif output is None and (trace := recorded_trace(of_worker, instance)) is not None:
            failed.append(trace)
    return tuple(sorted(outputs, key=lambda pair: pair[1].completed_at)), tuple(failed)


def recorded_output(
    recorded: Mapping[tuple[str, str], Fact], instance: str, output_type: OutputType | None = None
) -> TaskOutput | None:
    fact = find_fact(recorded, instance, OutputRecorded)
    return None if fact is None else typed_output(fact.data.output_data(), output_type)


def recorded_trace(recorded: Mapping[tuple[str, str], Fact], instance: str) -> TaskTrace | None:
    fact = find_fact(recorded, instance, FailureRecorded)
    return None if fact is None else read_trace(fact)


def typed_output(data: Mapping[str, object], output_type: OutputType | None = None) -> TaskOutput:
    """Build an output from recorded data, or raise `RecordError`. `output_type` None: its parsed output is JSON data.

    If the type has changed and the parsed output does not fit it, the raw text is parsed again. If that fails, the
    parsed output stays JSON data, with a warning (S-DUR-36).
    """
    values: dict[str, Any] = {**data, "output_type": output_type}
    if output_type is not None and values.get("parsed_output") is not None:
        values["parsed_output"] = parsed = _restore_parsed(values, output_type)
        if isinstance(values.get("trace"), Mapping):
            values["trace"] = {**values["trace"], "parsed_output": parsed}
    try:
        return TaskOutput(**values)
    except ValueError as error:
        msg = f"The record is damaged: output of task '{read_output(data).task_description[:80]}': {error}"
        raise RecordError(msg) from error


def _restore_parsed(data: Mapping[str, object], output_type: OutputType) -> object:
    read = read_output(data)
    restored = restore_output(read.parsed_output, output_type)
    if restored.is_success:
        return restored.value
    parsed = parse_output(read.raw, output_type)
    if parsed.is_success:
        return parsed.value
    _log.warning(
        "The recorded output of task '%s' no longer fits %s: %s",
        read.task_description[:80], type_name(output_type), brief(restored.error_message or ""),
    )  # fmt: skip
    return read.parsed_output
