"""Parallel workflow: a DAG over context references. Package: schedule.

Rules:
1. All roots start at once; a task starts as soon as its last in-plan dependency completed (S-PAR-10, S-PAR-11).
2. At most `max_parallel_tasks` run at a time; ready tasks wait in the order in which they became ready (S-PAR-17).
3. fail_fast: after the first failure nothing unstarted starts; running tasks finish (S-PAR-21).
4. continue_on_error: dependents of a failed or skipped task are skipped, transitively; the rest goes on (S-PAR-24).

One completion costs time in proportion to its dependents, not to the plan: counts of open dependencies are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ensemble_ray.schedule.instructions import Instruction, Skip, TaskChanges
from ensemble_ray.schedule.machine import Machine
from ensemble_ray.schedule.states import TaskState
from ensemble_ray.schedule.unit import Member
from ensemble_ray.values.ids import key_of

__all__ = ["ParallelMachine"]


class ParallelMachine(Machine):
    """Schedules a DAG.

    Args:
        members: Tasks and units, in declared order.
        error_strategy: `fail_fast` or `continue_on_error`.
        max_parallel: Members that may run at the same time; None: no cap of this machine's own.
        parent: The path that their instances lie below.
        changes: What each of them has beside itself.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        error_strategy: str = "fail_fast",
        max_parallel: int | None = None,
        parent: str = "",
        changes: TaskChanges | None = None,
    ) -> None:
        super().__init__(members, parent=parent, changes=changes)
        self._is_fail_fast = error_strategy == "fail_fast"
        self._cap = max_parallel
        #: open dependencies, of those that have some
        self._waits_for: dict[str, int] = {}
        #: of those that have some
        self._dependents: dict[str, list[str]] = {}
        own = dict(zip((each.key for each in members), self._states, strict=True))
        for each, instance in zip(members, self._states, strict=True):
            needed = [own[key] for key in dict.fromkeys(each.context) if key in own] if each.context else ()
            if needed:
                self._waits_for[instance] = len(needed)
            for other in needed:
                self._dependents.setdefault(other, []).append(instance)

    def _begin(self, at: float) -> None:
        for instance in self._states:
            if instance not in self._waits_for:
                self._make_ready(instance, at)

    def _after_completion(self, instance: str, at: float) -> None:
        for dependent in self._dependents.get(instance, ()):
            self._waits_for[dependent] -= 1
            if not self._waits_for[dependent] and self._states[dependent] is TaskState.PENDING:
                self._make_ready(dependent, at)

    def _after_failure(self, instance: str, at: float, done: list[Instruction]) -> None:
        if self._is_fail_fast:
            self._abandon(TaskState.SKIPPED, f"task '{key_of(instance)}' failed", at, done)
            return
        blocked = [instance]
        while blocked:
            cause = blocked.pop()
            for dependent in self._dependents.get(cause, ()):
                if self._states[dependent] is TaskState.PENDING:
                    self._move(dependent, TaskState.SKIPPED, at)
                    done.append(Skip(instance=dependent, reason=f"context task '{key_of(cause)}' did not complete"))
                    blocked.append(dependent)

    def _free_slots(self) -> int:
        return sys.maxsize if self._cap is None else self._cap - len(self._running)
