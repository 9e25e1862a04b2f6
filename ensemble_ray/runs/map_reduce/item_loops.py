"""Loops that factories return as the task of an item, each a small nested run with the machines of a plan's loops.

The run's source sees a single item (S-MR-190). A verdict is recorded before any consequence (S-MR-193).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.errors import message_of
from ensemble_ray.events import LoopIterationCompletedEvent
from ensemble_ray.execute.orders import TaskFailure, TaskOrder, TaskResult
from ensemble_ray.facts.runs import FailureRecorded
from ensemble_ray.ports import EventSink, Persistence
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.result import error_of_unit
from ensemble_ray.record.units import EndedUnits
from ensemble_ray.runs.coordinator import RunBackgroundTasks, RunJournal, TaskReporter
from ensemble_ray.runs.map_reduce.orders import OrderMaker, PreparedLoop
from ensemble_ray.runs.map_reduce.outputs import MapReduceFailure
from ensemble_ray.runs.outputs import InMemoryOutputs
from ensemble_ray.runs.unit_evaluations import (
    LocalPredicates,
    UnitEvaluations,
    UnitPorts,
    build_announcement,
    list_predicates,
)
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import (
    Announce,
    Cancel,
    End,
    Evaluate,
    Instruction,
    IterationEnded,
    LoopResult,
    Question,
    Start,
    StepEnded,
    UntilHolds,
)
from ensemble_ray.schedule.machine import PlanSource
from ensemble_ray.schedule.stimuli import (
    Begun,
    Cancelled,
    CancelRequested,
    Completed,
    Evaluated,
    Exited,
    Failed,
    Stimulus,
    encode_stimulus,
)
from ensemble_ray.schedule.unit import list_shown
from ensemble_ray.values.error_data import error_data
from ensemble_ray.values.ids import key_of, node_key
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.task_output import TaskOutput, join_iterations
from ensemble_ray.values.trace import TaskTrace

_log = bounded_logger(__name__)


class LoopEnd(Struct, frozen=True, kw_only=True):
    prepared: PreparedLoop
    at: float
    output: TaskOutput | None = None  # of the item
    source_instances: tuple[str, ...] = ()  # of the outputs from which the item's is built
    traces: Sequence[TaskTrace] = ()  # all executions, in order
    error: BaseException | None = None
    failed: TaskOrder | None = None  # None: the loop itself failed
    attempts: int = 0
    exit_reason: ExitReason | None = None  # of an early end, with the output so far

    def failure(self, error: BaseException) -> MapReduceFailure:
        order = self.failed
        return MapReduceFailure(
            key=key_of(self.prepared.instance),
            level=0,
            at=self.at,
            task_description=f"Loop '{self.prepared.ready.unit.name}'" if order is None else order.task.description,
            agent_role="" if order is None else order.agent_role,
            error=error,
            attempts=self.attempts,
        )

    def failure_fact(self, error: BaseException) -> FailureRecorded:
        """The work of the loop's tasks is recorded already."""
        return FailureRecorded(
            error_type=type(error).__name__,
            message=message_of(error),
            error=error_data(error),
            attempts=self.attempts,
            is_of_callable=self.failed is None or self.failed.task.handler is not None,
        )


class _Running(Struct, kw_only=True):
    prepared: PreparedLoop
    source: PlanSource
    evaluations: UnitEvaluations
    outputs: InMemoryOutputs[TaskOutput]
    verdicts: dict[Question, Evaluated]  # recorded and unused
    orders: dict[str, TaskOrder] = msgspec.field(default_factory=dict[str, "TaskOrder"])
    traces: list[TaskTrace] = msgspec.field(default_factory=list["TaskTrace"])
    completed: dict[str, TaskOutput] = msgspec.field(
        default_factory=dict[str, TaskOutput]
    )  # by instance, in completion order
    failure: tuple[TaskOrder, TaskResult] | None = None


class ItemLoops:
    """The running loops of one run, by instance of their items."""

    def __init__(
        self,
        journal: RunJournal,
        orders: OrderMaker,
        events: EventSink | None,
        verdicts: Mapping[str, Sequence[Evaluated]],
    ) -> None:
        """`verdicts` are recorded answers of predicates, by the instance of their item."""
        self._journal = journal
        self._orders = orders
        self._events = events
        self._recorded = verdicts
        self._running: dict[str, _Running] = {}
        self._reporter: TaskReporter
        self._background: RunBackgroundTasks
        self._finish: Callable[[LoopEnd], Stimulus]

    def open(self, reporter: TaskReporter, finish: Callable[[LoopEnd], Stimulus]) -> None:
        """`finish` receives a loop's end, and returns the stimulus of its item."""
        self._reporter, self._finish = reporter, finish
        self._background = RunBackgroundTasks(reporter.break_off)

    def detach(self) -> None:
        self._background.detach()
        for running in self._running.values():
            running.evaluations.detach()
        self._running.clear()

    def begin(self, prepared: PreparedLoop) -> None:
        item, planned = prepared.instance, prepared.ready.planned
        source, outputs = machine_for(planned.plan), InMemoryOutputs[TaskOutput]()
        unit = planned.plan.units[0]

        def announce(what: IterationEnded | StepEnded, given: Sequence[TaskOutput]) -> None:
            if self._events is not None and self._events.wants(LoopIterationCompletedEvent):
                placed = replace(what, unit=f"{item}/{what.unit}")
                self._events.emit(build_announcement(self._journal.run_id, unit, placed, given))

        ports = UnitPorts(
            predicates=LocalPredicates(list_predicates(planned.units)),
            announce=announce,
            failure_of=lambda raised: TaskFailure(
                error=raised.error if isinstance(raised.error, BaseException) else None
            ),
        )
        evaluations = UnitEvaluations(planned.plan, source, outputs, ports)
        prefix = f"{item}/"
        verdicts = {
            question: replace(each, question=question)
            for each in self._recorded.get(item, ())
            if (question := _move(each.question, prefix)) is not None
        }
        running = _Running(
            prepared=prepared, source=source, evaluations=evaluations, outputs=outputs, verdicts=verdicts
        )
        evaluations.open(
            lambda answer: self._background.start(self._record_answer(running, answer)),
            self._reporter.break_off,
            self._journal.now,
        )
        self._running[item] = running
        self._apply(running, Begun(at=self._journal.now()))

    def stop(self, item: str) -> bool:
        """Ask a loop to end; return whether it runs and will report its end."""
        running = self._running.get(item)
        if running is None:
            return False
        self._apply(running, CancelRequested(at=self._journal.now()))
        return True

    def owns(self, instance: str) -> bool:
        item, mark, _ = instance.partition("/")
        return bool(mark) and item in self._running

    def accept(self, result: TaskResult) -> None:
        item, _, instance = result.instance.partition("/")
        running = self._running[item]
        order = running.orders.pop(instance)
        output, failure = result.output, result.failure
        trace = output.trace if output is not None else None if failure is None else failure.trace
        running.traces += [] if trace is None else [trace]
        has_output = output is not None and result.status in {"completed", "exited"}
        if output is not None and has_output:  # true also if a gate after the output ended the run
            running.outputs.put(instance, output)
            running.completed[instance] = output
        ended: Stimulus
        match result.status:
            case "completed":
                duration_s, tokens = result.duration_s, result.total_tokens
                ended = Completed(at=result.at, instance=instance, duration_s=duration_s, total_tokens=tokens)
            case "failed":
                running.failure = order, result
                ended = Failed(at=result.at, instance=instance)
            case "exited":
                ended = Exited(at=result.at, instance=instance, reason=result.exit_reason, has_output=has_output)
            case _:
                ended = Cancelled(at=result.at, instance=instance)
        self._apply(running, ended)

    async def _record_answer(self, running: _Running, answered: Stimulus) -> None:
        if not isinstance(answered, Evaluated):
            raise TypeError(f"a predicate answers with a verdict, and not with {answered}")
        item = running.prepared.instance
        placed = replace(answered, question=_move(answered.question, "", f"{item}/") or answered.question)
        # Another process may commit work that follows from it first (S-DUR-122).
        fact = self._journal.fact(item, encode_stimulus(placed), answered.at)
        await self._journal.append(fact, until=Persistence.COMMITTED)
        self._apply(running, answered)

    def _apply(self, running: _Running, stimulus: Stimulus) -> None:
        """Apply a stimulus, then recorded results, and carry out the instructions."""
        waiting = [stimulus]
        while waiting and self._running.get(running.prepared.instance) is running:
            current = waiting.pop(0)
            for instruction in running.source.handle(current):
                recorded = self._carry_out(running, instruction, current.at)
                waiting += [] if recorded is None else [recorded]

    def _carry_out(self, running: _Running, instruction: Instruction, at: float) -> Stimulus | None:
        item = running.prepared.instance
        match instruction:
            case Start():
                order = self._orders.inner(running.prepared, instruction, running.outputs)
                running.orders[instruction.instance] = order
                self._reporter.submit([order])
            case Cancel():
                self._reporter.stop([f"{item}/{instruction.instance}"])
            case Evaluate():
                if (recorded := running.verdicts.pop(instruction.question, None)) is not None:
                    return recorded
                running.evaluations.ask(instruction.question)
            case Announce():
                running.evaluations.announce(instruction.what)
            case End():
                del self._running[item]
                running.evaluations.detach()
                self._reporter.notify(self._finish(_loop_end(running, instruction, at)))
            case _:
                _log.debug("The loop of %s: %s", item, instruction)
        return None


def _loop_end(running: _Running, end: End, at: float) -> LoopEnd:
    prepared = running.prepared
    ended = LoopEnd(prepared=prepared, at=at, traces=tuple(running.traces))
    if end.state is RunState.FAILED:
        if running.failure is None:
            raised = running.evaluations.raised
            units = EndedUnits(plan=prepared.ready.planned.plan, results=end.units, outputs=running.completed)
            failure = replace(end.unit_failures[0], completed_before=len(running.completed))
            return replace(ended, error=error_of_unit(units, failure, raised[-1][1].cause if raised else None))
        order, result = running.failure
        return replace(
            ended,
            error=result.error or RuntimeError("task failed without an error"),
            failed=order,
            attempts=result.attempts,
        )
    if end.state is RunState.CANCELLED:
        return ended
    if end.exit_reason is ExitReason.BUDGET_EXHAUSTED:  # with a larger budget it resumes
        return replace(ended, exit_reason=end.exit_reason)
    ready = prepared.ready
    (looped,) = (each for each in end.units if isinstance(each, LoopResult))
    given: Sequence[str] = next(reversed(list_shown(ready.unit, looped.iterations)), ())
    if ready.chosen:
        given = [name for names in looped.iterations for name in names if node_key(name) == ready.chosen][-1:]
    outputs = [running.completed[instance] for instance in given]
    return replace(
        ended,
        output=join_iterations(outputs) if len(outputs) > 1 else next(iter(outputs), None),
        source_instances=tuple(f"{prepared.instance}/{each}" for each in given),
        exit_reason=None if end.exit_reason is ExitReason.COMPLETED else end.exit_reason,
    )


def _move(question: Question, prefix: str, to: str = "") -> Question | None:
    """Return a predicate's question with its unit below another path, else None."""
    if isinstance(question, UntilHolds) and question.unit.startswith(prefix):
        return replace(question, unit=to + question.unit.removeprefix(prefix))
    return None
