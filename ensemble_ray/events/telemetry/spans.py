"""Spans as plain data, independent of the SDK."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from ensemble_ray.errors import ValidationError
from ensemble_ray.events import RunTracedEvent, TaskTracedEvent
from ensemble_ray.events.telemetry import conventions as gen_ai
from ensemble_ray.values.ids import delegating_call, effect_name, node_key
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.trace import CapturedMessage, LlmInteraction, TaskTrace, ToolCallTrace

Attribute: TypeAlias = str | int | float | bool | Sequence[str]


class SpanEvent(Struct, frozen=True, kw_only=True):
    """An event within a span."""

    name: str
    #: Unix time, s
    at: float
    attributes: Mapping[str, Attribute] = msgspec.field(default_factory=dict[str, Attribute])


class SpanData(Struct, frozen=True, kw_only=True):
    """One span. Ids are hexadecimal digits; times are Unix time, s."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    started_at: float
    ended_at: float
    kind: Literal["internal", "client"] = "internal"
    attributes: Mapping[str, Attribute] = msgspec.field(default_factory=dict[str, Attribute])
    events: Sequence[SpanEvent] = ()
    #: of the same trace, which this span follows
    links: Sequence[str] = ()
    is_error: bool = False
    #: only if content may be sent
    status_text: str = ""
    is_sampled: bool = True
    has_remote_parent: bool = False


def drop_empty(attributes: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    """Return the attributes that have a value."""
    return {name: value for name, value in attributes.items() if value is not None and value not in ("", ())}


CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


class Content(StrEnum):
    """Where prompts, answers, arguments and results are sent."""

    NO_CONTENT = "no_content"
    SPAN_ONLY = "span_only"
    EVENT_ONLY = "event_only"
    SPAN_AND_EVENT = "span_and_event"

    @property
    def is_on_spans(self) -> bool:
        """Whether content is sent as attributes."""
        return self in (Content.SPAN_ONLY, Content.SPAN_AND_EVENT)

    @property
    def is_in_events(self) -> bool:
        """Whether content is sent as events."""
        return self in (Content.EVENT_ONLY, Content.SPAN_AND_EVENT)


_WORDS = {
    "true": Content.SPAN_AND_EVENT,
    "1": Content.SPAN_AND_EVENT,
    "false": Content.NO_CONTENT,
    "0": Content.NO_CONTENT,
}


def content_mode(wanted: bool | Content | str | None, environment: Mapping[str, str]) -> Content:  # noqa: FBT001  as the setting is
    """Return the requested mode, else the environment's, else `NO_CONTENT`.

    Raises:
        ValidationError: the mode is unknown.
    """
    if isinstance(wanted, bool):
        return Content.SPAN_AND_EVENT if wanted else Content.NO_CONTENT
    text = str(environment.get(CONTENT_VARIABLE, "") if wanted is None else wanted).strip().lower()
    if not text:
        return Content.NO_CONTENT
    if text in _WORDS:
        return _WORDS[text]
    if text in set(Content):
        return Content(text)
    known = ", ".join(("true", "false", *(each.value for each in Content)))
    raise ValidationError(f"{CONTENT_VARIABLE} must be one of [{known}], got: '{text}'")


def place_content(
    said: Mapping[str, str], content: Content, *, at: float
) -> tuple[Mapping[str, Attribute], Sequence[SpanEvent]]:
    """Return content as attributes and as events of a span."""
    attributes = dict(said) if content.is_on_spans else {}
    if not content.is_in_events or not said:
        return attributes, ()
    return attributes, (SpanEvent(name=gen_ai.CONTENT_EVENT, at=at, attributes=dict(said)),)


def chat_content(trace: TaskTrace, index: int, call_ids: Sequence[Sequence[str]] = ()) -> dict[str, str]:
    """Return the recorded messages of a model call.

    Without the capture mode `standard` only the first call has messages.
    """
    interaction = trace.llm_interactions[index]
    told, system = _messages_of(trace, index)
    found = {gen_ai.OUTPUT_MESSAGES: _json([_answer(interaction, call_ids)])}
    if told:
        found[gen_ai.INPUT_MESSAGES] = _json(told)
    if system:
        found[gen_ai.SYSTEM_INSTRUCTIONS] = _json([{"type": "text", "content": system}])
    return found


def call_id_of(call_ids: Sequence[Sequence[str]], turn: int, number: int) -> str:
    """Return the model's id of a tool request; empty if unknown."""
    ids = call_ids[turn] if turn < len(call_ids) else ()
    return ids[number] if number < len(ids) else ""


def _messages_of(trace: TaskTrace, index: int) -> tuple[list[dict[str, object]], str]:
    """Return the messages before an answer, and the system prompt."""
    captured = trace.llm_interactions[index].messages
    if captured:
        # Captured after the answer and the results of its tool requests.
        last = max((place for place, each in enumerate(captured) if each.role == "assistant"), default=len(captured))
        told = [each for each in captured[:last] if each.role != "system"]
        return [_message(each) for each in told], next((m.content or "" for m in captured if m.role == "system"), "")
    if index or trace.prompts is None:
        return [], ""
    history = [_message(each) for each in trace.prompts.history]
    user: dict[str, object] = {"role": "user", "parts": [_text(trace.prompts.user_prompt)]}
    return [*history, user], trace.prompts.system_prompt


def _message(message: CapturedMessage) -> dict[str, object]:
    parts = [_text(message.content)] if message.content else []
    calls = message.tool_calls
    asked = [_request(each.get("id", ""), each.get("name", ""), each.get("arguments", "")) for each in calls]
    return {"role": message.role, "parts": [*parts, *asked]}


def _answer(interaction: LlmInteraction, call_ids: Sequence[Sequence[str]]) -> dict[str, object]:
    index = interaction.iteration_index
    parts: list[dict[str, object]] = [_text(interaction.response_text)] if interaction.response_text else []
    if interaction.reasoning:
        parts.insert(0, {"type": "reasoning", "content": interaction.reasoning})
    asked = [
        _request(call_id_of(call_ids, index, number), call.tool_name, call.arguments)
        for number, call in enumerate(interaction.tool_calls)
    ]
    return {"role": "assistant", "parts": [*parts, *asked], "finish_reason": finish_reason(interaction)}


def _request(call_id: str, name: str, arguments: str) -> dict[str, object]:
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def finish_reason(interaction: LlmInteraction) -> str:
    """Return why a model stopped, by default in the conventions' words."""
    usual = "tool_call" if interaction.response_type == "tool_calls" else "stop"
    return interaction.finish_reason or usual


def _text(content: str | None) -> dict[str, object]:
    return {"type": "text", "content": content or ""}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


RUN_ID, INSTANCE, STATUS = "ensemble_ray.run.id", "ensemble_ray.task.instance", "ensemble_ray.task.status"
REUSED = "ensemble_ray.model.reused"  # id of the run that an answer was taken from
_OUTCOME = "ensemble_ray.tool.outcome"
_ROUND = re.compile(r"(?:loop|phase|graph):[^/]*#\d+")


def task_spans(event: TaskTracedEvent, content: Content = Content.NO_CONTENT) -> list[SpanData]:
    """Return the spans of an execution and its effects, in order of their start."""
    spans = [_execution(event, content)]
    for interaction in event.trace.llm_interactions:
        if _is_new(event, interaction.started_at):
            spans.append(_chat(event, interaction, content))
        # A beginning reports the calls of a turn when all have ended. A call that it cut short is repeated or unknown. Calls
        # without duration reached no tool.
        if _is_new(event, interaction.started_at) or any(
            call.outcome == "unknown" or (call.duration and _is_new(event, call.completed_at))
            for call in interaction.tool_calls
        ):
            for number, call in enumerate(interaction.tool_calls):
                spans.append(_tool(event, (interaction.iteration_index, number), call, content))
    return spans


def new_interactions(event: TaskTracedEvent) -> list[LlmInteraction]:
    """Return the model calls that no earlier beginning of the run has reported (S-INT-36), without reused answers."""
    return [each for each in event.trace.llm_interactions if not each.reused and _is_new(event, each.started_at)]


def _is_new(event: TaskTracedEvent, at: datetime) -> bool:
    return at.timestamp() >= event.tracing.reported_until


def parent_of(event: TaskTracedEvent) -> str:
    """Return the parent of an execution: the delegating call, the enclosing unit, or the run."""
    tracing = event.tracing
    call = delegating_call(event.instance)
    if call is not None:
        return tracing.effect_span(call)
    rounds = rounds_around(event.instance)
    return tracing.execution_span(rounds[-1]) if rounds else tracing.run_span()


def rounds_around(instance: str) -> list[str]:
    """Return the rounds of units around an execution, outer ones first.

    Examples:
        >>> rounds_around("graph:triage#3/loop:refine#1/writer#0")
        ['graph:triage#3', 'graph:triage#3/loop:refine#1']
        >>> rounds_around("fetch/parse#0")
        []
    """
    found: list[str] = []
    for part in instance.split("/")[:-1]:
        if _ROUND.fullmatch(part) is None:
            break
        found.append(f"{found[-1]}/{part}" if found else part)
    return found


def _execution(event: TaskTracedEvent, content: Content) -> SpanData:
    tracing, trace = event.tracing, event.trace
    own: dict[str, Attribute | None] = {RUN_ID: event.run_id, INSTANCE: event.instance, STATUS: event.status}
    name = f"task {node_key(event.instance)}"
    if not event.is_handler:
        name = f"{gen_ai.INVOKE_AGENT} {trace.agent_role}".rstrip()
        first = next(iter(trace.llm_interactions), None)
        own |= {
            gen_ai.OPERATION: gen_ai.INVOKE_AGENT,
            gen_ai.AGENT_NAME: trace.agent_role,
            gen_ai.PROVIDER: None if first is None else first.provider,
            gen_ai.REQUEST_MODEL: None if first is None else first.model,
            gen_ai.INPUT_TOKENS: _drop_unknown(trace.metrics.input_tokens),
            gen_ai.OUTPUT_TOKENS: _drop_unknown(trace.metrics.output_tokens),
            gen_ai.CACHE_READ_TOKENS: trace.metrics.cached_tokens or None,
            gen_ai.CACHE_CREATION_TOKENS: trace.metrics.cache_write_tokens or None,
        }
    is_error = event.status == "failed"
    if is_error:
        own[gen_ai.ERROR_TYPE] = event.error_type or "_OTHER"
    return SpanData(
        name=name,
        trace_id=tracing.trace_id,
        span_id=tracing.execution_span(event.instance),
        parent_id=parent_of(event),
        started_at=trace.started_at.timestamp(),
        ended_at=trace.completed_at.timestamp(),
        attributes=drop_empty(own),
        is_error=is_error,
        status_text=event.error_message if is_error and content is not Content.NO_CONTENT else "",
        is_sampled=tracing.is_sampled,
    )


def _chat(event: TaskTracedEvent, interaction: LlmInteraction, content: Content) -> SpanData:
    tracing, index = event.tracing, interaction.iteration_index
    own: dict[str, Attribute | None] = {
        gen_ai.OPERATION: gen_ai.CHAT,
        gen_ai.PROVIDER: interaction.provider or "_OTHER",
        gen_ai.REQUEST_MODEL: interaction.model,
        gen_ai.AGENT_NAME: event.trace.agent_role,
        gen_ai.INPUT_TOKENS: _drop_unknown(interaction.input_tokens),
        gen_ai.OUTPUT_TOKENS: _drop_unknown(interaction.output_tokens),
        gen_ai.CACHE_READ_TOKENS: _drop_unknown(interaction.cached_tokens),
        gen_ai.CACHE_CREATION_TOKENS: _drop_unknown(interaction.cache_write_tokens),
        gen_ai.FINISH_REASONS: (finish_reason(interaction),),
        REUSED: interaction.reused or None,
    }
    ended_at = interaction.completed_at.timestamp()
    said = {} if content is Content.NO_CONTENT else chat_content(event.trace, index, event.call_ids)
    attributes, events = place_content(said, content, at=ended_at)
    return SpanData(
        name=f"{gen_ai.CHAT} {interaction.model or ''}".rstrip(),
        kind="internal" if interaction.reused else "client",
        trace_id=tracing.trace_id,
        span_id=tracing.effect_span(effect_name(event.instance, index)),
        parent_id=tracing.execution_span(event.instance),
        started_at=interaction.started_at.timestamp(),
        ended_at=ended_at,
        attributes={**drop_empty(own), **attributes},
        events=events,
        is_sampled=tracing.is_sampled,
    )


def _tool(event: TaskTracedEvent, place: tuple[int, int], call: ToolCallTrace, content: Content) -> SpanData:
    """Return the span of a tool call. `place` is the model call and the request within it."""
    tracing, (turn, number) = event.tracing, place
    is_error = call.outcome != "success"
    own: dict[str, Attribute | None] = {
        gen_ai.OPERATION: gen_ai.EXECUTE_TOOL,
        gen_ai.TOOL_NAME: call.tool_name,
        gen_ai.TOOL_TYPE: "function",
        gen_ai.TOOL_CALL_ID: call_id_of(event.call_ids, *place),
        gen_ai.AGENT_NAME: event.trace.agent_role,
        _OUTCOME: call.outcome,
        # The class of a tool's error is not recorded.
        gen_ai.ERROR_TYPE: call.outcome if is_error else None,
    }
    ended_at = call.completed_at.timestamp()
    said = {gen_ai.TOOL_ARGUMENTS: call.arguments, gen_ai.TOOL_RESULT: call.result}
    said = {} if content is Content.NO_CONTENT else said
    attributes, events = place_content(said, content, at=ended_at)
    return SpanData(
        name=f"{gen_ai.EXECUTE_TOOL} {call.tool_name}",
        trace_id=tracing.trace_id,
        span_id=tracing.effect_span(effect_name(event.instance, turn, f"call-{number}")),
        # In the conventions, tool calls are siblings of the requesting answers.
        parent_id=tracing.execution_span(event.instance),
        started_at=call.started_at.timestamp(),
        ended_at=ended_at,
        attributes={**drop_empty(own), **attributes},
        events=events,
        is_error=is_error,
        is_sampled=tracing.is_sampled,
    )


def _drop_unknown(tokens: int) -> int | None:
    return None if tokens < 0 else tokens


_WORKFLOW, _EXIT_REASON, _BEGINNING = "ensemble_ray.workflow", "ensemble_ray.exit_reason", "ensemble_ray.run.beginning"
_UNIT, _UNIT_NAME, _UNIT_ROUND = "ensemble_ray.unit", "ensemble_ray.unit.name", "ensemble_ray.unit.round"
_ROUNDS = {"loop": "iteration", "phase": "attempt", "graph": "step"}


class UnitTimes:
    """Start and end of the units of a run, by path, derived from their executions."""

    def __init__(self, events: Iterable[TaskTracedEvent] = ()) -> None:
        """Add the executions, in any order."""
        self._times: dict[str, tuple[float, float]] = {}
        self._first: float | None = None
        for event in events:
            self.add(event)

    @property
    def first(self) -> float | None:
        """Start of the first execution in the first beginning, Unix time, s."""
        return self._first

    def add(self, event: TaskTracedEvent) -> None:
        """Add an execution."""
        began, ended = event.trace.started_at.timestamp(), event.trace.completed_at.timestamp()
        if not event.tracing.beginning:  # later, a task may have waited for days
            self._first = began if self._first is None else min(self._first, began)
        if delegating_call(event.instance) is not None:
            return
        for around in rounds_around(event.instance):
            for path in (around.rpartition("#")[0], around):  # `loop:refine`, `loop:refine#2`
                first, last = self._times.get(path, (began, ended))
                self._times[path] = min(first, began), max(last, ended)

    def __iter__(self) -> Iterator[tuple[str, float, float]]:
        """Yield path, start and end, outer units first."""
        for path in sorted(self._times):
            yield path, *self._times[path]


def run_spans(event: RunTracedEvent, units: UnitTimes, content: Content = Content.NO_CONTENT) -> list[SpanData]:
    """Return the spans of a run and its units."""
    tracing = event.tracing
    is_error = event.exit_reason is ExitReason.ERROR
    own: dict[str, Attribute | None] = {
        gen_ai.OPERATION: gen_ai.INVOKE_WORKFLOW,
        gen_ai.WORKFLOW_NAME: event.name,
        RUN_ID: event.run_id,
        _WORKFLOW: event.workflow,
        _EXIT_REASON: event.exit_reason.value,
        _BEGINNING: tracing.beginning or None,
        gen_ai.ERROR_TYPE: (event.error_type or "_OTHER") if is_error else None,
    }
    # Clocks of processes may differ.
    started_at = event.started_at if units.first is None else min(event.started_at, units.first)
    run = SpanData(
        name=f"{gen_ai.INVOKE_WORKFLOW} {event.name}".rstrip(),
        trace_id=tracing.trace_id,
        span_id=tracing.run_span(),
        parent_id=None if tracing.caller is None else tracing.caller.span_id,
        has_remote_parent=tracing.caller is not None,
        started_at=started_at,
        ended_at=max(event.ended_at, started_at),
        attributes=drop_empty(own),
        links=(tracing.run_span(0),) if tracing.beginning else (),
        is_error=is_error,
        status_text=event.error_message if is_error and content is not Content.NO_CONTENT else "",
        is_sampled=tracing.is_sampled,
    )
    return [run, *(_unit(event, *times) for times in units)]


def _unit(event: RunTracedEvent, path: str, started_at: float, ended_at: float) -> SpanData:
    tracing = event.tracing
    outer, _, own = path.rpartition("/")
    key, mark, number = own.partition("#") if "#" in own else (own, "", "")
    template, _, name = key.partition(":")
    if mark:
        shown, above = f"{_ROUNDS.get(template, 'round')} {int(number) + 1}", path.rpartition("#")[0]
    else:
        shown, above = f"{template} {name}".rstrip(), outer
    round_number = int(number) + 1 if mark else None
    own_attributes = {INSTANCE: path, _UNIT: template, _UNIT_NAME: name, _UNIT_ROUND: round_number}
    attributes = drop_empty({RUN_ID: event.run_id, **own_attributes})
    return SpanData(
        name=shown,
        trace_id=tracing.trace_id,
        span_id=tracing.execution_span(path),
        parent_id=tracing.execution_span(above) if above else tracing.run_span(),
        started_at=started_at,
        ended_at=ended_at,
        attributes=attributes,
        is_sampled=tracing.is_sampled,
    )
