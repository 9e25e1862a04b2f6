"""Trace context of a run, in the form of W3C (`traceparent`). Package: values. Pure.

Ids follow from names: the trace's from the run's id, a span's from the run's id and the name of what it stands for. So every
process knows the parent of what it does without being told, and a record read later gives the spans that were sent live.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["RunTracing", "TraceParent", "parse_traceparent"]

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACE_DIGITS, _SPAN_DIGITS = 32, 16
#: The version that can have nothing behind its flags, and the one that is none.
_FIRST_VERSION, _NO_VERSION = "00", "ff"


class TraceParent(NamedTuple):
    """A span as another process names it."""

    #: 32 and 16 hexadecimal digits
    trace_id: str
    span_id: str
    is_sampled: bool = True

    def __str__(self) -> str:
        return f"{_FIRST_VERSION}-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


def parse_traceparent(text: str) -> TraceParent | None:
    """Return the span that a `traceparent` names; None where it is none: then a trace of its own begins, as W3C asks.

    Examples:
        >>> parse_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").span_id
        'b7ad6b7169203331'
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == _NO_VERSION or (version == _FIRST_VERSION and rest):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceParent(trace_id, span_id, is_sampled=bool(int(flags, 16) & 1))


def _id_of(name: str, digits: int) -> str:
    # An id of zeros is none; one in 2**64 names would have it.
    return hashlib.sha256(name.encode()).hexdigest()[:digits]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTracing:
    """What the spans of one run have in common; it travels to every process of the run."""

    run_id: str
    #: who asked for the run; None: it begins a trace of its own
    caller: TraceParent | None = None
    is_sampled: bool = True
    #: how often the run was resumed before
    beginning: int = 0
    #: what was done until then was told of by an earlier beginning, which ended; Unix time, s
    told_until: float = 0.0

    @property
    def trace_id(self) -> str:
        """The trace that the run is part of."""
        return _id_of(f"trace {self.run_id}", _TRACE_DIGITS) if self.caller is None else self.caller.trace_id

    def run_span(self, beginning: int | None = None) -> str:
        """Return the id of the run's span; each time it goes on it has another one."""
        number = self.beginning if beginning is None else beginning
        return _id_of(f"run {self.run_id} {number}", _SPAN_DIGITS)

    def execution_span(self, instance: str) -> str:
        """Return the id of the span of a task's execution, or of a unit's."""
        return _id_of(f"execution {self.run_id} {self.beginning} {instance}", _SPAN_DIGITS)

    def effect_span(self, name: str) -> str:
        """Return the id of the span of a call of a model or of a tool."""
        return _id_of(f"effect {self.run_id} {name}", _SPAN_DIGITS)

    def traceparent(self, span_id: str) -> str:
        """Return what names a span of the run to others."""
        return str(TraceParent(self.trace_id, span_id, self.is_sampled))
