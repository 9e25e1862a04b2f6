"""The tasks of a planned run: orders from its nodes, what came of them, and what the record gives.

A run that goes on after a crash passes the same code (S-DUR-30): its source is told its recorded stimuli again, what is
recorded of a task is its report, and what else runs is handed out anew. Fulfils `RunTasks`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, Never, TypeVar

from ensemble_ray.coordinator.directives import RunDirectives
from ensemble_ray.coordinator.later_reflections import LaterReflections
from ensemble_ray.coordinator.outputs import ListedOutputs
from ensemble_ray.coordinator.own_reasons import OwnReason, constraint_reasons, unit_reasons
from ensemble_ray.coordinator.ports import Opening
from ensemble_ray.coordinator.put_down import PutDown
from ensemble_ray.coordinator.recorded_results import RecordedResults
from ensemble_ray.coordinator.start_orders import make_order
from ensemble_ray.coordinator.unit_evaluations import UnitEvaluations
from ensemble_ray.errors import BudgetExhaustedError, RecordError, StaleEpochError
from ensemble_ray.execute.orders import FailedTask, FailureSummary, RunOutcome, TaskBody, TaskOrder, TaskResult
from ensemble_ray.facts.runs import NO_REASON, RecordedError, RunEnded, RunInterrupted, RunResumed
from ensemble_ray.ports import Persistence
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import Cancel, End, Inform, Instruction, ReflectOn, Start, Warn, capped_units
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
from ensemble_ray.values.ids import RUN, instance_of, node_key
from ensemble_ray.values.outputs import ExitReason, RunState

if TYPE_CHECKING:
    from ensemble_ray.coordinator.outputs import OutputStore
    from ensemble_ray.coordinator.ports import TaskReporter
    from ensemble_ray.coordinator.run_journal import RunJournal
    from ensemble_ray.coordinator.unit_evaluations import UnitPorts
    from ensemble_ray.execute.orders import Resumed
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.plan.plan import Node, Plan
    from ensemble_ray.schedule.instructions import IterationEnded, Question, StepEnded, WarnLeftOut, WarnOversized
    from ensemble_ray.schedule.machine import Source
    from ensemble_ray.values.trace import TaskTrace

#: Where what sources of planned runs say is logged, in whichever process.
LOGGER = __name__
_log = bounded_logger(LOGGER)
#: How a task is held: the object itself inline, its bytes in a scheduler actor. Outputs and failures alike.
Task = TypeVar("Task")
Output = TypeVar("Output")
Failure = TypeVar("Failure", bound=FailureSummary)


class PlannedTasks(Generic[Task, Output, Failure]):
    """The tasks of one plan."""

    def __init__(
        self,
        plan: Plan,
        journal: RunJournal,
        outputs: OutputStore[Output],
        bodies: Callable[[str], TaskBody[Task]],
        *,
        header: PlanRecorded,
        preamble: Sequence[Fact] = (),
        resumed: Resumed[Output, Failure] | None = None,
        units: UnitPorts[Output, Failure] | None = None,
    ) -> None:
        """Make them.

        Args:
            plan: What to run.
            journal: Of the run.
            outputs: Where outputs are kept.
            bodies: Returns a task by its key.
            header: The record's first fact, but for its time.
            preamble: Effects of before scheduling.
            resumed: What is recorded of a run that goes on; None: it begins.
            units: What its loops, phases and graph need; None: it has none.
        """
        self.plan = plan
        self.source = machine_for(plan)
        self._units = None if units is None else UnitEvaluations(plan, self.source, outputs, units)
        self._later: LaterReflections[Task, Output] = LaterReflections(plan)
        self._say = _log.say if units is None or units.say is None else units.say
        self._nodes: Mapping[str, Node] = {node.key: node for node in plan.nodes}
        self._journal = journal
        self._header = header
        self._preamble = preamble
        self._resumed = resumed
        self._recorded = RecordedResults(resumed)
        self._outputs = outputs
        self._bodies = bodies
        self._completed: list[str] = []
        #: under which names outputs of a manager's workers are kept
        self._delegated: list[str] = []
        self._failed_delegations: list[TaskTrace] = []
        #: answers that were cut off or empty, by instance; a task that waited is counted again when it has gone on
        self._incomplete: dict[str, int] = {}
        self._failed: list[FailedTask[Failure]] = []
        self._unfinished: list[tuple[str, Failure]] = []
        self.put_down = PutDown(self.source.is_waiting)
        self.directives = RunDirectives(journal, () if resumed is None else resumed.directives)
        #: of failed tasks
        self._reasons: list[OwnReason] = []
        #: of a manager's workers that gave something
        self._delegated_roles: set[str] = set()
        #: why it has no end on record
        self._interruption: RunInterrupted | None = None
        self._started_at = journal.now()
        self.depends_on_order = plan.depends_on_order  # see `RunTasks`

    # Beginning.

    async def open(self, source: Source, reporter: TaskReporter[TaskOrder[Task, Never, Output]]) -> Opening:
        """Begin the run, or go on with it."""
        del source  # it is this one's
        self._reporter = reporter
        if self._units is not None:
            self._units.open(reporter.notify, reporter.break_off, self._journal.now)
        if self._resumed is not None:
            return await self._go_on(self._resumed)
        self._started_at = self._journal.now()
        first = self._journal.fact(RUN, replace(self._header, started_at=self._started_at))
        await self._journal.append(first, *self._preamble, until=Persistence.COMMITTED)
        return Opening(stimuli=[Begun(at=self._started_at)])

    async def _go_on(self, resumed: Resumed[Output, Failure]) -> Opening:
        """Tell the source again what it was told; what is not resolved then is to be started."""
        self._started_at = resumed.started_at
        note = self._journal.fact(RUN, RunResumed.of(self._header, is_restart=resumed.is_restart))
        await self._journal.append(note, *self._preamble, until=Persistence.COMMITTED)
        if not resumed.stimuli:
            return Opening(stimuli=[Begun(at=self._started_at)])
        ending: list[Instruction] = []
        for group in resumed.stimuli:
            again = [stimulus for stimulus in group if self._repeats(stimulus)]
            done = self.source.handle(*again) if again else []
            ending += [each for each in done if isinstance(each, End) and each.state is not RunState.WAITING]
        if ending:  # it died between its last stimulus and the record of its end
            return Opening(instructions=ending)
        # What it wants of that is among what has no answer.
        self.source.handle(Continued(at=self._journal.now()))
        unanswered = self.source.list_unanswered()
        return Opening(
            stimuli=[self._make_stop(each.instance) for each in unanswered if isinstance(each, Cancel)],
            instructions=[each for each in unanswered if not isinstance(each, Cancel)],
        )

    def _make_stop(self, instance: str) -> Stimulus:
        """Return the end of a task that was asked to stop: what the record does not know of has stopped with its process."""
        if (recorded := self._recorded.pop(instance)) is not None:
            return self._keep(recorded)
        self._keep_unfinished(self._recorded.find_stopped(instance))
        return Cancelled(at=self._journal.now(), instance=instance)

    def _repeats(self, stimulus: Stimulus) -> bool:
        """Whether the source is to be told that again; takes what the record gives for its task.

        Of a task that does not run now (the plan was changed), or whose output is not recorded (durability `run`),
        nothing is told: it is handed out anew. So is one that was stopped for a cancellation that is forgotten, and not
        one that the source itself wants stopped, as a join does with branches that it needs no more (S-GRAPH-97).
        """
        if isinstance(stimulus, Cancelled):
            is_wanted = self.source.is_cancelling(stimulus.instance)
            if is_wanted:
                self._keep_unfinished(self._recorded.find_stopped(stimulus.instance))
            return is_wanted
        if isinstance(stimulus, Waiting):
            return self.source.is_running(stimulus.instance)
        if not isinstance(stimulus, Completed | Failed | Exited):
            return True
        is_running = self.source.is_running(stimulus.instance)
        result = self._recorded.pop(stimulus.instance) if is_running else None
        if result is None:
            return False
        self._keep(result)
        return True

    # Orders.

    def look_up(self, start: Start) -> Sequence[Stimulus]:
        """Return what the record says came of a task."""
        recorded = self._recorded.pop(start.instance, wants_text=start.wants_text)
        return () if recorded is None else (self._keep(recorded),)

    def make(self, starts: Sequence[Start]) -> None:
        """Make orders and submit them."""
        if self._units is not None:
            for start in starts:
                self._units.log_start(start.instance)
        self._reporter.submit([self._order(start) for start in starts])

    def _order(self, start: Start) -> TaskOrder[Task, Never, Output]:
        key = node_key(start.instance)
        order = make_order(
            start,
            self._nodes,
            self._bodies(key),
            self._outputs,
            run_id=self._journal.run_id,
            epoch=self._journal.epoch,
            is_sequential=self.plan.workflow == "sequential",
        )
        return replace(
            order,
            is_reflected_later=self._later.is_later(key),
            is_resubmission=self.put_down.pick_up(start.instance),
            directives=self.directives.active(),
            switches=self.directives.switches,
            asks=None if self._units is None else self._units.foresee(start, order.agent_key),
        )

    def discard(self, instance: str) -> bool:
        """Forget nothing: an order is made as soon as its task is started."""
        del instance
        return False

    # Results.

    def accept(self, result: TaskResult[Output, Failure]) -> Sequence[Stimulus]:
        """Keep what came of a task.

        Raises:
            StaleEpochError: somebody else has this run now: nothing more may be started here.
            RecordError: a process could not write its facts. Neither is a failure of the task: the run can be gone on with.
        """
        failure = result.failure
        if (
            failure is not None
            and failure.is_out_of_credit
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
        return (self._keep(result),)

    def _keep(self, result: TaskResult[Output, Failure]) -> Stimulus:
        """Keep what came of a task; return what the source is told."""
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
                self._keep_output(result)
                return Completed(
                    at=result.at,
                    instance=instance,
                    duration_s=result.duration_s,
                    total_tokens=result.total_tokens,
                    tool_call_count=result.tool_call_count,
                    delegated_roles=tuple(role for role, _ in result.delegated),
                    text=result.text,
                )
            case "failed":
                error_type, message = ("", "") if failure is None else (failure.error_type, failure.message)
                self._note_failure(result)
                return Failed(at=result.at, instance=instance, error_type=error_type, message=message)
            case _:
                self._keep_unfinished(self._recorded.most_of(result))
                if result.status == "waiting":
                    return self.put_down.keep(result)
                if result.status == "exited":
                    has_output = self._keep_output(result)  # where a gate behind it ended the run
                    return Exited(at=result.at, instance=instance, reason=result.exit_reason, has_output=has_output)
                return Cancelled(at=result.at, instance=instance)

    def _keep_output(self, result: TaskResult[Output, Failure]) -> bool:
        """Keep the output of a task, be it here or in the record; return whether there is one."""
        if result.output is not None:
            self._outputs.put(result.instance, result.output)
        if has_output := result.output is not None or self._outputs.lookup_recorded(result.instance):
            self._completed.append(result.instance)
        return has_output

    def _keep_unfinished(self, result: TaskResult[Output, Failure] | None) -> None:
        """Keep what a task did that gave no output and did not fail."""
        if result is not None and result.failure is not None:
            self._unfinished.append((result.instance, result.failure))
            self._incomplete[result.instance] = result.incomplete_answers

    def _note_failure(self, result: TaskResult[Output, Failure]) -> None:
        reason = NO_REASON
        if result.failure is not None:
            failed = FailedTask(
                instance=result.instance, at=result.at, failure=result.failure, completed_before=len(self._completed)
            )
            self._failed.append(failed)
            reason = result.failure.reason
        self._reasons.append(OwnReason(result.at, reason._replace(key=result.key)))

    def encode(self, stimuli: Sequence[Stimulus]) -> Sequence[Fact]:
        """Return the facts of stimuli; each says how many of the same group follow, since a group is told at once."""
        return [
            self._journal.fact(getattr(stimulus, "instance", RUN), encode_stimulus(stimulus, more=more), stimulus.at)
            for more, stimulus in zip(range(len(stimuli) - 1, -1, -1), stimuli, strict=True)
        ]

    def forget(self, instances: Sequence[str]) -> None:
        """Let outputs go."""
        self._outputs.forget(instances)

    # Units.

    def evaluate(self, question: Question) -> None:
        """Ask user code, or reset memory."""
        if isinstance(question, ReflectOn):
            self._reflect(question)
        else:
            self._units_for(question).ask(question)

    def _reflect(self, question: ReflectOn) -> None:
        """Have the outputs of an accepted attempt reflected on where its tasks were done."""
        if orders := self._later.begin(question, self._completed, self._order, self._outputs):
            self._reporter.submit(orders)
        else:
            self._reporter.notify(Evaluated(at=self._journal.now(), question=question, answer=True))

    def announce(self, what: IterationEnded | StepEnded) -> None:
        """Tell listeners of an iteration or a step."""
        self._units_for(what).announce(what)

    def _units_for(self, what: object) -> UnitEvaluations[Output, Failure]:
        """Return what asks and announces for units; a run without them does neither."""
        if self._units is None:
            raise TypeError(f"a run without units asks and announces nothing: {what}")
        return self._units

    def say(self, what: Inform | Warn | WarnLeftOut | WarnOversized) -> None:
        """Log what the source says, where people read it."""
        text = what.text if isinstance(what, Inform | Warn) else str(what)
        self._say(logging.INFO if isinstance(what, Inform) else logging.WARNING, text)

    # The end.

    async def close(self, ending: End) -> RunOutcome[Output, Failure]:
        """Put the end on record, and return how the run ended."""
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
            open_reviews=self.put_down.waited_for(ending),
        )
        # An interrupted run has no end on record, so that it can be resumed.
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

    async def _list_reasons(self, ending: End, outcome: RunOutcome[Output, Failure]) -> Sequence[RecordedError]:
        """Return why the run failed: its tasks' errors and its own, the earliest first."""
        reasons = list(self._reasons)
        raised = {unit: failure.reason for unit, failure in outcome.raised}
        reasons += await unit_reasons(self.plan, ending, raised, self._journal.journal)
        if ending.state is RunState.FAILED and not self._failed:
            reasons += constraint_reasons(self.plan, self._delegated_roles, outcome.completed_at)
        if ending.state is RunState.BUDGET_EXHAUSTED:
            spent = ((node_key(instance), failure.reason) for instance, failure in outcome.unfinished)
            reasons += [
                OwnReason(0.0, reason._replace(key=key))  # before failures that did not end it
                for key, reason in spent
                if reason.error_type == BudgetExhaustedError.__name__
            ][:1]
        return [each.error for each in sorted(reasons, key=lambda each: each.at)]

    def leave(self) -> None:
        """Wait for nothing any more."""
        if self._later.open:
            self._reporter.stop(self._later.open)
        if self._units is not None:
            self._units.leave()
