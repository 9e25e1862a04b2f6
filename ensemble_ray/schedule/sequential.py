"""Sequential workflow: one task at a time, in list order. Package: schedule.

Rules:
1. A task starts only after the previous one ended (S-ENG-10).
2. The first failure stops the run: later tasks never start (S-ENG-13).
"""

from __future__ import annotations

from ensemble_ray.schedule.instructions import Instruction
from ensemble_ray.schedule.machine import Machine
from ensemble_ray.schedule.states import TaskState
from ensemble_ray.values.ids import key_of

__all__ = ["SequentialMachine"]


class SequentialMachine(Machine):
    """Schedules members one after the other."""

    def _begin(self, at: float) -> None:
        self._advance(at)

    def _after_completion(self, instance: str, at: float) -> None:  # noqa: ARG002  list order decides, not who completed
        self._advance(at)

    def _after_failure(self, instance: str, at: float, done: list[Instruction]) -> None:
        self._abandon(TaskState.SKIPPED, f"task '{key_of(instance)}' failed", at, done)

    def _free_slots(self) -> int:
        return 0 if self._running else 1

    def _advance(self, at: float) -> None:
        """Make the next pending task ready, in list order."""
        position = len(self._completed)
        if position < len(self._members):
            instance = self._instance(self._members[position].key)
            if self._states[instance] is TaskState.PENDING:
                self._make_ready(instance, at)
