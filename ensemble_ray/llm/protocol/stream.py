"""Streamed answers of the chat-completions protocol. Package: llm; pure: bytes in, fragments and the whole out.

Every step costs time in proportion to what came, however the bytes are cut: a stream of a million pieces is hostile or a
long answer, and nobody can tell before its end. Must never happen: another error than `WireError` or `TooMuchError`
because of what a stream holds; more of it in memory than its limits allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ensemble_ray.llm.protocol.answer_limits import AnswerLimits, TooMuchError
from ensemble_ray.llm.protocol.wire import (
    FORM_ERRORS,
    WireError,
    finish_reason_in,
    has_failed,
    not_a_completion,
    parse_json,
    text_in,
    text_of_arguments,
    usage_in,
)
from ensemble_ray.values.messages import ChatResponse, TokenUsage, ToolCall

__all__ = ["SseParser", "StreamAssembler"]

_LIMITS = AnswerLimits()
#: How errors call a chunk.
_PIECE = "a piece of the stream"
#: What a line costs beside its bytes.
_LINE_BYTES = 64


class SseParser:
    """Server-sent events from bytes that come cut anywhere.

    Args:
        limits: How long an event, and a line without an end, may become.
    """

    def __init__(self, limits: AnswerLimits = _LIMITS) -> None:
        self._limits = limits
        #: the line that has not ended, in pieces
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        #: the lines of the event that has not ended
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._count = 0

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Give the data of every event that is complete now.

        Raises:
            TooMuchError: an event is beyond a limit, or there are too many.
        """
        *ended, rest = received.split(b"\n")
        for line in ended:
            if self._rest:
                line = b"".join((*self._rest, line))  # noqa: PLW2901  the whole of it
                self._rest, self._rest_bytes = [], 0
            yield from self._line(line.removesuffix(b"\r"))
        if rest:
            self._rest.append(rest)
            self._rest_bytes += len(rest) + _LINE_BYTES
            self._limits.check_event(self._rest_bytes)

    def finish(self) -> Iterator[bytes]:
        """Give the last event, where the server did not close it with an empty line."""
        yield from self.feed(b"\n\n")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._data_bytes += len(line) + _LINE_BYTES
            self._limits.check_event(self._data_bytes)
        elif not line and self._data:
            self._count += 1
            self._limits.check_events(self._count)
            data = b"\n".join(self._data)
            self._data, self._data_bytes = [], 0
            yield data


@dataclass(slots=True)
class _Call:
    """A tool call whose pieces are still coming."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list[str])


class StreamAssembler:
    """Chunks of a streamed answer become fragments of text and, at the end, the whole.

    Args:
        limits: How many tool calls one answer may ask for.
    """

    def __init__(self, limits: AnswerLimits = _LIMITS) -> None:
        self._limits = limits
        self._text: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._usage: TokenUsage | None = None
        self._finish_reason: str | None = None
        self._spoke = False

    def feed_data(self, data: bytes) -> str:
        """Return the text fragment in one event's data; empty when it carries none.

        Raises:
            WireError: it is no chunk of the protocol.
            TooMuchError: the answer asks for too many tool calls.
        """
        return self.feed(parse_json(data, _PIECE))

    def feed(self, chunk: object) -> str:
        """Return the text fragment in one decoded chunk; empty when it carries none.

        Raises:
            WireError: it is no chunk of the protocol.
            TooMuchError: the answer asks for too many tool calls.
        """
        if not isinstance(chunk, dict):
            raise not_a_completion(chunk, _PIECE)
        body = cast("dict[str, Any]", chunk)
        if body.get("error") or has_failed(body) or ("choices" not in body and "usage" not in body):
            raise not_a_completion(body)
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
        self._spoke = True
        self._finish_reason = finish_reason_in(choices[0]) or self._finish_reason
        delta = choices[0].get("delta") or {}
        for position, entry in enumerate(delta.get("tool_calls") or ()):
            self._add_call(entry, position)
        fragment = text_in(delta) or ""
        if fragment:
            self._text.append(fragment)
        return fragment

    def _add_call(self, entry: Mapping[str, Any], position: int) -> None:
        """Take one piece of a tool call: id and name come first, arguments in pieces after."""
        function = entry.get("function") or {}
        index = entry.get("index")
        if index is None:
            # Servers without an index send whole calls, or pieces of the last one.
            starts = bool(function.get("name"))
            index = len(self._calls) if starts else max(len(self._calls) - 1, position)
        call = self._calls.setdefault(int(index), _Call())
        self._limits.check_tool_calls(len(self._calls))
        call.id = call.id or str(entry.get("id") or "")
        call.name = call.name or str(function.get("name") or "")
        arguments = text_of_arguments(function.get("arguments") or "")
        if arguments:
            call.arguments.append(arguments)

    def finish(self) -> ChatResponse:
        """Return the whole answer.

        Raises:
            WireError: nothing came that belongs to an answer.
        """
        if not self._spoke:
            raise WireError("the stream ended without a single piece of an answer")
        calls = tuple(
            ToolCall(call.id or f"call_{index}", call.name, "".join(call.arguments))
            for index, call in sorted(self._calls.items())
        )
        text = "".join(self._text)
        return ChatResponse(text if text or not calls else None, calls, self._usage, self._finish_reason)
