"""The tasks of a planned run: orders from its nodes, what came of them, and what the record gives. Package: coordinator.

A run that goes on after a crash passes the same code (S-DUR-30): its source is told its recorded stimuli again, what is
recorded of a task is its report, and what else runs is handed out anew. Fulfils `RunTasks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

from ensemble_ray.coordinator.outputs import KeyedOutputs
from ensemble_ray.coordinator.ports import Opening
from ensemble_ray.errors import RecordError, StaleEpochError
from ensemble_ray.execute.reports import Report
from ensemble_ray.facts.runs import RecordedError, RunEnded, RunResumed
from ensemble_ray.ports import Until
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import End, Instruction, Start, TaskChanges, Warn
from ensemble_ray.schedule.states import TaskState
from ensemble_ray.schedule.stimuli import (
    Begun,
    Cancelled,
    CancelRequested,
    Completed,
    Exited,
    Failed,
    Stimulus,
    encode_stimulus,
)
from ensemble_ray.values.ids import RUN, instance_of, key_of

if TYPE_CHECKING:
    from ensemble_ray.coordinator.outputs import OutputStore
    from ensemble_ray.coordinator.ports import TaskReporter
    from ensemble_ray.coordinator.run_journal import RunJournal
    from ensemble_ray.execute.reports import Resumed
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.plan.plan import Node, Plan
    from ensemble_ray.schedule.instructions import IterationEnded, Question, StepEnded, WarnLeftOut, WarnOversized
    from ensemble_ray.schedule.source import Source
    from ensemble_ray.values.outputs import ExitReason, RunState
    from ensemble_ray.values.trace import TaskTrace

__all__ = ["Assignment", "FailedTask", "PlannedEnd", "PlannedTasks"]

_log = bounded_logger(__name__)
#: How an output is held: the object itself inline, its bytes in a scheduler actor.
Output = TypeVar("Output")
#: How a failure is held: the task's result inline, its bytes in a scheduler actor.
Failure = TypeVar("Failure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment(Generic[Output]):
    """A task that should run now, with what it needs."""

    node: Node
    instance: str
    epoch: int
    context: Sequence[Output] = ()
    missing_context: str | None = None
    changes: TaskChanges | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTask(Generic[Failure]):
    """A failed task of an ended run."""

    key: str
    at: float
    failure: Failure
    completed_before: int


@dataclass(slots=True, kw_only=True)
class PlannedEnd(Generic[Output, Failure]):
    """How a planned run ended."""

    state: RunState
    exit_reason: ExitReason
    started_at: float
    completed_at: float
    completed: Sequence[tuple[str, Output]] = ()
    #: outputs of a manager's workers in completion order
    delegated: Sequence[tuple[str, Output]] = ()
    #: what a manager's workers did that gave nothing
    failed_delegations: list[TaskTrace] = field(default_factory=list["TaskTrace"])
    failures: list[FailedTask[Failure]] = field(default_factory=list["FailedTask[Failure]"])
    #: failures of tasks that were cancelled or exited, for the trace
    unfinished: list[Failure] = field(default_factory=list["Failure"])


class PlannedTasks(Generic[Output, Failure]):
    """The tasks of one plan."""

    def __init__(
        self,
        plan: Plan,
        journal: RunJournal,
        outputs: OutputStore[Output],
        *,
        header: PlanRecorded,
        preamble: Sequence[Fact] = (),
        resumed: Resumed[Output, Failure] | None = None,
    ) -> None:
        """Make them.

        Args:
            plan: What to run.
            journal: Of the run.
            outputs: Where outputs are kept.
            header: The record's first fact, but for its time.
            preamble: Effects of before scheduling.
            resumed: What is recorded of a run that goes on; None: it begins.
        """
        self.plan = plan
        self.source = machine_for(plan)
        self._nodes: Mapping[str, Node] = {node.key: node for node in plan.nodes}
        self._journal = journal
        self._header = header
        self._preamble = preamble
        self._resumed = resumed
        #: reports that the record gives when their tasks are started
        self._recorded: dict[str, Report[Output, Failure]] = {}
        if resumed is not None:
            self._recorded = {instance_of(key): report for key, report in resumed.reports.items()}
        self._outputs = outputs
        self._completed: list[str] = []
        #: under which names outputs of a manager's workers are kept
        self._delegated: list[str] = []
        self._failed_delegations: list[TaskTrace] = []
        self._failed: list[FailedTask[Failure]] = []
        self._unfinished: list[Failure] = []
        self._errors: list[RecordedError] = []
        self._started_at = journal.now()

    # Beginning.

    async def open(self, source: Source, reporter: TaskReporter[Assignment[Output]]) -> Opening:
        """Begin the run, or go on with it."""
        del source  # it is this one's
        self._reporter = reporter
        if self._resumed is not None:
            return await self._go_on(self._resumed)
        self._started_at = self._journal.now()
        first = self._journal.fact(RUN, replace(self._header, started_at=self._started_at))
        await self._journal.append(first, *self._preamble, until=Until.WRITTEN)
        return Opening(stimuli=[Begun(at=self._started_at)])

    async def _go_on(self, resumed: Resumed[Output, Failure]) -> Opening:
        """Tell the source again what it was told; what is not resolved then is to be started."""
        self._started_at = resumed.started_at
        note = self._journal.fact(RUN, RunResumed.of(self._header, is_restart=resumed.is_restart))
        await self._journal.append(note, *self._preamble, until=Until.WRITTEN)
        if not resumed.stimuli:
            return Opening(stimuli=[Begun(at=self._started_at)])
        ending: list[Instruction] = []
        is_cancelled = False
        for group in resumed.stimuli:
            again = [stimulus for stimulus in group if self._repeats(stimulus)]
            done = self.source.handle(*again) if again else []
            ending += [each for each in done if isinstance(each, End)]
            is_cancelled = is_cancelled or any(isinstance(each, CancelRequested) for each in again)
        if ending:  # it died between its last stimulus and the record of its end
            return Opening(instructions=ending)
        running = self.source.running
        if not is_cancelled:
            return Opening(instructions=[Start(instance=instance) for instance in running])
        # Nothing starts any more; what the record does not know of has stopped with its process.
        ends: list[Stimulus] = []
        for instance in running:
            recorded = self._recorded.pop(instance, None)
            ends.append(
                Cancelled(at=self._journal.now(), instance=instance) if recorded is None else self._keep(recorded)
            )
        return Opening(stimuli=ends)

    def _repeats(self, stimulus: Stimulus) -> bool:
        """Whether the source is to be told that again; takes what the record gives for its task.

        Of a task that does not run now (the plan was changed), or whose output is not recorded (durability `run`),
        nothing is told: it is handed out anew.
        """
        if not isinstance(stimulus, Completed | Failed | Exited):
            return True
        runs = self.source.states.get(stimulus.instance) is TaskState.RUNNING
        report = self._recorded.pop(stimulus.instance, None) if runs else None
        if report is None:
            return False
        self._keep(report)
        return True

    # Orders.

    def look_up(self, start: Start) -> Sequence[Stimulus]:
        """Return what the record says came of a task."""
        recorded = self._recorded.pop(start.instance, None)
        return () if recorded is None else (self._keep(recorded),)

    def make(self, starts: Sequence[Start]) -> None:
        """Make orders and submit them."""
        self._reporter.submit([self._assignment(start) for start in starts])

    def _assignment(self, start: Start) -> Assignment[Output]:
        node = self._nodes[key_of(start.instance)]
        context = [(key, instance_of(key)) for key in node.context]
        missing = None
        if self.plan.workflow == "sequential":
            absent = [self._nodes[key].description for key, instance in context if instance not in self._outputs]
            missing = next(iter([*absent, *node.context_outside]), None)
        return Assignment(
            node=node,
            instance=start.instance,
            epoch=self._journal.epoch,
            context=tuple(self._outputs.get(instance) for _, instance in context if instance in self._outputs),
            missing_context=missing,
            changes=start.changes if isinstance(start.changes, TaskChanges) else None,
        )

    def discard(self, instance: str) -> None:
        """Forget nothing: an order is made as soon as its task is started."""

    # Results.

    def accept(self, result: Report[Output, Failure]) -> Sequence[Stimulus]:
        """Keep what came of a task.

        Raises:
            StaleEpochError: somebody else has this run now: nothing more may be started here.
            RecordError: a process could not write its facts. Neither is a failure of the task: the run can be gone on with.
        """
        if result.newer_epoch:
            raise StaleEpochError(self._journal.run_id, result.key, self._journal.epoch, result.newer_epoch)
        if result.error_type == RecordError.__name__:
            raise RecordError(result.message)
        return (self._keep(result),)

    def _keep(self, report: Report[Output, Failure]) -> Stimulus:
        """Keep what a report brought; return what the source is told."""
        instance = instance_of(report.key) if not report.instance else report.instance
        for _, output in report.delegated:
            name = instance_of("delegated", occurrence=len(self._delegated), parent=instance)
            self._outputs.put(name, output)
            self._delegated.append(name)
        self._failed_delegations.extend(report.failed_delegations)
        match report.status:
            case "completed":
                if report.output is not None:
                    self._outputs.put(instance, report.output)
                    self._completed.append(instance)
                return Completed(
                    at=report.at,
                    instance=instance,
                    duration_s=report.duration_s,
                    total_tokens=report.total_tokens,
                    tool_call_count=report.tool_call_count,
                    delegated_roles=tuple(role for role, _ in report.delegated),
                )
            case "failed":
                self._note_failure(report)
                return Failed(at=report.at, instance=instance, error_type=report.error_type, message=report.message)
            case "exited":
                if report.output is not None:  # a gate behind it ended the run
                    self._outputs.put(instance, report.output)
                    self._completed.append(instance)
                self._unfinished.extend(() if report.failure is None else (report.failure,))
                has_output = report.output is not None
                return Exited(at=report.at, instance=instance, reason=report.exit_reason, has_output=has_output)
            case _:
                self._unfinished.extend(() if report.failure is None else (report.failure,))
                return Cancelled(at=report.at, instance=instance)

    def _note_failure(self, report: Report[Output, Failure]) -> None:
        if report.failure is not None:
            failed = FailedTask(
                key=report.key, at=report.at, failure=report.failure, completed_before=len(self._completed)
            )
            self._failed.append(failed)
        self._errors.append(RecordedError(report.key, report.error_type, report.message))

    def encode(self, stimuli: Sequence[Stimulus]) -> Sequence[Fact]:
        """Return the facts of stimuli; each says how many of the same group follow, since a group is told at once."""
        return [
            self._journal.fact(getattr(stimulus, "instance", RUN), encode_stimulus(stimulus, more=more), stimulus.at)
            for more, stimulus in zip(range(len(stimuli) - 1, -1, -1), stimuli, strict=True)
        ]

    def forget(self, instances: Sequence[str]) -> None:
        """Let outputs go."""
        self._outputs.forget(instances)

    # What a plan has not.

    def evaluate(self, question: Question) -> NoReturn:
        """Refuse: a plan has no user code to ask."""
        raise NotImplementedError(f"a planned run has no code that answers {question}")

    def announce(self, what: IterationEnded | StepEnded) -> NoReturn:
        """Refuse: a plan of tasks has neither."""
        raise NotImplementedError(f"a planned run announces no {what}")

    def warn(self, warning: Warn | WarnLeftOut | WarnOversized) -> None:
        """Log a warning of the source's."""
        _log.warning("%s", warning.text if isinstance(warning, Warn) else warning)

    # The end.

    async def close(self, ending: End) -> PlannedEnd[Output, Failure]:
        """Put the end on record, and return how the run ended."""
        ended = PlannedEnd(
            state=ending.state,
            exit_reason=ending.exit_reason,
            started_at=self._started_at,
            completed_at=self._journal.now(),
            completed=KeyedOutputs(self._outputs, self._completed),
            delegated=KeyedOutputs(self._outputs, self._delegated),
            failed_delegations=list(self._failed_delegations),
            failures=list(self._failed),
            unfinished=list(self._unfinished),
        )
        data = RunEnded(state=ending.state, exit_reason=ending.exit_reason, errors=self._errors)
        last = self._journal.fact(RUN, data, ended.completed_at)
        await self._journal.append(last, until=Until.WRITTEN)
        return ended

    def leave(self) -> None:
        """Wait for nothing: whatever a planned run does, its executor does."""
