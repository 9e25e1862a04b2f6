"""The machines of the sequential, the parallel and the hierarchical workflow."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice

from ensemble_ray.plan.plan import HierarchyRules, Plan
from ensemble_ray.schedule.hierarchy import violations_of
from ensemble_ray.schedule.instructions import End, Instruction, Skip, TaskChanges
from ensemble_ray.schedule.machine import Machine, TaskState
from ensemble_ray.schedule.stimuli import Completed, Continued, Waiting
from ensemble_ray.schedule.unit import Member, UnitStimulus
from ensemble_ray.values.ids import key_of
from ensemble_ray.values.outputs import ExitReason, RunState


class SequentialMachine(Machine):
    """Runs members one after the other, in list order (S-ENG-10). The first failure stops the run (S-ENG-13)."""

    def _after_completion(self, instance: str, at: float) -> None:  # noqa: ARG002  list order decides
        self._begin(at)

    def _after_failure(self, instance: str, at: float, done: list[Instruction]) -> None:
        self._abandon(TaskState.SKIPPED, f"task '{key_of(instance)}' failed", at, done)

    def _free_slots(self) -> int:
        return 0 if self._running else 1

    def _followers(self, instance: str) -> Iterator[str]:  # noqa: ARG002  as above
        return (self._instance(each.key) for each in islice(self._members, len(self._completed) + 1, None))

    def _begin(self, at: float) -> None:
        position = len(self._completed)
        if position < len(self._members):
            instance = self._instance(self._members[position].key)
            if self._states[instance] is TaskState.PENDING:
                self._make_ready(instance, at)


class ParallelMachine(Machine):
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
        self._waits_for: dict[str, int] = {}
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

    def _followers(self, instance: str) -> Iterator[str]:
        waits_for: dict[str, int] = {}
        while True:
            for dependent in self._dependents.get(instance, ()):
                waits_for[dependent] = waits_for.get(dependent, self._waits_for[dependent]) - 1
            started = [
                each
                for each in self._dependents.get(instance, ())
                if not waits_for[each] and self._states[each] is TaskState.PENDING
            ]
            if len(started) != 1:
                return
            instance = started[0]
            yield instance

    def _free_slots(self) -> int:
        return sys.maxsize if self._cap is None else self._cap - len(self._running)


class HierarchicalMachine(Machine):
    """Runs a manager. The run fails if required workers are missing at its end (S-HIER-50)."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.nodes)
        self._rules = plan.hierarchy or HierarchyRules()
        self._has_violations = False

    def _handle_one(self, stimulus: UnitStimulus | Waiting | Continued, done: list[Instruction]) -> None:
        super()._handle_one(stimulus, done)
        if isinstance(stimulus, Completed):
            self._has_violations = bool(violations_of(self._rules, stimulus.delegated_roles))

    def _free_slots(self) -> int:
        return 1

    def _make_end(self) -> End:
        usual = super()._make_end()
        if usual.exit_reason is ExitReason.COMPLETED and self._has_violations:
            return End(state=RunState.FAILED, exit_reason=ExitReason.ERROR)
        return usual
