"""Hierarchical workflow, seen from the run: one task, the manager's. Room: schedule.

Rules:
1. The manager's task starts at once; what it delegates is decided in its own task (`hierarchy`).
2. A run whose manager completed fails all the same when a required worker gave nothing (S-HIER-50).
3. A manager that failed fails the run; nobody asks for required workers then (S-HIER-51).
"""

from __future__ import annotations

from ensemble_ray.plan.plan import HierarchyRules, Plan
from ensemble_ray.schedule.hierarchy import violations_of
from ensemble_ray.schedule.instructions import EndRun, Instruction
from ensemble_ray.schedule.machine import Machine
from ensemble_ray.schedule.stimuli import Stimulus, TaskCompleted
from ensemble_ray.values.outputs import ExitReason, RunState

__all__ = ["HierarchicalMachine"]


class HierarchicalMachine(Machine):
    """Schedules a manager."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._rules = plan.hierarchy or HierarchyRules()
        self._has_violations = False

    def _take(self, stimulus: Stimulus, done: list[Instruction]) -> None:
        super()._take(stimulus, done)
        if isinstance(stimulus, TaskCompleted):
            self._has_violations = bool(violations_of(self._rules, stimulus.delegated_roles))

    def _begin(self, at: float) -> None:
        for node in self._plan.nodes:
            self._make_ready(node.key, at)

    def _after_completion(self, key: str, at: float) -> None:
        """Nothing follows."""

    def _after_failure(self, key: str, at: float, done: list[Instruction]) -> None:
        """Nothing follows."""

    def _places(self) -> int:
        return 1

    def _ended(self) -> EndRun:
        usual = super()._ended()
        if usual.exit_reason is ExitReason.COMPLETED and self._has_violations:
            return EndRun(state=RunState.FAILED, exit_reason=ExitReason.ERROR)
        return usual
