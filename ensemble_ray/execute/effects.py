"""Effects of one task, and the trace and metrics that follow from them, always the same."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from ensemble_ray.errors import RecordError
from ensemble_ray.errors.texts import brief
from ensemble_ray.execute.agent.structured import parse_output, restore_output
from ensemble_ray.facts.effects import (
    DelegationDecided,
    MemoryRecalled,
    MemoryStored,
    ModelAnswered,
    ModelWait,
    ReflectionRecorded,
    SamplingAnswered,
    ToolReturned,
    is_making_agent,
)
from ensemble_ray.facts.fact import Fact, FactData, find_fact
from ensemble_ray.facts.runs import DirectivesShown, FailureRecorded, OutputRecorded, read_output, read_trace
from ensemble_ray.ports import Journal, MemoryOperationListener
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.delegation import DelegationRequest, DelegationResponse, DelegationStatus
from ensemble_ray.values.ids import delegated_instance, is_inside_unit
from ensemble_ray.values.messages import (
    ChatMessage,
    ChatResponse,
    TokenUsage,
    ToolCall,
    incomplete_reason,
    unusual_finish_reason,
)
from ensemble_ray.values.metrics import (
    BATCH,
    UNKNOWN_TOKENS,
    CostConfiguration,
    CostEstimate,
    MemoryOperationCounts,
    TaskMetrics,
    add_tokens,
)
from ensemble_ray.values.prices import PriceMark, RunCosts, RunPrices, estimate_embeddings
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

CallOutcome = Literal["success", "failure", "error", "unknown", "skipped_max_iterations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEffect:
    """A call that was started, with an unknown outcome. Argument of `on_unknown`."""

    run_id: str
    task: str  # key of the task: its name, or its position
    agent_role: str
    tool_name: str  # `handler` for a handler task
    arguments: str  # JSON text as the model wrote it; empty for a handler
    effect: str  # name of the effect in the record: `INSTANCE/TURN/CALL`
    idempotency_key: str  # key of the call; a repeated call has the same key
    begun_at: datetime
    #: whether a lost part of the record may contain the call. `begun_at` is then the time at which the loss was
    #: accepted, and the call may not have started
    is_lost: bool = False

    def to_dict(self) -> dict[str, object]:
        """Return the fields as data for another process."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> UnknownEffect:
        """Build the effect from data of `to_dict`."""
        return cls(**cast("dict[str, Any]", dict(data)))


class ToolEffect(Struct, kw_only=True):
    call: ToolCall
    outcome: CallOutcome
    text: str
    started_at: float
    duration_s: float
    structured_output: object = None
    asks_again: bool = False
    repairs: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    attachments: tuple[Attachment, ...] = ()

    def __post_init__(self) -> None:
        self.duration_s = max(0.0, self.duration_s)  # recorded durations are negative if the clock was set back

    def as_trace(self, *, has_parsed_input: bool) -> ToolCallTrace:
        started, completed = utc_of(self.started_at), utc_of(self.started_at + self.duration_s)
        parsed: object = None
        if has_parsed_input:
            with suppress(ValueError, RecursionError):
                parsed = json.loads(self.call.arguments)
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
            log=self.log,
            attachments=tuple([each.to_json() for each in self.attachments]),
            parsed_input=jsonable(parsed) if isinstance(parsed, dict) else None,  # S-CAP-14
            metadata={},
        )


class ModelEffect(Struct, kw_only=True):
    started_at: float
    latency_s: float
    response: ChatResponse
    is_final: bool
    attempts_failed: tuple[str, ...] = ()  # reasons before the answer (S-DUR-66)
    waits: tuple[ModelWait, ...] = ()  # before the attempt that was answered
    max_attempts: int = 0  # of the retry policy; 0: no attempt failed
    waited_s: float = 0.0  # time in `latency_s` that the call waited for permits of rate limits
    estimated: tuple[int, int] | None = None  # (input, output) tokens that the budget estimated (S-BUD-2)
    tools: list[ToolEffect] = msgspec.field(default_factory=list[ToolEffect])
    messages: tuple[CapturedMessage, ...] = ()
    model: str | None = None
    provider: str | None = None
    reuse_digest: str = ""  # these three as in `ModelAnswered`
    reused: str = ""
    reused_tokens: tuple[int, ...] = ()
    price: PriceMark = None
    delivery: str = ""  # as in `ModelAnswered`

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
            cached_tokens=UNKNOWN_TOKENS if usage is None else usage.cached_tokens,
            cache_write_tokens=UNKNOWN_TOKENS if usage is None else usage.cache_write_tokens,
            response_type="final_answer" if self.is_final else "tool_calls",
            response_text=self.response.text if self.is_final else None,
            reasoning=self.response.reasoning,
            finish_reason=unusual_finish_reason(self.response),
            model=self.model,
            provider=self.provider,
            permit_wait=timedelta(seconds=self.waited_s) if self.waited_s else None,
            waits=tuple(map(str, self.waits)),
            reused=self.reused,
            reused_tokens=add_tokens(self.reused_tokens),
            tool_calls=tuple([tool.as_trace(has_parsed_input=has_parsed_inputs) for tool in self.tools]),
            messages=self.messages,
        )


def capture_messages(messages: Sequence[ChatMessage]) -> tuple[CapturedMessage, ...]:
    """Copy messages, so that later changes have no effect (S-CAP-12, S-CAP-13)."""
    return tuple(
        CapturedMessage(
            role=message.role,
            content=message.content,
            tool_calls=tuple(
                {"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls
            ),
            tool_name=message.name if message.role == "tool" else None,
            attachments=tuple([each.to_json() for each in message.attachments]),
        )
        for message in messages
    )


class DelegationEffect(Struct, kw_only=True):
    """One attempt to delegate, perhaps refused, and its result."""

    request: DelegationRequest
    response: DelegationResponse
    worker_role: str  # the model's spelling if no agent has the role
    depth: int  # 0: by a task of the plan
    started_at: float
    position: tuple[int, int] = (0, 0)
    text: str
    is_started: bool = False
    instance: str = ""
    output: TaskOutput | None = None
    trace: TaskTrace | None = None  # of the worker, with or without an output

    @property
    def is_success(self) -> bool:
        return self.response.status is DelegationStatus.SUCCESS

    def as_trace(self, delegator_role: str, *, is_nested: bool) -> DelegationTrace:
        """`is_nested` includes the worker's trace (S-TRC-41)."""
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


class MemoryUse(Struct):
    """Counts memory operations of one task (S-MEM-101). Implements `MemoryOperationListener`."""

    short_term_entries_written: int = 0
    long_term_stores: int = 0
    long_term_retrievals: int = 0
    entity_lookups: int = 0
    reading_s: float = 0.0  # of retrievals and lookups

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


class TaskEffects(Struct, kw_only=True):
    task_description: str
    expected_output: str
    agent_role: str
    started_at: float
    capture_mode: CaptureMode = CaptureMode.OFF
    prompts: TaskPrompts | None = None
    prompt_build_s: float = 0.0
    models: list[ModelEffect] = msgspec.field(default_factory=list[ModelEffect])
    tool_call_count: int = 0
    delegations: list[DelegationEffect] = msgspec.field(default_factory=list[DelegationEffect])
    is_manager: bool = False  # the trace then lacks its workers' traces
    retry_count: int = 0  # repeated model calls, with those without an answer
    attempts: int = 0  # requests of the newest model call (S-MR-152)
    waits: Sequence[ModelWait] = ()  # of the newest model call, until it is answered
    max_attempts: int = 0  # of that call
    is_chained: bool = False  # the model is a fallback chain
    is_handler: bool = False
    is_outcome_unknown: bool = False  # of the handler or runner (S-DUR-26)
    instance: str = ""
    is_recorded: bool = False
    context_cuts: list[Mapping[str, object]] = msgspec.field(
        default_factory=list[Mapping[str, object]]
    )  # new cuts (S-MEM-136)
    embedding_tokens: int = 0  # read by an embedding endpoint for memory (S-MEM-128)
    sampled: list[tuple[str, SamplingAnswered]] = msgspec.field(default_factory=list["tuple[str, SamplingAnswered]"])
    memory: MemoryUse | None = None  # None: no memory
    memory_listener: MemoryOperationListener | None = None
    has_effect: bool = False  # the intent of a call with an effect on the world is on disk
    early_exit: tuple[str, str] = ("", "")  # (effect name, message) of the call that ended the run (S-DUR-138)
    reviews: list[Mapping[str, object]] = msgspec.field(default_factory=list[Mapping[str, object]])

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

    def metrics(self, costs: RunCosts) -> TaskMetrics:
        inputs: list[int] = []
        outputs: list[int] = []
        llm_s = tools_s = 0.0
        incomplete = reasoning = cached = written = 0
        reused: list[tuple[int, ...]] = []
        batched: Sequence[int] | None = None  # tokens of the first answer, if a batch has it
        for model in self.models:  # one pass: this runs for every task of every run
            if model.reused:
                reused.append(model.reused_tokens)
            usage = model.response.usage
            if model.delivery and usage is not None:
                batched = (usage.input_tokens, usage.output_tokens)
            inputs.append(UNKNOWN_TOKENS if usage is None else usage.input_tokens)
            outputs.append(UNKNOWN_TOKENS if usage is None else usage.output_tokens)
            if usage is not None:
                reasoning += max(0, usage.reasoning_tokens)
                cached += max(0, usage.cached_tokens)
                written += max(0, usage.cache_write_tokens)
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
        if isinstance(costs, CostConfiguration):
            cost, unpriced = _cost(costs, input_tokens, output_tokens, batched), 0
        else:
            cost, unpriced = (None, 0) if costs is None else self._cost(costs)
        return TaskMetrics.unchecked(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            total_tokens=UNKNOWN_TOKENS if input_tokens < 0 or output_tokens < 0 else input_tokens + output_tokens,
            reasoning_tokens=reasoning,
            cached_tokens=cached,
            cache_write_tokens=written,
            llm_latency=timedelta(seconds=llm_s),
            tool_execution_time=timedelta(seconds=tools_s),
            prompt_build_time=timedelta(seconds=self.prompt_build_s),
            llm_call_count=len(self.models) - len(reused) + len(self.sampled),
            answers_by_model=self._answers_by_model() if self.is_chained else None,
            tool_call_count=self.tool_call_count,
            retry_count=self.retry_count,
            incomplete_answers=incomplete,
            delegation_count=sum([each.is_started for each in self.delegations]),
            reused_calls=len(reused),
            reused_tokens=add_tokens(sum(reused, ())) if reused else 0,
            reused_output_tokens=add_tokens(tokens[-1] for tokens in reused) if reused else 0,
            unpriced_calls=unpriced,
            cost_estimate=cost,
            memory_retrieval_time=timedelta(seconds=0 if self.memory is None else self.memory.reading_s),
            memory_operations=MemoryOperationCounts.ZERO if self.memory is None else self.memory.counts,
        )

    def _answers_by_model(self) -> dict[str, int]:
        return dict(Counter([each.model for each in self.models if each.model and not each.reused]))

    def _cost(self, prices: RunPrices) -> tuple[CostEstimate | None, int]:
        """Return the cost of the calls with a known price, and the number of the other calls (S-PRC-12)."""
        found = [
            prices.estimate(model.response.usage or TokenUsage(), model.price, delivery=model.delivery)
            for model in self.models
            if not model.reused
        ]
        for _, answer in self.sampled:
            counts = (answer.input_tokens, answer.output_tokens, -1, answer.cached_tokens, answer.cache_write_tokens)
            found.append(answer_cost(prices, answer, TokenUsage(*counts)))
        if self.embedding_tokens:
            found.append(estimate_embeddings(prices, self.embedding_tokens))
        cost: CostEstimate | None = None
        for each in found:
            cost = each if cost is None else cost.add(each)
        is_priced = cost is not None or bool(prices.first)
        return cost, found.count(None) if is_priced else 0

    def trace(
        self, *, completed_at: float, final_output: str, parsed_output: object, metrics: TaskMetrics
    ) -> TaskTrace:
        started, completed = utc_of(self.started_at), utc_of(max(completed_at, self.started_at))  # clocks may differ
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
        """Return the trace of a cancelled task; None for a task in a unit without recorded work (S-DUR-138)."""
        if is_inside_unit(self.instance) and not self.is_recorded:
            return None
        return trace.replace(metadata={**trace.metadata, "state": "cancelled"})


def answer_cost(
    costs: RunCosts,
    answer: ModelAnswered | SamplingAnswered | ReflectionRecorded,
    usage: TokenUsage,
    *,
    delivery: str = "",
) -> CostEstimate | None:
    """Return the cost of a recorded answer with these counts; None: unknown."""
    if costs is None or isinstance(costs, CostConfiguration):
        counts = (usage.input_tokens, usage.output_tokens)
        return None if costs is None else costs.estimate(*counts, delivery=delivery)
    return costs.estimate(usage, answer.price, delivery=delivery)


def _cost(
    cost: CostConfiguration, input_tokens: int, output_tokens: int, batched: Sequence[int] | None
) -> CostEstimate | None:
    if batched is None:
        return cost.estimate(input_tokens, output_tokens)
    first = cost.estimate(*batched, delivery=BATCH)
    rest = cost.estimate(input_tokens - batched[0], output_tokens - batched[1])
    return None if first is None or rest is None else first.add(rest)


def is_work(data: FactData) -> bool:
    """Whether a fact is work of a task, and not an input of its prompts."""
    return data.IS_EFFECT and not isinstance(data, MemoryRecalled | MemoryStored | DirectivesShown)


def answers_before(facts: Iterable[Fact]) -> dict[str, list[Fact[ModelAnswered]]]:
    """Return answers of calls that built agents before the run, by effect name (S-SET-46)."""
    found: dict[str, list[Fact[ModelAnswered]]] = {}
    for fact in facts:
        if isinstance(fact.data, ModelAnswered) and is_making_agent(fact):
            found.setdefault(fact.name, []).append(cast("Fact[ModelAnswered]", fact))
    return found


async def recorded_workers(
    journal: Journal, recorded: Mapping[tuple[str, str], Fact]
) -> tuple[tuple[tuple[str, TaskOutput], ...], tuple[TaskTrace, ...]]:
    """Return (role, output) of workers in completion order, and traces of the others, from a delegating task's facts."""
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
    """Build an output from recorded data, or raise `RecordError`; without `output_type` with JSON data.

    If the type changed, the raw text is parsed again; at worst it stays JSON data, with a warning (S-DUR-36).
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
