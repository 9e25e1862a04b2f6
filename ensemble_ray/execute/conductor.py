"""RunConductor: carries out what one run's scheduling machine wants. Room: execute.

The same class conducts a run inline and inside the scheduler actor: journal the stimulus, ask the machine, carry out.
It holds outputs as it got them and looks into none, so that a scheduler process runs no user code.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ensemble_ray.ids import instance_of
from ensemble_ray.messages import Fact
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import CancelTask, EndRun, Instruction, SkipTask, StartTask
from ensemble_ray.schedule.stimuli import (
    CancelRequested,
    RunStarted,
    Stimulus,
    TaskCancelled,
    TaskCompleted,
    TaskExited,
    TaskFailed,
    stimulus_fields,
)

if TYPE_CHECKING:
    from ensemble_ray.outputs import ExitReason, RunState
    from ensemble_ray.plan.plan import Node, Plan
    from ensemble_ray.ports import Clock, Journal

__all__ = ["Assignment", "Conducted", "Failed", "Houses", "Report", "RunConductor"]

_log = logging.getLogger(__name__)
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
    is_timeout: bool = False
    output: Output | None = None
    #: error and trace of a task that gave no output, as the house gave them
    failure: Failure | None = None
    error_type: str = ""
    message: str = ""


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
        header: Mapping[str, object],
        journal: Journal,
        clock: Clock,
        houses: Houses[Output],
        earlier: Sequence[Fact] = (),
        epoch: int = 0,
    ) -> None:
        """`earlier` are effects of before scheduling. `header` is the data of the record's first fact; see the record format."""
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
        self._outputs: dict[str, Output] = {}
        self._failed: list[Failed[Failure]] = []
        self._unfinished: list[Failure] = []
        self._inbox: list[Report[Output, Failure]] = []
        self._reported: set[str] = set()
        self._is_draining = False
        self._ending: EndRun | None = None
        self._errors: list[dict[str, str]] = []
        self._started_at = clock.now()
        self.ended: asyncio.Future[Conducted[Output, Failure]] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Begin the run."""
        self._started_at = self._clock.now()
        first = self._fact("plan", "run", {**self._header, "started_at": self._started_at})
        await self._journal.append((first, *self._earlier), epoch=self._epoch)
        await self._tell([RunStarted(at=self._started_at)])

    async def cancel(self) -> None:
        """Ask for the end of the run; `ended` tells when it came. A run that ended stays as it is."""
        if self._ending is None and not self.ended.done():
            await self._tell([CancelRequested(at=self._clock.now())])

    async def report(self, reports: Sequence[Report[Output, Failure]]) -> None:
        """Take results; those that come while others are being taken are taken together afterwards.

        A task's first report counts; a late one of a replaced house is not even a fact (S-PAR-12).
        """
        for report in reports:
            if report.key not in self._reported:
                self._reported.add(report.key)
                self._inbox.append(report)
        if self._is_draining:
            return
        self._is_draining = True
        try:
            while self._inbox:
                taken, self._inbox = self._inbox, []
                await self._tell([self._stimulus(report) for report in taken])
        finally:
            self._is_draining = False

    def _stimulus(self, report: Report[Output, Failure]) -> Stimulus:
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
                )
            case "failed":
                if report.failure is not None:
                    self._failed.append(
                        Failed(
                            key=report.key, at=report.at, failure=report.failure, completed_before=len(self._outputs)
                        )
                    )
                self._errors.append({"key": report.key, "error_type": report.error_type, "message": report.message})
                return TaskFailed(at=report.at, key=report.key, error_type=report.error_type, message=report.message)
            case "exited":
                self._keep_unfinished(report)
                return TaskExited(at=report.at, key=report.key, is_timeout=report.is_timeout)
            case _:
                self._keep_unfinished(report)
                return TaskCancelled(at=report.at, key=report.key)

    def _keep_unfinished(self, report: Report[Output, Failure]) -> None:
        if report.failure is not None:
            self._unfinished.append(report.failure)

    async def _tell(self, stimuli: Sequence[Stimulus]) -> None:
        """Journal first, then act (design: the scheduler journals a stimulus before it acts on it)."""
        facts = [
            self._fact(
                "stimulus", instance_of(key) if (key := getattr(s, "key", "")) else "run", stimulus_fields(s), s.at
            )
            for s in stimuli
        ]
        await self._journal.append(facts, epoch=self._epoch)
        was_going_on = (
            self._ending is None
        )  # asked now: others may have told the machine while the journal was waited for
        self._carry_out(self._machine.handle(*stimuli))
        if was_going_on and self._ending is not None:
            await self._end(self._ending)

    def _fact(self, kind: str, name: str, data: Mapping[str, object], at: float | None = None) -> Fact:
        moment = self._clock.now() if at is None else at
        return Fact(run=self.run_id, kind=kind, name=name, at=moment, data=data, epoch=self._epoch)

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        starting: list[Assignment[Output]] = []
        stopping: list[str] = []
        for instruction in instructions:
            match instruction:
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
            failures=list(self._failed),
            unfinished=list(self._unfinished),
        )
        end = {"state": instruction.state.value, "exit_reason": instruction.exit_reason.value, "errors": self._errors}
        await self._journal.append((self._fact("end", "run", end, conducted.completed_at),), epoch=self._epoch)
        if not self.ended.done():
            self.ended.set_result(conducted)
