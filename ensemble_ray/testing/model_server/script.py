"""Scripted answers of a `ModelServer`, and their encoding as bytes of the protocol."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Literal, cast

import msgspec
from msgspec import Struct

from ensemble_ray.values.attachments import Attachment, Audio, File, Image
from ensemble_ray.values.messages import ChatResponse, TokenUsage, ToolCall

_Part = Mapping[str, object]
_TEXT_TYPES = frozenset({"text", "input_text"})
DEFAULT_USAGE = TokenUsage(input_tokens=10, output_tokens=5)


class ServedRequest:
    """One request as received by the server; the body is parsed on first use."""

    def __init__(
        self, path: str, headers: Mapping[str, str], raw: bytes, *, number: int = 0, arrived_at: float = 0.0
    ) -> None:
        self.path = path  # with its query
        self._headers = headers
        self.raw = raw
        self.number = number  # position in order of arrival, from 0
        self.arrived_at = arrived_at  # when its last byte was read, Unix time, s
        self.answered_at: float | None = None  # when the whole answer was written, Unix time, s; None for faults

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """Return the headers by lower-case name."""
        return {name.lower(): value for name, value in self._headers.items()}

    @property
    def key(self) -> str:
        """Return the `Idempotency-Key` header: the same for every repetition of one model call; empty without one."""
        return self.headers.get("idempotency-key", "")

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the body; requests with the same digest are identical."""
        return sha256(self.raw).hexdigest()

    @cached_property
    def body(self) -> Mapping[str, object]:
        """The body's JSON object."""
        return cast("dict[str, object]", json.loads(self.raw))

    @property
    def model(self) -> str:
        """The model asked for."""
        return str(self.body.get("model", ""))

    @property
    def is_response(self) -> bool:
        """Whether the client uses the Responses API; chat completions otherwise."""
        return self.path.partition("?")[0].endswith("/responses")

    @property
    def messages(self) -> Sequence[Mapping[str, object]]:
        """The conversation as sent; input items of the Responses API in the form of chat completions."""
        if self.is_response:
            return _messages_of(cast("list[Mapping[str, object]]", self.body.get("input", [])))
        return cast("list[Mapping[str, object]]", self.body.get("messages", []))

    @property
    def tools(self) -> Sequence[str]:
        """Names of the tools offered."""
        entries = cast("list[Mapping[str, object]]", self.body.get("tools", []))
        return tuple(str(cast("Mapping[str, str]", entry.get("function", entry))["name"]) for entry in entries)

    @property
    def text(self) -> str:
        """Text of the last message, without its attachments."""
        content = self.messages[-1].get("content") if self.messages else None
        if not isinstance(content, list):
            return str(content or "")
        return "\n".join(
            str(part.get("text")) for part in cast("list[_Part]", content) if part.get("type") in _TEXT_TYPES
        )

    @cached_property
    def attachments(self) -> Sequence[Attachment]:
        """Attachments of all messages, in order, with their contents. The protocol has names only of files."""
        contents = [each.get("content") for each in self.messages]
        parts = [part for each in contents if isinstance(each, list) for part in cast("list[_Part]", each)]
        return [found for part in parts if (found := _attachment_of(part)) is not None]

    @property
    def stream(self) -> bool:
        """Whether the client asked for a stream."""
        # A fixed answer needs no parsing.
        return b'"stream"' in self.raw and self.body.get("stream") is True

    @property
    def response_format(self) -> Mapping[str, object] | None:
        """The requested response format, as sent, or None. That of the Responses API in the form of chat completions."""
        found = self.body.get("response_format")
        text = self.body.get("text")
        if self.is_response and isinstance(text, dict):
            form = cast("Mapping[str, object]", cast("Mapping[str, object]", text).get("format") or {})
            schema = {name: value for name, value in form.items() if name != "type"}
            found = {"type": form["type"], **({str(form["type"]): schema} if schema else {})} if form else None
        return cast("Mapping[str, object]", found) if isinstance(found, dict) else None

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for a usage chunk at the end of the stream."""
        options = cast("Mapping[str, object]", self.body.get("stream_options") or {})
        return options.get("include_usage") is True


def _messages_of(items: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Reasoning is in no message."""
    messages: list[Mapping[str, object]] = []
    answer: dict[str, object] | None = None  # the last message, if calls belong to it
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            answer = None
        elif kind == "function_call":
            if answer is None:
                answer = {"role": "assistant", "content": None}
                messages.append(answer)
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            answer["tool_calls"] = [*cast("list[object]", answer.get("tool_calls", [])), call]
        elif kind == "message":
            content = item["content"]
            if isinstance(content, list) and item["role"] == "assistant":
                content = "".join(str(part.get("text") or "") for part in cast("list[Mapping[str, object]]", content))
            message = {"role": item["role"], "content": content}
            messages.append(message)
            answer = message if item["role"] == "assistant" else None
    return messages


def _attachment_of(part: _Part) -> Attachment | None:
    """Return the attachment of a content part; an address stays unread. None: the part is a text."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return Image(url)
        case {"type": "input_audio", "input_audio": {"data": str(data), "format": str(form)}}:
            return Audio(b64decode(data), name=f"audio.{form}")
        case {"type": "input_image", "image_url": str(url)}:
            return Image(url)
        case {"type": "file", "file": {"file_data": str(url), "filename": str(name)}} | {
            "type": "input_file",
            "file_data": str(url),
            "filename": str(name),
        }:
            return File(url, name=name)
        case _:
            return None


class Reply(Struct, frozen=True, kw_only=True):
    """An answer in detail."""

    text: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    finish_reason: str | None = None  # None: `tool_calls` with tool calls, else `stop`
    usage: TokenUsage | None = DEFAULT_USAGE  # None: the answer contains no usage
    fragments: Sequence[str] | None = None  # of the streamed text; None: words
    latency_s: float = 0.0  # added to the server's latency
    fragment_delay_s: float = 0.0  # pause between streamed pieces
    cut_after: int | None = None  # streamed: cut the connection after that many pieces
    is_ended: bool = True  # streamed: whether the finish reason and `[DONE]` are sent
    reasoning: str | None = None  # before the text: `reasoning_content`, or an item of the Responses API
    #: provider-specific; streamed in one piece before the text
    members: Mapping[str, object] = msgspec.field(default_factory=dict[str, object])

    @property
    def shown_finish_reason(self) -> str:
        """The finish reason that clients receive."""
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")


class Fault(Struct, frozen=True, kw_only=True):
    """An answer that fails.

    `status` answers with that HTTP status and an error object (status 200: an error body in an answer that looks
    successful; streamed: as the only event), `drop` cuts the connection, `garbage` answers 200 with a body that is not
    JSON, `silence` never answers.
    """

    kind: Literal["status", "drop", "garbage", "silence"] = "status"
    status: int = 500
    message: str = "scripted fault"
    code: str | None = None
    retry_after_s: float | None = None


class RawAnswer(Struct, frozen=True, kw_only=True):
    """An answer with bytes chosen by the script, for cases that no other answer can express."""

    body: bytes | Sequence[bytes]  # a sequence is sent piece by piece
    content_type: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])


Answer = str | ToolCall | Sequence[ToolCall] | ChatResponse | Reply | RawAnswer | Fault


def reply_of(answer: Answer) -> Reply | RawAnswer | Fault:
    """Return the detailed form."""
    if isinstance(answer, Reply | RawAnswer | Fault):
        return answer
    if isinstance(answer, str):
        return Reply(text=answer)
    if isinstance(answer, ToolCall):
        return Reply(tool_calls=(answer,))
    if isinstance(answer, ChatResponse):
        return Reply(
            text=answer.text,
            tool_calls=tuple(answer.tool_calls),
            usage=answer.usage,
            finish_reason=answer.finish_reason,
            reasoning=answer.reasoning,
        )
    return Reply(tool_calls=tuple(answer))


def usage_data(usage: TokenUsage) -> Mapping[str, object]:
    """Return the counts as chat completions name them."""
    details = {"completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}}
    cache = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens}
    known = {name: count for name, count in cache.items() if count >= 0}
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        **(details if usage.reasoning_tokens >= 0 else {}),
        **({"prompt_tokens_details": known} if known else {}),
    }


def completion_bytes(reply: Reply, *, model: str, number: int) -> bytes:
    """Return an answer in one piece."""
    reasoning = {} if reply.reasoning is None else {"reasoning_content": reply.reasoning}
    message: dict[str, object] = {"role": "assistant", "content": reply.text, **reasoning, **reply.members}
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    body: dict[str, object] = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reply.shown_finish_reason}],
    }
    if reply.usage is not None:
        body["usage"] = usage_data(reply.usage)
    return json.dumps(body).encode()


def sse_chunks(reply: Reply, *, model: str, number: int, with_usage: bool) -> Iterator[bytes]:
    """Yield the same answer as server-sent events."""

    def event(choices: Sequence[object], **more: object) -> bytes:
        body = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": 0, "model": model}
        return b"data: " + json.dumps({**body, "choices": choices, **more}).encode() + b"\n\n"

    def delta(change: Mapping[str, object], finish: str | None = None) -> bytes:
        return event([{"index": 0, "delta": change, "finish_reason": finish}])

    for change in _message_deltas(reply):
        yield delta(change)
    for index, call in enumerate(reply.tool_calls):
        opening = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        yield delta({"tool_calls": [opening]})
        middle = len(call.arguments) // 2
        for part in (call.arguments[:middle], call.arguments[middle:]):
            yield delta({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    if not reply.is_ended:
        return
    yield delta({}, reply.shown_finish_reason)
    if with_usage and reply.usage is not None:
        yield event([], usage=usage_data(reply.usage))
    yield b"data: [DONE]\n\n"


def _message_deltas(reply: Reply) -> Iterator[Mapping[str, object]]:
    """Yield the parts in the order of providers."""
    for fragment in words_of(reply.reasoning):
        yield {"reasoning_content": fragment}
    if reply.members:
        yield reply.members
    for fragment in words_of(reply.text) if reply.fragments is None else reply.fragments:
        yield {"content": fragment}


def words_of(text: str | None) -> Sequence[str]:
    """Split a text into words with the blanks after them."""
    return re.findall(r"\S+\s*|\s+", text or "")


def error_bytes(message: str, *, kind: str, code: str | None = None) -> bytes:
    """Return an error body."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
