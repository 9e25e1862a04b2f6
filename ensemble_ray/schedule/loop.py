"""A loop: its body in order, again and again, until the predicate holds or a cap is reached.

Rules:
1. The table of `loop_states` is the machine: a stimulus is turned into an event, the table says the next state, and each state says
   what is done when it is entered. What the table does not know is ignored as late.
2. An iteration runs the tasks of the body one after the other, whatever the run's workflow is (S-LOOP-3).
3. The predicate is asked after every iteration, the last allowed one included (S-LOOP-41), and wins over the caps
   (S-LOOP-42); the cap on iterations wins over the cap on tokens (S-LOOP-141).
4. An iteration that is over is announced before anything follows from it (S-LOOP-107).
5. Memory is reset before the iterations 2 to n, and only where the mode and the scopes of the body ask for it (S-LOOP-91).
6. Nothing of an earlier iteration is copied; an iteration costs the same however many there were.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Literal, assert_never

from ensemble_ray.plan.plan import LoopUnit
from ensemble_ray.schedule.instructions import (
    Announce,
    AsksAfter,
    Cancel,
    ContextPart,
    End,
    Evaluate,
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
    Decided,
    Evaluated,
    Exited,
    Failed,
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
    """Where a loop stands.

    `pending`           not begun.
    `running`           a task of the body runs.
    `asking`            the predicate is asked.
    `resetting`         memory is reset before the next iteration.
    `exiting`           the run ends early around it: the task that runs is the last.
    `cancelling`        the run was cancelled, or failed around it: the task that runs is the last.
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
        """Whether it will not change any more."""
        return self in _OVER


_OVER = frozenset(
    {
        LoopState.CONVERGED,
        LoopState.CAPPED,
        LoopState.BUDGET_EXHAUSTED,
        LoopState.EXITED,
        LoopState.FAILED,
        LoopState.CANCELLED,
    }
)


class LoopEvent(StrEnum):
    """What a stimulus means for a loop."""

    BEGUN = "begun"
    TASK_COMPLETED = "task completed, another follows"
    ITERATION_COMPLETED = "iteration completed"
    VERDICT_TRUE = "predicate holds"
    REPEAT = "below every cap"
    REPEAT_WITH_RESET = "below every cap, memory is to be reset"
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

#: (state, event) -> next state; the whole rule about loops, as data. An iteration without a predicate is judged at once.
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


_S_LOOP = LoopState
_Reason = Literal["predicate", "max_iterations", "exit_early", "budget_exhausted"]
#: What a loop's end is called in its result (S-LOOP-44).
_ENDS: dict[LoopState, _Reason | None] = {
    _S_LOOP.CONVERGED: "predicate",
    _S_LOOP.CAPPED: "max_iterations",
    _S_LOOP.BUDGET_EXHAUSTED: "budget_exhausted",
    _S_LOOP.EXITED: "exit_early",
    _S_LOOP.FAILED: None,
    _S_LOOP.CANCELLED: None,
}
_CAPS = frozenset({_S_LOOP.CAPPED, _S_LOOP.BUDGET_EXHAUSTED})


class LoopMachine:
    """The scheduling state of one execution of a loop."""

    def __init__(self, unit: LoopUnit, execution: Execution) -> None:
        """Make one that has not begun."""
        self._unit = unit
        self._execution = execution
        self._scope = scope_of(execution.instance)
        #: without an occurrence
        self._path = key_of(execution.instance)
        self._state = LoopState.PENDING
        #: per finished iteration, oldest first
        self._history: list[HistoryEntry] = []
        #: of the iteration that runs: what completed
        self._current: list[str] = []
        #: the task that runs
        self._running = ""
        self._iteration_began_at = 0.0
        self._spent_tokens = 0
        self._exit_reason = ExitReason.USER_EXIT_EARLY
        self._failure: UnitFailure | None = None

    # What may be asked.

    @property
    def state(self) -> LoopState:
        """Return where it stands."""
        return self._state

    @property
    def is_stopping(self) -> bool:
        """Whether it starts nothing more, though it has not ended."""
        return self._state in {LoopState.EXITING, LoopState.CANCELLING}

    @property
    def history(self) -> list[HistoryEntry]:
        """Return the finished iterations, oldest first."""
        return self._history

    def results(self) -> tuple[LoopResult, ...]:
        """Return its iterations; the last one may be unfinished."""
        iterations = [entry.instances for entry in self._history]
        if self._current:
            iterations.append(tuple(self._current))
        reason = _ENDS.get(self._state)
        return (LoopResult(unit=self._path, iterations=tuple(iterations), termination_reason=reason),)

    def projection(self) -> Parts:
        """Return what its output mode shows of it (S-LOOP-70, S-LOOP-71, S-LOOP-72)."""
        shown = list_shown(self._unit, [entry.instances for entry in self._history])
        if self._unit.output_mode == "all_iterations":
            return tuple(ContextPart(instances, is_joined=True) for instances in shown)
        return (ContextPart(tuple(instance for (instance,) in shown)),)

    # The door.

    def handle(self, *stimuli: UnitStimulus) -> list[Instruction]:
        """Take facts, give what is to be done now, in order."""
        done: list[Instruction] = []
        for stimulus in stimuli:
            event = None if self._state.is_over else self._event_of(stimulus, done)
            if event is not None and (after := LOOP_TRANSITIONS.get((self._state, event))) is not None:
                self._state = after
                self._enter(event, stimulus, done)
        return done

    def _event_of(self, stimulus: UnitStimulus, done: list[Instruction]) -> LoopEvent | None:
        """Return what a stimulus means; None for one that is late."""
        match stimulus:
            case Begun():
                return LoopEvent.BEGUN
            case Completed():
                return self._event_of_output(stimulus, done) if stimulus.instance == self._running else None
            case Failed():
                return LoopEvent.TASK_FAILED if stimulus.instance == self._running else None
            case Exited():
                return self._event_of_exit(stimulus) if stimulus.instance == self._running else None
            case Cancelled():
                return LoopEvent.TASK_CANCELLED if stimulus.instance == self._running else None
            case Evaluated():
                return self._event_of_answer(stimulus)
            case CancelRequested():
                return LoopEvent.RUN_CANCELLED
            case StopRequested():
                return LoopEvent.RUN_FAILS if stimulus.exit_reason is None else LoopEvent.RUN_EXITS
            case Decided():
                raise TypeError(f"nothing waits for {stimulus}")
            case _:
                assert_never(stimulus)

    def _event_of_output(self, completed: Completed, done: list[Instruction]) -> LoopEvent:
        self._current.append(completed.instance)
        self._spent_tokens += max(completed.total_tokens, 0)  # unknown counts as none
        if len(self._current) < len(self._unit.body):
            return LoopEvent.TASK_COMPLETED
        entry = HistoryEntry(names=self._unit.body_names, instances=tuple(self._current))
        self._history.append(entry)
        self._current.clear()
        ended = IterationEnded(
            unit=self._path,
            iteration=len(self._history),
            instances=entry.instances,
            duration_s=completed.at - self._iteration_began_at,
        )
        done.append(Announce(what=ended))
        is_asked = self._unit.has_until or self._state is not LoopState.RUNNING
        return LoopEvent.ITERATION_COMPLETED if is_asked else self._judge()

    def _event_of_exit(self, exited: Exited) -> LoopEvent:
        if exited.has_output:  # the gate behind it ended the run
            self._current.append(exited.instance)
        return LoopEvent.TASK_EXITED

    def _event_of_answer(self, answered: Evaluated) -> LoopEvent | None:
        question = answered.question
        if question == self._reset_question():
            return LoopEvent.RAISED if answered.answer is None else LoopEvent.MEMORY_RESET
        if question != self._until_question():
            return None
        if answered.answer is None:
            return LoopEvent.RAISED
        return LoopEvent.VERDICT_TRUE if answered.answer else self._judge()

    def _judge(self) -> LoopEvent:
        """Decide what follows an iteration whose predicate did not hold."""
        unit = self._unit
        if len(self._history) >= unit.max_iterations:
            return LoopEvent.CAP_REACHED
        if unit.max_tokens is not None and self._spent_tokens >= unit.max_tokens:
            return LoopEvent.BUDGET_REACHED
        is_reset = unit.memory_mode != "accumulate" and bool(unit.memory_scopes)
        return LoopEvent.REPEAT_WITH_RESET if is_reset else LoopEvent.REPEAT

    # What is done when a state is entered.

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
                self._finish(stimulus, done)

    def _until_question(self) -> UntilHolds:
        return UntilHolds(unit=self._path, iteration=len(self._history))

    def _reset_question(self) -> ResetMemory:
        return ResetMemory(unit=self._path, iteration=len(self._history) + 1)

    def _start_next(self, at: float, done: list[Instruction]) -> None:
        number = len(self._history)
        position = len(self._current)
        iteration = instance_of(self._unit.key, occurrence=number, parent=self._scope)
        self._running = instance_of(self._unit.body[position], parent=iteration)
        asks_after = self._asks_after() if position == len(self._unit.body) - 1 else None
        if position:
            done.append(Start(instance=self._running, asks_after=asks_after))
            return
        self._iteration_began_at = at
        if number:
            self._drop_scope(number - 1)
        start = Start(
            instance=self._running, changes=self._changes(), context=self._outer_context(), asks_after=asks_after
        )
        done.append(start)

    def _asks_after(self) -> AsksAfter | None:
        """Return what is asked when the iteration completed."""
        if not self._unit.has_until:
            return None
        question = UntilHolds(unit=self._path, iteration=len(self._history) + 1)
        return AsksAfter(questions=(question,), names=self._unit.body_names, instances=(*self._current, self._running))

    def _drop_scope(self, number: int) -> None:
        """Let the names of an iteration's outputs go: nothing looks into one that is over."""
        self._execution.scopes.drop(instance_of(self._unit.key, occurrence=number, parent=self._scope))

    def _changes(self) -> TaskChanges | None:
        """Return what the first task has beside itself (S-LOOP-100, S-LOOP-140)."""
        number = len(self._history)
        given = self._execution.changes
        if not number:
            return None if given is None else replace(given, prior=self._execution.scopes.last_output(given.prior))
        if not self._unit.inject_feedback:
            return None
        feedback = (
            f"Loop iteration {number + 1} of {self._unit.max_iterations}. "
            "Prior iteration's final body output is shown above; revise based on it."
        )
        return TaskChanges(attempt=number, feedback=feedback, prior=self._history[-1].instances[-1])

    def _outer_context(self) -> Parts | None:
        """Return what the loop waits for, which its first task is shown in every iteration (S-LOOP-124)."""
        keys = scope_keys(self._unit.context, self._unit.context_tasks)
        found = (self._execution.scopes.find(self._scope, key) for key in keys)
        return tuple(part for parts in found for part in parts or ()) or None

    # Ending.

    def _finish(self, stimulus: UnitStimulus, done: list[Instruction]) -> None:
        """End in the state that was entered."""
        if self._state in _CAPS and self._unit.on_max_iterations == "throw":
            self._fail("cap", stimulus)
        elif self._state is LoopState.FAILED and isinstance(stimulus, Evaluated):
            self._fail("evaluation", stimulus, stimulus.error_type, stimulus.message)
        self._note_exit(stimulus)
        self._end(done)

    def _note_exit(self, stimulus: UnitStimulus) -> None:
        """Keep why the run ends early; the first reason counts, which the run itself knows."""
        if isinstance(stimulus, Exited):
            self._exit_reason = stimulus.reason
        elif isinstance(stimulus, StopRequested) and stimulus.exit_reason is not None:
            self._exit_reason = stimulus.exit_reason

    def _fail(
        self, reason: Literal["cap", "evaluation"], stimulus: UnitStimulus, error_type: str = "", message: str = ""
    ) -> None:
        self._failure = UnitFailure(
            unit=self._path,
            at=stimulus.at,
            reason=reason,
            completed_before=0,  # the source of the run counts
            message=message,
            error_type=error_type,
        )

    def _end(self, done: list[Instruction]) -> None:
        self._drop_scope(len(self._history) if self._current else len(self._history) - 1)
        failures = () if self._failure is None else (self._failure,)
        state, exit_reason = self._how()
        if exit_reason is ExitReason.COMPLETED:
            self._show_bodies()
        self._inform_of_end(done)
        done.append(End(state=state, exit_reason=exit_reason, units=self.results(), unit_failures=failures))

    def _inform_of_end(self, done: list[Instruction]) -> None:
        """Tell people of the predicate or the cap that ended it (S-LOOP-132)."""
        unit = self._unit
        if self._state is LoopState.CONVERGED:
            after = f"{len(self._history)}/{unit.max_iterations}"
            done.append(Inform(text=f"Loop '{unit.name}' stopped by predicate after iteration {after}"))
        elif self._state is LoopState.CAPPED:
            cap = f"its cap of {unit.max_iterations} iterations: {unit.on_max_iterations}"
            done.append(Inform(text=f"Loop '{unit.name}' reached {cap}"))

    def _show_bodies(self) -> None:
        """Let each task of the body be named alone: by what it gave in the last iteration (S-LOOP-174)."""
        for task, instance in zip(self._unit.body, self._history[-1].instances, strict=True):
            self._execution.scopes.put(self._scope, body_of(self._unit.key, task), (ContextPart((instance,)),))

    def _how(self) -> tuple[RunState, ExitReason]:
        """Return how it ended, as the machine above is to understand it."""
        if self._state is LoopState.CANCELLED:
            return RunState.CANCELLED, ExitReason.CANCELLED
        if self._state is LoopState.FAILED or self._failure is not None:
            return RunState.FAILED, ExitReason.ERROR
        if self._state is LoopState.EXITED:
            return RunState.COMPLETED, self._exit_reason
        return RunState.COMPLETED, ExitReason.COMPLETED
