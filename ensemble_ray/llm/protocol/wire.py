"""The chat-completions protocol as bytes: encodes requests, and decodes whole and streamed answers.

`ModelApi` names what another protocol of models does in its own way; the rest of this module serves both.

For any content of an answer, decoding raises no other error than `WireError` and `TooMuchError`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar, cast

import msgspec
from msgspec import Struct

from ensemble_ray.errors.bodies import read_error_body
from ensemble_ray.process.concurrency import new_lock
from ensemble_ray.text.foreign_text import one_line, whole_text
from ensemble_ray.values.messages import (
    STREAM_CUT,
    ChatMessage,
    ChatResponse,
    ProviderFields,
    TokenUsage,
    ToolCall,
    ToolSpec,
)

#: Half a MiB is a hundred thousand tokens; log probabilities add twenty times as much.
DEFAULT_ANSWER_BYTES = 16 * 2**20
_STREAM_FACTOR = 4  # a token of a stream has an envelope of 200 to 300 bytes
DEFAULT_ANSWER_TIME_S = 3600.0
ERROR_BODY_BYTES = 64 * 2**10
MOST_EVENTS = 1_000_000
MOST_TOOL_CALLS = 1_000  # endpoints allow 128 tools
_MOST_TOKENS = 10**9
_SHOWN = 200
_LONGEST_REASON = 64
_FIRST_TURN = 2  # most conversations end after a system and a user message, so these are not cached

#: Errors of decoding an answer of another form, or one that is nested too deeply for the stack.
FORM_ERRORS = (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)

#: Members that this module reads, or that endpoints send but do not accept.
_OF_MESSAGE = frozenset({
    "role", "content", "name", "refusal", "tool_calls", "tool_call_id", "function_call", "annotations", "audio", "images",
    "executed_tools",
})  # fmt: skip
_OF_CALL = frozenset({"id", "type", "index", "function"})
_OF_FUNCTION = frozenset({"name", "arguments", "index"})

_THOUGHTS = frozenset(
    {"thinking", "redacted_thinking", "reasoning", "reasoning.text", "reasoning.summary", "reasoning.encrypted"}
)
_FAILURES = frozenset({
    "error", "network_error", "server_error", "internal_error", "insufficient_system_resource", "timeout", "abort",
    "aborted", "malformed_function_call", "malformed_response", "malformed_model_output", "malformed_tool_use",
    "unexpected_tool_call",
})  # fmt: skip

_ENDS = frozenset({"stop", "tool_calls"})

#: Names of counts in `usage`, by provider (S-PRC-1): OpenAI; DeepSeek; Anthropic's, as gateways pass them on; OpenRouter.
_THOUGHT_COUNTS = ("reasoning_tokens",)
_TOTALS = frozenset({"prompt_tokens", "completion_tokens", "total_tokens"})  # all others are parts of them
_CACHED_COUNTS = ("cached_tokens", "prompt_cache_hit_tokens", "cache_read_input_tokens")
_WRITTEN_COUNTS = ("cache_write_tokens", "cache_creation_tokens", "cache_creation_input_tokens")

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

_Piece = TypeVar("_Piece", ChatMessage, ToolSpec)
#: Ids of the message's tool calls, whether it contains its provider's members, and the name of the protocol's form.
MessageForm = tuple[tuple[str, ...], bool, str]


class TooMuchError(ValueError):
    """An answer exceeds a limit; the text says what to do."""


class AnswerLimits(Struct, frozen=True, kw_only=True):
    body_bytes: int = DEFAULT_ANSWER_BYTES
    time_s: float = DEFAULT_ANSWER_TIME_S
    events: int = MOST_EVENTS
    tool_calls: int = MOST_TOOL_CALLS

    @property
    def stream_bytes(self) -> int:
        return _STREAM_FACTOR * self.body_bytes

    def check_body(self, received_bytes: int) -> None:
        _check_bytes(received_bytes, self.body_bytes, "a whole answer")

    def check_stream(self, received_bytes: int) -> None:
        _check_bytes(received_bytes, self.stream_bytes, "a stream")

    def check_event(self, held_bytes: int) -> None:
        _check_bytes(held_bytes, self.body_bytes, "one event of a stream")

    def check_events(self, count: int) -> None:
        if count > self.events:
            raise TooMuchError(f"its stream has more than {self.events} events, the limit")

    def check_tool_calls(self, count: int) -> None:
        if count > self.tool_calls:
            raise TooMuchError(f"it asks for more than {self.tool_calls} tool calls, the limit of one answer")

    @property
    def too_late(self) -> str:
        return (
            f"it was not complete after {self.time_s:g} s, the limit of a whole answer. Raise `max_answer_time` if its "
            "answers take that long"
        )


def _check_bytes(count: int, limit: int, of: str) -> None:
    if count > limit:
        raise TooMuchError(
            f"it is longer than {limit} bytes, the limit of {of}. Raise `max_answer_bytes` if its answers are that "
            "long, or set `max_tokens`"
        )


_LIMITS = AnswerLimits()


class WireError(ValueError):
    """An answer is not one of the protocol, or is the provider's error, in `provider_error` as JSON."""

    provider_error = b""


class AnswerFailedError(WireError):
    """The provider failed while it answered (S-LLM-7, S-LLM-8)."""


class EncodedPieces:
    """Cache of encoded messages and tools by identity, bounded in bytes; it refers to them, so that ids stay unique."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self.known: dict[tuple[int, Hashable], tuple[object, bytes]] = {}
        self._lock = new_lock()

    def __len__(self) -> int:
        return len(self.known)

    def get(self, value: _Piece, data_of: Callable[[_Piece], object], form: Hashable = None) -> bytes:
        key = id(value), form
        cached = self.known.get(key)
        if cached is not None:
            return cached[1]
        data = data_of(value)
        encoded = json_bytes(data)
        if isinstance(data, list):  # the items of one message
            encoded = encoded[1:-1]
        with self._lock:
            if key not in self.known:
                self.known[key] = (value, encoded)
                self._held_bytes += len(encoded)
            while self._held_bytes > self._limit_bytes:
                oldest = next(iter(self.known))
                self._held_bytes -= len(self.known.pop(oldest)[1])
        return encoded


_pieces = EncodedPieces(4 * 1024 * 1024)  # about a thousand messages of a long tool loop


class Assembler(Protocol):
    """Makes one answer from the events of a stream."""

    reasoning_fragment: str  # of the last event
    is_ended: bool  # the rest of the stream is not part of the answer

    def feed_data(self, data: bytes) -> str:
        """Return the text fragment of an event, or ""."""
        ...

    def finish(self) -> ChatResponse: ...


class ModelApi(Struct, frozen=True, kw_only=True):
    path: str  # below the base URL
    conversation: bytes  # the member with the messages
    items_of: Callable[[MessageForm, ChatMessage], list[dict[str, object]]]
    tool_of: Callable[[ToolSpec], dict[str, object]]
    decode: Callable[[bytes, AnswerLimits, str], ChatResponse]
    assembler: Callable[[AnswerLimits, str], Assembler]
    #: returns the name of the form of messages for an origin, and members of its requests
    form_for: Callable[[str], tuple[str, bytes]] | None = None
    #: notes what the text of a failure refuses, for later requests to an origin; returns its name, or ""
    learn: Callable[[bytes, str], str] | None = None

    @property
    def batch_path(self) -> str:
        """The path of a request in a batch, as providers name it."""
        return f"/v1{self.path}"


def encode_request(
    prefix: bytes,
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolSpec],
    *,
    suffix: bytes = b"",
    origin: str = "",
    api: ModelApi | None = None,
    breakpoints: Mapping[int, Sequence[int]] | None = None,
) -> bytes:
    """Return the request's body. `prefix` and `suffix` are members, such as `"stream":true`.

    Only the `origin`, endpoint and model, gets the members that it sent with earlier answers (S-LLM-9). `breakpoints` of the
    provider's cache are positions in the texts of messages, by the message's position.
    """
    api = api or CHAT_COMPLETIONS
    form_name, members = ("", b"") if api.form_for is None else api.form_for(origin)
    forms = _forms(messages, origin, form_name)
    marks = breakpoints or {}
    if len(messages) > _FIRST_TURN:
        known, encoded = _pieces.known, list[bytes]()
        for place, (message, form) in enumerate(zip(messages, forms, strict=True)):
            held = known.get((id(message), form))  # most messages were part of the request before
            if place in marks:
                encoded.append(json_bytes(_marked(_members(form, message), marks[place])))
            else:
                encoded.append(_pieces.get(message, partial(api.items_of, form), form) if held is None else held[1])
        sent = b"[%b]" % b",".join(encoded)
    else:
        listed = [
            [_marked(_members(form, message), marks[place])] if place in marks else api.items_of(form, message)
            for place, (message, form) in enumerate(zip(messages, forms, strict=True))
        ]
        sent = json_bytes([item for items in listed for item in items])
    body = [b"{", prefix, b",", api.conversation, b":", sent]
    if members:
        body += [b",", members]
    if tools:
        described = [_pieces.get(tool, api.tool_of, api.path) for tool in tools]
        body += [b',"tools":[', b",".join(described), b"]"]
    if suffix:
        body += [b",", suffix]
    body.append(b"}")
    return b"".join(body)


def json_bytes(value: object) -> bytes:
    """Encode as UTF-8; lone surrogates become U+FFFD (S-SEC-56)."""
    text = _encode(value)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return whole_text(text).encode()


def _forms(messages: Sequence[ChatMessage], origin: str, name: str) -> list[MessageForm]:
    """Create ids of nine characters for calls without a unique one (S-LLM-10)."""
    forms: list[MessageForm] = []
    used: set[str] = set()
    waiting: dict[str, deque[str]] = {}  # model's id -> sent ids of calls without a result
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
        forms.append((tuple(ids), fields is not None and bool(origin) and fields.origin == origin, name))
    return forms


def _members(form: MessageForm, message: ChatMessage) -> dict[str, object]:
    ids, has_fields, _ = form
    fields = message.provider_fields if has_fields else None
    data: dict[str, object] = {"role": message.role, "content": message.content}
    if fields is not None:
        data |= members_of_message(object_in(fields.message), has_calls=bool(message.tool_calls))
    if message.tool_calls:
        if not (message.content or "").strip():
            data["content"] = None  # strict servers refuse an empty text (S-LLM-9)
        more = () if fields is None else fields.tool_calls
        calls: list[dict[str, object]] = []
        for number, (call, sent) in enumerate(zip(message.tool_calls, ids, strict=True)):
            own = object_in(more[number]) if number < len(more) else {}
            function = own.get("function")
            inner = without(cast("Mapping[str, object]", function), _OF_FUNCTION) if isinstance(function, dict) else {}
            members = {"name": call.name, "arguments": arguments_in_history(call), **inner}
            calls.append({"id": sent, "type": "function", "function": members, **without(own, _OF_CALL)})
        data["tool_calls"] = calls
    elif message.content is None:
        data["content"] = ""
    if message.attachments:
        from ensemble_ray.llm.protocol.attachments import content_parts  # few messages have any

        data["content"] = content_parts(message)
    if message.tool_call_id is not None:
        data["tool_call_id"] = ids[0] if ids else message.tool_call_id
    if message.name is not None and message.role != "tool":
        # Strict servers refuse a name of the role tool.
        data["name"] = message.name
    return data


def _marked(message: dict[str, object], positions: Sequence[int]) -> dict[str, object]:
    """Return a message with its text in parts, each but the last one before a breakpoint."""
    text = message["content"]
    if not positions or not isinstance(text, str):
        return message
    starts = [0, *positions]
    parts: list[dict[str, object]] = [
        {"type": "text", "text": text[start:end], "cache_control": {"type": "ephemeral"}}
        for start, end in pairwise(starts)
    ]
    if rest := text[starts[-1] :]:
        parts.append({"type": "text", "text": rest})
    return {**message, "content": parts}


def _tool(tool: ToolSpec) -> dict[str, object]:
    return {"type": "function", "function": description_of(tool)}


def description_of(tool: ToolSpec) -> dict[str, object]:
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters or {"type": "object", "properties": {}},
    }


def arguments_in_history(call: ToolCall) -> str:
    """Servers refuse a history whose arguments are not a JSON object."""
    arguments = call.arguments if call.arguments.strip() else "{}"
    return arguments if _is_object(arguments) else _encode({"unparsable": arguments})


def without(data: Mapping[str, object], known: frozenset[str]) -> dict[str, object]:
    if known.issuperset(data):
        return {}
    return {name: value for name, value in data.items() if name not in known and value is not None}


def members_of_message(message: Mapping[str, object], *, has_calls: bool) -> dict[str, object]:
    """Return the members that only the provider knows; those with reasoning only for tool calls (S-LLM-9)."""
    found = without(message, _OF_MESSAGE)
    return found if has_calls else {n: v for n, v in found.items() if not n.startswith(("reasoning", "thinking"))}


def members_of_call(entry: Mapping[str, Any]) -> dict[str, object]:
    inner = without(entry.get("function") or {}, _OF_FUNCTION)
    return {**without(entry, _OF_CALL), **({"function": inner} if inner else {})}


def provider_fields(
    origin: str, message: Mapping[str, object], calls: Sequence[Mapping[str, object]]
) -> ProviderFields | None:
    if not message and not any(calls):
        return None
    try:
        texts = [json_bytes(each).decode() for each in (message, *(calls if any(calls) else ()))]
    except (RecursionError, ValueError):  # too deep, or a number of more digits than Python writes
        return None
    return ProviderFields(origin=origin, message=texts[0], tool_calls=tuple(texts[1:]))


def object_in(text: str) -> dict[str, object]:
    try:
        data: object = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, object]", data) if isinstance(data, dict) else {}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def parse_json(raw: bytes | str, what: str = "it") -> object:
    try:
        return cast("object", json.loads(raw))
    except RecursionError:
        raise WireError(f"{what} is JSON that is nested too deeply") from None
    except ValueError:
        text = raw if isinstance(raw, str) else raw[: 8 * _SHOWN].decode(errors="replace")
        raise WireError(f"{what} is not JSON: {format_foreign(text, whole=len(raw))}") from None


def parse_answer(raw: bytes) -> dict[str, Any]:
    if not raw.strip():
        raise AnswerFailedError("the answer has no body")
    data = parse_json(raw)
    if not isinstance(data, dict):
        raise not_a_completion(data)
    return cast("dict[str, Any]", data)


def decode_completion(raw: bytes, limits: AnswerLimits = _LIMITS, origin: str = "") -> ChatResponse:
    body = parse_answer(raw)
    if has_failed(body):
        raise not_a_completion(body)
    try:
        choice = body["choices"][0]
        message = choice["message"]
        text = text_in(message)
        entries = message.get("tool_calls") or ()
        calls: tuple[ToolCall, ...] = ()
        fields = None
        if entries:
            limits.check_tool_calls(len(entries))
            calls = tuple(
                [
                    # Some servers omit the id, but the result of the call needs one.
                    ToolCall(
                        str(entry.get("id") or f"call_{index}"),
                        str(entry["function"]["name"]),
                        text_of_arguments(entry["function"].get("arguments")),
                    )
                    for index, entry in enumerate(entries)
                ]
            )
        if entries or not _OF_MESSAGE.issuperset(message):
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
    if finish_reason not in _ENDS and _is_failure(finish_reason):
        raise AnswerFailedError(f"the answer ended with finish_reason '{finish_reason}'")


def _is_failure(finish_reason: object) -> bool:
    return isinstance(finish_reason, str) and finish_reason.rpartition(":")[2].strip().lower() in _FAILURES


def has_failed(body: Mapping[str, Any]) -> bool:
    """Whether an error is in place of choices, in the first choice, or beside them with a status (S-LLM-20)."""
    if body.get("choices") and not body.get("error"):
        return bool(_first_choice(body).get("error"))
    found = _error_in(body)
    is_beside = found is not None and found is body.get("error") and "choices" in body
    return found is not None and (not is_beside or read_error_body(found).status is not None)


def _error_in(body: Mapping[str, Any]) -> object:
    if body.get("error"):
        return cast("object", body["error"])
    if body.get("choices") is not None:
        return _first_choice(body).get("error") or None
    # Some servers send the error's members without an enclosing object.
    return body if read_error_body(body).status is not None else None


def _first_choice(body: Mapping[str, Any]) -> Mapping[str, object]:
    choices = body.get("choices")
    is_there = isinstance(choices, list) and choices and isinstance(choices[0], dict)
    return cast("Sequence[Mapping[str, object]]", choices)[0] if is_there else {}


def not_a_completion(data: object, what: str = "it") -> WireError:
    """Return the provider's own error if there is one, else the form's."""
    entries = cast("Sequence[object]", data) if isinstance(data, list) else [data]
    body = cast("Mapping[str, Any]", entries[0]) if entries and isinstance(entries[0], dict) else None
    found = None if body is None else _error_in(body)
    if body is not None and found:
        has_ended = read_error_body(found).status is None and _is_failure(_first_choice(body).get("finish_reason"))
        return error_of_provider(found, AnswerFailedError if has_ended else WireError)
    if not isinstance(data, dict):
        return WireError(f"{what} is not a JSON object: {format_data(data)}")
    return WireError(f"it has no choices with a message: {format_data(data)}")


def error_of_provider(found: object, kind: type[WireError] = WireError) -> WireError:
    error = kind(format_foreign(read_error_body(found).message) or format_data(found))
    try:
        error.provider_error = json_bytes({"error": found})
    except (RecursionError, ValueError):  # as in `provider_fields`
        error.provider_error = b"{}"
    return error


def format_data(data: object) -> str:
    try:
        return format_foreign(data if isinstance(data, str) else _encode(data))
    except (RecursionError, ValueError):  # as in `provider_fields`
        return "nested too deeply to be shown"


def format_foreign(text: str, limit: int = _SHOWN, *, whole: int | None = None) -> str:
    """Return one short line; `whole` is the whole length if `text` is only the start."""
    line = " ".join(text[: 8 * limit].split())
    length = max(len(text), whole or 0)
    if len(line) <= limit and length <= 8 * limit:
        return one_line(line, None)
    return f"{one_line(line[:limit], None)}... [{length} characters in all]"


def text_in(message: Mapping[str, Any]) -> str | None:
    content: object = message.get("content")
    if not content and message.get("refusal"):
        return str(message["refusal"])
    if content is None or isinstance(content, str):
        return content
    parts = cast("Sequence[Mapping[str, Any]]", content)
    return "".join(str(part.get("text") or "") for part in parts if part.get("type") not in _THOUGHTS)


def reasoning_in(message: Mapping[str, Any]) -> str | None:
    """Endpoints use different names (S-LLM-3)."""
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
    reason: object = choice.get("finish_reason")
    if not isinstance(reason, str) or not reason:
        return None
    return reason if reason in _ENDS else one_line(reason[:_LONGEST_REASON], None)


def text_of_arguments(arguments: object) -> str:
    if isinstance(arguments, str):
        return arguments
    return "" if arguments is None else _encode(arguments)


def usage_in(data: object) -> TokenUsage | None:
    if not isinstance(data, dict):
        return None
    counts = cast("Mapping[str, object]", data)
    sent, received = _count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens"))
    if counts.keys() <= _TOTALS:
        return TokenUsage(sent, received)
    return TokenUsage(
        sent,
        received,
        _first_count(counts, "completion_tokens_details", _THOUGHT_COUNTS, _MOST_TOKENS),
        _first_count(counts, "prompt_tokens_details", _CACHED_COUNTS, sent),
        _first_count(counts, "prompt_tokens_details", _WRITTEN_COUNTS, sent),
    )


def _count(value: object, most: int = _MOST_TOKENS) -> int:
    return value if isinstance(value, int) and 0 <= value <= most else -1


def _first_count(counts: Mapping[str, object], details: str, names: Sequence[str], most: int) -> int:
    """Return the first known count of the details or of the usage itself, at most `most`; -1: none (S-PRC-1)."""
    inner = counts.get(details)
    for place in (cast("Mapping[str, object]", inner) if isinstance(inner, dict) else {}, counts):
        for name in names:
            value = place.get(name)
            if value is not None and (found := _count(value, most)) >= 0:
                return found
    return -1


# Streamed answers. Every step takes time in proportion to its bytes, however they are cut.

STREAM_END = b"[DONE]"
EMPTY_STREAM = "the stream ended without a single piece of an answer"
_BOM = b"\xef\xbb\xbf"
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
_LONGEST_FIELD = max(map(len, _FIELDS))
#: Events that only keep a connection open.
_PINGS = frozenset({"ping", "heartbeat", "keepalive", "keep-alive", "keep_alive"})
_CHUNK = "a piece of the stream"
_LINE_BYTES = 64
#: Later texts replace earlier ones here; texts of other members are appended.
_WHOLE_MEMBERS = frozenset({"type", "format", "id", "name", "role", "object", "status"})
#: A text may continue with an equal piece here. In other members a repeated text is a constant.
_TEXT_MEMBERS = frozenset({
    "text", "summary", "data", "signature", "thinking", "thought", "thought_signature", "reasoning", "reasoning_content",
    "reasoning_text",
})  # fmt: skip


def begin_of_body(received: bytes) -> bytes:
    return received.removeprefix(_BOM).lstrip()


def is_event_stream(begin: bytes) -> bool | None:
    """Return None if more bytes decide."""
    if begin.startswith(_FIELDS):
        return True
    is_short = len(begin) < _LONGEST_FIELD
    return None if is_short and any(name.startswith(begin) for name in (*_FIELDS, _BOM)) else False


class SseParser:
    """Parses server-sent events from bytes that are cut anywhere; skips events without data and pings."""

    def __init__(self, limits: AnswerLimits = _LIMITS) -> None:
        self._limits = limits
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._is_ping = False
        self._count = 0
        self._is_first = True
        self._ends_with_cr = False  # possibly the CR of a CR LF

    def feed(self, received: bytes) -> Iterator[bytes]:
        if self._ends_with_cr:
            received = received.removeprefix(b"\n")
            self._ends_with_cr = False
        if b"\r" in received:
            self._ends_with_cr = received.endswith(b"\r")
            received = received.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *ended, rest = received.split(b"\n")
        for line in ended:
            if self._rest:
                line = b"".join((*self._rest, line))  # noqa: PLW2901  the whole line
                self._rest, self._rest_bytes = [], 0
            yield from self._line(line)
        if rest:
            self._rest.append(rest)
            self._rest_bytes += len(rest) + _LINE_BYTES
            self._limits.check_event(self._rest_bytes)

    def finish(self) -> Iterator[bytes]:
        yield from self.feed(b"\n\n")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if self._is_first:
            line, self._is_first = line.removeprefix(_BOM), False
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(line) + _LINE_BYTES
            self._limits.check_event(self._data_bytes)
        elif name == b"event":
            self._is_ping = value.strip().lower().decode(errors="replace") in _PINGS
        elif not line:
            data, is_ping = b"\n".join(self._data), self._is_ping
            self._data, self._data_bytes, self._is_ping = [], 0, False
            if data.strip() and not is_ping:
                self._count += 1
                self._limits.check_events(self._count)
                yield data


class StreamAssembler:
    def __init__(self, limits: AnswerLimits = _LIMITS, origin: str = "") -> None:
        self._limits = limits
        self._origin = origin
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.reasoning_fragment = ""
        self._calls: dict[int, list[_Call]] = {}  # by index, in order of arrival
        self._call_count = 0
        self._index_by_id: dict[str, int] = {}
        self._last_index = -1
        self._members = _Object()  # members that only the provider knows, and the bytes of all their pieces
        self._members_bytes = 0
        self._choice: object = None  # a request may ask for several choices; only one is read
        self._usage: TokenUsage | None = None
        self._finish_reason: str | None = None
        self._has_begun = False
        self.is_ended = False

    def feed_data(self, data: bytes) -> str:
        """Return the text fragment, or ""."""
        if data.strip() == STREAM_END:
            self.is_ended, self.reasoning_fragment = True, ""
            return ""
        return self.feed(parse_json(data, _CHUNK))

    def feed(self, chunk: object) -> str:
        self.reasoning_fragment = ""
        if chunk is None:
            return ""
        if not isinstance(chunk, dict):
            raise not_a_completion(chunk, _CHUNK)
        body = cast("dict[str, Any]", chunk)
        # Unlike in a whole answer, an error without a status is a failure.
        if has_failed(body) or (body.get("error") and read_error_body(body["error"]).message):
            raise not_a_completion(body)
        if "choices" not in body and "usage" not in body:
            if not is_ping(body):
                raise not_a_completion(body)
            return ""
        try:
            return self._read_chunk(body)
        except FORM_ERRORS as error:
            if isinstance(error, TooMuchError):
                raise
            raise not_a_completion(body) from None

    def _read_chunk(self, body: Mapping[str, Any]) -> str:
        self._usage = usage_in(body.get("usage")) or self._usage
        choices = body.get("choices")
        if not choices:
            return ""
        choice = choices[0]
        if self._choice is None:
            self._choice = choice.get("index")
        elif choice.get("index") not in (None, self._choice):
            return ""
        self._has_begun = True
        self._finish_reason = finish_reason_in(choice) or self._finish_reason
        # Some servers send the whole message as the only piece, others send it again at the end.
        is_whole = not choice.get("delta")
        if is_whole:
            read = {"content": self._text, "refusal": self._text, "tool_calls": self._calls}
            message: Mapping[str, Any] = choice.get("message") or {}
            delta = {name: value for name, value in message.items() if not read.get(name, name in self._members)}
        else:
            delta = choice["delta"]
        self.reasoning_fragment = "" if is_whole and self._reasoning else reasoning_in(delta) or ""
        if self.reasoning_fragment:
            self._reasoning.append(self.reasoning_fragment)
        self._add_members(members_of_message(delta, has_calls=True), self._members)
        entries = delta.get("tool_calls") or ()
        for position, entry in enumerate(entries):
            if entry:
                self._add_call(entry, position if len(entries) > 1 else max(self._last_index, 0))
        fragment = text_in(delta) or ""
        if fragment:
            self._text.append(fragment)
        return fragment

    def _add_call(self, entry: Mapping[str, Any], position: int) -> None:
        """The first piece has id and name; all have parts of the arguments."""
        function = entry.get("function") or {}
        call_id, name = str(entry.get("id") or ""), str(function.get("name") or "")
        arguments = text_of_arguments(function.get("arguments") or "")
        index = self._index_of(entry, call_id, name, position)
        calls = self._calls.setdefault(index, [])
        if not calls or not calls[-1].is_continued_by(call_id, name, arguments):
            self._call_count += 1
            self._limits.check_tool_calls(self._call_count)
            calls.append(_Call())
        self._last_index = index
        call = calls[-1]
        if call_id and not call.id:
            call.id = call_id
            self._index_by_id.setdefault(call_id, index)
        call.name = call.name or name
        if arguments:
            call.arguments.append(arguments)
        self._add_members(members_of_call(entry), call.members)

    def _index_of(self, entry: Mapping[str, Any], call_id: str, name: str, position: int) -> int:
        index = entry.get("index")
        if index is not None:
            return int(index)
        # Servers without an index send whole calls, pieces of the last call, or pieces of all calls by position.
        if call_id in self._index_by_id:
            return self._index_by_id[call_id]
        return max(self._calls, default=-1) + 1 if name else position

    def _add_members(self, piece: Mapping[str, object], members: _Object) -> None:
        if piece:
            self._members_bytes += len(json_bytes(piece))
            self._limits.check_event(self._members_bytes)
            _merge(members, piece)

    def finish(self) -> ChatResponse:
        """Return the whole answer, or the part before a cut (S-LLM-8)."""
        calls = [call for _, under in sorted(self._calls.items()) for call in under]
        text, is_cut = "".join(self._text), not (self._finish_reason or self.is_ended)
        if not self._has_begun or (is_cut and not text and not calls):
            raise AnswerFailedError(EMPTY_STREAM)
        check_end(self._finish_reason)
        try:
            members = members_of_message(cast("dict[str, object]", _join(self._members)), has_calls=bool(calls))
            more = [cast("dict[str, object]", _join(call.members)) for call in calls]
            fields = provider_fields(self._origin, members, more)
        except RecursionError:  # nested too deeply for the stack
            fields = None
        return ChatResponse(
            text=text if text or not calls else None,
            tool_calls=tuple(
                [ToolCall(call.id or f"call_{n}", call.name, "".join(call.arguments)) for n, call in enumerate(calls)]
            ),
            usage=self._usage,
            finish_reason=STREAM_CUT if is_cut else self._finish_reason,
            reasoning="".join(self._reasoning) or None,
            provider_fields=fields,
        )


class _Text(list[str]):
    """Pieces of a text."""


class _Object(dict[str, object]):
    """An object with members in pieces."""


class _Items(list[object]):
    """A list in pieces; an item with the index of an earlier one continues it."""

    def __init__(self, items: Iterable[object]) -> None:
        super().__init__()
        self._places: dict[tuple[object, object], int] = {}
        self.add(items)

    def add(self, items: Iterable[object]) -> None:
        for item in items:
            entry = cast("dict[str, object]", item) if isinstance(item, dict) else {}
            place = len(self)
            if isinstance(entry.get("index"), int):
                place = self._places.setdefault((entry["index"], str(entry.get("type"))), place)
            if place == len(self):
                self.append(item)
            else:
                self[place] = _merge(self[place], item)


class _Call(Struct):
    id: str = ""
    name: str = ""
    arguments: list[str] = msgspec.field(default_factory=list[str])
    members: _Object = msgspec.field(default_factory=_Object)
    is_incomplete: bool = False  # its arguments were incomplete when a piece looked like another call

    def is_continued_by(self, call_id: str, name: str, arguments: str) -> bool:
        """Whether a piece under the same index belongs to this call (S-LLM-11)."""
        if name and self.name and name != self.name:
            return False
        if call_id and self.id:
            # Some servers create a new id for every piece, but only the first piece of a call has a name.
            return call_id == self.id or not (name or (arguments and self.is_complete()))
        # Calls of one tool without ids: each piece is a whole call.
        return not (name and self.name and arguments.lstrip().startswith("{") and self.is_complete())

    def is_complete(self) -> bool:
        """Parse the arguments only once: a stream may ask a million times."""
        if self.is_incomplete or not self.arguments:
            return False
        self.is_incomplete = not _is_object("".join(self.arguments))
        return not self.is_incomplete


def _merge(before: object, piece: object) -> object:
    """Add a piece to a value for `_join`; the first piece does not change."""
    if isinstance(piece, str) and isinstance(before, str | _Text):
        text = before if isinstance(before, _Text) else _Text([before])
        text.append(piece)
        return text
    if isinstance(piece, dict) and isinstance(before, dict):
        data = before if isinstance(before, _Object) else _Object(cast("dict[str, object]", before))
        for name, value in cast("dict[str, object]", piece).items():
            if value is None:
                continue
            is_constant = isinstance(value, str) and name not in _TEXT_MEMBERS and value == data.get(name)
            data[name] = value if is_constant or name in _WHOLE_MEMBERS else _merge(data.get(name), value)
        return data
    if isinstance(piece, list) and isinstance(before, list) and not isinstance(before, _Text):
        items = before if isinstance(before, _Items) else _Items(cast("list[object]", before))
        items.add(cast("list[object]", piece))
        return items
    return piece


def _join(value: object) -> object:
    if isinstance(value, _Text):
        return "".join(value)
    if isinstance(value, _Object):
        return {name: _join(each) for name, each in value.items()}
    if isinstance(value, _Items):
        return [_join(each) for each in value]
    return value


CHAT_COMPLETIONS = ModelApi(
    path="/chat/completions",
    conversation=b'"messages"',
    items_of=lambda form, message: [_members(form, message)],
    tool_of=_tool,
    decode=decode_completion,
    assembler=StreamAssembler,
)


def is_ping(body: Mapping[str, Any]) -> bool:
    return not body or not _PINGS.isdisjoint((str(body.get("type")).lower(), str(body.get("event")).lower(), *body))
