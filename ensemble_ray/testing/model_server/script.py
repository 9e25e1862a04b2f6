"""Scripted answers of a `ModelServer`, and their encoding as bytes of the protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Literal, cast

from ensemble_ray.values.messages import ChatResponse, TokenUsage, ToolCall

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
    def messages(self) -> Sequence[Mapping[str, object]]:
        """The conversation as sent."""
        return cast("list[Mapping[str, object]]", self.body.get("messages", []))

    @property
    def tools(self) -> Sequence[str]:
        """Names of the tools offered."""
        entries = cast("list[Mapping[str, Mapping[str, str]]]", self.body.get("tools", []))
        return tuple(entry["function"]["name"] for entry in entries)

    @property
    def text(self) -> str:
        """Text of the last message."""
        return str(self.messages[-1].get("content") or "") if self.messages else ""

    @property
    def stream(self) -> bool:
        """Whether the client asked for a stream."""
        # A fixed answer needs no parsing.
        return b'"stream"' in self.raw and self.body.get("stream") is True

    @property
    def response_format(self) -> Mapping[str, object] | None:
        """The requested response format, as sent, or None."""
        found = self.body.get("response_format")
        return cast("Mapping[str, object]", found) if isinstance(found, dict) else None

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for a usage chunk at the end of the stream."""
        options = cast("Mapping[str, object]", self.body.get("stream_options") or {})
        return options.get("include_usage") is True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
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
    reasoning: str | None = None  # sent as `reasoning_content` before the text
    #: provider-specific; streamed in one piece before the text
    members: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def shown_finish_reason(self) -> str:
        """The finish reason that clients receive."""
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RawAnswer:
    """An answer with bytes chosen by the script, for cases that no other answer can express."""

    body: bytes | Sequence[bytes]  # a sequence is sent piece by piece
    content_type: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


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


def _usage(usage: TokenUsage) -> Mapping[str, object]:
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
        body["usage"] = _usage(reply.usage)
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
        yield event([], usage=_usage(reply.usage))
    yield b"data: [DONE]\n\n"


def _message_deltas(reply: Reply) -> Iterator[Mapping[str, object]]:
    """Yield the parts in the order of providers."""
    words = re.compile(r"\S+\s*|\s+")
    for fragment in words.findall(reply.reasoning or ""):
        yield {"reasoning_content": fragment}
    if reply.members:
        yield reply.members
    for fragment in words.findall(reply.text or "") if reply.fragments is None else reply.fragments:
        yield {"content": fragment}


def error_bytes(message: str, *, kind: str, code: str | None = None) -> bytes:
    """Return an error body."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
