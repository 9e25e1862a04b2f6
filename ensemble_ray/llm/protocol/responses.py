"""The Responses API as bytes: encodes messages as input items, and decodes whole and streamed answers.

The provider stores no conversation: each request has all of it. So an answer's output items are kept as its
`ProviderFields`, and sent back to their origin. For any content of an answer, decoding raises no other error than
`WireError` and `TooMuchError`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from ensemble_ray.errors.bodies import read_error_body
from ensemble_ray.llm.protocol.wire import (
    EMPTY_STREAM,
    FORM_ERRORS,
    STREAM_END,
    AnswerFailedError,
    AnswerLimits,
    MessageForm,
    ModelApi,
    TooMuchError,
    WireError,
    arguments_in_history,
    check_end,
    description_of,
    error_of_provider,
    finish_reason_in,
    format_data,
    is_ping,
    not_a_completion,
    object_in,
    parse_answer,
    parse_json,
    provider_fields,
    text_of_arguments,
    usage_in,
    without,
)
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.messages import STREAM_CUT, ChatMessage, ChatResponse, TokenUsage, ToolCall

_log = bounded_logger(__name__)

_LIMITS = AnswerLimits()
_EVENT = "a piece of the stream"
#: Items that a `ChatMessage` can carry; an answer keeps other ones, such as reasoning, for its origin.
_PLAIN_ITEMS = frozenset({"message", "function_call"})
_OF_CALL = frozenset({"name", "arguments", "call_id"})  # these are in the `ToolCall`
_CONTENT, _LOGPROBS, _IDS = frozenset({"content"}), frozenset({"logprobs"}), frozenset({"id", "status"})
#: Calls of tools that the provider performs, or alone understands.
_BUILT_IN = re.compile(r"(?!function_call$).*_call|mcp_.*")
_NO_IDS = "no ids"
_FINISH_REASONS = {"max_output_tokens": "length"}
_FAILED = frozenset({"failed", "cancelled"})
_USAGE = {
    "input_tokens": "prompt_tokens",
    "input_tokens_details": "prompt_tokens_details",
    "output_tokens": "completion_tokens",
    "output_tokens_details": "completion_tokens_details",
}
_LAST_EVENTS = frozenset(f"response.{end}" for end in ("completed", "incomplete", *_FAILED))
_TEXTS = frozenset({"response.output_text.delta", "response.refusal.delta"})
_THOUGHTS = frozenset({"response.reasoning_summary_text.delta", "response.reasoning_text.delta"})

# Refusals of endpoints that this process knows, by origin.

_without_encrypted: set[str] = set()  # a model without reasoning
_without_ids: set[str] = set()  # it looks for items by their ids, and has stored none
_ENCRYPTED_REASONING = b'"include":["reasoning.encrypted_content"]'
_ENCRYPTED_REFUSED = re.compile(
    rb"reasoning\.encrypted_content|encrypted (content|reasoning) is not supported|parameter:? include\b|[\"'`]include[\"'`\\[]"
)
_IDS_REFUSED = re.compile(rb"items are not persisted|item with id .{1,200} not found", re.DOTALL)


def _form_for(origin: str) -> tuple[str, bytes]:
    return _NO_IDS if origin in _without_ids else "", b"" if origin in _without_encrypted else _ENCRYPTED_REASONING


def _learn(text: bytes, origin: str) -> str:
    for name, refusal, known, effect in (
        ("ids", _IDS_REFUSED, _without_ids, "output items are sent back without their ids"),
        ("include", _ENCRYPTED_REFUSED, _without_encrypted, "no encrypted reasoning is requested"),
    ):
        if refusal.search(text):
            if origin not in known:
                known.add(origin)
                _log.info("%s refused '%s'; from now on %s", origin, name, effect)
            return name
    return ""


# Requests.


def _input_items(form: MessageForm, message: ChatMessage) -> list[dict[str, object]]:
    """Return the items of one message, those of an answer in the order in which they came (S-RSP-4)."""
    ids, has_fields, name = form
    if message.tool_call_id is not None:
        call_id = ids[0] if ids else message.tool_call_id
        return [{"type": "function_call_output", "call_id": call_id, "output": _content(message)}]
    calls: list[dict[str, object]] = [
        {"type": "function_call", "call_id": sent, "name": call.name, "arguments": arguments_in_history(call)}
        for call, sent in zip(message.tool_calls, ids, strict=True)
    ]
    fields = message.provider_fields if has_fields else None
    kept = cast("list[dict[str, object]]", object_in(fields.message).get("output") or []) if fields else []
    if kept and sum(item.get("type") == "function_call" for item in kept) == len(calls):
        rest = iter(calls)
        items = [_restored(item, message, next(rest) if item.get("type") == "function_call" else {}) for item in kept]
        return [without(item, _IDS) for item in items] if name == _NO_IDS else items
    if calls and not (message.content or "").strip():
        return calls
    return [{"role": message.role, "content": _content(message)}, *calls]


def _content(message: ChatMessage) -> object:
    if not message.attachments:
        return message.content or ""
    from ensemble_ray.llm.protocol.attachments import content_parts  # few messages have any

    return [_input_part(part) for part in content_parts(message)]


def _input_part(part: Mapping[str, Any]) -> dict[str, object]:
    """Return a content part of chat completions in the form of this API (S-ATT-20)."""
    match part["type"]:
        case "text":
            return {**part, "type": "input_text"}
        case "image_url":
            return {"type": "input_image", "detail": "auto", "image_url": part["image_url"]["url"]}
        case "file":
            return {"type": "input_file", **part["file"]}
        case _:
            return dict(part)


def _restored(item: dict[str, object], message: ChatMessage, call: dict[str, object]) -> dict[str, object]:
    if item.get("type") == "message" and "content" not in item:
        return {**item, "content": [{"type": "output_text", "text": message.content or "", "annotations": []}]}
    return {**item, **call}


def _kept_items(output: Sequence[Mapping[str, Any]], *, is_stored: bool) -> list[dict[str, object]]:
    """Return what an answer with reasoning adds to its `ChatMessage`; empty if its items cannot be sent back."""
    if all(item["type"] in _PLAIN_ITEMS and not item.get("phase") for item in output):
        return []
    if output[-1]["type"] == "reasoning":
        return []  # of an incomplete answer; endpoints refuse reasoning without the item that it is for
    thoughts = [item for item in output if item["type"] == "reasoning"]
    if not is_stored and not all(item.get("encrypted_content") or item.get("content") for item in thoughts):
        return []  # the endpoint would look for them by their ids
    parts = [part for item in output if item["type"] == "message" for part in item.get("content") or ()]
    has_one_text = len(parts) == 1 and parts[0]["type"] == "output_text"
    kept: list[dict[str, object]] = []
    for item in output:
        if item["type"] == "function_call":
            kept.append(without(item, _OF_CALL))
        elif item["type"] == "message" and not has_one_text:
            content = [without(part, _LOGPROBS) for part in item.get("content") or ()]
            kept.append({**without(item, _CONTENT), "content": content})
        else:
            kept.append(without(item, _CONTENT if item["type"] == "message" else frozenset()))
    return kept


# Answers.


def decode_response(raw: bytes, limits: AnswerLimits = _LIMITS, origin: str = "") -> ChatResponse:
    return _read_response(parse_answer(raw), limits, origin)


def _read_response(body: Mapping[str, Any], limits: AnswerLimits, origin: str) -> ChatResponse:
    error = body.get("error")
    if not error and not isinstance(body.get("output"), list) and read_error_body(body).status is not None:
        error = body  # without an object around it
    if error and not _is_empty(error):
        raise error_of_provider(error)
    if (status := str(body.get("status"))) in _FAILED:
        raise AnswerFailedError(f"the answer ended with status '{status}'")
    try:
        response = _response_of(body, limits, origin)
    except TooMuchError as too_much:
        raise WireError(str(too_much)) from None
    except WireError:
        raise
    except FORM_ERRORS:
        raise WireError(f"it has no list of output items: {format_data(body)}") from None
    check_end(response.finish_reason)
    return response


def _is_empty(error: object) -> bool:
    found = read_error_body(error)
    return found.status is None and not found.message


def _response_of(body: Mapping[str, Any], limits: AnswerLimits, origin: str) -> ChatResponse:
    output = cast("list[Mapping[str, Any]]", body["output"])
    for item in output:
        if _BUILT_IN.fullmatch(item["type"]):
            raise WireError(
                f"it has a {item['type']}, a call of a built-in tool, whose effects are outside the record. Give the "
                "agent a tool of its own for that"
            )
    requested = [item for item in output if item["type"] == "function_call"]
    limits.check_tool_calls(len(requested))
    calls = tuple(
        [
            ToolCall(
                str(item.get("call_id") or item.get("id") or f"call_{number}"),
                str(item["name"]),
                text_of_arguments(item.get("arguments")),
            )
            for number, item in enumerate(requested)
        ]
    )
    text = _text_in(output)
    kept = _kept_items(output, is_stored=body.get("store") is True)
    return ChatResponse(
        text if text or not calls else None,
        calls,
        _usage_in(body.get("usage")),
        _finish_reason_in(body, has_calls=bool(calls)),
        reasoning="\n\n".join(each for item in output for each in _thoughts_in(item)) or None,
        provider_fields=provider_fields(origin, {"output": kept} if kept else {}, ()),
    )


def _text_in(output: Sequence[Mapping[str, Any]]) -> str:
    """Return the final answer if the model marks it; otherwise all its text, or its refusal."""
    messages = [item for item in output if item["type"] == "message"]
    final = [item for item in messages if item.get("phase") == "final_answer"] or messages
    parts = [part for item in final for part in item.get("content") or ()]
    said = "".join(str(part.get("text") or "") for part in parts)
    return said or "".join(str(part.get("refusal") or "") for part in parts)


def _thoughts_in(item: Mapping[str, Any]) -> list[str]:
    if item["type"] != "reasoning":
        return []
    return [str(part["text"]) for part in item.get("content") or item.get("summary") or () if part.get("text")]


def _finish_reason_in(body: Mapping[str, Any], *, has_calls: bool) -> str | None:
    status = body.get("status") or "completed"
    if status == "completed":
        return "tool_calls" if has_calls else "stop"
    reason = (body.get("incomplete_details") or {}).get("reason") or status
    return finish_reason_in({"finish_reason": _FINISH_REASONS.get(reason, reason)})


def _usage_in(data: object) -> TokenUsage | None:
    if not isinstance(data, dict):
        return None
    return usage_in({_USAGE.get(name, name): count for name, count in cast("dict[str, object]", data).items()})


def _check_other(event: Mapping[str, Any], kind: str) -> None:
    """Raise unless an event that is no part of an answer can be skipped."""
    error = event.get("error") or event
    if kind == "error" or not _is_empty(error):
        raise error_of_provider(error)
    if not kind and not is_ping(event):
        raise KeyError("type")


class ResponseAssembler:
    """Makes an answer from typed events: the last one has the whole answer, the pieces count if it does not come."""

    def __init__(self, limits: AnswerLimits = _LIMITS, origin: str = "") -> None:
        self._limits = limits
        self._origin = origin
        self._items: dict[int, Mapping[str, Any]] = {}  # by their places in the output
        self._texts: dict[int, list[str]] = {}
        self._arguments: dict[int, list[str]] = {}
        self._reasoning: list[str] = []
        self._thought: object = None  # the place of the last piece of reasoning
        self._response: Mapping[str, Any] | None = None
        self.reasoning_fragment = ""
        self.is_ended = False

    def feed_data(self, data: bytes) -> str:
        """Return the text fragment, or ""."""
        self.reasoning_fragment = ""
        if data.strip() == STREAM_END:
            self.is_ended = True
            return ""
        event = parse_json(data, _EVENT)
        if event is None:
            return ""
        if not isinstance(event, dict):
            raise not_a_completion(event, _EVENT)
        body = cast("dict[str, Any]", event)
        try:
            return self._read_event(body)
        except (TooMuchError, WireError):
            raise
        except FORM_ERRORS:
            raise WireError(f"{_EVENT} is no event of the Responses API: {format_data(body)}") from None

    def _read_event(self, event: Mapping[str, Any]) -> str:
        kind = str(event.get("type") or "")
        if not kind.startswith("response."):
            _check_other(event, kind)
            return ""
        if kind in _LAST_EVENTS:
            self._response, self.is_ended = dict(event["response"]), True
            return "" if self._texts or kind == "response.failed" else _text_in(self._response.get("output") or ())
        place = int(event.get("output_index") or 0)
        if kind in _TEXTS:
            return self._add_text(place, str(event["delta"]))
        if kind in _THOUGHTS:
            self._add_thought(str(event["delta"]), (place, event.get("summary_index"), event.get("content_index")))
        elif kind == "response.function_call_arguments.delta":
            self._arguments.setdefault(place, []).append(str(event["delta"]))
        elif kind in {"response.output_item.added", "response.output_item.done"}:
            item = event["item"]
            self._items[place] = item
            self._limits.check_tool_calls(len(self._items))
            if item["type"] == "message" and place not in self._texts:
                return self._add_text(place, _text_in([item]))
            if self._thought is None and (thoughts := _thoughts_in(item)):
                self._add_thought("\n\n".join(thoughts), place)
        return ""

    def _add_text(self, place: int, text: str) -> str:
        if text:
            self._texts.setdefault(place, []).append(text)
        return text

    def _add_thought(self, text: str, place: object) -> None:
        self.reasoning_fragment = text if self._thought in (None, place) else f"\n\n{text}"
        self._reasoning.append(self.reasoning_fragment)
        self._thought = place

    def finish(self) -> ChatResponse:
        """Return the whole answer, or the part before a cut (S-LLM-8)."""
        if self._response is not None:
            output = self._response.get("output") or self._output()
            return _read_response({**self._response, "output": output}, self._limits, self._origin)
        response = _read_response({"output": self._output()}, self._limits, self._origin)
        if not response.text and not response.tool_calls:
            raise AnswerFailedError(EMPTY_STREAM)
        if self.is_ended:
            return response
        reasoning = "".join(self._reasoning) or None
        return replace(response, finish_reason=STREAM_CUT, reasoning=reasoning, provider_fields=None)

    def _output(self) -> list[Mapping[str, Any]]:
        items = dict(self._items)
        for place, texts in self._texts.items():
            item = items.get(place, {})
            if not item.get("content"):
                content = [{"type": "output_text", "text": "".join(texts)}]
                items[place] = {"type": "message", **item, "content": content}
        for place, arguments in self._arguments.items():
            if place in items and not items[place].get("arguments"):
                items[place] = {**items[place], "arguments": "".join(arguments)}
        return [items[place] for place in sorted(items)]


RESPONSES = ModelApi(
    path="/responses",
    conversation=b'"input"',
    items_of=_input_items,
    # Strict is the API's default, which refuses most schemas.
    tool_of=lambda tool: {"type": "function", **description_of(tool), "strict": False},
    decode=decode_response,
    assembler=ResponseAssembler,
    form_for=_form_for,
    learn=_learn,
)
