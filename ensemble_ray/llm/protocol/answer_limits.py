"""How much of an endpoint's answer is taken. Package: llm; pure.

An endpoint is not trusted: its answer may never end, unpack to a thousand times its size, or come a byte a minute. Every
limit counts what is held in this process: bytes after unpacking. What is beyond a limit is an answer that cannot be
used, which no repetition mends (S-SEC-50 to S-SEC-53).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "DEFAULT_ANSWER_BYTES",
    "DEFAULT_ANSWER_TIME_S",
    "ERROR_BODY_BYTES",
    "MOST_EVENTS",
    "MOST_TOOL_CALLS",
    "AnswerLimits",
    "TooMuchError",
]

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
