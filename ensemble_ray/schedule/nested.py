"""The machine of a plan with units: a tree of machines, one for each execution of a unit."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import assert_never

import msgspec
from msgspec import Struct, structs

from ensemble_ray.plan.plan import GraphUnit, LoopUnit, PhaseUnit, Plan, in_waiting_order, members_of
from ensemble_ray.schedule.graph import GraphMachine
from ensemble_ray.schedule.instructions import (
    Announce,
    Cancel,
    ContextPart,
    End,
    Evaluate,
    Inform,
    Instruction,
    LoopResult,
    Question,
    Skip,
    Start,
    TaskChanges,
    UnitFailure,
    UnitResult,
    Warn,
    WarnLeftOut,
    WarnOversized,
)
from ensemble_ray.schedule.loop import LoopMachine
from ensemble_ray.schedule.machine import WAITS, ParallelMachine, SequentialMachine
from ensemble_ray.schedule.phases import PhasesMachine
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
from ensemble_ray.values.ids import key_of, node_key
from ensemble_ray.values.outputs import ExitReason, RunState

_ROOT = ""


class _Nested(Struct, frozen=True):
    machine: UnitMachine
    parent: str
    questions: set[Question] = msgspec.field(default_factory=set[Question])


class NestedSource:
    """Routes stimuli to the machines of a run and collects their instructions.

    A machine sees only its own members, and receives the end of a unit below like a task's. The cost of a stimulus depends
    on the depth of the tree, not on the number of past iterations and steps.
    """

    def __init__(self, plan: Plan, make_machine: Callable[[Execution], UnitMachine]) -> None:
        self._make_machine = make_machine
        self._nodes = {node.key: node for node in plan.nodes}
        members: dict[str, Member] = {**self._nodes}
        members.update(
            (
                unit.key,
                unit
                if isinstance(unit, LoopUnit)
                else UnitMember(unit.key, unit.after if isinstance(unit, PhaseUnit) else ()),
            )
            for unit in plan.units
        )
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
        self._machines: dict[str, _Nested] = {_ROOT: _Nested(make_machine(self._run), _ROOT)}
        self._owners: dict[str, str] = {}
        self._queued: dict[str, Start] = {}
        self._running: dict[str, Start] = {}
        #: tasks at gates hold no slot; their machines see them as running
        self._suspended: dict[str, Start] = {}
        self._cancelling: set[str] = set()
        self._questions: dict[Question, str] = {}
        self._inbox: deque[tuple[str, UnitStimulus]] = deque()
        self._completed: int = 0
        self._results: list[UnitResult] = []
        self._failures: list[UnitFailure] = []
        self._is_ended = False

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._running)

    def is_running(self, instance: str) -> bool:
        return instance in self._running

    def is_waiting(self, instance: str) -> bool:
        return instance in self._suspended

    def is_cancelling(self, instance: str) -> bool:
        return instance in self._cancelling

    def list_unanswered(self) -> list[Instruction]:
        tasks = [
            Cancel(instance=instance) if instance in self._cancelling else start
            for instance, start in self._running.items()
        ]
        return [*tasks, *(Evaluate(question=question) for question in self._questions)]

    def history_of(self, unit: str) -> Sequence[HistoryEntry]:
        nested = self._machines.get(f"{unit}#0")
        return () if nested is None else nested.machine.history

    def list_following(self, instance: str) -> Iterator[str]:  # noqa: ARG002  units decide what follows
        return iter(())

    def results(self) -> tuple[UnitResult, ...]:
        """The ended units in the order of their ends, then those that have begun."""
        return (*self._results, *(each for nested in self._machines.values() for each in nested.machine.results()))

    def failures(self) -> tuple[UnitFailure, ...]:
        return tuple(self._failures)

    @property
    def scope_count(self) -> int:
        return len(self._scopes)

    def handle(self, *stimuli: Stimulus) -> list[Instruction]:
        done: list[Instruction] = []
        for stimulus in stimuli:
            if not self._is_ended:
                self._route(stimulus)
                while self._inbox:
                    self._apply(*self._inbox.popleft(), done)
        while self._queued and len(self._running) < self._cap:
            instance = next(iter(self._queued))
            self._running[instance] = start = self._queued.pop(instance)
            done.append(start)
        if self._suspended and not (self._running or self._questions or self._is_ended):
            done.append(self._with_units(WAITS))  # S-REV-116
        return done

    def _route(self, stimulus: Stimulus) -> None:
        """Put a stimulus into the inbox of its machine. Late ones are ignored."""
        match stimulus:
            case Begun() | CancelRequested():
                self._inbox.append((_ROOT, stimulus))
            case Completed() | Failed() | Exited() | Cancelled():
                instance = stimulus.instance
                if self._running.pop(instance, None) is not None:
                    self._cancelling.discard(instance)
                    if isinstance(stimulus, Completed) or (isinstance(stimulus, Exited) and stimulus.has_output):
                        self._completed += 1
                        self._scopes.put(scope_of(instance), node_key(instance), (ContextPart((instance,)),))
                    self._inbox.append((self._owners.pop(instance), stimulus))
            case Waiting(at=at, instance=instance):
                self._suspend(instance, at)
            case Continued(instances=wanted):
                chosen = [each for each in self._suspended if wanted is None or each in wanted]
                self._queued = {**{each: self._suspended.pop(each) for each in chosen}, **self._queued}
            case Evaluated():
                if (unit := self._questions.pop(stimulus.question, None)) is not None:
                    self._machines[unit].questions.discard(stimulus.question)
                    self._inbox.append((unit, stimulus))
            case _:
                assert_never(stimulus)

    def _suspend(self, instance: str, at: float) -> None:
        if (start := self._running.pop(instance, None)) is None:
            return
        self._suspended[instance] = start
        is_stopping = instance in self._cancelling or self._machines[self._owners[instance]].machine.is_stopping
        self._cancelling.discard(instance)
        if is_stopping:  # an ending run opens no gate (S-REV-17)
            self._cancel_suspended(instance, at)

    def _cancel_suspended(self, instance: str, at: float) -> None:
        del self._suspended[instance]
        self._inbox.append((self._owners.pop(instance), Cancelled(at=at, instance=instance)))

    def _cancel_queued(self, instance: str, reason: str, at: float, done: list[Instruction]) -> None:
        del self._queued[instance]
        done.append(Skip(instance=instance, reason=reason))
        self._inbox.append((self._owners.pop(instance), Cancelled(at=at, instance=instance)))

    def _apply(self, unit: str, stimulus: UnitStimulus, done: list[Instruction]) -> None:
        if (nested := self._machines.get(unit)) is None:
            return  # it has ended in the meantime
        was_stopping = nested.machine.is_stopping
        for instruction in nested.machine.handle(stimulus):
            self._carry_out(unit, instruction, stimulus.at, done)
        if nested.machine.is_stopping and not was_stopping:
            self._stop_below(unit, stimulus, done)

    def _carry_out(self, unit: str, instruction: Instruction, at: float, done: list[Instruction]) -> None:
        match instruction:
            case Start():
                self._start(unit, instruction, at)
            case Cancel(instance=instance):
                if instance in self._machines:
                    self._inbox.append((instance, CancelRequested(at=at)))
                elif instance in self._queued:
                    self._cancel_queued(instance, "run cancelled", at, done)
                elif instance in self._suspended:
                    self._cancel_suspended(instance, at)
                elif instance in self._running:
                    self._cancelling.add(instance)
                    done.append(instruction)
            case Evaluate():
                self._questions[instruction.question] = unit
                self._machines[unit].questions.add(instruction.question)
                done.append(instruction)
            case End():
                self._end(unit, instruction, at, done)
            case Skip() | Announce() | Inform() | Warn() | WarnLeftOut() | WarnOversized():
                done.append(instruction)
            case _:
                assert_never(instruction)

    def _start(self, unit: str, start: Start, at: float) -> None:
        instance, changes = start.instance, start.changes
        if node_key(instance) in self._run.units:
            changes = changes if isinstance(changes, TaskChanges) else None
            execution = structs.replace(self._run, instance=instance, changes=changes)
            self._machines[instance] = _Nested(self._make_machine(execution), unit)
            self._inbox.append((instance, Begun(at=at)))
            return
        parts, missing = [*(start.context or ())], start.missing
        node, scope = self._nodes[node_key(instance)], scope_of(instance)
        for key in scope_keys(node.context, node.context_tasks):
            found = self._scopes.find(scope, key)
            parts += found or ()
            if found is None and missing is None and self._is_strict:
                missing = key
        self._owners[instance] = unit
        self._queued[instance] = replace(start, context=tuple(parts), missing=missing)

    def _stop_below(self, unit: str, cause: UnitStimulus, done: list[Instruction]) -> None:
        """Cancel the members of a stopping machine that are not running, and stop its units (S-PAR-21, S-PAR-30)."""
        for instance in [each for each in self._queued if self._owners[each] == unit]:
            self._cancel_queued(instance, "run ending early", cause.at, done)
        for instance in [each for each in self._suspended if self._owners[each] == unit]:
            self._cancel_suspended(instance, cause.at)
        match cause:
            case CancelRequested():
                return  # the machine cancels each member itself (S-SET-27)
            case Exited(reason=reason) | StopRequested(exit_reason=reason):
                pass
            case _:
                reason = None
        for instance, nested in self._machines.items():
            if nested.parent == unit and instance != _ROOT:
                self._inbox.append((instance, StopRequested(at=cause.at, exit_reason=reason)))

    def _end(self, unit: str, end: End, at: float, done: list[Instruction]) -> None:
        self._results += end.units
        self._failures += [structs.replace(each, completed_before=self._completed) for each in end.unit_failures]
        nested = self._machines.pop(unit)
        for question in nested.questions:  # it was cancelled, and ignores the answers
            del self._questions[question]
        if unit == _ROOT:
            self._is_ended = True
            done.append(self._with_units(end))
            return
        if end.state is RunState.COMPLETED and end.exit_reason is ExitReason.COMPLETED:
            self._scopes.put(scope_of(unit), node_key(unit), nested.machine.projection())
        self._inbox.append((nested.parent, _end_of_member(unit, end, at)))

    def _with_units(self, end: End) -> End:
        return structs.replace(end, units=self.results(), unit_failures=self.failures())


def make_machine(execution: Execution) -> UnitMachine:
    plan, units = execution.plan, execution.units
    if not execution.instance:
        if phases := [unit for unit in plan.units if isinstance(unit, PhaseUnit)]:
            return PhasesMachine(phases, execution)
        # Members outside every unit: the plain tasks, then the units, both in declared order (S-LOOP-120).
        inside = {key for unit in plan.units for key in members_of(unit)}
        members = [member for key, member in execution.members.items() if key not in inside]
        return _machine_over(members, execution, plan.workflow)
    unit = units[node_key(execution.instance)]
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
    parent, changes = execution.instance, execution.changes
    if workflow == "parallel":
        strategy = execution.plan.error_strategy
        return ParallelMachine(members, error_strategy=strategy, parent=parent, changes=changes)
    # Members follow the units that they wait for (S-LOOP-168). A task that names a later task as context stays in its
    # place, and fails with a message (S-ENG-11).
    rank = {member.key: position for position, member in enumerate(members)}
    waits_for = {
        member.key: [
            key for key in member.context if key in execution.units or rank.get(key, len(rank)) < rank[member.key]
        ]
        for member in members
    }
    ordered = in_waiting_order([member.key for member in members], waits_for)
    return SequentialMachine([execution.members[key] for key in ordered], parent=parent, changes=changes)


def _end_of_member(instance: str, end: End, at: float) -> TaskEnd:
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
