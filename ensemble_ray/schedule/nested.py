"""The source of a plan that has units: machines inside of machines.

Rules:
1. A machine is told what concerns its own members alone, and wants only those. Which member is a unit, and which machine a
   task belongs to, is known here and nowhere else.
2. A unit that is started gets a machine of its own; how that ends is told to the machine above as the member's end.
3. Outputs are put into the scope that their task ran in, before a machine hears of them; a unit's projection into the scope
   of the unit. A task's context is looked up when a machine wants it started.
4. At most `max_parallel_tasks` tasks of the whole run are handed out; others wait in the order in which they were wanted.
5. When a machine starts nothing more because the run is ending, the units below it are asked to stop, and what waits for a
   place is taken back (S-PAR-21, S-PAR-30). A cancelled run cancels all that runs (S-SET-27).
6. A stimulus for a task that was not handed out, or that ended, is ignored: it is late. So is an answer nobody waits for.
7. The run ends exactly once, when the machine of the run ended; no machine and no task is left then.
8. Of a task that waits at a gate no machine hears: to them it has not ended. It holds no slot; where nothing else runs and
   nothing is asked, the run waits (S-REV-116).

One stimulus costs what the machines above its task cost, however many iterations and steps the run has had.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from ensemble_ray.plan.plan import GraphUnit, LoopUnit, PhaseUnit, Plan, Unit, in_waiting_order, members_of
from ensemble_ray.schedule.graph import GraphMachine
from ensemble_ray.schedule.instructions import (
    Announce,
    Cancel,
    ContextPart,
    End,
    Evaluate,
    Forget,
    Inform,
    Instruction,
    LoopResult,
    Question,
    Skip,
    Start,
    TaskChanges,
    UnitFailure,
    UnitResult,
    Wait,
    Warn,
    WarnLeftOut,
    WarnOversized,
)
from ensemble_ray.schedule.loop import LoopMachine
from ensemble_ray.schedule.machine import WAITS
from ensemble_ray.schedule.phases import PhasesMachine
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
    Stimulus,
    Waiting,
)
from ensemble_ray.schedule.unit import (
    Execution,
    HistoryEntry,
    Member,
    Scopes,
    StopRequested,
    UnitMachine,
    UnitMember,
    UnitStimulus,
    scope_keys,
    scope_of,
)
from ensemble_ray.schedule.workflows import ParallelMachine, SequentialMachine
from ensemble_ray.values.ids import key_of, node_key
from ensemble_ray.values.outputs import ExitReason, RunState

#: The machine of the run itself.
_ROOT = ""


@dataclass(frozen=True, slots=True)
class _Nested:
    """A machine in its place."""

    machine: UnitMachine
    #: the instance of the unit whose machine started it
    parent: str
    #: its open questions
    asked: set[Question] = field(default_factory=set[Question])


class NestedSource:
    """A run's tree of machines.

    Args:
        plan: What to run.
        make_machine: Makes the machine of a unit's execution; that of the run has the instance "".
    """

    def __init__(self, plan: Plan, make_machine: Callable[[Execution], UnitMachine]) -> None:
        self._make_machine = make_machine
        self._nodes = {node.key: node for node in plan.nodes}
        members: dict[str, Member] = {**self._nodes}
        members.update((unit.key, _member(unit)) for unit in plan.units)
        self._scopes = Scopes()
        self._run = Execution(
            instance=_ROOT,
            plan=plan,
            units={unit.key: unit for unit in plan.units},
            members=members,
            scopes=self._scopes,
        )
        self._is_strict = plan.workflow != "parallel"
        self._cap = sys.maxsize if plan.max_parallel_tasks is None else plan.max_parallel_tasks
        #: by the instance of the unit
        self._machines: dict[str, _Nested] = {_ROOT: _Nested(make_machine(self._run), _ROOT)}
        #: the unit that each task in flight or waiting belongs to
        self._owners: dict[str, str] = {}
        #: tasks that were wanted and have no place yet, in order
        self._waiting: dict[str, Start] = {}
        #: tasks that were handed out, in order
        self._running: dict[str, Start] = {}
        #: tasks that were put down at gates, in that order
        self._at_gates: dict[str, Start] = {}
        #: those that run and were asked to stop
        self._cancelling: set[str] = set()
        #: open questions and who asked, in order
        self._asked: dict[Question, str] = {}
        self._untold: deque[tuple[str, UnitStimulus]] = deque()
        self._completed: int = 0
        self._results: list[UnitResult] = []
        self._failures: list[UnitFailure] = []
        self._is_ended = False

    # What may be asked.

    @property
    def running(self) -> tuple[str, ...]:
        """Return the tasks that were handed out and have not been reported, in that order."""
        return tuple(self._running)

    def is_running(self, instance: str) -> bool:
        """Whether that was handed out and has not been reported."""
        return instance in self._running

    def is_waiting(self, instance: str) -> bool:
        """Whether that was put down, and is started again when the run goes on."""
        return instance in self._at_gates

    def is_cancelling(self, instance: str) -> bool:
        """Whether that is running and was asked to stop."""
        return instance in self._cancelling

    def list_unanswered(self) -> list[Instruction]:
        """Return what was wanted and has no answer yet, of a task what was wanted last: what a run that goes on does first."""
        tasks = [
            Cancel(instance=instance) if instance in self._cancelling else start
            for instance, start in self._running.items()
        ]
        return [*tasks, *(Evaluate(question=question) for question in self._asked)]

    def history_of(self, unit: str) -> Sequence[HistoryEntry]:
        """Return what the predicates of a unit are shown, by its path; it only grows, and is not copied."""
        nested = self._machines.get(f"{unit}#0")
        return () if nested is None else nested.machine.history

    def results(self) -> tuple[UnitResult, ...]:
        """Return what became of the units so far: of those that ended, in that order, then of those that have begun."""
        return (*self._results, *(each for nested in self._machines.values() for each in nested.machine.results()))

    def failures(self) -> tuple[UnitFailure, ...]:
        """Return why units failed where none of their tasks did, in order."""
        return tuple(self._failures)

    @property
    def scope_count(self) -> int:
        """Return how many scopes are kept; it does not grow with iterations."""
        return len(self._scopes)

    # The door.

    def handle(self, *stimuli: Stimulus) -> list[Instruction]:
        """Take facts, give what is to be done now, in order."""
        done: list[Instruction] = []
        for stimulus in stimuli:
            if not self._is_ended:
                self._route(stimulus)
                while self._untold:
                    self._apply(*self._untold.popleft(), done)
        while self._waiting and len(self._running) < self._cap:
            instance = next(iter(self._waiting))
            self._running[instance] = start = self._waiting.pop(instance)
            done.append(start)
        if self._at_gates and not (self._running or self._asked or self._is_ended):
            done.append(self._with_units(WAITS))
        return done

    def _route(self, stimulus: Stimulus) -> None:
        """Find out whom a stimulus concerns."""
        match stimulus:
            case Begun() | CancelRequested():
                self._untold.append((_ROOT, stimulus))
            case Completed() | Failed() | Exited() | Cancelled():
                if self._running.pop(stimulus.instance, None) is not None:
                    self._cancelling.discard(stimulus.instance)
                    if isinstance(stimulus, Completed) or (isinstance(stimulus, Exited) and stimulus.has_output):
                        self._keep(stimulus.instance)
                    self._untold.append((self._owners.pop(stimulus.instance), stimulus))
            case Waiting(at=at, instance=instance):
                self._put_down(instance, at)
            case Continued(instances=wanted):
                chosen = [each for each in self._at_gates if wanted is None or each in wanted]
                self._waiting = {**{each: self._at_gates.pop(each) for each in chosen}, **self._waiting}
            case Evaluated():
                if (asker := self._asked.pop(stimulus.question, None)) is not None:
                    self._machines[asker].asked.discard(stimulus.question)
                    self._untold.append((asker, stimulus))
            case Decided():
                raise TypeError(f"nothing waits for {stimulus}")
            case _:
                assert_never(stimulus)

    def _put_down(self, instance: str, at: float) -> None:
        if (start := self._running.pop(instance, None)) is None:
            return
        self._at_gates[instance] = start
        owner = self._owners[instance]
        is_unwanted = instance in self._cancelling or self._machines[owner].machine.is_stopping
        self._cancelling.discard(instance)
        if is_unwanted:  # nobody is asked any more (S-REV-17)
            self._drop(instance, at)

    def _drop(self, instance: str, at: float) -> None:
        """Tell that a task that waits at a gate will not be started again."""
        del self._at_gates[instance]
        self._untold.append((self._owners.pop(instance), Cancelled(at=at, instance=instance)))

    def _keep(self, instance: str) -> None:
        self._completed += 1
        self._scopes.put(scope_of(instance), node_key(instance), (ContextPart((instance,)),))

    def _apply(self, unit: str, stimulus: UnitStimulus, done: list[Instruction]) -> None:
        """Apply a stimulus to a machine, and do what it wants."""
        if (nested := self._machines.get(unit)) is None:
            return  # it ended before it could hear of that
        was_stopping = nested.machine.is_stopping
        for instruction in nested.machine.handle(stimulus):
            self._carry_out(unit, instruction, stimulus.at, done)
        if nested.machine.is_stopping and not was_stopping:
            self._stop_below(unit, stimulus, done)

    def _carry_out(self, unit: str, instruction: Instruction, at: float, done: list[Instruction]) -> None:
        match instruction:
            case Start():
                self._start(unit, instruction, at)
            case Cancel():
                self._cancel(instruction, at, done)
            case Evaluate():
                self._asked[instruction.question] = unit
                self._machines[unit].asked.add(instruction.question)
                done.append(instruction)
            case End():
                self._end(unit, instruction, at, done)
            case Skip() | Announce() | Forget() | Wait() | Inform() | Warn() | WarnLeftOut() | WarnOversized():
                done.append(instruction)
            case _:
                assert_never(instruction)

    # Starting.

    def _start(self, unit: str, start: Start, at: float) -> None:
        instance = start.instance
        if node_key(instance) in self._run.units:
            changes = start.changes
            changes = changes if isinstance(changes, TaskChanges) else None
            execution = replace(self._run, instance=instance, changes=changes)
            self._machines[instance] = _Nested(self._make_machine(execution), unit)
            self._untold.append((instance, Begun(at=at)))
        else:
            self._owners[instance] = unit
            self._waiting[instance] = self._with_context(start)

    def _with_context(self, start: Start) -> Start:
        """Return the start with what the machine gives and then what the task's own context does."""
        parts = [*(start.context or ())]
        missing = start.missing
        scope = scope_of(start.instance)
        node = self._nodes[node_key(start.instance)]
        for key in scope_keys(node.context, node.context_tasks):
            found = self._scopes.find(scope, key)
            parts += found or ()
            if found is None and missing is None and self._is_strict:
                missing = key
        return replace(start, context=tuple(parts), missing=missing)

    # Stopping.

    def _cancel(self, cancel: Cancel, at: float, done: list[Instruction]) -> None:
        instance = cancel.instance
        if instance in self._machines:
            self._untold.append((instance, CancelRequested(at=at)))
        elif instance in self._waiting:
            self._take_back(instance, "run cancelled", at, done)
        elif instance in self._at_gates:
            self._drop(instance, at)
        elif instance in self._running:
            self._cancelling.add(instance)
            done.append(cancel)

    def _take_back(self, instance: str, reason: str, at: float, done: list[Instruction]) -> None:
        """Have a task not run that waits for a slot."""
        del self._waiting[instance]
        done.append(Skip(instance=instance, reason=reason))
        self._untold.append((self._owners.pop(instance), Cancelled(at=at, instance=instance)))

    def _stop_below(self, unit: str, cause: UnitStimulus, done: list[Instruction]) -> None:
        for instance in [each for each in self._waiting if self._owners[each] == unit]:
            self._take_back(instance, "run ending early", cause.at, done)
        for instance in [each for each in self._at_gates if self._owners[each] == unit]:
            self._drop(instance, cause.at)
        if isinstance(cause, CancelRequested):
            return  # its machine cancels each member itself
        reason = cause.reason if isinstance(cause, Exited) else None
        if isinstance(cause, StopRequested):
            reason = cause.exit_reason
        for instance, nested in self._machines.items():
            if nested.parent == unit and instance != _ROOT:
                self._untold.append((instance, StopRequested(at=cause.at, exit_reason=reason)))

    # Ending.

    def _end(self, unit: str, end: End, at: float, done: list[Instruction]) -> None:
        self._results += end.units
        self._failures += [replace(each, completed_before=self._completed) for each in end.unit_failures]
        nested = self._machines.pop(unit)
        for question in nested.asked:
            del self._asked[question]  # it was cancelled meanwhile: nobody waits for the answer
        if unit == _ROOT:
            self._is_ended = True
            done.append(self._with_units(end))
            return
        if end.state is RunState.COMPLETED and end.exit_reason is ExitReason.COMPLETED:
            self._scopes.put(scope_of(unit), node_key(unit), nested.machine.projection())
        self._untold.append((nested.parent, _end_of_member(unit, end, at)))

    def _with_units(self, end: End) -> End:
        return replace(end, units=self.results(), unit_failures=self.failures())

    # Invariants, for tests and for hunting defects.

    def validate(self) -> None:
        """Check the invariants that hold between any two calls of `handle`.

        Raises:
            AssertionError: one does not hold.
        """
        assert len(self._running) <= self._cap, "cap"  # noqa: S101  invariants
        assert self._cancelling <= self._running.keys(), "what is asked to stop runs"  # noqa: S101
        assert self._owners.keys() == {*self._running, *self._waiting, *self._at_gates}, "owners"  # noqa: S101
        assert not self._waiting or len(self._running) == self._cap, "a free place is taken"  # noqa: S101
        for each in (*self._owners.values(), *self._asked.values()):
            assert each in self._machines, "somebody waits for every task and answer"  # noqa: S101
        for nested in self._machines.values():
            assert nested.parent in self._machines, "a machine stands in one that runs"  # noqa: S101
        assert not self._untold, "everybody was told"  # noqa: S101
        assert self._is_ended == (_ROOT not in self._machines), "ended with the run's machine"  # noqa: S101


def _member(unit: Unit) -> Member:
    """Return a unit as the machine above it knows it."""
    match unit:
        case LoopUnit():
            return unit
        case PhaseUnit():
            return UnitMember(unit.key, unit.after)
        case GraphUnit():
            return UnitMember(unit.key)
        case _:
            assert_never(unit)


def _end_of_member(instance: str, end: End, at: float) -> Completed | Failed | Exited | Cancelled:
    """Return how a unit ended, as the machine above is told of any member."""
    match end.state:
        case RunState.CANCELLED:
            return Cancelled(at=at, instance=instance)
        case RunState.FAILED:
            failure = end.unit_failures[0] if end.unit_failures else None
            return Failed(
                at=at,
                instance=instance,
                error_type="" if failure is None else failure.error_type,
                message=f"'{key_of(instance)}' failed" if failure is None else failure.message,
            )
        case _:
            if end.exit_reason is ExitReason.COMPLETED:
                return Completed(at=at, instance=instance)
            has_output = any(isinstance(each, LoopResult) and any(each.iterations) for each in end.units)
            return Exited(at=at, instance=instance, reason=end.exit_reason, has_output=has_output)


def make_machine(execution: Execution) -> UnitMachine:
    """Return the machine of one execution of a unit, or of the run."""
    if not execution.instance:
        phases = [unit for unit in execution.plan.units if isinstance(unit, PhaseUnit)]
        if phases:
            return PhasesMachine(phases, execution)
        return _machine_over(_top_members(execution), execution, execution.plan.workflow)
    unit = execution.units[node_key(execution.instance)]
    match unit:
        case LoopUnit():
            return LoopMachine(unit, execution)
        case PhaseUnit():
            return _machine_over([execution.members[key] for key in unit.members], execution, unit.workflow)
        case GraphUnit():
            return GraphMachine(unit, execution)
        case _:
            assert_never(unit)


def _machine_over(members: Sequence[Member], execution: Execution, workflow: str) -> UnitMachine:
    """Return the machine that runs members by a workflow; how many tasks run at once is the run's affair."""
    parent, changes = execution.instance, execution.changes
    if workflow == "parallel":
        strategy = execution.plan.error_strategy
        return ParallelMachine(members, error_strategy=strategy, parent=parent, changes=changes)
    return SequentialMachine(_in_order(members, execution), parent=parent, changes=changes)


def _in_order(members: Sequence[Member], execution: Execution) -> list[Member]:
    """Return members such that what waits for a unit stands behind it (S-LOOP-168).

    A task that names a later one as context stays where it is: it fails, and says so (S-ENG-11).
    """
    rank = {member.key: position for position, member in enumerate(members)}
    waits_for = {
        member.key: [
            key for key in member.context if key in execution.units or rank.get(key, len(rank)) < rank[member.key]
        ]
        for member in members
    }
    ordered = in_waiting_order([member.key for member in members], waits_for)
    return [execution.members[key] for key in ordered]


def _top_members(execution: Execution) -> list[Member]:
    """Return what is in no unit: the plain tasks, then the units, each in declared order (S-LOOP-120)."""
    inside = {key for unit in execution.plan.units for key in members_of(unit)}
    return [member for key, member in execution.members.items() if key not in inside]
