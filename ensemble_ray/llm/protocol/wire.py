"""The chat-completions protocol as bytes. Package: llm; pure: values in, bytes out, and back.

A conversation grows by two messages per turn of a tool loop and is sent whole each time, so the encoded form of a
message is kept: an old message is never encoded twice. What comes back is checked for its form only; the arguments of
tool calls stay the model's raw text. Must never happen: a body that is no UTF-8; another error than `WireError` because
of what an answer holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from ensemble_ray.llm.protocol.answer_limits import AnswerLimits, TooMuchError
from ensemble_ray.process.forks import new_lock
from ensemble_ray.text.foreign_text import one_line, whole_text
from ensemble_ray.values.messages import ChatMessage, ChatResponse, TokenUsage, ToolCall, ToolSpec

__all__ = [
    "FORM_ERRORS",
    "EncodedPieces",
    "WireError",
    "completion_of",
    "decode_completion",
    "encode_request",
    "finish_reason_in",
    "format_foreign",
    "json_bytes",
    "not_a_completion",
    "parse_json",
    "shown_data",
    "text_in",
    "text_of_arguments",
    "usage_in",
]

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
        told_by_provider: The text is the provider's, sent with a status of success.
    """

    is_from_provider = False


class EncodedPieces:
    """Encoded messages and tool specs by identity, bounded in bytes; the oldest are forgotten first.

    The values are immutable and held here, so that an id cannot come to mean another object.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._pieces: dict[int, tuple[object, bytes]] = {}
        self._lock = new_lock()

    def __len__(self) -> int:
        return len(self._pieces)

    def get(self, value: _Piece, encode: Callable[[_Piece], bytes]) -> bytes:
        """Return the encoded form of that very object."""
        kept = self._pieces.get(id(value))
        if kept is not None:
            return kept[1]
        encoded = encode(value)
        with self._lock:
            if id(value) not in self._pieces:
                self._pieces[id(value)] = (value, encoded)
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
    prefix: bytes, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], *, suffix: bytes = b""
) -> bytes:
    """Return the request's body.

    Args:
        prefix: Members that are the same in every request, as `"model":"m","temperature":0`.
        messages: The conversation.
        tools: What the model may ask for; when empty the body carries no tool field (S-CONV-24).
        suffix: Members of this kind of request, as `"stream":true`.
    """
    if len(messages) > _FIRST_TURN:
        sent = b"[%b]" % b",".join([_pieces.get(message, _message) for message in messages])
    else:
        sent = json_bytes([_members(message) for message in messages])
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


def _message(message: ChatMessage) -> bytes:
    return json_bytes(_members(message))


def _members(message: ChatMessage) -> dict[str, object]:
    data: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        data["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    elif message.content is None:
        data["content"] = ""
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if message.name is not None and message.role != "tool":
        # The protocol knows a name on every role but tool; strict servers refuse it there.
        data["name"] = message.name
    return data


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


def decode_completion(raw: bytes, limits: AnswerLimits = _LIMITS) -> ChatResponse:
    """Return the answer in a response's body.

    Raises:
        WireError: it is not a chat completion; the text says what came.
    """
    return completion_of(parse_json(raw), limits)


def completion_of(data: object, limits: AnswerLimits = _LIMITS) -> ChatResponse:
    """Return the answer in a response's decoded JSON.

    Raises:
        WireError: it is not a chat completion; the text says what came.
    """
    if not isinstance(data, dict):
        raise WireError(f"it is not a JSON object: {shown_data(data)}")
    body = cast("dict[str, Any]", data)
    try:
        choice = body["choices"][0]
        message = choice["message"]
        text = text_in(message)
        entries = message.get("tool_calls") or ()
        limits.check_tool_calls(len(entries))
        calls = tuple(_call(entry, index) for index, entry in enumerate(entries))
        return ChatResponse(text, calls, usage_in(body.get("usage")), finish_reason_in(choice))
    except TooMuchError as error:
        raise WireError(str(error)) from None
    except FORM_ERRORS:
        raise not_a_completion(body) from None


def not_a_completion(body: Mapping[str, Any]) -> WireError:
    """Return the error for an object that is no answer: the provider's own where it holds one."""
    found = body.get("error")
    if found:
        words = cast("Mapping[str, object]", found).get("message") if isinstance(found, dict) else found
        error = WireError(format_foreign(words) if isinstance(words, str) else shown_data(words))
        error.is_from_provider = True
        return error
    return WireError(f"it has no choices with a message: {shown_data(body)}")


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
    if content is None:
        refusal: object = message.get("refusal")
        return None if refusal is None else str(refusal)
    if isinstance(content, str):
        return content
    parts = cast("Sequence[Mapping[str, Any]]", content)
    return "".join(str(part.get("text", "")) for part in parts)


#: The protocol's own words are shorter.
_LONGEST_REASON = 40


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
    return TokenUsage(_count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens")))


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value <= _MOST_TOKENS else -1
