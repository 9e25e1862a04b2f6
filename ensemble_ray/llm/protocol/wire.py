"""The chat-completions protocol as bytes: encoding of requests, and decoding of whole answers.

A conversation grows by two messages per turn of a tool loop, and each request contains all of it, so encoded messages
are cached. Decoding checks the form of an answer only; the arguments of tool calls stay the model's text. Decoding
raises no other error than `WireError`, for any content of an answer.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from ensemble_ray.errors.bodies import read_error_body
from ensemble_ray.process.forks import new_lock
from ensemble_ray.text.foreign_text import one_line, whole_text
from ensemble_ray.values.messages import ChatMessage, ChatResponse, ProviderFields, TokenUsage, ToolCall, ToolSpec

#: A hundred thousand tokens are half a MiB of text; log probabilities add twenty times as much.
DEFAULT_ANSWER_BYTES = 16 * 2**20
#: Each token of a stream has an envelope of 200 to 300 bytes.
_STREAM_FACTOR = 4
#: Default of the longest time of a whole streamed answer, s.
DEFAULT_ANSWER_TIME_S = 3600.0
#: Bytes of a failure's body that are read; the connection is closed with the rest.
ERROR_BODY_BYTES = 64 * 2**10
#: Most events of a stream: one per token, and more for reasoning and pings.
MOST_EVENTS = 1_000_000
#: Most tool calls of an answer; endpoints allow 128 tools.
MOST_TOOL_CALLS = 1_000
#: A larger number of tokens is an error.
_MOST_TOKENS = 10**9
#: Characters of an answer in an error.
_SHOWN = 200
#: Characters of a `finish_reason`; the protocol's are shorter.
_LONGEST_REASON = 64
#: A first turn is a system and a user message. Most conversations end there, so it is not cached.
_FIRST_TURN = 2

#: Errors of decoding an answer of another form than the protocol's, or one that is nested too deeply for the stack.
FORM_ERRORS = (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)

#: Members of an assistant message that this module reads, or that endpoints send but do not accept.
_OF_MESSAGE = frozenset({
    "role", "content", "name", "refusal", "tool_calls", "tool_call_id", "function_call", "annotations", "audio", "images",
    "executed_tools",
})  # fmt: skip
_OF_CALL = frozenset({"id", "type", "index", "function"})
_OF_FUNCTION = frozenset({"name", "arguments", "index"})

#: Types of parts of a message, and of `reasoning_details`, that contain reasoning.
_THOUGHTS = frozenset(
    {"thinking", "redacted_thinking", "reasoning", "reasoning.text", "reasoning.summary", "reasoning.encrypted"}
)
#: Values of `finish_reason` for a failure of the provider; some of Gemini's have a prefix.
_FAILURES = frozenset({
    "error", "network_error", "server_error", "internal_error", "insufficient_system_resource", "timeout", "abort",
    "aborted", "malformed_function_call", "malformed_response", "malformed_model_output", "malformed_tool_use",
    "unexpected_tool_call",
})  # fmt: skip

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

_Piece = TypeVar("_Piece", ChatMessage, ToolSpec)
#: Form of a message in a request: ids of its tool calls, and whether it contains its provider's members.
_Form = tuple[tuple[str, ...], bool]


class TooMuchError(ValueError):
    """An answer exceeds a limit; the text says which, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """The limits of one answer. The checks raise `TooMuchError`."""

    #: longest whole answer, and longest event of a stream
    body_bytes: int = DEFAULT_ANSWER_BYTES
    #: longest time of a whole streamed answer, from the request on
    time_s: float = DEFAULT_ANSWER_TIME_S
    events: int = MOST_EVENTS
    tool_calls: int = MOST_TOOL_CALLS

    @property
    def stream_bytes(self) -> int:
        """Longest stream, including envelopes."""
        return _STREAM_FACTOR * self.body_bytes

    def check_body(self, received_bytes: int) -> None:
        if received_bytes > self.body_bytes:
            raise TooMuchError(_beyond(self.body_bytes, "a whole answer"))

    def check_stream(self, received_bytes: int) -> None:
        if received_bytes > self.stream_bytes:
            raise TooMuchError(_beyond(self.stream_bytes, "a stream"))

    def check_event(self, held_bytes: int) -> None:
        """Check the length of an event, or of a line without an end."""
        if held_bytes > self.body_bytes:
            raise TooMuchError(_beyond(self.body_bytes, "one event of a stream"))

    def check_events(self, count: int) -> None:
        if count > self.events:
            raise TooMuchError(f"its stream has more than {self.events} events, the limit")

    def check_tool_calls(self, count: int) -> None:
        if count > self.tool_calls:
            raise TooMuchError(f"it asks for more than {self.tool_calls} tool calls, the limit of one answer")

    @property
    def too_late(self) -> str:
        """Text of the error for an answer that was not complete in time."""
        return (
            f"it was not complete after {self.time_s:g} s, the limit of a whole answer. Raise `max_answer_time` if its "
            "answers take that long"
        )


def _beyond(limit: int, of: str) -> str:
    return (
        f"it is longer than {limit} bytes, the limit of {of}. Raise `max_answer_bytes` if its answers are that long, or "
        "set `max_tokens`"
    )


_LIMITS = AnswerLimits()


class WireError(ValueError):
    """An answer is not one of the protocol, or it is the provider's error.

    Attributes:
        provider_error: The provider's error in a successful answer, as JSON `{"error": ...}`; otherwise empty.
    """

    provider_error = b""


class AnswerFailedError(WireError):
    """The provider failed while it answered; a retry may succeed (S-LLM-7, S-LLM-8)."""


# Requests.


class EncodedPieces:
    """Cache of encoded messages and tool specs by identity, bounded in bytes; the oldest are evicted first.

    The values are immutable, and the cache refers to them, so that their ids stay unique.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._pieces: dict[tuple[int, Hashable], tuple[object, bytes]] = {}
        self._lock = new_lock()

    def __len__(self) -> int:
        return len(self._pieces)

    def get(self, value: _Piece, encode: Callable[[_Piece], bytes], form: Hashable = None) -> bytes:
        """Return the encoded value; `form` is part of the key."""
        key = id(value), form
        cached = self._pieces.get(key)
        if cached is not None:
            return cached[1]
        encoded = encode(value)
        with self._lock:
            if key not in self._pieces:
                self._pieces[key] = (value, encoded)
                self._held_bytes += len(encoded)
            while self._held_bytes > self._limit_bytes:
                oldest = next(iter(self._pieces))
                self._held_bytes -= len(self._pieces.pop(oldest)[1])
        return encoded


#: 4 MiB hold about a thousand messages of a long tool loop.
_pieces = EncodedPieces(4 * 1024 * 1024)


def encode_request(
    prefix: bytes, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], *, suffix: bytes = b"", origin: str = ""
) -> bytes:
    """Return the request's body.

    Args:
        prefix: Members of every request, such as `"model":"m","temperature":0`.
        messages: The conversation.
        tools: If empty, the body has no tool field (S-CONV-24).
        suffix: Members of this kind of request, such as `"stream":true`.
        origin: Endpoint and model; only they get the members that they sent with earlier answers (S-LLM-9).
    """
    forms = _forms(messages, origin)
    if len(messages) > _FIRST_TURN:
        encoded = [
            _pieces.get(message, partial(_message, form), form) for message, form in zip(messages, forms, strict=True)
        ]
        sent = b"[%b]" % b",".join(encoded)
    else:
        sent = json_bytes([_members(form, message) for message, form in zip(messages, forms, strict=True)])
    body = [b"{", prefix, b',"messages":', sent]
    if tools:
        body += [b',"tools":[', b",".join([_pieces.get(tool, _tool) for tool in tools]), b"]"]
    if suffix:
        body += [b",", suffix]
    body.append(b"}")
    return b"".join(body)


def json_bytes(value: object) -> bytes:
    """Return compact JSON as UTF-8; lone surrogates are replaced by U+FFFD (S-SEC-56)."""
    text = _encode(value)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return whole_text(text).encode()


def _forms(messages: Sequence[ChatMessage], origin: str) -> list[_Form]:
    """Return the forms of all messages.

    Each tool call of the conversation gets a unique id, and each result the id of its call (S-LLM-10). New ids have nine
    letters and digits, which all providers accept.
    """
    forms: list[_Form] = []
    used: set[str] = set()
    #: model's id -> sent ids of calls without a result
    waiting: dict[str, deque[str]] = {}
    replaced = 0
    for message in messages:
        fields = message.provider_fields
        ids: list[str] = []
        if message.tool_calls:
            waiting = {}
            for call in message.tool_calls:
                sent = call.id
                while not sent.strip() or sent in used:
                    replaced += 1
                    sent = f"call{replaced:05d}"
                used.add(sent)
                ids.append(sent)
                waiting.setdefault(call.id, deque()).append(sent)
        elif message.tool_call_id is not None:
            calls = waiting.get(message.tool_call_id)
            ids.append(calls.popleft() if calls else message.tool_call_id)
        forms.append((tuple(ids), fields is not None and bool(origin) and fields.origin == origin))
    return forms


def _message(form: _Form, message: ChatMessage) -> bytes:
    return json_bytes(_members(form, message))


def _members(form: _Form, message: ChatMessage) -> dict[str, object]:
    ids, has_fields = form
    fields = message.provider_fields if has_fields else None
    data: dict[str, object] = {"role": message.role, "content": message.content}
    if fields is not None:
        data |= members_of_message(_object_in(fields.message), has_calls=bool(message.tool_calls))
    if message.tool_calls:
        if not (message.content or "").strip():
            data["content"] = None  # strict servers refuse an empty text (S-LLM-9)
        more = () if fields is None else fields.tool_calls
        data["tool_calls"] = [
            _call_data(call, sent, _object_in(more[number]) if number < len(more) else {})
            for number, (call, sent) in enumerate(zip(message.tool_calls, ids, strict=True))
        ]
    elif message.content is None:
        data["content"] = ""
    if message.tool_call_id is not None:
        data["tool_call_id"] = ids[0] if ids else message.tool_call_id
    if message.name is not None and message.role != "tool":
        # Strict servers refuse a name of the role tool.
        data["name"] = message.name
    return data


def _call_data(call: ToolCall, sent_id: str, fields: Mapping[str, Any]) -> dict[str, object]:
    function: object = fields.get("function")
    inner = _without(cast("Mapping[str, object]", function), _OF_FUNCTION) if isinstance(function, dict) else {}
    members = {"name": call.name, "arguments": _arguments(call), **inner}
    return {"id": sent_id, "type": "function", "function": members, **_without(fields, _OF_CALL)}


def _without(data: Mapping[str, object], known: frozenset[str]) -> dict[str, object]:
    return {name: value for name, value in data.items() if name not in known and value is not None}


def members_of_message(message: Mapping[str, object], *, has_calls: bool) -> dict[str, object]:
    """Return the members that only the provider knows; those with reasoning only for tool calls (S-LLM-9)."""
    found = _without(message, _OF_MESSAGE)
    return found if has_calls else {n: v for n, v in found.items() if not n.startswith(("reasoning", "thinking"))}


def members_of_call(entry: Mapping[str, Any]) -> dict[str, object]:
    """Return the members of a tool call and its function that only the provider knows."""
    inner = _without(entry.get("function") or {}, _OF_FUNCTION)
    return {**_without(entry, _OF_CALL), **({"function": inner} if inner else {})}


def provider_fields(
    origin: str, message: Mapping[str, object], calls: Sequence[Mapping[str, object]]
) -> ProviderFields | None:
    """Return the members that only the provider knows; None if there are none, or they cannot be encoded."""
    if not message and not any(calls):
        return None
    try:
        texts = [json_bytes(each).decode() for each in (message, *(calls if any(calls) else ()))]
    except (RecursionError, ValueError):  # too deep, or a number of more digits than Python writes
        return None
    return ProviderFields(origin=origin, message=texts[0], tool_calls=tuple(texts[1:]))


def _object_in(text: str) -> dict[str, object]:
    """Return the object in JSON text; empty if a record or a user's model has another text there."""
    try:
        data: object = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, object]", data) if isinstance(data, dict) else {}


def _arguments(call: ToolCall) -> str:
    """Return the model's arguments; servers refuse a history with arguments that are not a JSON object."""
    try:
        if isinstance(json.loads(call.arguments), dict):
            return call.arguments
    except (ValueError, RecursionError):
        pass
    return _encode({"unparsable": call.arguments}) if call.arguments.strip() else "{}"


def _tool(tool: ToolSpec) -> bytes:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return json_bytes({"type": "function", "function": function})


# Answers.


def parse_json(raw: bytes | str, what: str = "it") -> object:
    """Return the value of JSON text; `what` names the text in errors."""
    try:
        return cast("object", json.loads(raw))
    except RecursionError:
        raise WireError(f"{what} is JSON that is nested too deeply") from None
    except ValueError:
        text = raw if isinstance(raw, str) else raw[: 8 * _SHOWN].decode(errors="replace")
        raise WireError(f"{what} is not JSON: {format_foreign(text, whole=len(raw))}") from None


def decode_completion(raw: bytes, limits: AnswerLimits = _LIMITS, origin: str = "") -> ChatResponse:
    """Return the answer in a response's body; `origin` is its endpoint and model."""
    if not raw.strip():
        raise AnswerFailedError("the answer has no body")
    data = parse_json(raw)
    if not isinstance(data, dict):
        raise not_a_completion(data)
    body = cast("dict[str, Any]", data)
    if has_failed(body):
        raise not_a_completion(body)
    try:
        choice = body["choices"][0]
        message = choice["message"]
        text = text_in(message)
        entries = message.get("tool_calls") or ()
        limits.check_tool_calls(len(entries))
        calls = tuple(
            # A few servers leave the id out; the result of the call needs one.
            ToolCall(
                str(entry.get("id") or f"call_{index}"),
                str(entry["function"]["name"]),
                text_of_arguments(entry["function"].get("arguments")),
            )
            for index, entry in enumerate(entries)
        )
        members = members_of_message(message, has_calls=bool(calls))
        fields = provider_fields(origin, members, [members_of_call(entry) for entry in entries])
        response = ChatResponse(
            text,
            calls,
            usage_in(body.get("usage")),
            finish_reason_in(choice),
            reasoning=reasoning_in(message),
            provider_fields=fields,
        )
    except TooMuchError as error:
        raise WireError(str(error)) from None
    except FORM_ERRORS:
        raise not_a_completion(body) from None
    check_end(response.finish_reason)
    return response


def check_end(finish_reason: str | None) -> None:
    """Raise `AnswerFailedError` if the answer ended with a failure of its provider."""
    if _is_failure(finish_reason):
        raise AnswerFailedError(f"the answer ended with finish_reason '{finish_reason}'")


def _is_failure(finish_reason: object) -> bool:
    return isinstance(finish_reason, str) and finish_reason.rpartition(":")[2].strip().lower() in _FAILURES


def has_failed(body: Mapping[str, Any]) -> bool:
    """Whether an answer is an error, or has one in its first choice, or one with a status next to its choices (S-LLM-20)."""
    found = _error_in(body)
    is_beside = found is not None and found is body.get("error") and "choices" in body
    return found is not None and (not is_beside or read_error_body(found).status is not None)


def _error_in(body: Mapping[str, Any]) -> object:
    """Return the provider's error in an answer or in its first choice, or None."""
    if body.get("error"):
        return cast("object", body["error"])
    if body.get("choices") is not None:
        return _first_choice(body).get("error") or None
    # Some servers send the members of the error without an enclosing object.
    return body if read_error_body(body).status is not None else None


def _first_choice(body: Mapping[str, Any]) -> Mapping[str, object]:
    choices = body.get("choices")
    is_there = isinstance(choices, list) and choices and isinstance(choices[0], dict)
    return cast("Sequence[Mapping[str, object]]", choices)[0] if is_there else {}


def not_a_completion(data: object, what: str = "it") -> WireError:
    """Return the error for an unusable answer: the provider's own error, if the answer or its first item contains one."""
    entries = cast("Sequence[object]", data) if isinstance(data, list) else [data]
    body = cast("Mapping[str, Any]", entries[0]) if entries and isinstance(entries[0], dict) else None
    found = None if body is None else _error_in(body)
    if body is not None and found:
        body_error = read_error_body(found)
        has_ended = body_error.status is None and _is_failure(_first_choice(body).get("finish_reason"))
        kind = AnswerFailedError if has_ended else WireError
        error = kind(format_foreign(body_error.message) or _format_data(found))
        try:
            error.provider_error = json_bytes({"error": found})
        except (RecursionError, ValueError):  # as in `provider_fields`
            error.provider_error = b"{}"
        return error
    if not isinstance(data, dict):
        return WireError(f"{what} is not a JSON object: {_format_data(data)}")
    return WireError(f"it has no choices with a message: {_format_data(data)}")


def _format_data(data: object) -> str:
    try:
        return format_foreign(data if isinstance(data, str) else _encode(data))
    except (RecursionError, ValueError):  # as in `provider_fields`
        return "nested too deeply to be shown"


def format_foreign(text: str, limit: int = _SHOWN, *, whole: int | None = None) -> str:
    """Return a text of unknown origin as one short line; `whole` is the length of all of it if `text` is its start."""
    line = " ".join(text[: 8 * limit].split())
    length = max(len(text), whole or 0)
    if len(line) <= limit and length <= 8 * limit:
        return one_line(line, None)
    return f"{one_line(line[:limit], None)}... [{length} characters in all]"


def text_in(message: Mapping[str, Any]) -> str | None:
    """Return the text of a message. Some servers send it in parts, or a refusal instead of a text."""
    content: object = message.get("content")
    if not content and message.get("refusal"):
        return str(message["refusal"])
    if content is None or isinstance(content, str):
        return content
    parts = cast("Sequence[Mapping[str, Any]]", content)
    return "".join(str(part.get("text") or "") for part in parts if part.get("type") not in _THOUGHTS)


def reasoning_in(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning of a message. Endpoints use different names, and some send it twice (S-LLM-3)."""
    for name in ("reasoning_content", "reasoning"):
        text: object = message.get(name)
        if isinstance(text, str) and text:
            return text
    thoughts = [_thought(part) for part in message.get("reasoning_details") or ()]
    content: object = message.get("content")
    if not isinstance(content, str):
        thoughts += [_thought(part) for part in cast("Sequence[object]", content or ())]
    return "".join(thoughts) or None


def _thought(part: object) -> str:
    """Return the reasoning in one part; empty for other parts and encrypted ones."""
    if not isinstance(part, dict) or part.get("type") not in _THOUGHTS:
        return ""
    data = cast("Mapping[str, object]", part)
    for name in ("thinking", "reasoning", "summary", "text"):
        text = data.get(name)
        if isinstance(text, str) and text:
            return text
        if isinstance(text, list):  # parts with texts
            inner = [cast("Mapping[str, object]", each).get("text") for each in text if isinstance(each, dict)]
            return "".join(each for each in inner if isinstance(each, str))
    return ""


def finish_reason_in(choice: Mapping[str, Any]) -> str | None:
    """Return why the model stopped; None if the endpoint sends no text."""
    reason: object = choice.get("finish_reason")
    return one_line(reason[:_LONGEST_REASON], None) if isinstance(reason, str) and reason else None


def text_of_arguments(arguments: object) -> str:
    """Return arguments as text; a few servers send an object."""
    if isinstance(arguments, str):
        return arguments
    return "" if arguments is None else _encode(arguments)


def usage_in(data: object) -> TokenUsage | None:
    """Return the tokens of an answer; None if the endpoint does not report them."""
    if not isinstance(data, dict):
        return None
    counts = cast("Mapping[str, object]", data)
    details = counts.get("completion_tokens_details")
    thought = cast("Mapping[str, object]", details).get("reasoning_tokens") if isinstance(details, dict) else None
    return TokenUsage(_count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens")), _count(thought))


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value <= _MOST_TOKENS else -1
