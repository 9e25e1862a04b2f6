"""What all scheduling machines share: the door, the states, the story, cancelling and ending.

Rules:
1. `handle` is the one door. The same stimuli give the same instructions; no clock, no I/O, no randomness.
2. A cancelled run starts nothing more; it ends when no task runs (S-SET-27).
3. An early exit starts nothing more, lets running tasks finish and outranks a recorded failure (S-PAR-30).
4. A stimulus for a task that is resolved already is ignored: a late message of a replaced process changes nothing.
5. The run ends exactly once, when every task is resolved.
6. A task that waits at a gate holds no slot. Where nothing else runs or can start, the run waits: it ends for now. Told that
   it goes on, it starts those tasks again. A run that ends for another reason cancels them (S-REV-116, S-REV-119).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, assert_never

from ensemble_ray.schedule.instructions import (
    Cancel,
    ContextPart,
    End,
    Instruction,
    Skip,
    Start,
    TaskChanges,
    UnitResult,
)
from ensemble_ray.schedule.stimuli import (
    Begun,
    Cancelled,
    CancelRequested,
    Completed,
    Continued,
    Decided,
    Evaluated,
    Exited,
    Failed,
    Waiting,
)
from ensemble_ray.schedule.unit import HistoryEntry, Member, Parts, StopRequested, UnitStimulus
from ensemble_ray.values.ids import instance_of, key_of, node_key
from ensemble_ray.values.outputs import ExitReason, RunState

if TYPE_CHECKING:
    from ensemble_ray.schedule.stimuli import Stimulus


class TaskState(StrEnum):
    """Where a task of a run stands.

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


#: How a run ends for now whose tasks wait at gates.
WAITS = End(state=RunState.WAITING, exit_reason=ExitReason.WAITING)


_STATE_AFTER: Mapping[type[Completed | Failed | Exited | Cancelled], TaskState] = {
    Completed: TaskState.COMPLETED,
    Failed: TaskState.FAILED,
    Exited: TaskState.EXITED,
    Cancelled: TaskState.CANCELLED,
}
_UNSTARTED = frozenset({TaskState.PENDING, TaskState.READY})
#: What a run that ends releases: none of it runs.
_RELEASABLE = _UNSTARTED | {TaskState.WAITING}


class Machine:
    """The scheduling state of members. A workflow kind decides what becomes ready and what a failure means.

    Args:
        members: Tasks and units, in declared order.
        parent: The path that their instances lie below; "": of the run.
        changes: What each of them has beside itself; `prior` is the path of an earlier execution of them all.
    """

    def __init__(self, members: Sequence[Member], *, parent: str = "", changes: TaskChanges | None = None) -> None:
        self._members = members
        self._parent = parent
        self._changes = changes
        self._states: dict[str, TaskState] = {self._instance(each.key): TaskState.PENDING for each in members}
        self._ready: deque[str] = deque()
        self._running: set[str] = set()
        #: put down at gates, in that order
        self._waiting: dict[str, None] = {}
        self._open = len(members)
        #: time, instance and state of each move, one behind the other: a tuple for each costs more than the move itself
        self._story: list[float | str | TaskState] = []
        self._completed: list[str] = []
        self._failed: list[str] = []
        self._exit: ExitReason | None = None
        self._is_cancelled = False
        self._is_stopping = False
        self._is_ended = False

    # What may be asked.

    @property
    def states(self) -> Mapping[str, TaskState]:
        """Return the state of every task, by instance."""
        return self._states

    @property
    def running(self) -> tuple[str, ...]:
        """Return the tasks that were handed out and have not been reported, in plan order."""
        return tuple(key for key in self._states if key in self._running)

    @property
    def completed(self) -> tuple[str, ...]:
        """Return the completed tasks in completion order (S-PAR-14)."""
        return tuple(self._completed)

    @property
    def failed(self) -> tuple[str, ...]:
        """Return the failed tasks in the order of their failures; the first one counts (S-PAR-23)."""
        return tuple(self._failed)

    @property
    def is_stopping(self) -> bool:
        """Whether it starts nothing more."""
        return self._is_stopping

    @property
    def history(self) -> Sequence[HistoryEntry]:
        """Return nothing: no predicate is asked."""
        return ()

    def results(self) -> Sequence[UnitResult]:
        """Return nothing: its members have results of their own."""
        return ()

    def projection(self) -> Parts:
        """Return the outputs of its members, in declared order."""
        instances = [self._instance(each.key) for each in self._members]
        done = tuple(each for each in instances if self._states[each] is TaskState.COMPLETED)
        return (ContextPart(done),) if done else ()

    def is_running(self, instance: str) -> bool:
        """Whether that was handed out and has not been reported."""
        return instance in self._running

    def is_waiting(self, instance: str) -> bool:
        """Whether that was put down, and is started again when the run goes on."""
        return instance in self._waiting

    def is_cancelling(self, instance: str) -> bool:
        """Whether that is running and was asked to stop."""
        return self._is_cancelled and instance in self._running

    def list_unanswered(self) -> list[Instruction]:
        """Return what was wanted and has no answer yet, in plan order: what a run that goes on does first."""
        if self._is_cancelled:
            return [Cancel(instance=instance) for instance in self.running]
        return [self._start_of(instance) for instance in self.running]

    def history_of(self, unit: str) -> Sequence[HistoryEntry]:  # noqa: ARG002  as every source of a plan is asked
        """Return nothing: no unit is inside."""
        return ()

    def story(self, instance: str) -> str:
        """Return everything that happened to a task, oldest first."""
        moves = zip(self._story[::3], self._story[1::3], self._story[2::3], strict=True)
        return ", ".join(f"{after} at {at:.3f}" for at, who, after in moves if who == instance)

    # The door.

    def handle(self, *stimuli: UnitStimulus | Waiting | Continued) -> list[Instruction]:
        """Take facts, give what is to be done now, in order."""
        done: list[Instruction] = []
        for stimulus in stimuli:
            self._handle_one(stimulus, done)
        if not self._is_ended:
            self._start_ready(stimuli[-1].at if stimuli else 0.0, done)
            self._end_if_resolved(done)
        return done

    def _handle_one(self, stimulus: UnitStimulus | Waiting | Continued, done: list[Instruction]) -> None:
        match stimulus:
            case Begun():
                self._begin(stimulus.at)
            case Completed() | Failed() | Exited() | Cancelled():
                if self._resolve(stimulus.instance, _STATE_AFTER[type(stimulus)], stimulus.at):
                    self._follow(stimulus, done)
            case Waiting():
                self._put_down(stimulus, done)
            case Continued():
                self._pick_up(stimulus)
            case CancelRequested():
                self._cancel(stimulus.at, done)
            case StopRequested():
                self._stop(stimulus, done)
            case Evaluated() | Decided():
                raise TypeError(f"nothing was asked that {stimulus} answers")
            case _:
                assert_never(stimulus)

    def _follow(self, end: Completed | Failed | Exited | Cancelled, done: list[Instruction]) -> None:
        """Do what follows from the end of a task."""
        match end:
            case Completed():
                self._completed.append(end.instance)
                self._after_completion(end.instance, end.at)
            case Failed():
                self._failed.append(end.instance)
                self._after_failure(end.instance, end.at, done)
            case Exited():
                if end.has_output:
                    self._completed.append(end.instance)
                self._exit_early(end, done)
            case Cancelled():
                pass
            case _:
                assert_never(end)

    # What a workflow kind decides.

    def _begin(self, at: float) -> None:
        """Make ready what can start."""
        raise NotImplementedError

    def _after_completion(self, instance: str, at: float) -> None:
        """Make ready what that completion frees."""
        raise NotImplementedError

    def _after_failure(self, instance: str, at: float, done: list[Instruction]) -> None:
        """Skip what that failure forbids."""
        raise NotImplementedError

    def _free_slots(self) -> int:
        """How many more tasks may start now."""
        raise NotImplementedError

    # What they share.

    def _exit_early(self, stimulus: Exited, done: list[Instruction]) -> None:
        """Start nothing more; the first reason wins (S-PAR-30)."""
        self._exit = self._exit or stimulus.reason
        self._abandon(TaskState.SKIPPED, "run ending early", stimulus.at, done)

    def _cancel(self, at: float, done: list[Instruction]) -> None:
        if self._is_cancelled or self._is_ended:
            return
        self._is_cancelled = True
        self._abandon(TaskState.CANCELLED, "run cancelled", at, done)
        done.extend(Cancel(instance=each) for each in sorted(self._running))

    def _put_down(self, stimulus: Waiting, done: list[Instruction]) -> None:
        instance = stimulus.instance
        if instance not in self._running:
            return
        self._running.remove(instance)
        self._move(instance, TaskState.WAITING, stimulus.at)
        self._waiting[instance] = None
        if self._is_stopping:  # nobody is asked any more (S-REV-17)
            self._skip(instance, TaskState.CANCELLED, "run ending early", stimulus.at, done)

    def _pick_up(self, stimulus: Continued) -> None:
        """Make ready what waits, before all that is ready: it was started before."""
        wanted = stimulus.instances
        chosen = [each for each in self._waiting if wanted is None or each in wanted]
        for instance in chosen:
            del self._waiting[instance]
            self._move(instance, TaskState.READY, stimulus.at)
        self._ready.extendleft(reversed(chosen))

    def _stop(self, stimulus: StopRequested, done: list[Instruction]) -> None:
        """Start nothing more, since the run is ending around this; where all had started, that just ends, units sooner."""
        self._is_stopping = True
        if any(state in _UNSTARTED for state in self._states.values()):
            self._exit = self._exit or stimulus.exit_reason
            self._is_cancelled = self._is_cancelled or stimulus.exit_reason is None
            self._abandon(TaskState.SKIPPED, "run ending early", stimulus.at, done)

    def _move(self, instance: str, after: TaskState, at: float) -> None:
        before = self._states[instance]
        if (before, after) not in TRANSITIONS:
            raise InvalidTransitionError(key_of(instance), before, after, self.story(instance))
        self._states[instance] = after
        self._story += (at, instance, after)
        if after.is_resolved:
            self._open -= 1

    def _make_ready(self, instance: str, at: float) -> None:
        self._move(instance, TaskState.READY, at)
        self._ready.append(instance)

    def _resolve(self, instance: str, after: TaskState, at: float) -> bool:
        """Resolve a running task; False if it is not running any more (rule 4)."""
        if instance not in self._running:
            return False
        self._running.remove(instance)
        self._move(instance, after, at)
        return True

    def _abandon(self, after: TaskState, reason: str, at: float, done: list[Instruction]) -> None:
        """Resolve everything that has not started."""
        self._is_stopping = True
        self._ready.clear()
        for instance, state in self._states.items():
            if state in _RELEASABLE:
                self._skip(instance, after if state in _UNSTARTED else TaskState.CANCELLED, reason, at, done)

    def _skip(self, instance: str, after: TaskState, reason: str, at: float, done: list[Instruction]) -> None:
        self._waiting.pop(instance, None)
        self._move(instance, after, at)
        done.append(Skip(instance=instance, reason=reason))

    def _start_ready(self, at: float, done: list[Instruction]) -> None:
        free_slots = self._free_slots()
        while self._ready and free_slots > 0:
            instance = self._ready.popleft()
            self._move(instance, TaskState.RUNNING, at)
            self._running.add(instance)
            done.append(self._start_of(instance))
            free_slots -= 1

    def _start_of(self, instance: str) -> Start:
        changes = self._changes
        if changes is not None and changes.prior:
            changes = replace(changes, prior=instance_of(node_key(instance), parent=changes.prior))
        return Start(instance=instance, changes=changes)

    def _instance(self, key: str) -> str:
        return instance_of(key, parent=self._parent)

    def _end_if_resolved(self, done: list[Instruction]) -> None:
        if not self._open:
            self._is_ended = True
            done.append(self._make_end())
        elif self._waiting and not self._running:
            done.append(WAITS)

    def _make_end(self) -> End:
        """How the run ends, now that nothing is open."""
        return end_of(is_cancelled=self._is_cancelled, exit_reason=self._exit, has_failed=bool(self._failed))

    # Invariants, for tests and for hunting defects.

    def validate(self) -> None:
        """Check the invariants that hold between any two stimuli.

        Raises:
            AssertionError: one does not hold.
        """
        states = list(self._states.values())
        assert self._open == sum(not state.is_resolved for state in states), "open count"  # noqa: S101  invariants
        assert self._running == {k for k, s in self._states.items() if s is TaskState.RUNNING}, "running set"  # noqa: S101
        assert set(self._waiting) == {k for k, s in self._states.items() if s is TaskState.WAITING}, "waiting set"  # noqa: S101
        assert set(self._ready) == {k for k, s in self._states.items() if s is TaskState.READY}, "ready queue"  # noqa: S101
        assert self._is_ended == (self._open == 0), "ended exactly when all are resolved"  # noqa: S101


def end_of(*, is_cancelled: bool, exit_reason: ExitReason | None, has_failed: bool) -> End:
    """Return how a run ends: cancelling outranks an early exit, an early exit a failed task (S-PAR-30)."""
    if is_cancelled:
        return End(state=RunState.CANCELLED, exit_reason=ExitReason.CANCELLED)
    if exit_reason is not None:
        is_spent = exit_reason is ExitReason.BUDGET_EXHAUSTED  # more may be done with a larger budget (S-BUD-6)
        state = RunState.BUDGET_EXHAUSTED if is_spent else RunState.COMPLETED
        return End(state=state, exit_reason=exit_reason)
    if has_failed:
        return End(state=RunState.FAILED, exit_reason=ExitReason.ERROR)
    return End(state=RunState.COMPLETED, exit_reason=ExitReason.COMPLETED)


class Source(Protocol):
    """The machine of one kind of work: what is ready, what follows from a result, is it over?"""

    def handle(self, *stimuli: Stimulus) -> list[Instruction]:
        """Take facts, give what is to be done now, in order."""
        ...


class PlanSource(Source, Protocol):
    """The source of a plan, with what a run that goes on has to know."""

    @property
    def running(self) -> tuple[str, ...]:
        """Return the tasks that were handed out and have not been reported."""
        ...

    def is_running(self, instance: str) -> bool:
        """Whether that was handed out and has not been reported."""
        ...

    def is_waiting(self, instance: str) -> bool:
        """Whether that was put down, and is started again when the run goes on."""
        ...

    def is_cancelling(self, instance: str) -> bool:
        """Whether that is running and was asked to stop."""
        ...

    def list_unanswered(self) -> list[Instruction]:
        """Return what was wanted and has no answer yet, of a task what was wanted last: what a run that goes on does first."""
        ...

    def history_of(self, unit: str) -> Sequence[HistoryEntry]:
        """Return what the predicates of a unit are shown, by its path; it only grows."""
        ...
