"""RunConductor: carries out what one run's scheduling machine wants, inline and in the scheduler actor. Room: execute.

Journal the stimulus, ask the machine, carry out. It holds outputs as it got them and looks into none, so that a scheduler
process runs no user code. A run that goes on after a crash is conducted by the same code (S-DUR-30): its recorded stimuli
are told to the machine again, what is recorded of a task is its report, and what else runs is handed out anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.errors import RecordError, StaleEpochError
from ensemble_ray.facts.fact import Fact, FactData
from ensemble_ray.facts.runs import PlanRecorded, RecordedError, RunEnded, RunResumed, StimulusRecorded
from ensemble_ray.ids import RUN, instance_of
from ensemble_ray.outputs import ExitReason
from ensemble_ray.ports import Until
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import CancelTask, EndRun, Instruction, SkipTask, StartTask
from ensemble_ray.schedule.states import TaskState
from ensemble_ray.schedule.stimuli import (
    CancelRequested,
    RunStarted,
    Stimulus,
    TaskCancelled,
    TaskCompleted,
    TaskExited,
    TaskFailed,
)

if TYPE_CHECKING:
    from ensemble_ray.outputs import RunState
    from ensemble_ray.plan.plan import Node, Plan
    from ensemble_ray.ports import Clock, Journal
    from ensemble_ray.trace import TaskTrace

__all__ = ["Assignment", "Conducted", "Failed", "Houses", "Report", "Resumed", "RunConductor"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Generic[Output, Failure]):
    """What came of a task, as far as scheduling needs it."""

    key: str
    status: str
    at: float
    duration_s: float = 0.0
    total_tokens: int = -1
    tool_call_count: int = 0
    exit_reason: ExitReason = ExitReason.USER_EXIT_EARLY
    output: Output | None = None
    #: of a manager: what its workers gave, in completion order: (role, output)
    delegated: Sequence[tuple[str, Output]] = ()
    #: of a manager: what its workers did that gave nothing
    lost_work: Sequence[TaskTrace] = ()
    #: error and trace of a task that gave no output, as the house gave them
    failure: Failure | None = None
    error_type: str = ""
    message: str = ""
    #: of the dispatch that it is the report of
    epoch: int = 0
    #: path of the execution that it is the report of; needed where it comes from a process
    instance: str = ""
    #: the epoch that took the task's place, where that is why it failed
    newer_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Generic[Output, Failure]):
    """What the record knows of a run that goes on."""

    #: when it began first
    started_at: float
    #: what its machine was told, in the groups in which it was; what a cancellation did is left out
    stimuli: Sequence[Sequence[Stimulus]]
    #: by key: tasks whose output or failure is recorded, whether or not the machine was told
    reports: Mapping[str, Report[Output, Failure]]
    #: whether only its owner's process was replaced; else somebody wants it to go on, also after a cancellation
    is_restart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Generic[Failure]):
    """A failed task of an ended run."""

    key: str
    at: float
    failure: Failure
    completed_before: int


@dataclass(slots=True, kw_only=True)
class Conducted(Generic[Output, Failure]):
    """How a run ended."""

    state: RunState
    exit_reason: ExitReason
    started_at: float
    completed_at: float
    completed: list[tuple[str, Output]] = field(default_factory=list["tuple[str, Output]"])
    #: outputs of a manager's workers in completion order
    delegated: list[Output] = field(default_factory=list["Output"])
    #: what a manager's workers did that gave nothing
    lost_work: list[TaskTrace] = field(default_factory=list["TaskTrace"])
    failures: list[Failed[Failure]] = field(default_factory=list["Failed[Failure]"])
    #: failures of tasks that were cancelled or exited, for the trace
    unfinished: list[Failure] = field(default_factory=list["Failure"])


class Houses(Protocol[Output]):
    """Where tasks run. Reports come back through `RunConductor.report`."""

    def start(self, assignments: Sequence[Assignment[Output]]) -> None:
        """Run these tasks; never waits."""
        ...

    def stop(self, instances: Sequence[str]) -> None:
        """Stop these tasks; each is still reported, within the houses' grace."""
        ...


class RunConductor(Generic[Output, Failure]):
    """One run: its machine, its outputs, its end."""

    def __init__(
        self,
        *,
        run_id: str,
        plan: Plan,
        header: PlanRecorded,
        journal: Journal,
        clock: Clock,
        houses: Houses[Output],
        earlier: Sequence[Fact] = (),
        epoch: int = 0,
        resumed: Resumed[Output, Failure] | None = None,
    ) -> None:
        """Make one.

        Args:
            run_id: The run's id.
            plan: What to run.
            header: The record's first fact, but for its time.
            journal: Where facts go.
            clock: Time.
            houses: Where tasks run.
            earlier: Effects of before scheduling.
            epoch: What this owner of the run writes under.
            resumed: What is recorded of a run that goes on; None: it begins.
        """
        self.run_id = run_id
        self._header = header
        self._earlier = earlier
        self.plan = plan
        self._nodes: Mapping[str, Node] = {node.key: node for node in plan.nodes}
        self._machine = machine_for(plan)
        self._journal = journal
        self._clock = clock
        self._houses = houses
        self._epoch = epoch
        self._resumed = resumed
        #: reports that the record gives when their tasks are started
        self._recorded: dict[str, Report[Output, Failure]] = {} if resumed is None else dict(resumed.reports)
        self._outputs: dict[str, Output] = {}
        self._delegated: list[Output] = []
        self._lost_work: list[TaskTrace] = []
        self._failed: list[Failed[Failure]] = []
        self._unfinished: list[Failure] = []
        self._inbox: list[Report[Output, Failure]] = []
        self._reported: set[str] = set()
        self._is_draining = False
        self._telling = asyncio.Lock()
        self._ending: EndRun | None = None
        self._errors: list[RecordedError] = []
        self._started_at = clock.now()
        self.ended: asyncio.Future[Conducted[Output, Failure]] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Begin the run, or go on with it."""
        if self._resumed is not None:
            await self._go_on(self._resumed)
            return
        self._started_at = self._clock.now()
        first = self._fact(RUN, replace(self._header, started_at=self._started_at))
        await self._journal.append((first, *self._earlier), epoch=self._epoch, until=Until.WRITTEN)
        await self._tell([RunStarted(at=self._started_at)])
        await self._drain()

    async def _go_on(self, resumed: Resumed[Output, Failure]) -> None:
        """Tell the machine again what it was told, then start what is not resolved."""
        self._started_at = resumed.started_at
        note = self._fact(RUN, RunResumed.of(self._header, is_restart=resumed.is_restart))
        await self._journal.append((note, *self._earlier), epoch=self._epoch, until=Until.WRITTEN)
        ending: EndRun | None = None
        is_cancelled = False
        for told in resumed.stimuli:
            again = [stimulus for stimulus in told if self._recall(stimulus)]
            done = self._machine.handle(*again) if again else []
            ending = next((each for each in done if isinstance(each, EndRun)), ending)
            is_cancelled = is_cancelled or any(isinstance(each, CancelRequested) for each in again)
        if not resumed.stimuli:
            await self._tell([RunStarted(at=self._started_at)])
        elif ending is not None:  # it died between its last stimulus and the record of its end
            self._ending = ending
            await self._end(ending)
        elif is_cancelled:  # nothing starts any more; what the record does not know of has stopped with its house
            now = self._clock.now()
            for key in self._machine.running:
                known = self._recorded.pop(key, None)
                self._put(known or Report(key=key, status="cancelled", at=now))
        else:
            self._carry_out([StartTask(key=key) for key in self._machine.running])
        await self._drain()

    def _recall(self, stimulus: Stimulus) -> bool:
        """Whether the machine is to be told that again; takes what the record gives for its task.

        Of a task that does not run now (the plan was changed), or whose output is not recorded (durability `run`),
        nothing is told: it is handed out anew.
        """
        if not isinstance(stimulus, TaskCompleted | TaskFailed | TaskExited):
            return True
        runs = self._machine.states.get(stimulus.key) is TaskState.RUNNING
        report = self._recorded.pop(stimulus.key, None) if runs else None
        if report is None:
            return False
        self._reported.add(stimulus.key)
        self._take(report)
        return True

    async def cancel(self) -> None:
        """Ask for the end of the run; `ended` tells when it came. A run that ended stays as it is."""
        if self._ending is None and not self.ended.done():
            await self._tell([CancelRequested(at=self._clock.now())], until=Until.WRITTEN)
            await self._drain()

    async def report(self, reports: Sequence[Report[Output, Failure]]) -> None:
        """Take results; those that come while others are being taken are taken together afterwards.

        A task's first report counts; a late one of a replaced house is not even a fact (S-PAR-12).

        Raises:
            StaleEpochError: somebody else has this run now.
            RecordError: a house could not write its facts. Neither is a failure of the task: the run can be gone on with.
        """
        for report in reports:
            if report.newer_epoch:
                # Somebody else has this run now: nothing more may be started here.
                raise StaleEpochError(self.run_id, report.key, self._epoch, report.newer_epoch)
            if report.error_type == RecordError.__name__:
                raise RecordError(report.message)
            self._put(report)
        await self._drain()

    def _put(self, report: Report[Output, Failure]) -> None:
        if report.key not in self._reported:
            self._reported.add(report.key)
            self._inbox.append(report)

    async def _drain(self) -> None:
        if self._is_draining:
            return
        self._is_draining = True
        try:
            while self._inbox:
                taken, self._inbox = self._inbox, []
                await self._tell([self._take(report) for report in taken])
        finally:
            self._is_draining = False

    def _take(self, report: Report[Output, Failure]) -> Stimulus:
        """Keep what a report brought; gives what the machine is told."""
        self._delegated.extend(output for _, output in report.delegated)
        self._lost_work.extend(report.lost_work)
        match report.status:
            case "completed":
                if report.output is not None:
                    self._outputs[report.key] = report.output
                return TaskCompleted(
                    at=report.at,
                    key=report.key,
                    duration_s=report.duration_s,
                    total_tokens=report.total_tokens,
                    tool_call_count=report.tool_call_count,
                    delegated_roles=tuple(role for role, _ in report.delegated),
                )
            case "failed":
                if report.failure is not None:
                    self._failed.append(
                        Failed(
                            key=report.key, at=report.at, failure=report.failure, completed_before=len(self._outputs)
                        )
                    )
                self._errors.append(RecordedError(report.key, report.error_type, report.message))
                return TaskFailed(at=report.at, key=report.key, error_type=report.error_type, message=report.message)
            case "exited":
                self._unfinished.extend(() if report.failure is None else (report.failure,))
                return TaskExited(at=report.at, key=report.key, reason=report.exit_reason)
            case _:
                self._unfinished.extend(() if report.failure is None else (report.failure,))
                return TaskCancelled(at=report.at, key=report.key)

    async def _tell(self, stimuli: Sequence[Stimulus], *, until: Until = Until.TAKEN) -> None:
        """Journal first, then act.

        A stimulus need not be committed before: a task's own facts are, so that a lost one is told again (S-DUR-30).
        """
        facts = [self._told(stimulus, len(stimuli) - position) for position, stimulus in enumerate(stimuli, start=1)]
        async with self._telling:  # the machine is told in the order of the record, whoever waits for the journal
            if self._ending is not None and isinstance(stimuli[0], RunStarted | CancelRequested):
                return  # it was cancelled before it began, or has ended meanwhile
            await self._journal.append(facts, epoch=self._epoch, until=until)
            was_going_on = self._ending is None
            self._carry_out(self._machine.handle(*stimuli))
            if was_going_on and self._ending is not None:
                await self._end(self._ending)

    def _told(self, stimulus: Stimulus, more: int) -> Fact:
        """The fact of a stimulus; `more` says how many of the same group follow, since a group is told at once."""
        key: str = getattr(stimulus, "key", "")
        return self._fact(instance_of(key) if key else RUN, StimulusRecorded.of(stimulus, more=more), stimulus.at)

    def _fact(self, name: str, data: FactData, at: float | None = None) -> Fact:
        moment = self._clock.now() if at is None else at
        return Fact(run=self.run_id, name=name, at=moment, data=data, epoch=self._epoch)

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        starting: list[Assignment[Output]] = []
        stopping: list[str] = []
        for instruction in instructions:
            match instruction:
                case StartTask() if (known := self._recorded.pop(instruction.key, None)) is not None:
                    self._put(known)
                case StartTask():
                    starting.append(self._assignment(self._nodes[instruction.key]))
                case CancelTask():
                    stopping.append(instance_of(instruction.key))
                case SkipTask():
                    _log.debug("Task '%s' is skipped: %s", instruction.key, instruction.reason)
                case EndRun():
                    self._ending = instruction
        if starting:
            self._houses.start(starting)
        if stopping:
            self._houses.stop(stopping)

    def _assignment(self, node: Node) -> Assignment[Output]:
        missing = None
        if self.plan.workflow == "sequential":
            absent = [self._nodes[key].description for key in node.context if key not in self._outputs]
            missing = next(iter([*absent, *node.context_outside]), None)
        return Assignment(
            node=node,
            instance=instance_of(node.key),
            epoch=self._epoch,
            context=tuple(self._outputs[key] for key in node.context if key in self._outputs),
            missing_context=missing,
        )

    async def _end(self, instruction: EndRun) -> None:
        conducted = Conducted(
            state=instruction.state,
            exit_reason=instruction.exit_reason,
            started_at=self._started_at,
            completed_at=self._clock.now(),
            completed=[(key, self._outputs[key]) for key in self._machine.completed],
            delegated=list(self._delegated),
            lost_work=list(self._lost_work),
            failures=list(self._failed),
            unfinished=list(self._unfinished),
        )
        end = RunEnded(state=instruction.state, exit_reason=instruction.exit_reason, errors=self._errors)
        last = self._fact(RUN, end, conducted.completed_at)
        await self._journal.append((last,), epoch=self._epoch, until=Until.WRITTEN)
        if not self.ended.done():
            self.ended.set_result(conducted)
