"""What was said, in the form of the conventions; only where that is asked for. Package: telemetry. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from ensemble_ray.errors import ValidationError
from ensemble_ray.events.telemetry import conventions as gen_ai
from ensemble_ray.events.telemetry.span import SpanEvent

if TYPE_CHECKING:
    from ensemble_ray.events.telemetry.span import Attribute
    from ensemble_ray.values.trace import CapturedMessage, LlmInteraction, TaskTrace, ToolCallTrace

__all__ = [
    "CONTENT_VARIABLE",
    "Content",
    "call_id_of",
    "chat_content",
    "content_mode",
    "finish_reason",
    "place_content",
    "tool_content",
]

#: The variable of the conventions that asks for content.
CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


class Content(StrEnum):
    """Where prompts, answers, arguments and results are told."""

    NO_CONTENT = "no_content"
    #: as attributes of their spans
    SPAN_ONLY = "span_only"
    #: as events of their spans
    EVENT_ONLY = "event_only"
    SPAN_AND_EVENT = "span_and_event"

    @property
    def is_on_spans(self) -> bool:
        """Whether spans have it as attributes."""
        return self in (Content.SPAN_ONLY, Content.SPAN_AND_EVENT)

    @property
    def is_in_events(self) -> bool:
        """Whether events have it."""
        return self in (Content.EVENT_ONLY, Content.SPAN_AND_EVENT)


_WORDS = {
    "true": Content.SPAN_AND_EVENT,
    "1": Content.SPAN_AND_EVENT,
    "false": Content.NO_CONTENT,
    "0": Content.NO_CONTENT,
}


def content_mode(wanted: bool | Content | str | None, environment: Mapping[str, str]) -> Content:  # noqa: FBT001  as the setting is
    """Return where content is told: as is asked for, else as the environment says, else nowhere.

    Raises:
        ValidationError: that is no such place.
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
    """Return what is said as attributes of a span, and as events of it."""
    attributes = dict(said) if content.is_on_spans else {}
    if not content.is_in_events or not said:
        return attributes, ()
    return attributes, (SpanEvent(name=gen_ai.CONTENT_EVENT, at=at, attributes=dict(said)),)


def chat_content(trace: TaskTrace, index: int, call_ids: Sequence[Sequence[str]] = ()) -> dict[str, str]:
    """Return what a model was told and what it answered, as far as the trace has kept it.

    The messages of all its calls are kept by the capture mode `standard`; else those of the first alone.
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
    """Return a model's own id of a tool request; empty where it is not known."""
    ids = call_ids[turn] if turn < len(call_ids) else ()
    return ids[number] if number < len(ids) else ""


def tool_content(call: ToolCallTrace) -> dict[str, str]:
    """Return what a tool was asked and what it gave."""
    return {gen_ai.TOOL_ARGUMENTS: call.arguments, gen_ai.TOOL_RESULT: call.result}


def _messages_of(trace: TaskTrace, index: int) -> tuple[list[dict[str, object]], str]:
    """Return the messages before an answer, and the system's."""
    captured = trace.llm_interactions[index].messages
    if captured:
        # They were kept behind the answer, and behind the results of what it asked for.
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
    asked = [
        _request(each.get("id", ""), each.get("name", ""), each.get("arguments", "")) for each in message.tool_calls
    ]
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
    """Return why a model stopped, in the conventions' words where it is usual."""
    usual = "tool_call" if interaction.response_type == "tool_calls" else "stop"
    return interaction.finish_reason or usual


def _text(content: str | None) -> dict[str, object]:
    return {"type": "text", "content": content or ""}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
