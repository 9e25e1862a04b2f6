"""Where a definition came from, so that a record can name it and a run can be resumed from there. Package: definition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

__all__ = ["Origin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A place that a loader understands, and what was chosen in place of what stands there."""

    #: a YAML path or `module:attribute`; empty: it was made by a program, and only that has it
    place: str = ""
    #: options of the loader: `llm`, `workflow`, `directory`; all others are arguments of the callable that made it
    overrides: Mapping[str, str] = field(default_factory=dict[str, str])
    #: what a team without a name is called whose place says nothing to people; empty: as its place says
    called: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """What a team without a name is called: the stem of its file, or its attribute; empty: a program made it (S-DOM-84)."""
        if self.called:
            return self.called
        is_file = self.place.lower().endswith((".yaml", ".yml"))
        return PurePath(self.place).stem if is_file else self.place.rpartition(":")[2]
