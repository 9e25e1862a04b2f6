"""Where a definition came from, so that a record can name it and a run can be resumed from there. Package: definition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Origin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A place that a loader understands, and what was chosen in place of what stands there."""

    #: a YAML path or `module:attribute`; empty: it was made by a program, and only that has it
    place: str = ""
    #: options of the loader: `llm`, `workflow`, `directory`; all others are arguments of the callable that made it
    overrides: Mapping[str, str] = field(default_factory=dict[str, str])
