"""The chat-completions protocol as bytes. Package: llm; pure: values in, bytes out, and back.

A conversation grows by two messages per turn of a tool loop and is sent whole each time, so the encoded form of a
message is kept: an old message is never encoded twice. What comes back is checked for its form only; the arguments of
tool calls stay the model's raw text. Must never happen: a body that is no UTF-8; another error than `WireError` because
of what an answer holds.
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

#: A hundred thousand tokens are half a MiB of text; log probabilities make twenty times as much of them.
DEFAULT_ANSWER_BYTES = 16 * 2**20
#: Each token of a stream comes in an envelope of its own, of 200 to 300 bytes.
_STREAM_FACTOR = 4
#: Longest time of a whole streamed answer where its model says nothing else, s.
DEFAULT_ANSWER_TIME_S = 3600.0
#: What is read of the body of a failure; the rest is left in the connection, which is closed.
ERROR_BODY_BYTES = 64 * 2**10
#: Events of one stream: one a token, and servers that reason or keep alive send more.
MOST_EVENTS = 1_000_000
#: Calls of tools in one answer; endpoints allow 128 tools.
MOST_TOOL_CALLS = 1_000


class TooMuchError(ValueError):
    """An answer is beyond a limit; the text says which, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """The limits of one answer."""

    #: of a whole body
    body_bytes: int = DEFAULT_ANSWER_BYTES
    #: of a whole streamed answer, from the request on
    time_s: float = DEFAULT_ANSWER_TIME_S
    events: int = MOST_EVENTS
    tool_calls: int = MOST_TOOL_CALLS

    @property
    def stream_bytes(self) -> int:
        """Bytes of a whole stream, envelopes included."""
        return _STREAM_FACTOR * self.body_bytes

    def check_body(self, received_bytes: int) -> None:
        """Refuse a body that is longer.

        Raises:
            TooMuchError: it is.
        """
        if received_bytes > self.body_bytes:
            raise TooMuchError(_beyond(self.body_bytes, "a whole answer"))

    def check_stream(self, received_bytes: int) -> None:
        """Refuse a stream that is longer.

        Raises:
            TooMuchError: it is.
        """
        if received_bytes > self.stream_bytes:
            raise TooMuchError(_beyond(self.stream_bytes, "a stream"))

    def check_event(self, held_bytes: int) -> None:
        """Refuse an event, or a line without an end, that is longer than a whole answer.

        Raises:
            TooMuchError: it is.
        """
        if held_bytes > self.body_bytes:
            raise TooMuchError(_beyond(self.body_bytes, "one event of a stream"))

    def check_events(self, count: int) -> None:
        """Refuse a stream of more events.

        Raises:
            TooMuchError: there are more.
        """
        if count > self.events:
            raise TooMuchError(f"its stream has more than {self.events} events, the limit")

    def check_tool_calls(self, count: int) -> None:
        """Refuse an answer with more calls of tools.

        Raises:
            TooMuchError: there are more.
        """
        if count > self.tool_calls:
            raise TooMuchError(f"it asks for more than {self.tool_calls} tool calls, the limit of one answer")

    @property
    def too_late(self) -> str:
        """The error's text for an answer that was not complete in time."""
        return (
            f"it was not complete after {self.time_s:g} s, the limit of a whole answer. Raise `max_answer_time` if its "
            "answers take that long"
        )


def _beyond(limit: int, of: str) -> str:
    return (
        f"it is longer than {limit} bytes, the limit of {of}. Raise `max_answer_bytes` if its answers are that long, or "
        "set `max_tokens`"
    )


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_LIMITS = AnswerLimits()
#: A larger count of tokens is no count.
_MOST_TOKENS = 10**9
#: What taking an answer apart raises where it has another form than the protocol's, or is nested beyond the stack.
FORM_ERRORS = (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)

_Piece = TypeVar("_Piece", ChatMessage, ToolSpec)


class WireError(ValueError):
    """What came is not an answer of the protocol, or it is the provider's own error in the body.

    Attributes:
        provider_error: `{"error": ...}` as JSON where the text is the provider's, sent with a status of success.
    """

    provider_error = b""


class AnswerFailedError(WireError):
    """The provider failed while it answered; another attempt may succeed (S-LLM-7, S-LLM-8)."""


class EncodedPieces:
    """Encoded messages and tool specs by identity, bounded in bytes; the oldest are forgotten first.

    The values are immutable and held here, so that an id cannot come to mean another object.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._pieces: dict[tuple[int, Hashable], tuple[object, bytes]] = {}
        self._lock = new_lock()

    def __len__(self) -> int:
        return len(self._pieces)

    def get(self, value: _Piece, encode: Callable[[_Piece], bytes], form: Hashable = None) -> bytes:
        """Return the encoded form of that very object; `form` tells its forms apart where it has several."""
        key = id(value), form
        kept = self._pieces.get(key)
        if kept is not None:
            return kept[1]
        encoded = encode(value)
        with self._lock:
            if key not in self._pieces:
                self._pieces[key] = (value, encoded)
                self._held_bytes += len(encoded)
            while self._held_bytes > self._limit_bytes:
                oldest = next(iter(self._pieces))
                self._held_bytes -= len(self._pieces.pop(oldest)[1])
        return encoded


#: The process's encoded pieces; 4 MiB hold about a thousand messages of a long tool loop.
_pieces = EncodedPieces(4 * 1024 * 1024)

#: A first turn is a system and a user message; most conversations end there and are not worth keeping.
_FIRST_TURN = 2


def encode_request(
    prefix: bytes,
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolSpec],
    *,
    suffix: bytes = b"",
    origin: str = "",
) -> bytes:
    """Return the request's body.

    Args:
        prefix: Members that are the same in every request, as `"model":"m","temperature":0`.
        messages: The conversation.
        tools: What the model may ask for; when empty the body carries no tool field (S-CONV-24).
        suffix: Members of this kind of request, as `"stream":true`.
        origin: Endpoint and model that it goes to; they get back what they sent with their messages (S-LLM-9).
    """
    forms = _forms(messages, origin)
    if len(messages) > _FIRST_TURN:
        encoded = [
            _pieces.get(message, partial(_message, form), form) for message, form in zip(messages, forms, strict=True)
        ]
        sent = b"[%b]" % b",".join(encoded)
    else:
        sent = json_bytes([_members(*form, message) for message, form in zip(messages, forms, strict=True)])
    body = [b"{", prefix, b',"messages":', sent]
    if tools:
        body += [b',"tools":[', b",".join([_pieces.get(tool, _tool) for tool in tools]), b"]"]
    if suffix:
        body += [b",", suffix]
    body.append(b"}")
    return b"".join(body)


def json_bytes(value: object) -> bytes:
    """Return compact JSON as UTF-8, which has no halves of surrogate pairs: they go out as U+FFFD (S-SEC-56)."""
    text = _encode(value)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return whole_text(text).encode()


def _forms(messages: Sequence[ChatMessage], origin: str) -> list[tuple[tuple[str, ...], bool]]:
    """Return how each message is sent: with which ids of tool calls, and whether with its provider's members.

    Each call of the conversation has an id of its own, and each result that of its call (S-LLM-10). Ids that are replaced
    have nine letters and digits, which all providers accept.
    """
    forms: list[tuple[tuple[str, ...], bool]] = []
    used: set[str] = set()
    #: the ids sent for calls without a result, by the model's own id
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


def _message(form: tuple[tuple[str, ...], bool], message: ChatMessage) -> bytes:
    return json_bytes(_members(*form, message))


def _members(ids: tuple[str, ...], has_fields: bool, message: ChatMessage) -> dict[str, object]:  # noqa: FBT001  private
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
        # The protocol knows a name on every role but tool; strict servers refuse it there.
        data["name"] = message.name
    return data


def _call_data(call: ToolCall, sent_id: str, fields: Mapping[str, Any]) -> dict[str, object]:
    function: object = fields.get("function")
    inner = _beside(cast("Mapping[str, object]", function), _OF_FUNCTION) if isinstance(function, dict) else {}
    members = {"name": call.name, "arguments": _arguments(call), **inner}
    return {"id": sent_id, "type": "function", "function": members, **_beside(fields, _OF_CALL)}


#: Members of an assistant message that this module reads, and those that endpoints send but do not take back.
_OF_MESSAGE = frozenset({
    "role", "content", "name", "refusal", "tool_calls", "tool_call_id", "function_call", "annotations", "audio", "images",
    "executed_tools",
})  # fmt: skip
_OF_CALL = frozenset({"id", "type", "index", "function"})
_OF_FUNCTION = frozenset({"name", "arguments", "index"})


def _beside(data: Mapping[str, object], known: frozenset[str]) -> dict[str, object]:
    return {name: value for name, value in data.items() if name not in known and value is not None}


def members_of_message(message: Mapping[str, object], *, has_calls: bool) -> dict[str, object]:
    """Return the members that only the provider knows; those with reasoning only beside tool calls (S-LLM-9)."""
    found = _beside(message, _OF_MESSAGE)
    return found if has_calls else {n: v for n, v in found.items() if not n.startswith(("reasoning", "thinking"))}


def members_of_call(entry: Mapping[str, Any]) -> dict[str, object]:
    """Return the members of a tool call that only the provider knows, those of its function in a member of that name."""
    inner = _beside(entry.get("function") or {}, _OF_FUNCTION)
    return {**_beside(entry, _OF_CALL), **({"function": inner} if inner else {})}


def provider_fields(
    origin: str, message: Mapping[str, object], calls: Sequence[Mapping[str, object]]
) -> ProviderFields | None:
    """Return the members that only the provider knows; None where there are none, or they are nested beyond the stack."""
    if not message and not any(calls):
        return None
    try:
        texts = [json_bytes(each).decode() for each in (message, *(calls if any(calls) else ()))]
    except (RecursionError, ValueError):  # the latter: numbers of more digits than Python writes
        return None
    return ProviderFields(origin=origin, message=texts[0], tool_calls=tuple(texts[1:]))


def _object_in(text: str) -> dict[str, object]:
    """Return the object in JSON text; an empty one where a record or a user's model has something else there."""
    try:
        data: object = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, object]", data) if isinstance(data, dict) else {}


def _arguments(call: ToolCall) -> str:
    """Return the model's arguments, fit to be sent back: servers refuse a history where they are no JSON object."""
    try:
        if isinstance(json.loads(call.arguments), dict):
            return call.arguments
    except (ValueError, RecursionError):  # the latter: nested beyond the stack
        pass
    return _encode({"unparsable": call.arguments}) if call.arguments.strip() else "{}"


def _tool(tool: ToolSpec) -> bytes:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return json_bytes({"type": "function", "function": function})


def parse_json(raw: bytes | str, what: str = "it") -> object:
    """Return the value of JSON text.

    Args:
        raw: The text.
        what: How an error calls it.

    Raises:
        WireError: it is not JSON, or nested deeper than this process's stack.
    """
    try:
        return cast("object", json.loads(raw))
    except RecursionError:
        raise WireError(f"{what} is JSON that is nested too deeply") from None
    except ValueError:
        text = raw if isinstance(raw, str) else raw[: 8 * _SHOWN].decode(errors="replace")
        raise WireError(f"{what} is not JSON: {format_foreign(text, whole=len(raw))}") from None


def decode_completion(raw: bytes, limits: AnswerLimits = _LIMITS, origin: str = "") -> ChatResponse:
    """Return the answer in a response's body, which came from that endpoint and model.

    Raises:
        WireError: it is not a chat completion; the text says what came.
        AnswerFailedError: the provider failed while it answered, or sent nothing.
    """
    if not raw.strip():
        raise AnswerFailedError("the answer has no body")
    return completion_of(parse_json(raw), limits, origin)


def completion_of(data: object, limits: AnswerLimits = _LIMITS, origin: str = "") -> ChatResponse:
    """Return the answer in a response's decoded JSON; see `decode_completion`."""
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
        calls = tuple(_call(entry, index) for index, entry in enumerate(entries))
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


#: How providers name an end that is their failure, and not the model's decision; some of Gemini's have more before it.
_FAILURES = frozenset({
    "error", "network_error", "server_error", "internal_error", "insufficient_system_resource", "timeout", "abort",
    "aborted", "malformed_function_call", "malformed_response", "malformed_model_output", "malformed_tool_use",
    "unexpected_tool_call",
})  # fmt: skip


def check_end(finish_reason: str | None) -> None:
    """Refuse an answer that ends with a failure of its provider.

    Raises:
        AnswerFailedError: it does.
    """
    if _is_failure(finish_reason):
        raise AnswerFailedError(f"the answer ended with finish_reason '{finish_reason}'")


def _is_failure(finish_reason: object) -> bool:
    return isinstance(finish_reason, str) and finish_reason.rpartition(":")[2].strip().lower() in _FAILURES


def has_failed(body: Mapping[str, Any]) -> bool:
    """Whether an answer is an error, or holds one in its first choice, or beside its choices with a status (S-LLM-20)."""
    found = _error_in(body)
    is_beside = found is not None and found is body.get("error") and "choices" in body
    return found is not None and (not is_beside or read_error_body(found).status is not None)


def _error_in(body: Mapping[str, Any]) -> object:
    """Return the provider's error in an answer, or in its first choice; None where there is none."""
    if body.get("error"):
        return cast("object", body["error"])
    if body.get("choices") is not None:
        return _first_choice(body).get("error") or None
    # Some servers send the members of the error without an object around them.
    return body if read_error_body(body).status is not None else None


def _first_choice(body: Mapping[str, Any]) -> Mapping[str, object]:
    choices = body.get("choices")
    is_there = isinstance(choices, list) and choices and isinstance(choices[0], dict)
    return cast("Sequence[Mapping[str, object]]", choices)[0] if is_there else {}


def not_a_completion(data: object, what: str = "it") -> WireError:
    """Return the error for what is no answer: the provider's own where it holds one, also in a list.

    Args:
        data: What came.
        what: How an error calls it.
    """
    entries = cast("Sequence[object]", data) if isinstance(data, list) else [data]
    body = cast("Mapping[str, Any]", entries[0]) if entries and isinstance(entries[0], dict) else None
    found = None if body is None else _error_in(body)
    if body is not None and found:
        told = read_error_body(found)
        has_ended = told.status is None and _is_failure(_first_choice(body).get("finish_reason"))
        kind = AnswerFailedError if has_ended else WireError
        error = kind(format_foreign(told.message) or shown_data(found))
        try:
            error.provider_error = json_bytes({"error": found})
        except (RecursionError, ValueError):  # as in `shown_data`
            error.provider_error = b"{}"
        return error
    if not isinstance(data, dict):
        return WireError(f"{what} is not a JSON object: {shown_data(data)}")
    return WireError(f"it has no choices with a message: {shown_data(data)}")


#: Characters of an answer that an error shows.
_SHOWN = 200


def shown_data(data: object) -> str:
    """Return JSON data, fit for an error message."""
    try:
        return format_foreign(data if isinstance(data, str) else _encode(data))
    except (RecursionError, ValueError):  # numbers of more digits than Python writes
        return "nested too deeply to be shown"


def format_foreign(text: str, limit: int = _SHOWN, *, whole: int | None = None) -> str:
    """Return a text of unknown origin, fit for an error message: one line, cut.

    Args:
        text: Whatever came, or its beginning.
        limit: Characters that are shown.
        whole: Length of all that came, where `text` is its beginning.
    """
    line = " ".join(text[: 8 * limit].split())
    length = max(len(text), whole or 0)
    if len(line) <= limit and length <= 8 * limit:
        return one_line(line, None)
    return f"{one_line(line[:limit], None)}... [{length} characters in all]"


def text_in(message: Mapping[str, Any]) -> str | None:
    """Return the text; some servers send it in parts, and a refusal beside an empty text."""
    content: object = message.get("content")
    if not content and message.get("refusal"):
        return str(message["refusal"])
    if content is None or isinstance(content, str):
        return content
    parts = cast("Sequence[Mapping[str, Any]]", content)
    return "".join(str(part.get("text") or "") for part in parts if part.get("type") not in _THOUGHTS)


#: Types of the parts of a message, and of `reasoning_details`, that hold reasoning.
_THOUGHTS = frozenset(
    {"thinking", "redacted_thinking", "reasoning", "reasoning.text", "reasoning.summary", "reasoning.encrypted"}
)


def reasoning_in(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning beside a message's text; endpoints name it differently, and some send it twice (S-LLM-3)."""
    for name in ("reasoning_content", "reasoning"):
        said: object = message.get(name)
        if isinstance(said, str) and said:
            return said
    thoughts = [_thought(part) for part in message.get("reasoning_details") or ()]
    content: object = message.get("content")
    if not isinstance(content, str):
        thoughts += [_thought(part) for part in cast("Sequence[object]", content or ())]
    return "".join(thoughts) or None


def _thought(part: object) -> str:
    """Return the reasoning in one part; "" where it is another part, or encrypted."""
    if not isinstance(part, dict) or part.get("type") not in _THOUGHTS:
        return ""
    data = cast("Mapping[str, object]", part)
    for name in ("thinking", "reasoning", "summary", "text"):
        said = data.get(name)
        if isinstance(said, str) and said:
            return said
        if isinstance(said, list):  # parts in turn, each with a text
            inner = [cast("Mapping[str, object]", each).get("text") for each in said if isinstance(each, dict)]
            return "".join(each for each in inner if isinstance(each, str))
    return ""


#: The protocol's own words are shorter.
_LONGEST_REASON = 64


def finish_reason_in(choice: Mapping[str, Any]) -> str | None:
    """Return why the model stopped; None where the endpoint does not say it in a word."""
    reason: object = choice.get("finish_reason")
    return one_line(reason[:_LONGEST_REASON], None) if isinstance(reason, str) and reason else None


def _call(entry: Mapping[str, Any], index: int) -> ToolCall:
    function = entry["function"]
    arguments = text_of_arguments(function.get("arguments"))
    # A few servers leave the id out; a result must name its call all the same.
    return ToolCall(str(entry.get("id") or f"call_{index}"), str(function["name"]), arguments)


def text_of_arguments(arguments: object) -> str:
    """Return arguments as text; a few servers send them as an object."""
    if isinstance(arguments, str):
        return arguments
    return "" if arguments is None else _encode(arguments)


def usage_in(data: object) -> TokenUsage | None:
    """Return the tokens that an answer says it cost; None where it does not say."""
    if not isinstance(data, dict):
        return None
    counts = cast("Mapping[str, object]", data)
    details = counts.get("completion_tokens_details")
    thought = cast("Mapping[str, object]", details).get("reasoning_tokens") if isinstance(details, dict) else None
    return TokenUsage(_count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens")), _count(thought))


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value <= _MOST_TOKENS else -1
