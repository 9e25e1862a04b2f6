"""What a loop or a phase gives, as an entry of a task's context. Package: definition.

It names the unit by its hidden id; a copy that travels holds nothing of it: a task that waits for a loop does not carry its
body along.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["UnitOutput", "name_output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOutput:
    """The outputs of a loop or a phase, or of one body task of a loop.

    Made by `loop.output`, `loop.output_of(task)` and `phase.output` alone.
    """

    #: hidden id of the loop or phase; for look-up inside a process
    object_id: str
    unit: Literal["loop", "phase"]
    #: of the loop or phase
    name: str
    #: of a body task that is meant alone: its hidden id and what histories call it; empty: all that the unit gives
    task_id: str = ""
    task: str = ""
    #: the loop itself where it was made in this process, so that a factory can return what one of its tasks gives (S-MR-190)
    loop: object = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        """Travel without the loop."""
        return _restore, (self.object_id, self.unit, self.name, self.task_id, self.task)

    @property
    def description(self) -> str:
        """What messages call it."""
        whole = f"{self.unit} '{self.name}'"
        return f"output of task '{self.task}' of {whole}" if self.task_id else f"output of {whole}"


def _restore(object_id: str, unit: Literal["loop", "phase"], name: str, task_id: str, task: str) -> UnitOutput:
    return UnitOutput(object_id=object_id, unit=unit, name=name, task_id=task_id, task=task)


def name_output(entry: object) -> str:
    """Return what a message adds where a loop or phase stands in place of its output; "" where it does not."""
    output = getattr(entry, "output", None)
    if not isinstance(output, UnitOutput):
        return ""
    return f". Name what it gives: the .output of {output.unit} '{output.name}'"
