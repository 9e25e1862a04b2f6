"""How loops, phases, graphs and their executions stand, by what runs in them. Package: studio. Pure.

Rules:
1. A unit begins with the first thing inside it.
2. An execution is completed when its round was announced, when the next one begins, or when all that it declares is completed.
3. A loop is completed when its predicate holds or its cap is reached, a graph when it is routed to its end, a phase when an
   attempt is completed and no other follows. What the run's end tells of a unit counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ensemble_ray.facts.lenient import as_sequence, as_text
from ensemble_ray.schedule.instructions import IterationEnded, UntilHolds
from ensemble_ray.schedule.results import PhaseResult
from ensemble_ray.values.ids import instance_of, node_key

if TYPE_CHECKING:
    from ensemble_ray.schedule.instructions import End, StepEnded
    from ensemble_ray.schedule.stimuli import Evaluated
    from ensemble_ray.studio.schemas.steps import StepStatus
    from ensemble_ray.studio.views.step_names import StepNames
    from ensemble_ray.studio.views.step_state import StepState

__all__ = ["UnitSteps"]

_END_STATE = "__END__"
_ROUNDS = frozenset({"iteration", "attempt", "state"})
_UNITS = frozenset({"loop", "phase", "graph"})


class _Steps(Protocol):
    """The steps of a run."""

    names: StepNames
    states: dict[str, StepState]

    def state_of(self, step: str) -> StepState: ...

    def mark_changed(self, state: StepState) -> None: ...


class UnitSteps:
    """The units among the steps of a run."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps
        #: steps that are part of a unit's execution, and executions of a unit, by their parent
        self._children: dict[str, dict[str, None]] = {}

    def child_changed(self, child: StepState) -> None:
        """Take notice that something changed which may be part of an execution."""
        parent = None if child.parent is None else self._steps.states.get(child.parent)
        if parent is None or parent.kind not in _ROUNDS | _UNITS:
            if parent is not None:
                parent.touch(child.changed)
            return
        before = (parent.status, parent.started_at, parent.ended_at, parent.attempts)
        siblings = self._children.setdefault(parent.id, {})
        is_new = child.id not in siblings
        siblings[child.id] = None
        if child.started_at is not None and (parent.started_at is None or child.started_at < parent.started_at):
            parent.started_at = child.started_at
        parent.attempts = max(1, parent.attempts)
        if parent.kind in _UNITS:
            self._unit_changed(parent, child, is_new=is_new)
        else:
            self._round_changed(parent, child)
        if is_new or before != (parent.status, parent.started_at, parent.ended_at, parent.attempts):
            self._steps.mark_changed(parent)

    def _round_changed(self, parent: StepState, child: StepState) -> None:
        match child.status:
            case "running" | "waiting" | "failed" | "exited":
                self._set(parent, child.status, child.ended_at)
            case "completed":
                done = {node_key(each) for each in self._children[parent.id] if self._is_completed(each)}
                unit = self._steps.names.units.get(node_key(parent.id), {})
                declared = self._steps.names.members_of(unit)
                wanted = 1 if parent.kind == "state" else len(declared)
                if len(done) >= wanted > 0:
                    self._set(parent, "completed", self._last_end(parent) or child.ended_at)
            case _:
                pass

    def _unit_changed(self, unit: StepState, child: StepState, *, is_new: bool) -> None:
        if is_new:
            for each in list(self._children[unit.id])[:-1]:
                earlier = self._steps.states[each]
                if not earlier.is_ended and unit.kind != "graph":  # branches of a graph run side by side
                    self._set(earlier, "completed", child.started_at)
                    earlier.touch(child.changed)
            for before in self._phases_before(unit) if unit.kind == "phase" else ():
                self._close_rounds(before, "completed", child.started_at, child.changed)
        match child.status:
            case "running" | "waiting":
                self._set(unit, child.status, None)
            case "failed" | "exited":
                self._set(unit, child.status, child.ended_at)
            case "completed" if unit.kind == "phase":
                self._set(unit, "completed", self._last_end(unit) or child.ended_at)
            case _:
                pass

    def evaluate(self, told: Evaluated) -> None:
        """Take what a loop's predicate answered."""
        if isinstance(told.question, UntilHolds) and told.answer is True:
            self._finish(told.question.unit, told.at)

    def announce(self, what: IterationEnded | StepEnded, at: float) -> None:
        """Take the end of an iteration or of a graph's step."""
        number = what.iteration if isinstance(what, IterationEnded) else what.step
        state = self._steps.state_of(instance_of(what.unit, occurrence=number - 1))
        self._set(state, "completed", at)
        self._steps.mark_changed(state)
        unit = self._steps.names.units.get(what.unit.rpartition("/")[2], {})
        if isinstance(what, IterationEnded):
            if what.iteration == unit.get("max_iterations"):
                self._finish(what.unit, at)
        elif as_text(what.next_state) == _END_STATE:
            self._finish(what.unit, at)

    def end(self, end: End, at: float) -> None:
        """Take what the run's source tells of its units when it ends."""
        failed = {each.unit: each for each in end.unit_failures}
        for result in end.units:
            state = self._steps.states.get(result.unit)
            if state is None:
                continue
            status: StepStatus = "completed"
            if isinstance(result, PhaseResult):
                status = result.status
            elif result.termination_reason is None:
                status = "failed" if result.unit in failed or state.status == "failed" else "cancelled"
            self._close_rounds(state, status, at, state.changed)
            self._set(state, status, state.ended_at or at)
            state.error = failed[result.unit].message if result.unit in failed else state.error
            self._steps.mark_changed(state)

    def close(self, at: float, begun: StepStatus) -> None:
        """Take notice that nothing runs any more."""
        for state in self._steps.states.values():
            if state.kind not in _ROUNDS | _UNITS or state.is_ended:
                continue
            if state.started_at is None:
                if begun != "interrupted":
                    self._set(state, "skipped", at)
                    self._steps.mark_changed(state)
                continue
            children = [self._steps.states[each].status for each in self._children.get(state.id, ())]
            is_done = bool(children) and all(each == "completed" for each in children)
            self._set(state, "completed" if is_done and begun != "interrupted" else begun, at)
            self._steps.mark_changed(state)

    def _phases_before(self, phase: StepState) -> list[StepState]:
        """Return the phases that have to be completed before one begins."""
        parent, slash, key = phase.id.rpartition("/")
        after = map(str, as_sequence(self._steps.names.units.get(key, {}).get("after")))
        found = (self._steps.states.get(f"{parent}{slash}{each}") for each in after)
        return [each for each in found if each is not None]

    def _close_rounds(self, unit: StepState, status: StepStatus, at: float | None, seq: int) -> None:
        """End the executions of a unit that has come to its end, since something begins that waited for it or its run ends."""
        rounds = [self._steps.states[each] for each in self._children.get(unit.id, ())]
        for each in rounds:
            if not each.is_ended:
                self._set(each, status, self._last_end(each) or at)
                each.touch(seq)
        if not unit.is_ended:
            self._set(unit, status, self._last_end(unit) or at)
            unit.touch(seq)

    def _finish(self, path: str, at: float) -> None:
        state = self._steps.state_of(path)
        self._set(state, "completed", at)
        self._steps.mark_changed(state)

    def _last_end(self, parent: StepState) -> float | None:
        """Return when the last thing in a unit or an execution ended; None: nothing did."""
        inside = (self._steps.states[each].ended_at for each in self._children.get(parent.id, ()))
        return max((at for at in inside if at is not None), default=None)

    def _is_completed(self, step: str) -> bool:
        return self._steps.states[step].status == "completed"

    @staticmethod
    def _set(state: StepState, status: StepStatus, at: float | None) -> None:
        state.status = status
        state.ended_at = at if state.is_ended else None
