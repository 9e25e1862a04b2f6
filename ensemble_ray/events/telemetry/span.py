"""A span as plain data. Package: telemetry. Pure; knows no SDK, so that what is sent can be compared without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["Attribute", "SpanData", "SpanEvent", "drop_empty"]

#: What an attribute may hold.
Attribute: TypeAlias = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """Something that happened within a span."""

    name: str
    #: Unix time, s
    at: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict[str, Attribute])


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanData:
    """One span. Ids are hexadecimal digits, times Unix time, s."""

    name: str
    trace_id: str
    span_id: str
    #: None: it has no parent
    parent_id: str | None
    started_at: float
    ended_at: float
    kind: Literal["internal", "client"] = "internal"
    attributes: Mapping[str, Attribute] = field(default_factory=dict[str, Attribute])
    events: Sequence[SpanEvent] = ()
    #: spans of the same trace that it follows
    links: Sequence[str] = ()
    is_error: bool = False
    #: why, where that may be told
    status_text: str = ""
    is_sampled: bool = True
    #: whether the parent is another program's
    has_remote_parent: bool = False


def drop_empty(attributes: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    """Return the attributes that say something."""
    return {name: value for name, value in attributes.items() if value is not None and value not in ("", ())}
