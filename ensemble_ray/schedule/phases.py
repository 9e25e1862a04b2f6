"""The machine of a run's phases."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Literal, assert_never

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.plan.plan import PhaseUnit
from ensemble_ray.schedule.instructions import (
    Cancel,
    Evaluate,
    Instruction,
    PhaseResult,
    ReflectOn,
    Start,
    TaskChanges,
    UnitFailure,
    Warn,
)
from ensemble_ray.schedule.machine import end_of
from ensemble_ray.schedule.stimuli import (
    Begun,
    Cancelled,
    CancelRequested,
    Completed,
    Evaluated,
    Exited,
    Failed,
    TaskEnd,
)
from ensemble_ray.schedule.unit import Execution, HistoryEntry, Parts, StopRequested, UnitStimulus
from ensemble_ray.values.ids import instance_of
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.reviews import read_decision_text


class PhaseState(StrEnum):
    """The state of a phase.

    `waiting`      a predecessor is not completed: not begun, or about to run again.
    `running`      the members of an attempt run.
    `reviewing`    the review of the attempt runs.
    `reflecting`   reflections on the accepted attempt are made.
    `completed`    its attempt was accepted.
    `failed`       a member or the review failed, the review rejected it, or a predecessor that it sent back failed.
    `skipped`      never begun, or withdrawn and not run again: a predecessor did not complete, or the run was ending.
    `cut_short`    the run ended while it ran; its outputs so far remain.
    """

    WAITING = "waiting"
    RUNNING = "running"
    REVIEWING = "reviewing"
    REFLECTING = "reflecting"
    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"
    CUT_SHORT = "cut_short"


class PhaseEvent(StrEnum):
    PREDECESSORS_COMPLETED = "all predecessors completed"
    MEMBERS_COMPLETED = "its members completed, no review follows"
    REVIEW_FOLLOWS = "its members completed, its review follows"
    ACCEPTED = "its review accepted"
    REFLECTION_FOLLOWS = "its attempt is accepted, reflections follow"
    REFLECTED = "its reflections are made, or the run was cancelled"
    SENT_BACK = "its review requested another attempt"
    PREDECESSOR_SENT_BACK = "its review sent a predecessor back"
    REJECTED = "its review rejected"
    FAILED = "a member or its review failed"
    WITHDRAWN = "a successor's review sent it back"
    RERUN_FAILED = "the predecessor that it sent back failed"
    PREDECESSOR_LOST = "a predecessor failed or was skipped"
    RUN_ENDED = "the run is ending"


_S, _E = PhaseState, PhaseEvent

#: (state, event) -> next state. Every other pair is a defect.
PHASE_TRANSITIONS: dict[tuple[PhaseState, PhaseEvent], PhaseState] = {
    (_S.WAITING, _E.PREDECESSORS_COMPLETED): _S.RUNNING,
    (_S.WAITING, _E.PREDECESSOR_LOST): _S.SKIPPED,
    (_S.WAITING, _E.RERUN_FAILED): _S.FAILED,
    (_S.WAITING, _E.RUN_ENDED): _S.SKIPPED,
    (_S.RUNNING, _E.MEMBERS_COMPLETED): _S.COMPLETED,
    (_S.RUNNING, _E.REVIEW_FOLLOWS): _S.REVIEWING,
    (_S.RUNNING, _E.FAILED): _S.FAILED,
    (_S.RUNNING, _E.RUN_ENDED): _S.CUT_SHORT,
    (_S.RUNNING, _E.REFLECTION_FOLLOWS): _S.REFLECTING,
    (_S.REVIEWING, _E.REFLECTION_FOLLOWS): _S.REFLECTING,
    (_S.REFLECTING, _E.REFLECTED): _S.COMPLETED,
    (_S.REVIEWING, _E.ACCEPTED): _S.COMPLETED,
    (_S.REVIEWING, _E.SENT_BACK): _S.RUNNING,
    (_S.REVIEWING, _E.PREDECESSOR_SENT_BACK): _S.WAITING,
    (_S.REVIEWING, _E.REJECTED): _S.FAILED,
    (_S.REVIEWING, _E.FAILED): _S.FAILED,
    (_S.REVIEWING, _E.RUN_ENDED): _S.CUT_SHORT,
    (_S.COMPLETED, _E.WITHDRAWN): _S.WAITING,
}

_STATUS: dict[PhaseState, Literal["running", "completed", "failed", "skipped"]] = {
    _S.COMPLETED: "completed",
    _S.CUT_SHORT: "completed",
    _S.FAILED: "failed",
    _S.SKIPPED: "skipped",
}


class ScheduledPhase(Struct):
    unit: PhaseUnit
    state: PhaseState = PhaseState.WAITING
    executions: int = 0
    #: 0-based, since its last start from the original tasks
    attempt: int = 0
    changes: TaskChanges | None = None
    #: whether that execution is for a successor, and has no review (S-PHASE-89)
    is_rerun: bool = False
    #: attempts of its predecessors (S-PHASE-36)
    seen: tuple[str, ...] = ()
    #: successors see it also while the phase runs again (S-PHASE-102)
    accepted: str = ""
    reviews: list[str] = msgspec.field(default_factory=list[str])
    reruns: int = 0
    #: of successors that sent it back; served one after the other (S-PHASE-101)
    requests: deque[str] = msgspec.field(default_factory=deque[str])
    #: they wait for the last rerun
    requesters: list[ScheduledPhase] = msgspec.field(default_factory=list["ScheduledPhase"])
    sent_back: Counter[str] = msgspec.field(default_factory=Counter[str])
    started_at: float = 0.0
    settled_at: float = 0.0

    @property
    def instance(self) -> str:
        """The last execution; "" before the first."""
        return instance_of(self.unit.key, occurrence=self.executions - 1) if self.executions else ""


class PhasesMachine:
    """The scheduling state of a run's phases, in declared order.

    An attempt is one execution of a phase (S-PHASE-31). The review follows when all members have completed, and successors
    begin after acceptance (S-PHASE-62, S-PHASE-65). A failed phase skips its successors (S-PHASE-51, S-PHASE-52).
    """

    def __init__(self, units: Sequence[PhaseUnit], execution: Execution) -> None:
        self._execution = execution
        self._phases = {unit.key: ScheduledPhase(unit) for unit in units}
        self._successors: dict[str, list[ScheduledPhase]] = {unit.key: [] for unit in units}
        for phase in self._phases.values():
            for key in dict.fromkeys(phase.unit.after):
                self._successors[key].append(phase)
        #: attempts and reviews
        self._running: dict[str, ScheduledPhase] = {}
        self._settled: dict[str, ScheduledPhase] = {}
        self._failures: list[UnitFailure] = []
        self._exit: ExitReason | None = None
        self._is_cancelled = False
        self._is_ended = False

    @property
    def states(self) -> dict[str, PhaseState]:
        return {key: phase.state for key, phase in self._phases.items()}

    @property
    def is_stopping(self) -> bool:
        return self._is_cancelled or self._exit is not None

    @property
    def history(self) -> Sequence[HistoryEntry]:
        return ()

    def results(self) -> tuple[PhaseResult, ...]:
        begun = [phase for key, phase in self._phases.items() if phase.executions and key not in self._settled]
        return tuple(
            PhaseResult(
                unit=phase.unit.key,
                status=_STATUS.get(phase.state, "running"),
                outputs=() if phase.state is PhaseState.SKIPPED else self._outputs_of(phase),
                reviews=tuple(phase.reviews),
                attempts=phase.executions,
                started_at=phase.started_at,
                completed_at=phase.settled_at,
            )
            for phase in (*self._settled.values(), *begun)
        )

    def projection(self) -> Parts:
        return ()  # no context entry names the run

    def handle(self, *stimuli: UnitStimulus) -> list[Instruction]:
        done: list[Instruction] = []
        for stimulus in stimuli:
            if not self._is_ended:
                self._handle_one(stimulus, done)
                if len(self._settled) == len(self._phases):
                    self._is_ended = True
                    has_failed = any(phase.state is PhaseState.FAILED for phase in self._phases.values())
                    usual = end_of(is_cancelled=self._is_cancelled, exit_reason=self._exit, has_failed=has_failed)
                    done.append(replace(usual, units=self.results(), unit_failures=tuple(self._failures)))
        return done

    def _handle_one(self, stimulus: UnitStimulus, done: list[Instruction]) -> None:
        match stimulus:
            case Begun():
                self._begin_ready(self._phases.values(), stimulus.at, done)
            case Completed() | Failed() | Exited() | Cancelled():
                if (phase := self._running.pop(stimulus.instance, None)) is not None:
                    if isinstance(stimulus, Exited):
                        self._exit = self._exit or stimulus.reason
                    self._move(phase, self._event_of(phase, stimulus, done), stimulus.at, done)
                    if isinstance(stimulus, Exited):
                        self._stop(stimulus.at, done)
            case CancelRequested():
                self._cancel(stimulus.at, done)
            case StopRequested():
                self._exit = self._exit or stimulus.exit_reason
                self._is_cancelled = self._is_cancelled or stimulus.exit_reason is None
                self._stop(stimulus.at, done)
            case Evaluated(question=ReflectOn(unit=unit)):
                self._end_reflecting(self._phases[unit], stimulus.at, done)
            case Evaluated():
                raise TypeError(f"unexpected stimulus: {stimulus}")
            case _:
                assert_never(stimulus)

    def _event_of(self, phase: ScheduledPhase, end: TaskEnd, done: list[Instruction]) -> PhaseEvent:
        if isinstance(end, Failed):
            return PhaseEvent.FAILED
        if not isinstance(end, Completed):
            return PhaseEvent.RUN_ENDED
        if phase.state is PhaseState.REVIEWING:
            event = self._decide(phase, end, done)
        elif phase.unit.review is None or phase.is_rerun:
            event = PhaseEvent.MEMBERS_COMPLETED
        else:
            return PhaseEvent.RUN_ENDED if self.is_stopping else PhaseEvent.REVIEW_FOLLOWS
        # Reflections on an accepted attempt precede its successors (S-REFL-19).
        is_accepted = event in {PhaseEvent.ACCEPTED, PhaseEvent.MEMBERS_COMPLETED}
        return (
            PhaseEvent.REFLECTION_FOLLOWS if is_accepted and phase.unit.reflecting and not self._is_cancelled else event
        )

    # Decisions of reviews.

    def _decide(self, phase: ScheduledPhase, end: Completed, done: list[Instruction]) -> PhaseEvent:
        read = read_decision_text(end.text)
        if read.is_unknown:
            done.append(
                Warn(text=f"Phase '{phase.unit.name}': its review gave no decision, which approves: {end.text}")
            )
        match read.decision:
            case "approve":
                return PhaseEvent.ACCEPTED
            case "retry":
                return self._send_back(phase, read.text, done)
            case "retry_predecessor":
                return self._send_predecessor_back(phase, read.phase_name, read.text, done)
            case "reject":
                failure = UnitFailure(
                    unit=phase.unit.key,
                    at=end.at,
                    reason="rejected",
                    completed_before=0,  # the nested source sets it
                    message=read.text,
                )
                self._failures.append(failure)
                return PhaseEvent.REJECTED
            case _:
                assert_never(read.decision)

    def _send_back(self, phase: ScheduledPhase, feedback: str, done: list[Instruction]) -> PhaseEvent:
        """Request another attempt, within its cap (S-PHASE-81)."""
        limit = phase.unit.max_retries
        if phase.attempt >= limit:
            return _accept_anyway(phase, f"asked for another attempt after {limit} retries", done)
        if self.is_stopping:
            return PhaseEvent.RUN_ENDED
        phase.attempt += 1
        phase.changes = TaskChanges(attempt=phase.attempt, feedback=feedback, prior=phase.instance)
        return PhaseEvent.SENT_BACK

    def _send_predecessor_back(
        self, phase: ScheduledPhase, name: str, feedback: str, done: list[Instruction]
    ) -> PhaseEvent:
        """Request another attempt of a direct predecessor, within the cap (S-PHASE-86 to S-PHASE-88)."""
        before = [self._phases[key] for key in phase.unit.after if self._phases[key].unit.name == name]
        if not before:
            return _accept_anyway(phase, f"sent back '{name}', which is no direct predecessor", done)
        predecessor, limit = before[0], phase.unit.max_predecessor_retries
        if phase.sent_back[predecessor.unit.key] >= limit:
            return _accept_anyway(phase, f"sent back '{name}' again after {limit} retries of it", done)
        if self.is_stopping:
            return PhaseEvent.RUN_ENDED
        phase.sent_back[predecessor.unit.key] += 1
        predecessor.requests.append(feedback)
        predecessor.requesters.append(phase)
        return PhaseEvent.PREDECESSOR_SENT_BACK

    # Transitions, and the actions on entering a state.

    def _move(self, phase: ScheduledPhase, event: PhaseEvent, at: float, done: list[Instruction]) -> None:
        phase.state = PHASE_TRANSITIONS[phase.state, event]
        self._settled.pop(phase.unit.key, None)
        if phase.state in _STATUS:
            phase.settled_at = at
            self._settled[phase.unit.key] = phase
        match phase.state:
            case PhaseState.RUNNING:
                self._begin_attempt(phase, event, at, done)
            case PhaseState.REVIEWING:
                review = instance_of(phase.unit.review or "", parent=phase.instance)
                phase.reviews.append(review)
                self._running[review] = phase
                done.append(Start(instance=review, wants_text=True))
            case PhaseState.REFLECTING:
                done.append(Evaluate(question=ReflectOn(unit=phase.unit.key, execution=phase.executions)))
            case PhaseState.WAITING:
                self._wait(phase, event, at, done)
            case PhaseState.COMPLETED:
                self._complete(phase, at, done)
            case PhaseState.FAILED | PhaseState.SKIPPED:
                phase.requests.clear()
            case PhaseState.CUT_SHORT:
                pass
            case _:
                assert_never(phase.state)
        if event in {PhaseEvent.FAILED, PhaseEvent.REJECTED}:
            self._fail_after(phase, at, done)

    def _begin_attempt(self, phase: ScheduledPhase, event: PhaseEvent, at: float, done: list[Instruction]) -> None:
        phase.executions += 1
        if phase.executions == 1:
            phase.started_at = at
        if event is PhaseEvent.PREDECESSORS_COMPLETED:
            phase.seen = tuple(before.accepted for before in self._all_before(phase))
        self._execution.scopes.enclose(phase.instance, phase.seen)
        self._running[phase.instance] = phase
        done.append(Start(instance=phase.instance, changes=phase.changes))

    def _wait(self, phase: ScheduledPhase, event: PhaseEvent, at: float, done: list[Instruction]) -> None:
        if event is PhaseEvent.PREDECESSOR_SENT_BACK:  # it starts again from its original tasks (S-PHASE-87)
            phase.attempt, phase.changes = 0, None
            for before in (self._phases[key] for key in phase.unit.after):
                if before.requests and before.state is PhaseState.COMPLETED:
                    self._move(before, PhaseEvent.WITHDRAWN, at, done)
            return
        phase.reruns += 1
        phase.is_rerun = True
        phase.changes = TaskChanges(attempt=phase.reruns, feedback=phase.requests.popleft(), prior=phase.accepted)
        self._execution.scopes.withdraw("", phase.unit.key)
        self._begin_ready((phase,), at, done)

    def _complete(self, phase: ScheduledPhase, at: float, done: list[Instruction]) -> None:
        """Other phases see the outputs from now on, also under the phase's key."""
        scopes = self._execution.scopes
        own = scopes.own(phase.instance)
        parts = tuple(part for key in phase.unit.members for part in own.get(key, ()))
        for scope in ("", phase.instance):
            scopes.put(scope, phase.unit.key, parts)
        phase.accepted = phase.instance
        if self.is_stopping:
            phase.requests.clear()
        if phase.requests:
            self._move(phase, PhaseEvent.WITHDRAWN, at, done)
            return
        phase.requesters.clear()
        self._begin_ready(self._successors[phase.unit.key], at, done)

    def _begin_ready(self, phases: Iterable[ScheduledPhase], at: float, done: list[Instruction]) -> None:
        for phase in phases:
            completed = (self._phases[key].state is PhaseState.COMPLETED for key in phase.unit.after)
            if phase.state is PhaseState.WAITING and not self.is_stopping and all(completed):
                self._move(phase, PhaseEvent.PREDECESSORS_COMPLETED, at, done)

    def _fail_after(self, failed: ScheduledPhase, at: float, done: list[Instruction]) -> None:
        """Fail the phases that sent it back, then skip all waiting successors of the failed ones (S-PHASE-51, S-PHASE-92)."""
        lost = [failed]
        for requester in failed.requesters:
            if requester.state is PhaseState.WAITING:
                self._move(requester, PhaseEvent.RERUN_FAILED, at, done)
                lost.append(requester)
        failed.requesters.clear()
        while lost:
            before = lost.pop(0)
            for phase in self._successors[before.unit.key]:
                if phase.state is PhaseState.WAITING:
                    self._move(phase, PhaseEvent.PREDECESSOR_LOST, at, done)
                    has_failed = before.state is PhaseState.FAILED
                    reason = "failed" if has_failed else f"was skipped, since '{failed.unit.name}' failed"
                    skipped = f"Phase '{phase.unit.name}' is skipped: its predecessor '{before.unit.name}' {reason}"
                    done.append(Warn(text=skipped))
                    lost.append(phase)

    def _cancel(self, at: float, done: list[Instruction]) -> None:
        if self._is_cancelled:
            return
        self._is_cancelled = True
        self._stop(at, done)
        done.extend(Cancel(instance=instance) for instance in sorted(self._running))
        for phase in self._phases.values():
            self._end_reflecting(phase, at, done)

    def _end_reflecting(self, phase: ScheduledPhase, at: float, done: list[Instruction]) -> None:
        if phase.state is PhaseState.REFLECTING:
            self._move(phase, PhaseEvent.REFLECTED, at, done)

    def _stop(self, at: float, done: list[Instruction]) -> None:
        for phase in self._phases.values():
            if phase.state is PhaseState.WAITING:
                self._move(phase, PhaseEvent.RUN_ENDED, at, done)

    def _all_before(self, phase: ScheduledPhase) -> list[ScheduledPhase]:
        found: dict[str, ScheduledPhase] = {}
        open_keys = list(phase.unit.after)
        while open_keys:
            key = open_keys.pop()
            if key not in found:
                found[key] = self._phases[key]
                open_keys += found[key].unit.after
        return list(found.values())

    def _outputs_of(self, phase: ScheduledPhase) -> tuple[str, ...]:
        """Return the outputs of its last attempt in the order of completion. Loops that have not completed come last, by path."""
        members, units = phase.unit.members, self._execution.units
        keys = [key for key in self._execution.scopes.own(phase.instance) if key in members]
        if phase.state is not PhaseState.COMPLETED:
            keys += [key for key in members if key in units and key not in keys]
        return tuple(
            f"{phase.instance}/{key}" if key in units else instance_of(key, parent=phase.instance) for key in keys
        )


def _accept_anyway(phase: ScheduledPhase, what: str, done: list[Instruction]) -> PhaseEvent:
    done.append(Warn(text=f"Phase '{phase.unit.name}': its review {what}; the output is accepted as it is"))
    return PhaseEvent.ACCEPTED
