"""Effects of one task, and the fold that makes its trace and metrics of them. Pure.

The runner notes each effect when it is done; nothing else is needed for the trace, so a record of the same effects
gives the same trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

from ensemble_ray.errors import RecordError
from ensemble_ray.errors.texts import brief
from ensemble_ray.execute.agent.structured import parse_output, restore_output
from ensemble_ray.facts.effects import (
    DelegationDecided,
    MemoryRecalled,
    MemoryStored,
    ModelAnswered,
    ToolReturned,
    is_making_agent,
)
from ensemble_ray.facts.fact import Fact, find_fact
from ensemble_ray.facts.runs import (
    DirectivesShown,
    FailureRecorded,
    OutputRecorded,
    RecordedOutput,
    read_output,
    read_trace,
)
from ensemble_ray.ports import MemoryOperationListener
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
)
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from ensemble_ray.facts.effects import SamplingAnswered
    from ensemble_ray.facts.fact import FactData
    from ensemble_ray.ports import Journal


@dataclass(slots=True)
class MemoryUse:
    """Counts what it hears. Fulfils `MemoryOperationListener`; one for each task that is counted (S-MEM-101)."""

    short_term_entries_written: int = 0
    long_term_stores: int = 0
    long_term_retrievals: int = 0
    entity_lookups: int = 0
    #: time of retrievals and lookups, s
    reading_s: float = 0.0

    def on_stm_write(self) -> None:
        """Count it."""
        self.short_term_entries_written += 1

    def on_ltm_store(self) -> None:
        """Count it."""
        self.long_term_stores += 1

    def on_ltm_retrieval(self, duration: float) -> None:
        """Count it and its time, s."""
        self.long_term_retrievals += 1
        self.reading_s += max(0.0, duration)

    def on_entity_lookup(self, duration: float) -> None:
        """Count it and its time, s."""
        self.entity_lookups += 1
        self.reading_s += max(0.0, duration)

    @property
    def counts(self) -> MemoryOperationCounts:
        """How often memory was used."""
        return MemoryOperationCounts(
            short_term_entries_written=self.short_term_entries_written,
            long_term_stores=self.long_term_stores,
            long_term_retrievals=self.long_term_retrievals,
            entity_lookups=self.entity_lookups,
        )

    @property
    def reading_time(self) -> timedelta:
        """How long it took to read."""
        return timedelta(seconds=self.reading_s)


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
    #: what was repaired in the arguments before the call
    repairs: tuple[str, ...] = ()

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
            repairs=tool.repairs,
            parsed_input=_parsed_input(tool.call.arguments) if self.capture_mode is CaptureMode.FULL else None,
        )


_log = bounded_logger(__name__)


def answers_before(facts: Iterable[Fact]) -> dict[str, list[Fact[ModelAnswered]]]:
    """Return the answers to calls that made agents before the run began (S-SET-46): by effect name, in order."""
    found: dict[str, list[Fact[ModelAnswered]]] = {}
    for fact in facts:
        if isinstance(fact.data, ModelAnswered) and is_making_agent(fact):
            found.setdefault(fact.name, []).append(cast("Fact[ModelAnswered]", fact))
    return found


@dataclass(frozen=True, slots=True)
class RecordedWorkers:
    """What is recorded of the workers of a task."""

    #: what they gave, by role, in the order in which they were done
    delegated: tuple[tuple[str, TaskOutput], ...]
    #: what those did that failed
    failed_delegations: tuple[TaskTrace, ...]


async def recorded_workers(journal: Journal, recorded: Mapping[tuple[str, str], Fact]) -> RecordedWorkers:
    """Return what the workers of a task gave, and what those did that gave nothing.

    Args:
        journal: The run's.
        recorded: What is recorded of the task that asked them.
    """
    outputs: list[tuple[str, TaskOutput]] = []
    lost: list[TaskTrace] = []
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
            lost.append(trace)
    return RecordedWorkers(tuple(sorted(outputs, key=lambda pair: pair[1].completed_at)), tuple(lost))


def recorded_output(
    recorded: Mapping[tuple[str, str], Fact], instance: str, output_type: OutputType | None = None
) -> TaskOutput | None:
    """Return the recorded output of an instance; see `typed_output`. None where it has none.

    Raises:
        RecordError: it is no output.
    """
    fact = find_fact(recorded, instance, OutputRecorded)
    return None if fact is None else typed_output(fact.data.output_data(), output_type)


def recorded_trace(recorded: Mapping[tuple[str, str], Fact], instance: str) -> TaskTrace | None:
    """Return what an instance did that failed; None where that is not recorded.

    Raises:
        RecordError: it is no trace.
    """
    fact = find_fact(recorded, instance, FailureRecorded)
    return None if fact is None else read_trace(fact)


def typed_output(data: Mapping[str, object], output_type: OutputType | None = None) -> TaskOutput:
    """Return a recorded output; its parsed output of that type, or JSON data where there is none.

    What does not fit the type any more is parsed from the raw text; where that fails too, it stays JSON data and a WARN
    line says so (S-DUR-36: a definition may be changed on purpose).

    Raises:
        RecordError: it is no output.
    """
    fields: dict[str, Any] = {**data, "output_type": output_type}
    if output_type is not None and fields.get("parsed_output") is not None:
        fields["parsed_output"] = parsed = _parse(fields, output_type)
        if isinstance(fields.get("trace"), Mapping):
            fields["trace"] = {**fields["trace"], "parsed_output": parsed}
    try:
        return TaskOutput(**fields)
    except ValueError as error:
        msg = f"The record is damaged: output of task '{_task_of(read_output(data))}': {error}"
        raise RecordError(msg) from error


def _parse(fields: Mapping[str, object], output_type: OutputType) -> object:
    read = read_output(fields)
    restored = restore_output(read.parsed_output, output_type)
    if restored.is_success:
        return restored.value
    parsed = parse_output(read.raw, output_type)
    if parsed.is_success:
        return parsed.value
    _log.warning(
        "The recorded output of task '%s' is no %s any more: %s",
        _task_of(read),
        type_name(output_type),
        brief(restored.error_message or ""),
    )
    return read.parsed_output


def _task_of(read: RecordedOutput) -> str:
    return read.task_description[:80]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEffect:
    """A call that was begun, and of which nobody knows whether it was done; what `on_unknown` is asked about."""

    run_id: str
    #: key of the task: its name, else its position
    task: str
    agent_role: str
    #: `handler` where the task has one
    tool_name: str
    #: JSON text as the model wrote it; empty for a handler
    arguments: str
    #: name of the effect in the record: `INSTANCE/TURN/CALL`
    effect: str
    #: what the call was given, and gets again if it is repeated
    idempotency_key: str
    begun_at: datetime
    #: whether the part of the record is lost in which it would stand: then it may not have been begun at all, and
    #: `begun_at` is when the loss was accepted
    is_lost: bool = False

    def to_dict(self) -> dict[str, object]:
        """As data, for another process."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> UnknownEffect:
        """Return what `to_dict` gave."""
        return cls(**cast("dict[str, Any]", dict(data)))
