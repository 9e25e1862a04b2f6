"""The machine of a loop."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, assert_never

from msgspec.structs import replace

from ensemble_ray.plan.plan import LoopUnit
from ensemble_ray.schedule.instructions import (
    Announce,
    Cancel,
    ContextPart,
    End,
    Evaluate,
    FollowUpQuestions,
    Inform,
    Instruction,
    IterationEnded,
    LoopResult,
    ResetMemory,
    Start,
    TaskChanges,
    UnitFailure,
    UntilHolds,
)
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
from ensemble_ray.schedule.unit import (
    Execution,
    HistoryEntry,
    Parts,
    StopRequested,
    UnitStimulus,
    body_of,
    list_shown,
    scope_keys,
    scope_of,
)
from ensemble_ray.values.ids import instance_of, key_of
from ensemble_ray.values.outputs import ExitReason, RunState


class LoopState(StrEnum):
    """The state of a loop.

    `pending`           not begun.
    `running`           a task of the body runs.
    `asking`            waits for the predicate.
    `resetting`         memory is reset before the next iteration.
    `exiting`           the run ends early around it: the running task is the last.
    `cancelling`        the run was cancelled, or failed around it: the running task is the last.
    `converged`         the predicate held.
    `capped`            the cap on iterations ended it.
    `budget_exhausted`  the cap on tokens ended it.
    `exited`            a task ended the run early, or the run ended early around it.
    `failed`            a task, the predicate, or resetting memory failed.
    `cancelled`         the run was cancelled or failed around it.
    """

    PENDING = "pending"
    RUNNING = "running"
    ASKING = "asking"
    RESETTING = "resetting"
    EXITING = "exiting"
    CANCELLING = "cancelling"
    CONVERGED = "converged"
    CAPPED = "capped"
    BUDGET_EXHAUSTED = "budget_exhausted"
    EXITED = "exited"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self in _REASONS


class LoopEvent(StrEnum):
    BEGUN = "begun"
    TASK_COMPLETED = "task completed, another follows"
    ITERATION_COMPLETED = "iteration completed"
    VERDICT_TRUE = "predicate holds"
    REPEAT = "below every cap"
    REPEAT_WITH_RESET = "below every cap, with a memory reset"
    CAP_REACHED = "cap on iterations reached"
    BUDGET_REACHED = "cap on tokens reached"
    MEMORY_RESET = "memory was reset"
    RAISED = "user code raised"
    TASK_FAILED = "task failed"
    TASK_EXITED = "task ended the run early"
    TASK_CANCELLED = "task was stopped"
    RUN_EXITS = "run ends early around it"
    RUN_FAILS = "run failed around it"
    RUN_CANCELLED = "run cancelled"


_S, _E = LoopState, LoopEvent

#: An event without an entry is late, and ignored. Without a predicate, `_judge` replaces the event of a completed iteration.
LOOP_TRANSITIONS: dict[tuple[LoopState, LoopEvent], LoopState] = {
    (_S.PENDING, _E.BEGUN): _S.RUNNING,
    (_S.RUNNING, _E.TASK_COMPLETED): _S.RUNNING,
    (_S.RUNNING, _E.ITERATION_COMPLETED): _S.ASKING,
    (_S.RUNNING, _E.REPEAT): _S.RUNNING,
    (_S.RUNNING, _E.REPEAT_WITH_RESET): _S.RESETTING,
    (_S.RUNNING, _E.CAP_REACHED): _S.CAPPED,
    (_S.RUNNING, _E.BUDGET_REACHED): _S.BUDGET_EXHAUSTED,
    (_S.RUNNING, _E.TASK_FAILED): _S.FAILED,
    (_S.RUNNING, _E.TASK_EXITED): _S.EXITED,
    (_S.RUNNING, _E.TASK_CANCELLED): _S.CANCELLED,
    (_S.RUNNING, _E.RUN_EXITS): _S.EXITING,
    (_S.RUNNING, _E.RUN_FAILS): _S.CANCELLING,
    (_S.RUNNING, _E.RUN_CANCELLED): _S.CANCELLING,
    (_S.ASKING, _E.VERDICT_TRUE): _S.CONVERGED,
    (_S.ASKING, _E.REPEAT): _S.RUNNING,
    (_S.ASKING, _E.REPEAT_WITH_RESET): _S.RESETTING,
    (_S.ASKING, _E.CAP_REACHED): _S.CAPPED,
    (_S.ASKING, _E.BUDGET_REACHED): _S.BUDGET_EXHAUSTED,
    (_S.ASKING, _E.RAISED): _S.FAILED,
    (_S.ASKING, _E.RUN_EXITS): _S.EXITED,
    (_S.ASKING, _E.RUN_FAILS): _S.CANCELLED,
    (_S.ASKING, _E.RUN_CANCELLED): _S.CANCELLED,
    (_S.RESETTING, _E.MEMORY_RESET): _S.RUNNING,
    (_S.RESETTING, _E.RAISED): _S.FAILED,
    (_S.RESETTING, _E.RUN_EXITS): _S.EXITED,
    (_S.RESETTING, _E.RUN_FAILS): _S.CANCELLED,
    (_S.RESETTING, _E.RUN_CANCELLED): _S.CANCELLED,
    (_S.EXITING, _E.TASK_COMPLETED): _S.EXITED,
    (_S.EXITING, _E.ITERATION_COMPLETED): _S.EXITED,
    (_S.EXITING, _E.TASK_FAILED): _S.FAILED,
    (_S.EXITING, _E.TASK_EXITED): _S.EXITED,
    (_S.EXITING, _E.TASK_CANCELLED): _S.EXITED,
    (_S.EXITING, _E.RUN_CANCELLED): _S.CANCELLING,
    (_S.CANCELLING, _E.TASK_COMPLETED): _S.CANCELLED,
    (_S.CANCELLING, _E.ITERATION_COMPLETED): _S.CANCELLED,
    (_S.CANCELLING, _E.TASK_FAILED): _S.FAILED,
    (_S.CANCELLING, _E.TASK_EXITED): _S.EXITED,
    (_S.CANCELLING, _E.TASK_CANCELLED): _S.CANCELLED,
    (_S.CANCELLING, _E.RUN_CANCELLED): _S.CANCELLING,
}

_REASONS: dict[LoopState, Literal["predicate", "max_iterations", "exit_early", "budget_exhausted"] | None] = {
    _S.CONVERGED: "predicate",
    _S.CAPPED: "max_iterations",
    _S.BUDGET_EXHAUSTED: "budget_exhausted",
    _S.EXITED: "exit_early",
    _S.FAILED: None,
    _S.CANCELLED: None,
}


class LoopMachine:
    """The scheduling state of one execution of a loop. Its tasks run one after the other, in every workflow (S-LOOP-3)."""

    def __init__(self, unit: LoopUnit, execution: Execution) -> None:
        self._unit = unit
        self._execution = execution
        self._scope = scope_of(execution.instance)
        self._path = key_of(execution.instance)
        self._state = LoopState.PENDING
        self._history: list[HistoryEntry] = []
        self._current: list[str] = []
        self._running = ""
        self._iteration_began_at = 0.0
        self._used_tokens = 0
        self._exit_reason = ExitReason.USER_EXIT_EARLY

    @property
    def state(self) -> LoopState:
        return self._state

    @property
    def is_stopping(self) -> bool:
        return self._state in {LoopState.EXITING, LoopState.CANCELLING}

    @property
    def history(self) -> list[HistoryEntry]:
        return self._history

    def results(self) -> tuple[LoopResult, ...]:
        iterations = [entry.instances for entry in self._history]
        if self._current:
            iterations.append(tuple(self._current))
        reason = _REASONS.get(self._state)
        return (LoopResult(unit=self._path, iterations=tuple(iterations), termination_reason=reason),)

    def projection(self) -> Parts:
        """The outputs that the output mode selects (S-LOOP-70, S-LOOP-71, S-LOOP-72)."""
        shown = list_shown(self._unit, [entry.instances for entry in self._history])
        if self._unit.output_mode == "all_iterations":
            return tuple(ContextPart(instances, is_joined=True) for instances in shown)
        return (ContextPart(tuple(instance for (instance,) in shown)),)

    def handle(self, *stimuli: UnitStimulus) -> list[Instruction]:
        done: list[Instruction] = []
        for stimulus in stimuli:
            event = None if self._state.is_over else self._event_of(stimulus, done)
            if event is not None and (after := LOOP_TRANSITIONS.get((self._state, event))) is not None:
                self._state = after
                self._enter(event, stimulus, done)
        return done

    # The event of a stimulus.

    def _event_of(self, stimulus: UnitStimulus, done: list[Instruction]) -> LoopEvent | None:
        match stimulus:
            case Begun():
                return LoopEvent.BEGUN
            case Completed() | Failed() | Exited() | Cancelled():
                return self._event_of_task(stimulus, done) if stimulus.instance == self._running else None
            case Evaluated():
                return self._event_of_answer(stimulus)
            case CancelRequested():
                return LoopEvent.RUN_CANCELLED
            case StopRequested():
                return LoopEvent.RUN_FAILS if stimulus.exit_reason is None else LoopEvent.RUN_EXITS
            case _:
                assert_never(stimulus)

    def _event_of_task(self, end: TaskEnd, done: list[Instruction]) -> LoopEvent:
        match end:
            case Completed():
                return self._event_of_output(end, done)
            case Failed():
                return LoopEvent.TASK_FAILED
            case Exited():
                if end.has_output:  # the gate after the task ended the run
                    self._current.append(end.instance)
                return LoopEvent.TASK_EXITED
            case Cancelled():
                return LoopEvent.TASK_CANCELLED
            case _:
                assert_never(end)

    def _event_of_answer(self, answered: Evaluated) -> LoopEvent | None:
        if answered.question == self._reset_question():
            return LoopEvent.RAISED if answered.answer is None else LoopEvent.MEMORY_RESET
        if answered.question != self._until_question():
            return None
        if answered.answer is None:
            return LoopEvent.RAISED
        return LoopEvent.VERDICT_TRUE if answered.answer else self._judge()

    def _event_of_output(self, completed: Completed, done: list[Instruction]) -> LoopEvent:
        self._current.append(completed.instance)
        self._used_tokens += max(completed.total_tokens, 0)  # an unknown number counts as 0
        if len(self._current) < len(self._unit.body):
            return LoopEvent.TASK_COMPLETED
        entry = HistoryEntry(names=self._unit.body_names, instances=tuple(self._current))
        self._history.append(entry)
        self._current.clear()
        # The announcement precedes all that follows from the iteration (S-LOOP-107).
        ended = IterationEnded(
            unit=self._path,
            iteration=len(self._history),
            instances=entry.instances,
            duration_s=completed.at - self._iteration_began_at,
        )
        done.append(Announce(what=ended))
        # The predicate is evaluated after the last allowed iteration too, and wins over the caps (S-LOOP-41, S-LOOP-42).
        asks = self._unit.has_until or self._state is not LoopState.RUNNING
        return LoopEvent.ITERATION_COMPLETED if asks else self._judge()

    def _judge(self) -> LoopEvent:
        """Return the event after an iteration whose predicate did not hold; the cap on iterations wins (S-LOOP-141)."""
        unit = self._unit
        if len(self._history) >= unit.max_iterations:
            return LoopEvent.CAP_REACHED
        if unit.max_tokens is not None and self._used_tokens >= unit.max_tokens:
            return LoopEvent.BUDGET_REACHED
        is_reset = unit.memory_mode != "accumulate" and bool(unit.memory_scopes)  # S-LOOP-91
        return LoopEvent.REPEAT_WITH_RESET if is_reset else LoopEvent.REPEAT

    # The actions on entering a state.

    def _enter(self, event: LoopEvent, stimulus: UnitStimulus, done: list[Instruction]) -> None:
        match self._state:
            case LoopState.RUNNING:
                self._start_next(stimulus.at, done)
            case LoopState.ASKING:
                done.append(Evaluate(question=self._until_question()))
            case LoopState.RESETTING:
                done.append(Evaluate(question=self._reset_question()))
            case LoopState.EXITING | LoopState.CANCELLING:
                self._note_exit(stimulus)
                if event is LoopEvent.RUN_CANCELLED:
                    done.append(Cancel(instance=self._running))
            case _:
                self._end(stimulus, done)

    def _until_question(self) -> UntilHolds:
        return UntilHolds(unit=self._path, iteration=len(self._history))

    def _reset_question(self) -> ResetMemory:
        return ResetMemory(unit=self._path, iteration=len(self._history) + 1)

    def _start_next(self, at: float, done: list[Instruction]) -> None:
        unit, number, position = self._unit, len(self._history), len(self._current)
        iteration = instance_of(unit.key, occurrence=number, parent=self._scope)
        self._running = instance_of(unit.body[position], parent=iteration)
        asks_after = None
        if unit.has_until and position == len(unit.body) - 1:
            asks_after = FollowUpQuestions(
                questions=(UntilHolds(unit=self._path, iteration=number + 1),),
                names=unit.body_names,
                instances=(*self._current, self._running),
            )
        if position:
            done.append(Start(instance=self._running, asks_after=asks_after))
            return
        self._iteration_began_at = at
        if number:
            self._drop_scope(number - 1)
        # The first task of every iteration sees the context of the loop (S-LOOP-124).
        keys = scope_keys(unit.context, unit.context_tasks)
        found = (self._execution.scopes.find(self._scope, key) for key in keys)
        context = tuple(part for parts in found for part in parts or ()) or None
        start = Start(instance=self._running, changes=self._changes(), context=context, asks_after=asks_after)
        done.append(start)

    def _changes(self) -> TaskChanges | None:
        """Return the additions to the first task of an iteration (S-LOOP-100, S-LOOP-140)."""
        number = len(self._history)
        outer = self._execution.changes
        if not number:
            return None if outer is None else replace(outer, prior=self._execution.scopes.last_output(outer.prior))
        if not self._unit.inject_feedback:
            return None
        feedback = (
            f"Loop iteration {number + 1} of {self._unit.max_iterations}. "
            "Prior iteration's final body output is shown above; revise based on it."
        )
        return TaskChanges(attempt=number, feedback=feedback, prior=self._history[-1].instances[-1])

    def _drop_scope(self, number: int) -> None:
        self._execution.scopes.drop(instance_of(self._unit.key, occurrence=number, parent=self._scope))

    def _note_exit(self, stimulus: UnitStimulus) -> None:
        if isinstance(stimulus, Exited):
            self._exit_reason = stimulus.reason
        elif isinstance(stimulus, StopRequested) and stimulus.exit_reason is not None:
            self._exit_reason = stimulus.exit_reason

    def _end(self, stimulus: UnitStimulus, done: list[Instruction]) -> None:
        unit, number = self._unit, len(self._history)
        self._note_exit(stimulus)
        self._drop_scope(number if self._current else number - 1)
        failures = self._failures(stimulus)
        state, exit_reason = RunState.COMPLETED, ExitReason.COMPLETED
        if self._state is LoopState.CANCELLED:
            state, exit_reason = RunState.CANCELLED, ExitReason.CANCELLED
        elif self._state is LoopState.FAILED or failures:
            state, exit_reason = RunState.FAILED, ExitReason.ERROR
        elif self._state is LoopState.EXITED:
            exit_reason = self._exit_reason
        if exit_reason is ExitReason.COMPLETED:
            # Context entries may name one task of the body: they see its output of the last iteration (S-LOOP-174).
            for task, instance in zip(unit.body, self._history[-1].instances, strict=True):
                self._execution.scopes.put(self._scope, body_of(unit.key, task), (ContextPart((instance,)),))
        if self._state is LoopState.CONVERGED:  # S-LOOP-132
            after = f"{number}/{unit.max_iterations}"
            done.append(Inform(text=f"Loop '{unit.name}' stopped by predicate after iteration {after}"))
        elif self._state is LoopState.CAPPED:
            cap = f"its cap of {unit.max_iterations} iterations: {unit.on_max_iterations}"
            done.append(Inform(text=f"Loop '{unit.name}' reached {cap}"))
        done.append(End(state=state, exit_reason=exit_reason, units=self.results(), unit_failures=failures))

    def _failures(self, stimulus: UnitStimulus) -> tuple[UnitFailure, ...]:
        # The nested source sets `completed_before`.
        is_capped = self._state in {LoopState.CAPPED, LoopState.BUDGET_EXHAUSTED}
        if is_capped and self._unit.on_max_iterations == "throw":
            return (UnitFailure(unit=self._path, at=stimulus.at, reason="cap", completed_before=0),)
        if self._state is not LoopState.FAILED or not isinstance(stimulus, Evaluated):
            return ()
        failure = UnitFailure(
            unit=self._path,
            at=stimulus.at,
            reason="evaluation",
            completed_before=0,
            message=stimulus.message,
            error_type=stimulus.error_type,
        )
        return (failure,)
