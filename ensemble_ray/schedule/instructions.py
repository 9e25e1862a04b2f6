"""What a scheduling machine wants done. Room: schedule. Verbs; carried out by the conductor, never here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from ensemble_ray.values.outputs import ExitReason, RunState

__all__ = ["CancelTask", "EndRun", "Instruction", "SkipTask", "StartTask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTask:
    """Hand the task to a house."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipTask:
    """Tell the log that the task will not run, and why; no event (S-PAR-28)."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTask:
    """Stop a running task."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """Nothing will run any more."""

    state: RunState
    exit_reason: ExitReason


Instruction = Union[StartTask, SkipTask, CancelTask, EndRun]  # noqa: UP007  a name for the union, also at run time
