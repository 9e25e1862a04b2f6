"""The base of all workflow machines, and those of sequential and parallel workflows."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from typing import Protocol, assert_never

from msgspec.structs import replace

from ensemble_ray.plan.plan import HierarchyRules, Plan
from ensemble_ray.schedule.hierarchy import violations_of
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
    Evaluated,
    Exited,
    Failed,
    Stimulus,
    TaskEnd,
    Waiting,
)
from ensemble_ray.schedule.unit import HistoryEntry, Member, Parts, StopRequested, UnitStimulus
from ensemble_ray.values.ids import instance_of, key_of, node_key
from ensemble_ray.values.outputs import ExitReason, RunState


class Source(Protocol):
    """A scheduling machine. The same stimuli always produce the same instructions."""

    def handle(self, *stimuli: Stimulus) -> list[Instruction]: ...


class PlanSource(Source, Protocol):
    """The machine of a plan, with the queries that resuming a run needs."""

    @property
    def running(self) -> tuple[str, ...]: ...

    def is_running(self, instance: str) -> bool: ...

    def is_waiting(self, instance: str) -> bool:
        """Whether a task is suspended."""
        ...

    def is_cancelling(self, instance: str) -> bool:
        """Whether a running task has a `Cancel`."""
        ...

    def list_unanswered(self) -> list[Instruction]:
        """Return the latest instruction per task without an answer. A resumed run repeats them first."""
        ...

    def history_of(self, unit: str) -> Sequence[HistoryEntry]:
        """Return the history that the predicates of a unit see, by its path. It only grows."""
        ...

    def list_following(self, instance: str) -> Iterator[str]:
        """Yield the tasks that start after a running task, one after the other and beside no other task, if each completes."""
        ...


class TaskState(StrEnum):
    """The state of a task in a run.

    `pending`    waits for its dependencies.
    `ready`      waits for a slot under the cap.
    `running`    started; its result has not arrived.
    `waiting`    suspended at an open gate; holds no slot, and starts again when the run resumes (S-REV-115).
    `completed`  succeeded; its output can be used.
    `failed`     failed; dependents cannot run.
    `exited`     requested the early end of the run (S-ENG-59).
    `skipped`    never started: a dependency failed, or the run was ending (S-PAR-21, S-PAR-24).
    `cancelled`  the run was cancelled before the task ended.
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
        return self not in _OPEN


_UNSTARTED = frozenset({TaskState.PENDING, TaskState.READY})
_OPEN = _UNSTARTED | {TaskState.RUNNING, TaskState.WAITING}

#: (from, to) -> why. Every other transition is a defect.
TRANSITIONS: dict[tuple[TaskState, TaskState], str] = {
    (TaskState.PENDING, TaskState.READY): "dependencies resolved",
    (TaskState.READY, TaskState.RUNNING): "a slot is free",
    (TaskState.RUNNING, TaskState.WAITING): "reached an open gate",
    (TaskState.WAITING, TaskState.READY): "run resumes",
    (TaskState.RUNNING, TaskState.COMPLETED): "succeeded",
    (TaskState.RUNNING, TaskState.FAILED): "failed",
    (TaskState.RUNNING, TaskState.EXITED): "requested the end of the run",
    (TaskState.RUNNING, TaskState.CANCELLED): "run cancelled",
    (TaskState.PENDING, TaskState.SKIPPED): "dependency failed, or run ending",
    (TaskState.READY, TaskState.SKIPPED): "run ending",
    (TaskState.PENDING, TaskState.CANCELLED): "run cancelled",
    (TaskState.READY, TaskState.CANCELLED): "run cancelled",
    (TaskState.WAITING, TaskState.CANCELLED): "run cancelled, or ending",
}
_STATE_AFTER: Mapping[type[TaskEnd], TaskState] = {
    Completed: TaskState.COMPLETED,
    Failed: TaskState.FAILED,
    Exited: TaskState.EXITED,
    Cancelled: TaskState.CANCELLED,
}

#: The end of a run that waits for decisions at gates.
WAITS = End(state=RunState.WAITING, exit_reason=ExitReason.WAITING)


class InvalidTransitionError(RuntimeError):
    """A defect of this library: the table has no such transition."""

    def __init__(self, key: str, before: str, after: str, story: str) -> None:
        super().__init__(key, before, after, story)
        self.key = key
        self.before = before
        self.after = after
        self.story = story

    def __str__(self) -> str:
        return f"Task '{self.key}': no transition {self.before} -> {self.after}. Story: {self.story}"


class Machine:
    """The scheduling state of members. A subclass decides which members become ready and what a failure means.

    Args:
        parent: Path of the instances' parent; "": the run.
        changes: Additions to each member; `prior` is the path of an earlier execution of them all.
    """

    def __init__(self, members: Sequence[Member], *, parent: str = "", changes: TaskChanges | None = None) -> None:
        self._members = members
        self._parent = parent
        self._changes = changes
        self._states: dict[str, TaskState] = {self._instance(each.key): TaskState.PENDING for each in members}
        self._ready: deque[str] = deque()
        self._running: set[str] = set()
        self._waiting: dict[str, None] = {}
        self._open = len(members)
        #: time, instance and state of each move, flat: a tuple per move would cost more than the move itself
        self._story: list[float | str | TaskState] = []
        self._completed: list[str] = []
        self._failed: list[str] = []
        self._exit: ExitReason | None = None
        self._is_cancelled = False
        self._is_stopping = False
        self._is_ended = False

    @property
    def states(self) -> Mapping[str, TaskState]:
        return self._states

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(key for key in self._states if key in self._running)

    @property
    def completed(self) -> tuple[str, ...]:
        """In completion order (S-PAR-14)."""
        return tuple(self._completed)

    @property
    def failed(self) -> tuple[str, ...]:
        """In the order of their failures; the first one counts (S-PAR-23)."""
        return tuple(self._failed)

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    @property
    def history(self) -> Sequence[HistoryEntry]:
        return ()

    def results(self) -> Sequence[UnitResult]:
        return ()

    def projection(self) -> Parts:
        instances = [self._instance(each.key) for each in self._members]
        done = tuple(each for each in instances if self._states[each] is TaskState.COMPLETED)
        return (ContextPart(done),) if done else ()

    def is_running(self, instance: str) -> bool:
        return instance in self._running

    def is_waiting(self, instance: str) -> bool:
        return instance in self._waiting

    def is_cancelling(self, instance: str) -> bool:
        return self._is_cancelled and instance in self._running

    def list_unanswered(self) -> list[Instruction]:
        if self._is_cancelled:
            return [Cancel(instance=instance) for instance in self.running]
        return [self._start_of(instance) for instance in self.running]

    def history_of(self, unit: str) -> Sequence[HistoryEntry]:  # noqa: ARG002  the port's signature
        return ()

    def list_following(self, instance: str) -> Iterator[str]:
        if self._running == {instance} and not (self._ready or self._waiting or self._is_stopping):
            yield from self._followers(instance)

    def _followers(self, instance: str) -> Iterator[str]:  # noqa: ARG002  the rule of a workflow
        return iter(())

    def story(self, instance: str) -> str:
        moves = zip(self._story[::3], self._story[1::3], self._story[2::3], strict=True)
        return ", ".join(f"{after} at {at:.3f}" for at, who, after in moves if who == instance)

    def handle(self, *stimuli: UnitStimulus | Waiting | Continued) -> list[Instruction]:
        done: list[Instruction] = []
        for stimulus in stimuli:
            self._handle_one(stimulus, done)
        if not self._is_ended:
            self._start_ready(stimuli[-1].at if stimuli else 0.0, done)
            if not self._open:
                self._is_ended = True
                done.append(self._make_end())
            elif self._waiting and not self._running:
                done.append(WAITS)
        return done

    def _handle_one(self, stimulus: UnitStimulus | Waiting | Continued, done: list[Instruction]) -> None:
        match stimulus:
            case Begun():
                self._begin(stimulus.at)
            case Completed() | Failed() | Exited() | Cancelled():
                self._resolve(stimulus, done)
            case Waiting():
                self._suspend(stimulus, done)
            case Continued():
                self._reactivate(stimulus)
            case CancelRequested():
                if not (self._is_cancelled or self._is_ended):
                    self._is_cancelled = True
                    self._abandon(TaskState.CANCELLED, "run cancelled", stimulus.at, done)
                    done.extend(Cancel(instance=each) for each in sorted(self._running))  # S-SET-27
            case StopRequested():
                self._is_stopping = True
                if any(state in _UNSTARTED for state in self._states.values()):  # else only its units end sooner
                    self._exit = self._exit or stimulus.exit_reason
                    self._is_cancelled = self._is_cancelled or stimulus.exit_reason is None
                    self._abandon(TaskState.SKIPPED, "run ending early", stimulus.at, done)
            case Evaluated():
                raise TypeError(f"unexpected stimulus: {stimulus}")
            case _:
                assert_never(stimulus)

    # The rules of a workflow.

    def _begin(self, at: float) -> None:
        for instance in self._states:
            self._make_ready(instance, at)

    def _after_completion(self, instance: str, at: float) -> None:
        """Make the members ready that waited for this one."""

    def _after_failure(self, instance: str, at: float, done: list[Instruction]) -> None:
        """Skip the members that cannot run after this failure."""

    def _free_slots(self) -> int:
        raise NotImplementedError

    # The rules that all workflows share.

    def _resolve(self, end: TaskEnd, done: list[Instruction]) -> None:
        if end.instance not in self._running:  # it is late, such as a message of a replaced process
            return
        self._running.remove(end.instance)
        self._move(end.instance, _STATE_AFTER[type(end)], end.at)
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
                self._exit = self._exit or end.reason  # the first reason wins; running tasks may finish (S-PAR-30)
                self._abandon(TaskState.SKIPPED, "run ending early", end.at, done)
            case Cancelled():
                pass
            case _:
                assert_never(end)

    def _suspend(self, stimulus: Waiting, done: list[Instruction]) -> None:
        instance = stimulus.instance
        if instance not in self._running:
            return
        self._running.remove(instance)
        self._move(instance, TaskState.WAITING, stimulus.at)
        self._waiting[instance] = None
        if self._is_stopping:  # an ending run opens no gate (S-REV-17)
            self._skip(instance, TaskState.CANCELLED, "run ending early", stimulus.at, done)

    def _reactivate(self, stimulus: Continued) -> None:
        wanted = stimulus.instances
        chosen = [each for each in self._waiting if wanted is None or each in wanted]
        for instance in chosen:
            del self._waiting[instance]
            self._move(instance, TaskState.READY, stimulus.at)
        self._ready.extendleft(reversed(chosen))  # they had started before all ready ones

    def _abandon(self, after: TaskState, reason: str, at: float, done: list[Instruction]) -> None:
        """Resolve all members that are not running. Suspended ones are cancelled (S-REV-119)."""
        self._is_stopping = True
        self._ready.clear()
        for instance, state in self._states.items():
            if state in _UNSTARTED:
                self._skip(instance, after, reason, at, done)
            elif state is TaskState.WAITING:
                self._skip(instance, TaskState.CANCELLED, reason, at, done)

    def _skip(self, instance: str, after: TaskState, reason: str, at: float, done: list[Instruction]) -> None:
        self._waiting.pop(instance, None)
        self._move(instance, after, at)
        done.append(Skip(instance=instance, reason=reason))

    def _move(self, instance: str, after: TaskState, at: float) -> None:
        before = self._states[instance]
        if (before, after) not in TRANSITIONS:
            raise InvalidTransitionError(key_of(instance), before, after, self.story(instance))
        self._states[instance] = after
        self._story += (at, instance, after)
        if after not in _OPEN:
            self._open -= 1

    def _make_ready(self, instance: str, at: float) -> None:
        self._move(instance, TaskState.READY, at)
        self._ready.append(instance)

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

    def _make_end(self) -> End:
        return end_of(is_cancelled=self._is_cancelled, exit_reason=self._exit, has_failed=bool(self._failed))


def end_of(*, is_cancelled: bool, exit_reason: ExitReason | None, has_failed: bool) -> End:
    """Return the end of a run: cancelling outranks an early exit, an early exit outranks a failed task (S-PAR-30)."""
    if is_cancelled:
        return End(state=RunState.CANCELLED, exit_reason=ExitReason.CANCELLED)
    if exit_reason is not None:
        is_exhausted = exit_reason is ExitReason.BUDGET_EXHAUSTED  # a larger budget can resume the run (S-BUD-6)
        state = RunState.BUDGET_EXHAUSTED if is_exhausted else RunState.COMPLETED
        return End(state=state, exit_reason=exit_reason)
    if has_failed:
        return End(state=RunState.FAILED, exit_reason=ExitReason.ERROR)
    return End(state=RunState.COMPLETED, exit_reason=ExitReason.COMPLETED)


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
