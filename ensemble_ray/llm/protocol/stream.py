"""Decoding of streamed answers: server-sent events, and their assembly to one answer.

Every step takes time in proportion to its bytes, however they are cut, because a hostile stream may have a million
pieces. A stream cannot raise other errors than `WireError` and `TooMuchError`.
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

#: Data of the event that ends a stream.
STREAM_END = b"[DONE]"
_BOM = b"\xef\xbb\xbf"
#: Prefixes of the lines of an event stream.
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
#: Names of events, and types of objects, that only keep a connection open.
_PINGS = frozenset({"ping", "heartbeat", "keepalive", "keep-alive", "keep_alive"})
_LIMITS = AnswerLimits()
#: Name of a chunk in errors.
_PIECE = "a piece of the stream"
#: Memory of a line besides its bytes.
_LINE_BYTES = 64
#: In these members later texts replace earlier ones; texts of other members are appended.
_WHOLE_MEMBERS = frozenset({"type", "format", "id", "name", "role", "object", "status"})
#: In these members a text may continue with an equal piece. In other members a repeated text is a constant.
_TEXT_MEMBERS = frozenset({
    "text", "summary", "data", "signature", "thinking", "thought", "thought_signature", "reasoning", "reasoning_content",
    "reasoning_text",
})  # fmt: skip


def begin_of_body(received: bytes) -> bytes:
    """Return the start of a body without a byte order mark and leading white space."""
    return received.removeprefix(_BOM).lstrip()


def is_event_stream(begin: bytes) -> bool | None:
    """Whether a body that starts like this is an event stream; None: more bytes decide."""
    if begin.startswith(_FIELDS):
        return True
    return None if any(name.startswith(begin) for name in (*_FIELDS, _BOM)) else False


class SseParser:
    """Parses server-sent events from bytes that are cut anywhere; events without data and pings are skipped."""

    def __init__(self, limits: AnswerLimits = _LIMITS) -> None:
        self._limits = limits
        #: pieces of the incomplete line
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        #: lines of the incomplete event
        self._data: list[bytes] = []
        self._data_bytes = 0
        #: whether the incomplete event is a ping
        self._is_ping = False
        self._count = 0
        self._is_first = True
        #: whether the last byte was a CR, possibly of a CR LF
        self._ends_with_cr = False

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the data of every event that is complete now."""
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
        """Yield the last event if the server did not end it with an empty line."""
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
    """Assembles the chunks of a streamed answer: fragments of text, and the whole answer at the end."""

    def __init__(self, limits: AnswerLimits = _LIMITS, origin: str = "") -> None:
        self._limits = limits
        self._origin = origin
        self._text: list[str] = []
        self._reasoning: list[str] = []
        #: the reasoning in the latest chunk; empty if there is none
        self.reasoning_fragment = ""
        #: by index, in order of arrival
        self._calls: dict[int, list[_Call]] = {}
        self._call_count = 0
        self._index_by_id: dict[str, int] = {}
        self._last_index = -1
        #: members of the message that only the provider knows, and the bytes of all such pieces
        self._members = _Object()
        self._members_bytes = 0
        #: index of the choice that is read; a request may ask for several
        self._choice: object = None
        self._usage: TokenUsage | None = None
        self._finish_reason: str | None = None
        self._has_begun = False
        #: whether the stream's end mark has arrived
        self._is_ended = False

    def feed_data(self, data: bytes) -> str:
        """Return the text fragment in one event's data; empty if there is none."""
        if data.strip() == STREAM_END:
            self._is_ended, self.reasoning_fragment = True, ""
            return ""
        return self.feed(parse_json(data, _PIECE))

    def feed(self, chunk: object) -> str:
        self.reasoning_fragment = ""
        if chunk is None:
            return ""
        if not isinstance(chunk, dict):
            raise not_a_completion(chunk, _PIECE)
        body = cast("dict[str, Any]", chunk)
        # Unlike a whole answer, a chunk is a failure if its error has no status.
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
            return ""
        self._has_begun = True
        self._finish_reason = finish_reason_in(choice) or self._finish_reason
        # Some servers send the whole message as the only piece, others send it again at the end.
        is_whole = not choice.get("delta")
        delta = self._missing_in(choice.get("message") or {}) if is_whole else choice["delta"]
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

    def _missing_in(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the members of a whole message that earlier pieces did not contain."""
        read = {"content": self._text, "refusal": self._text, "tool_calls": self._calls}
        return {n: value for n, value in message.items() if not read.get(n, n in self._members)}

    def _add_call(self, entry: Mapping[str, Any], position: int) -> None:
        """Add a piece of a tool call. The first piece has id and name; all have parts of the arguments."""
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
        """Return the whole answer, or the received part of one that was cut off (S-LLM-8)."""
        calls = [call for _, under in sorted(self._calls.items()) for call in under]
        text, is_cut = "".join(self._text), not (self._finish_reason or self._is_ended)
        if not self._has_begun or (is_cut and not text and not calls):
            raise AnswerFailedError("the stream ended without a single piece of an answer")
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
    """An object with members that arrive in pieces."""


class _Items(list[object]):
    """A list with items that arrive in pieces; an item with an index continues an earlier one with that index."""

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


@dataclass(slots=True)
class _Call:
    """A tool call with pieces that are still arriving."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list[str])
    #: members that only the provider knows
    members: _Object = field(default_factory=_Object)
    #: whether the arguments were incomplete when a piece looked like the start of another call
    is_incomplete: bool = False

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
        """Whether the arguments are a JSON object. Parsed only once, since a stream may ask a million times."""
        if self.is_incomplete or not self.arguments:
            return False
        try:
            self.is_incomplete = not isinstance(json.loads("".join(self.arguments)), dict)
        except (ValueError, RecursionError):
            self.is_incomplete = True
        return not self.is_incomplete


def _merge(before: object, piece: object) -> object:
    """Return a JSON value with another piece added; `_join` converts it to JSON. The first piece does not change."""
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


def _is_ping(body: Mapping[str, Any]) -> bool:
    """Whether an object only keeps the connection open."""
    return not body or not _PINGS.isdisjoint((str(body.get("type")).lower(), str(body.get("event")).lower(), *body))
