"""Hierarchical workflow, seen from the run: one task, the manager's. Package: schedule.

Rules:
1. The manager's task starts at once; what it delegates is decided in its own task (`hierarchy`).
2. A run whose manager completed fails all the same when a required worker gave nothing (S-HIER-50).
3. A manager that failed fails the run; nobody asks for required workers then (S-HIER-51).
"""

from __future__ import annotations

from ensemble_ray.plan.plan import HierarchyRules, Plan
from ensemble_ray.schedule.hierarchy import violations_of
from ensemble_ray.schedule.instructions import End, Instruction
from ensemble_ray.schedule.machine import Machine
from ensemble_ray.schedule.stimuli import Completed, Continued, Waiting
from ensemble_ray.schedule.unit import UnitStimulus
from ensemble_ray.values.outputs import ExitReason, RunState

__all__ = ["HierarchicalMachine"]


class HierarchicalMachine(Machine):
    """Schedules a manager."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.nodes)
        self._rules = plan.hierarchy or HierarchyRules()
        self._has_violations = False

    def _handle_one(self, stimulus: UnitStimulus | Waiting | Continued, done: list[Instruction]) -> None:
        super()._handle_one(stimulus, done)
        if isinstance(stimulus, Completed):
            self._has_violations = bool(violations_of(self._rules, stimulus.delegated_roles))

    def _begin(self, at: float) -> None:
        for each in self._members:
            self._make_ready(self._instance(each.key), at)

    def _after_completion(self, instance: str, at: float) -> None:
        """Nothing follows."""

    def _after_failure(self, instance: str, at: float, done: list[Instruction]) -> None:
        """Nothing follows."""

    def _free_slots(self) -> int:
        return 1

    def _make_end(self) -> End:
        usual = super()._make_end()
        if usual.exit_reason is ExitReason.COMPLETED and self._has_violations:
            return End(state=RunState.FAILED, exit_reason=ExitReason.ERROR)
        return usual
