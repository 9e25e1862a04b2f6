"""The spans of one execution of a task. Package: telemetry. Pure.

In: the trace of the execution. Out: its span, and one for each call of a model and of a tool inside. Work that was handed on has
spans of its own, whose parent is the call that asked for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ensemble_ray.events.telemetry import conventions as gen_ai
from ensemble_ray.events.telemetry.content import (
    Content,
    call_id_of,
    chat_content,
    finish_reason,
    place_content,
    tool_content,
)
from ensemble_ray.events.telemetry.span import SpanData, drop_empty
from ensemble_ray.values.ids import delegating_call, effect_name, node_key

if TYPE_CHECKING:
    from datetime import datetime

    from ensemble_ray.events.telemetry.span import Attribute
    from ensemble_ray.events.tracing import TaskTracedEvent
    from ensemble_ray.values.trace import LlmInteraction, ToolCallTrace

__all__ = ["INSTANCE", "RUN_ID", "STATUS", "new_interactions", "parent_of", "rounds_around", "task_spans"]

#: Attributes of ours.
RUN_ID, INSTANCE, STATUS = "ensemble_ray.run.id", "ensemble_ray.task.instance", "ensemble_ray.task.status"
_OUTCOME = "ensemble_ray.tool.outcome"
#: One round of a unit, in the path of what is in it.
_ROUND = re.compile(r"(?:loop|phase|graph):[^/]*#\d+")


def task_spans(event: TaskTracedEvent, content: Content = Content.NO_CONTENT) -> list[SpanData]:
    """Return the span of an execution, and those of what it did, in the order in which that began."""
    spans = [_execution(event, content)]
    for interaction in event.trace.llm_interactions:
        if _is_new(event, interaction.started_at):
            spans.append(_chat(event, interaction, content))
        if _has_new_tools(event, interaction):
            for number, call in enumerate(interaction.tool_calls):
                spans.append(_tool(event, (interaction.iteration_index, number), call, content))
    return spans


def new_interactions(event: TaskTracedEvent) -> Iterator[LlmInteraction]:
    """Yield the model calls that no earlier beginning of the run has told of (S-INT-36)."""
    for interaction in event.trace.llm_interactions:
        if _is_new(event, interaction.started_at):
            yield interaction


def _is_new(event: TaskTracedEvent, at: datetime) -> bool:
    """Return whether something happened behind what an earlier beginning has told of."""
    return at.timestamp() >= event.tracing.told_until


def _has_new_tools(event: TaskTracedEvent, interaction: LlmInteraction) -> bool:
    """Return whether no earlier beginning has told of the tool calls of an answer, which it may have told of.

    A turn's calls are told of when all of them have ended: one that the end of that beginning cut short is made again, or has an
    unknown outcome. Calls that took no time reached no tool, and have the time of who says so.
    """
    if _is_new(event, interaction.started_at):
        return True
    calls = interaction.tool_calls
    return any(call.outcome == "unknown" or (call.duration and _is_new(event, call.completed_at)) for call in calls)


def parent_of(event: TaskTracedEvent) -> str:
    """Return the parent of an execution: the call that asked for it, the unit that it is in, or the run."""
    tracing = event.tracing
    call = delegating_call(event.instance)
    if call is not None:
        return tracing.effect_span(call)
    rounds = rounds_around(event.instance)
    return tracing.execution_span(rounds[-1]) if rounds else tracing.run_span()


def rounds_around(instance: str) -> list[str]:
    """Return the rounds of units that an execution is in, outer ones first; names of tasks may have slashes, too.

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
        gen_ai.FINISH_REASONS: (finish_reason(interaction),),
    }
    ended_at = interaction.completed_at.timestamp()
    said = {} if content is Content.NO_CONTENT else chat_content(event.trace, index, event.call_ids)
    attributes, events = place_content(said, content, at=ended_at)
    return SpanData(
        name=f"{gen_ai.CHAT} {interaction.model or ''}".rstrip(),
        kind="client",
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
    """Return the span of a tool call; `place`: of the model call that asked for it, and among its requests."""
    tracing, (turn, number) = event.tracing, place
    is_error = call.outcome != "success"
    own: dict[str, Attribute | None] = {
        gen_ai.OPERATION: gen_ai.EXECUTE_TOOL,
        gen_ai.TOOL_NAME: call.tool_name,
        gen_ai.TOOL_TYPE: "function",
        gen_ai.TOOL_CALL_ID: call_id_of(event.call_ids, *place),
        gen_ai.AGENT_NAME: event.trace.agent_role,
        _OUTCOME: call.outcome,
        # What a tool raised is told to the model as text; its class is not kept.
        gen_ai.ERROR_TYPE: call.outcome if is_error else None,
    }
    ended_at = call.completed_at.timestamp()
    said = {} if content is Content.NO_CONTENT else tool_content(call)
    attributes, events = place_content(said, content, at=ended_at)
    return SpanData(
        name=f"{gen_ai.EXECUTE_TOOL} {call.tool_name}",
        trace_id=tracing.trace_id,
        span_id=tracing.effect_span(effect_name(event.instance, turn, f"call-{number}")),
        # The conventions know tool calls as work of the agent, beside the answers that ask for them.
        parent_id=tracing.execution_span(event.instance),
        started_at=call.started_at.timestamp(),
        ended_at=ended_at,
        attributes={**drop_empty(own), **attributes},
        events=events,
        is_error=is_error,
        is_sampled=tracing.is_sampled,
    )


def _drop_unknown(tokens: int) -> int | None:
    """Return a count that is known."""
    return None if tokens < 0 else tokens
