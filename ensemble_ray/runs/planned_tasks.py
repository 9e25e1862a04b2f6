"""The tasks of a planned run: orders, results, and recorded results (S-DUR-30)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec.structs import replace

from ensemble_ray.errors import BudgetExhaustedError, RecordError, StaleEpochError
from ensemble_ray.execute.orders import FailedTask, ResumePoint, Revision, RunOutcome, TaskBody, TaskOrder
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import NO_REASON, PlanRecorded, RecordedError, RunEnded, RunInterrupted, RunResumed
from ensemble_ray.plan.plan import Node, PhaseUnit, Plan
from ensemble_ray.ports import Persistence
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.runs.coordinator import (
    AnyOrder,
    AnyResult,
    InitialStep,
    OwnReason,
    RunDirectives,
    RunJournal,
    SuspendedTasks,
    TaskReporter,
    constraint_reasons,
    unit_reasons,
)
from ensemble_ray.runs.outputs import ListedOutputs, OutputsToCome, OutputStore, ReadableOutputs
from ensemble_ray.runs.unit_evaluations import UnitEvaluations, UnitPorts
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import (
    Cancel,
    Changes,
    ContextPart,
    End,
    Inform,
    Instruction,
    IterationEnded,
    Question,
    ReflectOn,
    Start,
    StepEnded,
    TaskChanges,
    Warn,
    WarnLeftOut,
    WarnOversized,
    capped_units,
)
from ensemble_ray.schedule.machine import Source
from ensemble_ray.schedule.stimuli import (
    Begun,
    Cancelled,
    Completed,
    Continued,
    Evaluated,
    Exited,
    Failed,
    Stimulus,
    Waiting,
    encode_stimulus,
)
from ensemble_ray.values.ids import RUN, instance_of, node_key, reflecting_instance
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.trace import TaskTrace


def make_order(
    start: Start,
    nodes: Mapping[str, Node],
    body: TaskBody[Any],
    outputs: ReadableOutputs,
    *,
    run_id: str,
    epoch: int,
    is_sequential: bool,
    **more: Any,
) -> AnyOrder:
    """Return a task's order with `more` fields; sequential tasks need all context outputs (S-ENG-11)."""
    node = nodes[node_key(start.instance)]
    absent = [] if start.missing is None else [start.missing]
    context: tuple[Any, ...]
    joined: tuple[tuple[int, int], ...] = ()
    if start.context is not None:
        context, joined = gather_context(start.context, outputs)
    else:
        found: list[Any] = []
        for key in node.context:
            if (instance := instance_of(key)) in outputs:
                found.append(outputs.get(instance))
            elif is_sequential:
                absent.append(key)
        context = tuple(found)
    missing = [nodes[key].description if key in nodes else key for key in absent] if absent else []
    if start.context is None and is_sequential:
        missing += node.context_outside
    return TaskOrder(
        run_id=run_id,
        key=node.key,
        instance=start.instance,
        epoch=epoch,
        index=node.index,
        task=body.task,
        agent_key=node.agent_key,
        agent_role=node.agent_role,
        total_tasks=node.total,
        context=context,
        joined=joined,
        missing_context=missing[0] if missing else None,
        revision=None if start.changes is None else revision_of(start.changes, outputs),
        is_streaming=node.is_streaming,
        input_guardrails=body.input_guardrails,
        output_guardrails=body.output_guardrails,
        wants_text=start.wants_text,
        description=node.description,
        **more,
    )


def gather_context(
    parts: Sequence[ContextPart], outputs: ReadableOutputs
) -> tuple[tuple[Any, ...], tuple[tuple[int, int], ...]]:
    """Return the context outputs, and the ranges that count as one part."""
    context: list[Any] = []
    joined: list[tuple[int, int]] = []
    for part in parts:
        begin = len(context)
        context += (outputs.get(instance) for instance in part.instances)
        joined += [(begin, len(context))] if part.is_joined else []
    return tuple(context), tuple(joined)


def revision_of(changes: Changes | None, outputs: ReadableOutputs) -> Revision[Any] | None:
    """Return the changes for another attempt, if any."""
    if not isinstance(changes, TaskChanges):
        return None
    prior = outputs.get(changes.prior) if changes.prior in outputs else None
    return Revision(attempt=changes.attempt, feedback=changes.feedback, prior=prior)


class RecordedResults:
    """Recorded results of one run; None: the run is new."""

    def __init__(self, resumed: ResumePoint[Any, Any] | None) -> None:
        self._resumed = resumed
        self._left: set[str] = set() if resumed is None else set(resumed.results)  # instances with unused results

    def pop(self, instance: str, *, wants_text: bool = False) -> AnyResult | None:
        """Return the recorded result of a task, once."""
        if self._resumed is None or instance not in self._left:
            return None
        self._left.remove(instance)
        result = self._resumed.results[instance]
        return result if wants_text else replace(result, text=None)

    def has(self, instance: str) -> bool:
        return instance in self._left

    def find_stopped(self, instance: str) -> AnyResult | None:
        """Return the recorded work of a stopped task that does not run again (S-DUR-135)."""
        return None if self._resumed is None else self._resumed.stopped.get(instance)

    def choose_result(self, result: AnyResult) -> AnyResult:
        """Return a stopped task's result, or its recorded work if that is more."""
        before = self.find_stopped(result.instance)
        if before is None or result.status != "cancelled":
            return result
        done, now = ((each.total_tokens, each.tool_call_count) for each in (before, result))
        return before if done > now else result


_log = bounded_logger(__name__)


_MOST_FOLLOWING = 31  # limits of one continuation: large messages of an actor overtake each other
_FOLLOWING_BYTES = 64 * 1024


class DeferredReflections:
    """Reflections that wait for a phase's verdict; those on one task build on each other."""

    def __init__(self, plan: Plan) -> None:
        self._by_unit = {unit.key: frozenset(unit.reflecting) for unit in plan.units if isinstance(unit, PhaseUnit)}
        self._keys: frozenset[str] = frozenset().union(*self._by_unit.values())
        self._open: dict[str, ReflectOn] = {}  # orders without an end, and their questions
        self._waiting: dict[str, deque[AnyOrder]] = {}  # by key of the task: orders that wait for the dispatched one

    @property
    def open(self) -> Sequence[str]:
        return tuple(self._open)

    def is_later(self, key: str) -> bool:
        return key in self._keys

    def begin(
        self, question: ReflectOn, completed: Iterable[str], make: Callable[[Start], AnyOrder], outputs: OutputStore
    ) -> list[AnyOrder]:
        """Return the first orders that reflect on the outputs of an attempt."""
        attempt = instance_of(question.unit, occurrence=question.execution - 1)
        keys = self._by_unit[question.unit]
        orders = [
            replace(
                make(Start(instance=each, context=())),
                instance=reflecting_instance(each),
                reflects_on=outputs.get(each),
            )
            for each in dict.fromkeys(completed)
            if each.startswith(f"{attempt}/") and node_key(each) in keys
        ]
        self._open.update((order.instance, question) for order in orders)
        first: list[AnyOrder] = []
        for order in orders:
            if order.key in self._waiting:
                self._waiting[order.key].append(order)
            else:
                self._waiting[order.key] = deque()
                first.append(order)
        return first

    def end(self, result: AnyResult) -> tuple[AnyOrder | None, ReflectOn | None]:
        """Return the next order, and the question if this was its last order."""
        if result.failure is not None and result.failure.message:
            _log.warning("Task '%s' is not reflected on: %s", result.key, result.failure.message)
        question = self._open.pop(result.instance)
        waiting = self._waiting[result.key]
        if waiting:
            return waiting.popleft(), None
        del self._waiting[result.key]
        return None, None if question in self._open.values() else question

    def __contains__(self, instance: object) -> bool:
        return instance in self._open


LOGGER = __name__  # logger of the sources of planned runs, in every process


class PlannedTasks:
    def __init__(
        self,
        plan: Plan,
        journal: RunJournal,
        outputs: OutputStore,
        bodies: Callable[[str], TaskBody[Any]],
        *,
        header: PlanRecorded,
        preamble: Sequence[Fact] = (),
        contents: Sequence[bytes] = (),
        resumed: ResumePoint[Any, Any] | None = None,
        units: UnitPorts | None = None,
    ) -> None:
        """`bodies` returns a task by its key; `header` has no time yet; `preamble` are effects before scheduling.

        `contents` of attachments are stored first.
        """
        self.plan = plan
        self.source = machine_for(plan)
        self._units = None if units is None else UnitEvaluations(plan, self.source, outputs, units)
        self._later = DeferredReflections(plan)
        self._log_text = _log.log_text if units is None or units.log is None else units.log
        self._nodes: Mapping[str, Node] = {node.key: node for node in plan.nodes}
        self._journal = journal
        self._header = header
        self._preamble = preamble
        self._contents = contents
        self._resumed = resumed
        self._recorded = RecordedResults(resumed)
        self._outputs = outputs
        self._bodies = bodies
        self._completed: list[str] = []
        self._delegated: list[str] = []  # names of outputs of a manager's workers
        self._failed_delegations: list[TaskTrace] = []
        self._incomplete: dict[str, int] = {}  # cut off or empty, by instance; a resumed task is counted again
        self._failed: list[FailedTask[Any]] = []
        self._unfinished: list[tuple[str, Any]] = []
        self.suspended = SuspendedTasks(self.source.is_waiting)
        self.directives = RunDirectives(journal, () if resumed is None else resumed.directives)
        self._reasons: list[OwnReason] = []  # of failed tasks
        self._delegated_roles: set[str] = set()  # of a manager's workers with an output
        self._interruption: RunInterrupted | None = None  # no end is recorded
        self._started_at = journal.now()
        self.depends_on_order = plan.depends_on_order  # see `RunTasks`

    async def open(self, source: Source, reporter: TaskReporter) -> InitialStep:
        del source  # the source is the one of this object
        self._reporter = reporter
        if self._units is not None:
            self._units.open(reporter.notify, reporter.break_off, self._journal.now)
        for content in self._contents:
            await self._journal.journal.store_content(content)
        self._contents = ()
        if self._resumed is not None:
            return await self._resume(self._resumed)
        self._started_at = self._journal.now()
        first = self._journal.fact(RUN, replace(self._header, started_at=self._started_at))
        await self._journal.append(first, *self._preamble, until=Persistence.COMMITTED)
        return InitialStep(stimuli=[Begun(at=self._started_at)])

    async def _resume(self, resumed: ResumePoint[Any, Any]) -> InitialStep:
        self._started_at = resumed.started_at
        note = self._journal.fact(RUN, RunResumed.of(self._header, is_restart=resumed.is_restart))
        await self._journal.append(note, *self._preamble, until=Persistence.COMMITTED)
        if not resumed.stimuli:
            return InitialStep(stimuli=[Begun(at=self._started_at)])
        ending: list[Instruction] = []
        for group in resumed.stimuli:
            again = [stimulus for stimulus in group if self._repeats(stimulus)]
            done = self.source.handle(*again) if again else []
            ending += [each for each in done if isinstance(each, End) and each.state is not RunState.WAITING]
        if ending:  # the process died between its last stimulus and the record of the end
            return InitialStep(instructions=ending)
        self.source.handle(Continued(at=self._journal.now()))  # the instructions for this are among the unanswered ones
        stimuli: list[Stimulus] = []
        instructions: list[Instruction] = []
        for each in self.source.list_unanswered():
            if not isinstance(each, Cancel):
                instructions.append(each)
            elif (recorded := self._recorded.pop(each.instance)) is not None:
                stimuli.append(self._store(recorded))
            else:  # it stopped with its process
                self._store_unfinished(self._recorded.find_stopped(each.instance))
                stimuli.append(Cancelled(at=self._journal.now(), instance=each.instance))
        return InitialStep(stimuli=stimuli, instructions=instructions)

    def _repeats(self, stimulus: Stimulus) -> bool:
        """Return whether to replay a stimulus; claims its task's recorded result.

        A task is dispatched again if it does not run now (the plan changed), its output is not recorded (durability
        `run`), or a forgotten cancellation stopped it, but not if the source stops it (S-GRAPH-97).
        """
        if isinstance(stimulus, Cancelled):
            is_wanted = self.source.is_cancelling(stimulus.instance)
            if is_wanted:
                self._store_unfinished(self._recorded.find_stopped(stimulus.instance))
            return is_wanted
        if isinstance(stimulus, Waiting):
            return self.source.is_running(stimulus.instance)
        if not isinstance(stimulus, Completed | Failed | Exited):
            return True
        is_running = self.source.is_running(stimulus.instance)
        result = self._recorded.pop(stimulus.instance) if is_running else None
        if result is None:
            return False
        self._store(result)
        return True

    def look_up(self, start: Start) -> Sequence[Stimulus]:
        recorded = self._recorded.pop(start.instance, wants_text=start.wants_text)
        return () if recorded is None else (self._store(recorded),)

    def make(self, starts: Sequence[Start]) -> None:
        if self._units is not None:
            for start in starts:
                self._units.log_start(start.instance)
        self._reporter.submit([self._order(start) for start in starts])

    def _order(self, start: Start, outputs: ReadableOutputs | None = None) -> AnyOrder:
        key = node_key(start.instance)
        return make_order(
            start,
            self._nodes,
            self._bodies(key),
            outputs or self._outputs,
            run_id=self._journal.run_id,
            epoch=self._journal.epoch,
            is_sequential=self.plan.workflow == "sequential",
            is_reflected_later=self._later.is_later(key),
            is_resubmission=self.suspended.reactivate(start.instance),
            directives=self.directives.active(),
            switches=self.directives.switches,
            asks=None if self._units is None else self._units.questions_after(start, self._nodes[key].agent_key),
        )

    def list_following(self, order: AnyOrder) -> Sequence[AnyOrder]:
        """Return orders of the tasks that certainly follow with the same agent, with `OutputOf` in contexts.

        A directive may expire, so there are none with directives.
        """
        if order.agent_key is None or order.directives:
            return ()
        outputs = OutputsToCome(self._outputs, {order.instance})
        found: list[AnyOrder] = []
        size_bytes = 0
        for instance in islice(self.source.list_following(order.instance), _MOST_FOLLOWING):
            if self._nodes[node_key(instance)].agent_key != order.agent_key or self._recorded.has(instance):
                break
            following = self._order(Start(instance=instance), outputs)
            size_bytes += sum(len(each) for each in (following.task, *following.context) if isinstance(each, bytes))
            if size_bytes > _FOLLOWING_BYTES:
                break
            found.append(following)
            outputs.coming.add(instance)
        return found

    def discard(self, instance: str) -> bool:
        del instance
        return False

    def accept(self, result: AnyResult) -> Sequence[Stimulus]:
        failure = result.failure
        if (
            failure is not None
            and failure.interrupts_run
            and self._nodes[node_key(result.instance)].agent_key is not None
        ):
            self._note_failure(result)
            self._interruption = self._interruption or RunInterrupted.of(failure.reason._replace(key=result.key))
            self._reporter.interrupt(End(state=RunState.INTERRUPTED, exit_reason=ExitReason.ERROR))
            return ()
        if failure is not None and failure.newer_epoch:
            raise StaleEpochError(self._journal.run_id, result.key, self._journal.epoch, failure.newer_epoch)
        if failure is not None and failure.error_type == RecordError.__name__:
            raise RecordError(failure.message)
        if result.instance in self._later:
            following, question = self._later.end(result)
            self._reporter.submit([] if following is None else [following])
            return () if question is None else (Evaluated(at=self._journal.now(), question=question, answer=True),)
        if self._units is not None:
            self._units.keep_verdicts(result.instance, result.verdicts)
        return (self._store(result),)

    def _store(self, result: AnyResult) -> Stimulus:
        instance, failure = result.instance, result.failure
        self._incomplete[instance] = result.incomplete_answers
        for role, output in result.delegated:
            self._delegated_roles.add(role)
            name = instance_of("delegated", occurrence=len(self._delegated), parent=instance)
            self._outputs.put(name, output)
            self._delegated.append(name)
        self._failed_delegations.extend(result.failed_delegations)
        match result.status:
            case "completed":
                self._store_output(result)
                return Completed(
                    at=result.at,
                    instance=instance,
                    duration_s=result.duration_s,
                    total_tokens=result.total_tokens,
                    tool_call_count=result.tool_call_count,
                    delegated_roles=tuple([role for role, _ in result.delegated]) if result.delegated else (),
                    text=result.text,
                )
            case "failed":
                error_type, message = ("", "") if failure is None else (failure.error_type, failure.message)
                self._note_failure(result)
                return Failed(at=result.at, instance=instance, error_type=error_type, message=message)
            case _:
                self._store_unfinished(self._recorded.choose_result(result))
                if result.status == "waiting":
                    return self.suspended.add(result)
                if result.status == "exited":
                    has_output = self._store_output(result)  # true if a gate after the output ended the run
                    return Exited(at=result.at, instance=instance, reason=result.exit_reason, has_output=has_output)
                return Cancelled(at=result.at, instance=instance)

    def _store_output(self, result: AnyResult) -> bool:
        """Store an output, here or in the record; return whether there is one."""
        if result.output is not None:
            self._outputs.put(result.instance, result.output)
        if has_output := result.output is not None or self._outputs.lookup_recorded(result.instance):
            self._completed.append(result.instance)
        return has_output

    def _store_unfinished(self, result: AnyResult | None) -> None:
        if result is not None and result.failure is not None:
            self._unfinished.append((result.instance, result.failure))
            self._incomplete[result.instance] = result.incomplete_answers

    def _note_failure(self, result: AnyResult) -> None:
        reason = NO_REASON
        if result.failure is not None:
            failed = FailedTask(
                instance=result.instance, at=result.at, failure=result.failure, completed_before=len(self._completed)
            )
            self._failed.append(failed)
            reason = result.failure.reason
        inside = result.instance if "/" in result.instance else ""
        self._reasons.append(OwnReason(result.at, reason._replace(key=result.key, instance=inside)))

    def encode(self, stimuli: Sequence[Stimulus]) -> Sequence[Fact]:
        """Each fact counts the following ones of its group, which is handled together."""
        return [
            self._journal.fact(getattr(stimulus, "instance", RUN), encode_stimulus(stimulus, more=more), stimulus.at)
            for more, stimulus in zip(range(len(stimuli) - 1, -1, -1), stimuli, strict=True)
        ]

    def evaluate(self, question: Question) -> None:
        if not isinstance(question, ReflectOn):
            self._units_for(question).ask(question)
        elif orders := self._later.begin(question, self._completed, self._order, self._outputs):
            self._reporter.submit(orders)  # the processes of the tasks reflect
        else:
            self._reporter.notify(Evaluated(at=self._journal.now(), question=question, answer=True))

    def announce(self, what: IterationEnded | StepEnded) -> None:
        self._units_for(what).announce(what)

    def _units_for(self, what: object) -> UnitEvaluations:
        if self._units is None:
            raise TypeError(f"a run without units has no questions and announcements: {what}")
        return self._units

    def log(self, what: Inform | Warn | WarnLeftOut | WarnOversized) -> None:
        text = what.text if isinstance(what, Inform | Warn) else str(what)
        self._log_text(logging.INFO if isinstance(what, Inform) else logging.WARNING, text)

    async def close(self, ending: End) -> RunOutcome[Any, Any]:
        outcome = RunOutcome(
            state=ending.state,
            exit_reason=ending.exit_reason,
            started_at=self._started_at,
            completed_at=self._journal.now(),
            completed=ListedOutputs(self._outputs, self._completed),
            delegated=ListedOutputs(self._outputs, self._delegated),
            failed_delegations=tuple(self._failed_delegations),
            failures=tuple(self._failed),
            unfinished=tuple(self._unfinished),
            units=ending.units,
            unit_failures=ending.unit_failures,
            raised=() if self._units is None else tuple(self._units.raised),
            open_reviews=self.suspended.open_gates(ending),
        )
        data = self._interruption or RunEnded(
            state=ending.state,
            exit_reason=ending.exit_reason,
            errors=await self._list_reasons(ending, outcome),
            incomplete_answers=sum(self._incomplete.values()),
            capped=capped_units(ending.units),
        )
        last = self._journal.fact(RUN, data, outcome.completed_at)
        await self._journal.append(last, until=Persistence.COMMITTED)
        return outcome

    async def _list_reasons(self, ending: End, outcome: RunOutcome[Any, Any]) -> Sequence[RecordedError]:
        """Return the errors of a failed run's tasks and its own, the earliest first."""
        reasons = list(self._reasons)
        raised = {unit: failure.reason for unit, failure in outcome.raised}
        reasons += await unit_reasons(self.plan, ending, raised, self._journal.journal)
        if ending.state is RunState.FAILED and not self._failed:
            reasons += constraint_reasons(self.plan, self._delegated_roles, outcome.completed_at)
        if ending.state is RunState.BUDGET_EXHAUSTED:
            spent = ((node_key(instance), failure.reason) for instance, failure in outcome.unfinished)
            reasons += [
                OwnReason(0.0, reason._replace(key=key))  # before failures that did not end the run
                for key, reason in spent
                if reason.error_type == BudgetExhaustedError.__name__
            ][:1]
        return [each.error for each in sorted(reasons, key=lambda each: each.at)]

    def detach(self) -> None:
        if self._later.open:
            self._reporter.stop(self._later.open)
        if self._units is not None:
            self._units.detach()
