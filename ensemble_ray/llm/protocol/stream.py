"""Streamed answers of the chat-completions protocol. Package: llm; pure: bytes in, fragments and the whole out.

Every step costs time in proportion to what came, however the bytes are cut: a stream of a million pieces is hostile or a
long answer, and nobody can tell before its end. Must never happen: another error than `WireError` or `TooMuchError`
because of what a stream holds; more of it in memory than its limits allow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ensemble_ray.errors.bodies import read_error_body
from ensemble_ray.llm.protocol.wire import (
    FORM_ERRORS,
    AnswerFailedError,
    AnswerLimits,
    TooMuchError,
    check_end,
    finish_reason_in,
    has_failed,
    json_bytes,
    members_of_call,
    members_of_message,
    not_a_completion,
    parse_json,
    provider_fields,
    reasoning_in,
    text_in,
    text_of_arguments,
    usage_in,
)
from ensemble_ray.values.messages import STREAM_CUT, ChatResponse, TokenUsage, ToolCall

#: The data of the event that ends a stream.
STREAM_END = b"[DONE]"
_BOM = b"\xef\xbb\xbf"
#: How a line of an event stream begins.
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
#: Names of events that only keep a connection open, and types of such objects.
_PINGS = frozenset({"ping", "heartbeat", "keepalive", "keep-alive", "keep_alive"})
_LIMITS = AnswerLimits()
#: How errors call a chunk.
_PIECE = "a piece of the stream"
#: What a line costs beside its bytes.
_LINE_BYTES = 64


def begin_of_body(received: bytes) -> bytes:
    """Return what came of a body without what means nothing before it: a byte order mark, blanks, empty lines."""
    return received.removeprefix(_BOM).lstrip()


def is_event_stream(begin: bytes) -> bool | None:
    """Return whether a body that begins so is an event stream; None: more bytes decide."""
    if begin.startswith(_FIELDS):
        return True
    return None if any(name.startswith(begin) for name in (*_FIELDS, _BOM)) else False


class SseParser:
    """Server-sent events from bytes that come cut anywhere; events without data are left out, and pings.

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
        #: whether a ping's event has begun
        self._is_ping = False
        self._count = 0
        self._is_first = True
        #: whether the last byte was a CR, which a LF may belong to
        self._ends_with_cr = False

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Give the data of every event that is complete now.

        Raises:
            TooMuchError: an event is beyond a limit, or there are too many.
        """
        if self._ends_with_cr:
            received = received.removeprefix(b"\n")
            self._ends_with_cr = False
        if b"\r" in received:
            self._ends_with_cr = received.endswith(b"\r")
            received = received.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *ended, rest = received.split(b"\n")
        for line in ended:
            if self._rest:
                line = b"".join((*self._rest, line))  # noqa: PLW2901  the whole of it
                self._rest, self._rest_bytes = [], 0
            yield from self._line(line)
        if rest:
            self._rest.append(rest)
            self._rest_bytes += len(rest) + _LINE_BYTES
            self._limits.check_event(self._rest_bytes)

    def finish(self) -> Iterator[bytes]:
        """Give the last event, where the server did not close it with an empty line."""
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


class _Text(list[str]):
    """A text in pieces."""


class _Object(dict[str, object]):
    """An object whose members come in pieces."""


class _Items(list[object]):
    """A list whose items come in pieces: those with an index are continued under it."""

    def __init__(self, items: Iterable[object]) -> None:
        super().__init__()
        self._places: dict[tuple[object, object], int] = {}
        self.add(items)

    def add(self, items: Iterable[object]) -> None:
        """Add the items of another piece."""
        for item in items:
            entry = cast("dict[str, object]", item) if isinstance(item, dict) else {}
            place = len(self)
            if isinstance(entry.get("index"), int):
                place = self._places.setdefault((entry["index"], str(entry.get("type"))), place)
            if place == len(self):
                self.append(item)
            else:
                self[place] = _merge(self[place], item)


@dataclass(slots=True)
class _Call:
    """A tool call whose pieces are still coming."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list[str])
    #: members that only the provider knows
    members: _Object = field(default_factory=_Object)
    #: whether its arguments were found not to be complete where the next call might have begun
    is_incomplete: bool = False

    def is_continued_by(self, call_id: str, name: str, arguments: str) -> bool:
        """Whether a piece under the same index belongs to it: no new call begins with the piece (S-LLM-11)."""
        if name and self.name and name != self.name:
            return False
        if call_id and self.id:
            # Some servers make a new id for every piece; only the first piece of a call has a name.
            return call_id == self.id or not (name or (arguments and self.is_complete()))
        # Calls without ids, of the same tool: each comes whole.
        return not (name and self.name and arguments.lstrip().startswith("{") and self.is_complete())

    def is_complete(self) -> bool:
        """Whether its arguments are a JSON object; looked at once, since a stream may ask a million times."""
        if self.is_incomplete or not self.arguments:
            return False
        try:
            self.is_incomplete = not isinstance(json.loads("".join(self.arguments)), dict)
        except (ValueError, RecursionError):
            self.is_incomplete = True
        return not self.is_incomplete


#: Members whose later texts take the place of earlier ones; those of other members are continued.
_WHOLE_MEMBERS = frozenset({"type", "format", "id", "name", "role", "object", "status"})
#: Members whose text may continue with a piece that is equal to the first one. Other texts that repeat are constants.
_TEXT_MEMBERS = frozenset({
    "text", "summary", "data", "signature", "thinking", "thought", "thought_signature", "reasoning", "reasoning_content",
    "reasoning_text",
})  # fmt: skip


def _merge(before: object, piece: object) -> object:
    """Return a JSON value with another piece of it; `_join` makes JSON of it again. The first piece stays as it is."""
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


class StreamAssembler:
    """Chunks of a streamed answer become fragments of text and, at the end, the whole.

    Args:
        limits: How many tool calls one answer may ask for, and how long it may be.
        origin: Endpoint and model that it comes from.
    """

    def __init__(self, limits: AnswerLimits = _LIMITS, origin: str = "") -> None:
        self._limits = limits
        self._origin = origin
        self._text: list[str] = []
        self._reasoning: list[str] = []
        #: the fragment of reasoning in the latest chunk; empty when it carries none
        self.thought = ""
        #: by index, each in the order in which its calls came
        self._calls: dict[int, list[_Call]] = {}
        self._call_count = 0
        self._index_by_id: dict[str, int] = {}
        self._last_index = -1
        #: members of the message that only the provider knows, and bytes of all pieces of such members
        self._members = _Object()
        self._members_bytes = 0
        #: index of the choice that is read
        self._choice: object = None
        self._usage: TokenUsage | None = None
        self._finish_reason: str | None = None
        self._spoke = False
        #: whether the mark of the stream's end came
        self._is_ended = False

    def feed_data(self, data: bytes) -> str:
        """Return the text fragment in one event's data; empty when it carries none.

        Raises:
            WireError: it is no chunk of the protocol.
            TooMuchError: the answer asks for too many tool calls.
        """
        if data.strip() == STREAM_END:
            self._is_ended, self.thought = True, ""
            return ""
        return self.feed(parse_json(data, _PIECE))

    def feed(self, chunk: object) -> str:
        """Return the text fragment in one decoded chunk; empty when it carries none.

        Raises:
            WireError: it is no chunk of the protocol.
            TooMuchError: the answer asks for too many tool calls.
        """
        self.thought = ""
        if chunk is None:
            return ""
        if not isinstance(chunk, dict):
            raise not_a_completion(chunk, _PIECE)
        body = cast("dict[str, Any]", chunk)
        # A piece is no whole answer: an error beside it needs no status.
        if has_failed(body) or (body.get("error") and read_error_body(body["error"]).message):
            raise not_a_completion(body)
        if "choices" not in body and "usage" not in body:
            if not _is_ping(body):
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
            return ""  # one of several answers that the request asked for
        self._spoke = True
        self._finish_reason = finish_reason_in(choice) or self._finish_reason
        # Some servers send the whole message as the only piece, others once more at the end.
        is_whole = not choice.get("delta")
        delta = self._missing_in(choice.get("message") or {}) if is_whole else choice["delta"]
        self.thought = "" if is_whole and self._reasoning else reasoning_in(delta) or ""
        if self.thought:
            self._reasoning.append(self.thought)
        self._add_members(members_of_message(delta, has_calls=True), self._members)
        entries = delta.get("tool_calls") or ()
        for position, entry in enumerate(entries):
            if entry:
                self._add_call(entry, position if len(entries) > 1 else max(self._last_index, 0))
        fragment = text_in(delta) or ""
        if fragment:
            self._text.append(fragment)
        return fragment

    def _missing_in(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the members of a whole message that no piece before it had."""
        read = {"content": self._text, "refusal": self._text, "tool_calls": self._calls}
        return {n: value for n, value in message.items() if not read.get(n, n in self._members)}

    def _add_call(self, entry: Mapping[str, Any], position: int) -> None:
        """Take one piece of a tool call: id and name come first, arguments in pieces after."""
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
        # Servers without an index send whole calls, or pieces of the last one, or of all by their position.
        if call_id in self._index_by_id:
            return self._index_by_id[call_id]
        return max(self._calls, default=-1) + 1 if name else position

    def _add_members(self, piece: Mapping[str, object], members: _Object) -> None:
        """Add a piece of members that only the provider knows."""
        if piece:
            self._members_bytes += len(json_bytes(piece))
            self._limits.check_event(self._members_bytes)
            _merge(members, piece)

    def finish(self) -> ChatResponse:
        """Return the whole answer, or what came of one that was cut off (S-LLM-8).

        Raises:
            AnswerFailedError: the provider failed while it answered, or before.
        """
        calls = [call for _, under in sorted(self._calls.items()) for call in under]
        text, is_cut = "".join(self._text), not (self._finish_reason or self._is_ended)
        if not self._spoke or (is_cut and not text and not calls):
            raise AnswerFailedError("the stream ended without a single piece of an answer")
        check_end(self._finish_reason)
        try:
            members = members_of_message(cast("dict[str, object]", _join(self._members)), has_calls=bool(calls))
            more = [cast("dict[str, object]", _join(call.members)) for call in calls]
            fields = provider_fields(self._origin, members, more)
        except RecursionError:  # nested beyond the stack
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


def _is_ping(body: Mapping[str, Any]) -> bool:
    """Whether an object without an answer only keeps the connection open."""
    return not body or not _PINGS.isdisjoint((str(body.get("type")).lower(), str(body.get("event")).lower(), *body))
