"""Facts told to a scheduling machine, each with its time. Room: schedule. With `instructions`, its only words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from ensemble_ray.values.outputs import ExitReason

__all__ = [
    "CancelRequested",
    "RunStarted",
    "Stimulus",
    "TaskCancelled",
    "TaskCompleted",
    "TaskExited",
    "TaskFailed",
    "stimulus_fields",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The run begins."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCompleted:
    """A task succeeded. Carries what folds need, not the output itself."""

    at: float
    key: str
    duration_s: float = 0.0
    #: -1: unknown
    total_tokens: int = -1
    tool_call_count: int = 0
    #: of a manager: roles of the workers that gave it something
    delegated_roles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailed:
    """A task failed; which error class, for the record and for rules that tell them apart."""

    at: float
    key: str
    error_type: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExited:
    """A task ended the run early: it asked for that (S-ENG-59), or needed more than may be spent (S-BUD-4)."""

    at: float
    key: str
    reason: ExitReason = ExitReason.USER_EXIT_EARLY


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCancelled:
    """A running task was stopped because the run was cancelled."""

    at: float
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """Somebody wants the run to end now."""

    at: float


Stimulus = Union[RunStarted, TaskCompleted, TaskFailed, TaskExited, TaskCancelled, CancelRequested]  # noqa: UP007  a name for the union, also at run time


def stimulus_fields(stimulus: Stimulus) -> dict[str, object]:
    """The stimulus as data for the record: its class name and its fields."""
    fields = {name: getattr(stimulus, name) for name in type(stimulus).__slots__}
    if not fields.get("delegated_roles"):  # which only managers have
        fields.pop("delegated_roles", None)
    return {"type": type(stimulus).__name__, **fields}
