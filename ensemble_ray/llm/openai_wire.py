"""The chat-completions protocol as bytes. Room: llm; pure: values in, bytes out, and back.

A conversation grows by two messages per turn of a tool loop and is sent whole each time, so the encoded form of a
message is kept: an old message is never encoded twice. What comes back is checked for its form only; the arguments of
tool calls stay the model's raw text.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from ensemble_ray.messages import ChatMessage, ChatResponse, TokenUsage, ToolCall, ToolSpec

__all__ = ["EncodedPieces", "SseParser", "StreamAssembler", "WireError", "decode_completion", "encode_request"]

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_ascii = json.JSONEncoder(separators=(",", ":")).encode

_Piece = TypeVar("_Piece", ChatMessage, ToolSpec)


class WireError(ValueError):
    """What came is not an answer of the protocol, or it is the provider's own error in the body.

    Attributes:
        told_by_provider: The text is the provider's, sent with a status of success.
    """

    told_by_provider = False


class EncodedPieces:
    """Encoded messages and tool specs by identity, bounded in bytes; the oldest are forgotten first.

    The values are immutable and held here, so that an id cannot come to mean another object.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._pieces: dict[int, tuple[object, bytes]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pieces)

    def get(self, value: _Piece, encode: Callable[[_Piece], bytes]) -> bytes:
        """The encoded form of that very object."""
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
    """The request's body.

    Args:
        prefix: Members that are the same in every request, as `"model":"m","temperature":0`.
        messages: The conversation.
        tools: What the model may ask for; when empty the body carries no tool field (S-CONV-24).
        suffix: Members of this kind of request, as `"stream":true`.
    """
    if len(messages) > _FIRST_TURN:
        parts = [_pieces.get(message, _message) for message in messages]
    else:
        parts = [_message(message) for message in messages]
    body = [b"{", prefix, b',"messages":[', b",".join(parts), b"]"]
    if tools:
        body += [b',"tools":[', b",".join([_pieces.get(tool, _tool) for tool in tools]), b"]"]
    if suffix:
        body += [b",", suffix]
    body.append(b"}")
    return b"".join(body)


def json_bytes(value: object) -> bytes:
    """Compact JSON; text with lone surrogates, which UTF-8 cannot hold, goes out escaped."""
    try:
        return _encode(value).encode()
    except UnicodeEncodeError:
        return _encode_ascii(value).encode()


def _message(message: ChatMessage) -> bytes:
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
    return json_bytes(data)


def _arguments(call: ToolCall) -> str:
    """The model's arguments, fit to be sent back: servers refuse a history whose arguments are no JSON object."""
    try:
        if isinstance(json.loads(call.arguments), dict):
            return call.arguments
    except ValueError:
        pass
    return _encode({"unparsable": call.arguments}) if call.arguments.strip() else "{}"


def _tool(tool: ToolSpec) -> bytes:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return json_bytes({"type": "function", "function": function})


def decode_completion(raw: bytes) -> ChatResponse:
    """The answer in a response's body.

    Raises:
        WireError: it is not a chat completion; the text says what came.
    """
    try:
        data: object = json.loads(raw)
    except ValueError:
        msg = f"it is not JSON: {shown(raw.decode(errors='replace'))}"
        raise WireError(msg) from None
    return completion_of(data)


def completion_of(data: object) -> ChatResponse:
    """The answer in a response's decoded JSON.

    Raises:
        WireError: it is not a chat completion; the text says what came.
    """
    if not isinstance(data, dict):
        msg = f"it is not a JSON object: {shown(_encode(data) if not isinstance(data, str) else data)}"
        raise WireError(msg)
    body = cast("dict[str, Any]", data)
    try:
        message = body["choices"][0]["message"]
        text = _text(message)
        calls = tuple(_call(entry, index) for index, entry in enumerate(message.get("tool_calls") or ()))
        return ChatResponse(text, calls, _usage(body.get("usage")))
    except (KeyError, IndexError, TypeError, AttributeError):
        raise _not_a_completion(body) from None


def _not_a_completion(body: Mapping[str, Any]) -> WireError:
    found = body.get("error")
    if found:
        words = cast("Mapping[str, object]", found).get("message") if isinstance(found, dict) else found
        error = WireError(shown(str(words)))
        error.told_by_provider = True
        return error
    return WireError(f"it has no choices with a message: {shown(_encode(body))}")


def shown(text: str, limit: int = 200) -> str:
    """A text of unknown origin, fit for an error message: one line, cut."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."


def _text(message: Mapping[str, Any]) -> str | None:
    """The text; some servers send it in parts, and a refusal beside an empty text."""
    content: object = message.get("content")
    if content is None:
        refusal: object = message.get("refusal")
        return None if refusal is None else str(refusal)
    if isinstance(content, str):
        return content
    parts = cast("Sequence[Mapping[str, Any]]", content)
    return "".join(str(part.get("text", "")) for part in parts)


def _call(entry: Mapping[str, Any], index: int) -> ToolCall:
    function = entry["function"]
    arguments: object = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else _encode(arguments)
    # A few servers leave the id out; a result must name its call all the same.
    return ToolCall(str(entry.get("id") or f"call_{index}"), str(function["name"]), arguments)


def _usage(data: object) -> TokenUsage | None:
    if not isinstance(data, dict):
        return None
    counts = cast("Mapping[str, object]", data)
    return TokenUsage(_count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens")))


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else -1


class SseParser:
    """Server-sent events from bytes that come cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The data of every event that is complete now."""
        lines = (self._rest + received).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            stripped = line.removesuffix(b"\r")
            if stripped.startswith(b"data:"):
                self._data.append(stripped[5:].removeprefix(b" "))
            elif not stripped and self._data:
                yield self._take()

    def finish(self) -> Iterator[bytes]:
        """The last event, where the server did not close it with an empty line."""
        yield from self.feed(b"\n\n")

    def _take(self) -> bytes:
        data = b"\n".join(self._data)
        self._data.clear()
        return data


class StreamAssembler:
    """Chunks of a streamed answer become fragments of text and, at the end, the whole."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._calls: dict[int, list[str]] = {}
        self._usage: TokenUsage | None = None
        self._spoke = False

    def feed_data(self, data: bytes) -> str:
        """The text fragment in one event's data; empty when it carries none.

        Raises:
            WireError: it is no chunk of the protocol.
        """
        try:
            chunk: object = json.loads(data)
        except ValueError:
            msg = f"a piece of the stream is not JSON: {shown(data.decode(errors='replace'))}"
            raise WireError(msg) from None
        return self.feed(chunk)

    def feed(self, chunk: object) -> str:
        """The text fragment in one decoded chunk; empty when it carries none.

        Raises:
            WireError: it is no chunk of the protocol.
        """
        if not isinstance(chunk, dict):
            msg = f"a piece of the stream is not a JSON object: {shown(_encode(chunk))}"
            raise WireError(msg)
        body = cast("dict[str, Any]", chunk)
        if body.get("error") or ("choices" not in body and "usage" not in body):
            raise _not_a_completion(body)
        self._usage = _usage(body.get("usage")) or self._usage
        choices = body.get("choices")
        if not choices:
            return ""
        self._spoke = True
        try:
            delta = choices[0].get("delta") or {}
            for position, entry in enumerate(delta.get("tool_calls") or ()):
                self._add_call(entry, position)
            fragment = _text(delta) or ""
        except (KeyError, TypeError, AttributeError, ValueError):
            raise _not_a_completion(body) from None
        if fragment:
            self._text.append(fragment)
        return fragment

    def _add_call(self, entry: Mapping[str, Any], position: int) -> None:
        """One piece of a tool call: id and name come first, arguments in pieces after."""
        function = entry.get("function") or {}
        index = entry.get("index")
        if index is None:
            # Servers without an index send whole calls, or pieces of the last one.
            starts = bool(function.get("name"))
            index = len(self._calls) if starts else max(len(self._calls) - 1, position)
        parts = self._calls.setdefault(int(index), ["", "", ""])
        parts[0] = parts[0] or str(entry.get("id") or "")
        parts[1] = parts[1] or str(function.get("name") or "")
        arguments: object = function.get("arguments") or ""
        parts[2] += arguments if isinstance(arguments, str) else _encode(arguments)

    def finish(self) -> ChatResponse:
        """The whole answer.

        Raises:
            WireError: nothing came that belongs to an answer.
        """
        if not self._spoke:
            msg = "the stream ended without a single piece of an answer"
            raise WireError(msg)
        calls = tuple(
            ToolCall(parts[0] or f"call_{index}", parts[1], parts[2]) for index, parts in sorted(self._calls.items())
        )
        text = "".join(self._text)
        return ChatResponse(text if text or not calls else None, calls, self._usage)
