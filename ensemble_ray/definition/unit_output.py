"""What a loop or a phase gives, as an entry of a task's context. Package: definition.

It names the unit by its hidden id and holds nothing of it: a task that waits for a loop does not carry its body along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["UnitOutput", "name_output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOutput:
    """The outputs of a loop or a phase; made by `loop.output` and `phase.output` alone (S-LOOP-166)."""

    #: hidden id of the loop or phase; for look-up inside a process
    object_id: str
    unit: Literal["loop", "phase"]
    #: of the loop or phase
    name: str

    @property
    def description(self) -> str:
        """What messages call it."""
        return f"output of {self.unit} '{self.name}'"


def name_output(entry: object) -> str:
    """Return what a message adds where a loop or phase stands in place of its output; "" where it does not."""
    output = getattr(entry, "output", None)
    if not isinstance(output, UnitOutput):
        return ""
    return f". Name what it gives: the .output of {output.unit} '{output.name}'"
