"""ItemLoops: loops that factories return in place of the task of an item, each a small nested run.

1. The machines of a plan's loops drive these loops too; the run's own source sees a single item (S-MR-190).
2. A verdict is recorded before any consequence; a recorded verdict is not evaluated again (S-MR-193).
3. Outputs of a loop are stored until its item has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEnd:
    """End of the loop of an item."""

    prepared: PreparedLoop
    at: float
    #: output of the item; None: no output
    output: TaskOutput | None = None
    #: instances of the outputs from which its output is built
    source_instances: tuple[str, ...] = ()
    #: of all executions, in order
    traces: Sequence[TaskTrace] = ()
    error: BaseException | None = None
    #: the task that failed; None: the loop itself failed
    failed: TaskOrder | None = None
    attempts: int = 0
    #: reason why it ended the run early, with its output so far; None: it did not
    exit_reason: ExitReason | None = None

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
        """Return the fact of the failure; the work of its tasks is recorded already."""
        return FailureRecorded(
            error_type=type(error).__name__,
            message=message_of(error),
            error=error_data(error),
            attempts=self.attempts,
            is_of_callable=self.failed is None or self.failed.task.handler is not None,
        )


@dataclass(slots=True, kw_only=True)
class _Running:
    prepared: PreparedLoop
    source: PlanSource
    evaluations: UnitEvaluations
    outputs: InMemoryOutputs[TaskOutput]
    #: recorded answers that are still unused
    verdicts: dict[Question, Evaluated]
    orders: dict[str, TaskOrder] = field(default_factory=dict[str, "TaskOrder"])
    traces: list[TaskTrace] = field(default_factory=list["TaskTrace"])
    #: by instance, in completion order
    completed: dict[str, TaskOutput] = field(default_factory=dict[str, TaskOutput])
    failure: tuple[TaskOrder, TaskResult] | None = None


class ItemLoops:
    """The running loops of one run, by the instances of their items."""

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
        """Begin; `finish` receives the end of a loop, and returns the stimulus of its item for the run's source."""
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
        # Another process may commit work that follows from it before this process does (S-DUR-122).
        fact = self._journal.fact(item, encode_stimulus(placed), answered.at)
        await self._journal.append(fact, until=Persistence.COMMITTED)
        self._apply(running, answered)

    def _apply(self, running: _Running, stimulus: Stimulus) -> None:
        """Apply a stimulus to a loop, and carry out its instructions; recorded results are applied next."""
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
            return replace(ended, error=_error_of_loop(running, end))
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
    given = _list_outputs_of_item(running, end)
    outputs = [running.completed[instance] for instance in given]
    return replace(
        ended,
        output=join_iterations(outputs) if len(outputs) > 1 else next(iter(outputs), None),
        source_instances=tuple(f"{prepared.instance}/{each}" for each in given),
        exit_reason=None if end.exit_reason is ExitReason.COMPLETED else end.exit_reason,
    )


def _list_outputs_of_item(running: _Running, end: End) -> Sequence[str]:
    """Return the instances of the item's output: of the chosen task, else of the last output that the loop shows."""
    ready = running.prepared.ready
    (result,) = (each for each in end.units if isinstance(each, LoopResult))
    if ready.chosen:
        names = [name for names in result.iterations for name in names if node_key(name) == ready.chosen]
        return names[-1:]
    return next(reversed(list_shown(ready.unit, result.iterations)), ())


def _error_of_loop(running: _Running, end: End) -> BaseException:
    plan, raised = running.prepared.ready.planned.plan, running.evaluations.raised
    ended = EndedUnits(plan=plan, results=end.units, outputs=running.completed)
    failure = replace(end.unit_failures[0], completed_before=len(running.completed))
    return error_of_unit(ended, failure, raised[-1][1].cause if raised else None)


def _move(question: Question, prefix: str, to: str = "") -> Question | None:
    """Return a loop's question with its unit below another path; None unless it is a question of a predicate there."""
    if isinstance(question, UntilHolds) and question.unit.startswith(prefix):
        return replace(question, unit=to + question.unit.removeprefix(prefix))
    return None
