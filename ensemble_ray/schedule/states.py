"""Task states and the table of their transitions. Package: schedule.

Rules:
1. A task resolves exactly once: completed, failed, exited, skipped or cancelled (S-PAR-12).
2. What is not in `TRANSITIONS` is a defect: `InvalidTransition` tells the task's whole story.
3. Everything that decides about states is in this package; the diagram in the architecture page is drawn from the table.

`pending`    not all of its dependencies are resolved.
`ready`      could run; waits for a slot under the cap.
`running`    handed to an executor; its result has not come.
`waiting`    put down at an open gate; holds no slot, and is started again when the run goes on (S-REV-115).
`completed`  succeeded; its output can be used.
`failed`     failed; dependents cannot run.
`exited`     asked to end the run early (S-ENG-59).
`skipped`    never started: a dependency failed, or the run was ending (S-PAR-21, S-PAR-24).
`cancelled`  the run was cancelled while it waited or ran.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["TRANSITIONS", "InvalidTransitionError", "TaskState"]


class TaskState(StrEnum):
    """Where a task of a run stands."""

    PENDING = "pending"
    READY = "ready"
    RUNNING = "running"
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    EXITED = "exited"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"

    @property
    def is_resolved(self) -> bool:
        """Whether it will not change any more."""
        return self not in _OPEN


_OPEN = frozenset({TaskState.PENDING, TaskState.READY, TaskState.RUNNING, TaskState.WAITING})

#: (from, to) -> why; the whole rule about task states, as data.
TRANSITIONS: dict[tuple[TaskState, TaskState], str] = {
    (TaskState.PENDING, TaskState.READY): "dependencies resolved",
    (TaskState.READY, TaskState.RUNNING): "a slot is free",
    (TaskState.RUNNING, TaskState.WAITING): "came to an open gate",
    (TaskState.WAITING, TaskState.READY): "run goes on",
    (TaskState.RUNNING, TaskState.COMPLETED): "succeeded",
    (TaskState.RUNNING, TaskState.FAILED): "failed",
    (TaskState.RUNNING, TaskState.EXITED): "asked to end the run",
    (TaskState.RUNNING, TaskState.CANCELLED): "run cancelled",
    (TaskState.PENDING, TaskState.SKIPPED): "dependency failed, or run ending",
    (TaskState.READY, TaskState.SKIPPED): "run ending",
    (TaskState.PENDING, TaskState.CANCELLED): "run cancelled",
    (TaskState.READY, TaskState.CANCELLED): "run cancelled",
    (TaskState.WAITING, TaskState.CANCELLED): "run cancelled, or ending",
}


class InvalidTransitionError(RuntimeError):
    """A transition that the table does not know; a defect of ours, never the user's."""

    def __init__(self, key: str, before: str, after: str, story: str) -> None:
        super().__init__(key, before, after, story)
        self.key = key
        self.before = before
        self.after = after
        self.story = story

    def __str__(self) -> str:
        """Say which transition it was and how the task came there."""
        return f"Task '{self.key}': no transition {self.before} -> {self.after}. Story: {self.story}"
