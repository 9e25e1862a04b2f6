"""Ports and values between runs and runtimes. A planned run is submitted as a whole; a run with items or factories is
coordinated in the caller's process and opens a session for its orders (decision 0007).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeAlias, runtime_checkable

from ensemble_ray.definition.fields import OnUnknown
from ensemble_ray.events import Event
from ensemble_ray.execute.memory import LocalRunReflections
from ensemble_ray.execute.orders import RunContext, RunOutcome, TaskResult
from ensemble_ray.execute.scope import Spending
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.memory.tools import LocalRunMemory
from ensemble_ray.plan.planner import Planned
from ensemble_ray.ports import Journal, Reviewer, RunEventSink, ToolMetrics
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.runs.coordinator import Executor
from ensemble_ray.values.reviews import RunDirective


class SubmissionReason(Enum):
    """Why a run is submitted."""

    FIRST = "first"
    RESUMED = "resumed"
    TAKEN_OVER = "taken_over"
    RESUBMITTED = "resubmitted"
    RESTARTED = "restarted"

    @classmethod
    def of_resume(cls, *, takes_over: bool) -> SubmissionReason:
        return cls.TAKEN_OVER if takes_over else cls.RESUMED

    @property
    def is_recorded(self) -> bool:
        return self in {SubmissionReason.RESUMED, SubmissionReason.TAKEN_OVER, SubmissionReason.RESTARTED}

    @property
    def takes_over(self) -> bool:
        """Whether the run is claimed from a process that still owns it."""
        return self is SubmissionReason.TAKEN_OVER

    @property
    def is_restart(self) -> bool:
        """Whether only its owner's process was replaced. No user resumed it, so a cancellation stays in effect."""
        return self is SubmissionReason.RESTARTED

    def without_answer(self) -> SubmissionReason:
        """Return the submission to repeat if it is unknown whether this one arrived."""
        return self if self.is_recorded else SubmissionReason.RESUBMITTED

    def resolve(self, *, is_recorded: bool) -> SubmissionReason:
        """Return the reason that applies after a check of the record."""
        if self is not SubmissionReason.RESUBMITTED:
            return self
        return SubmissionReason.RESTARTED if is_recorded else SubmissionReason.FIRST


#: Receives results of orders, several per call.
Deliver: TypeAlias = Callable[[Sequence[TaskResult]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Fields of every request of a run to a runtime."""

    run_id: str
    #: source of the definition; empty: a program began the run
    origin: str = ""
    #: common context of its tasks
    context: RunContext
    #: receives the run's events in this process
    events: RunEventSink
    tool_metrics: ToolMetrics
    #: how a user or a callable resolves an unknown effect (S-DUR-24)
    on_unknown: OnUnknown | Callable[..., object] = OnUnknown.TELL_MODEL
    #: handles review gates; None: no reviewer
    reviewer: Reviewer | None = None
    #: store of the record; None: the run is not recorded
    store: StoreAddress | None = None
    #: set when the run is cancelled; a cancelled run need not wait for a runtime to start
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    #: its memory, in this process; None: it has none
    memory: LocalRunMemory | None = None
    #: reflections on its tasks, in this process; None: no store, and no task of its plan needs one
    reflections: LocalRunReflections | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWork:
    """A run that is planned as a whole, with all data for its coordinator."""

    planned: Planned
    #: the record's first fact, without its time; empty if the run is not recorded
    header: PlanRecorded
    #: effects before scheduling: calls of an LLM-based synthesizer (S-SET-46)
    preliminary: Sequence[Fact] = ()
    #: called in order for every delegation
    delegation_policies: Sequence[object] = ()
    submission: SubmissionReason = SubmissionReason.FIRST


class SubmittedRun(Protocol):
    """A planned run in a runtime."""

    async def wait(self) -> RunOutcome:
        """Return when the run has ended and the sink has all its events."""
        ...

    async def cancel(self) -> None:
        """Request the end of the run; `wait` returns within seconds."""
        ...

    async def inject(self, directive: RunDirective) -> bool:
        """Record a directive for tasks that start from now on; return False if the run has ended. An EnsembleError: it
        cannot be recorded, or the coordinator of the run cannot be reached.
        """
        ...


class ExecutorSession(Executor, Protocol):
    """The executor of a run that this process coordinates, from its opening to its end."""

    @property
    def failed(self) -> asyncio.Future[None]:
        """Fails if the session is broken, for example if the cluster is gone; otherwise never done."""
        ...

    @property
    def most_processes(self) -> int | None:
        """Maximum number of processes per kind of agent; None: this process is the only one."""
        ...

    @property
    def spending(self) -> Spending | None:
        """Budget of this process's own requests for the run, such as those that create agents; None: no budget."""
        ...

    def emit(self, event: Event) -> None:
        """Send an event of this process to listeners, after all events of delivered tasks; never waits."""
        ...

    async def close(self) -> None:
        """Wait until the sink has all events of delivered tasks, then release all resources; deliver no more."""
        ...


@runtime_checkable
class Runtime(Protocol):
    """Executes runs: in this process, or in actors on a cluster."""

    @property
    def name(self) -> str:
        """Name of the runtime for `connect`. It is recorded, since a run resumes on the same runtime."""
        ...

    @property
    def store_address(self) -> StoreAddress:
        """Store of its runs' records."""
        ...

    async def submit(self, request: RunRequest, work: PlannedWork) -> SubmittedRun:
        """Begin or resume a planned run.

        Raises:
            ValidationError: a value that must be sent cannot be pickled.
            CancelledError: the run was cancelled before it began.
        """
        ...

    async def open_session(self, request: RunRequest, *, journal: Journal, deliver: Deliver) -> ExecutorSession:
        """Open an executor for tasks that are created while their run continues.

        `journal` writes the run's facts for this process; `deliver` is called on the library's loop, once per result.

        Raises:
            ValidationError: a value that must be sent cannot be pickled.
            CancelledError: the run was cancelled before the session was open.
        """
        ...

    async def close(self) -> None:
        """Release all resources that the runtime caches."""
        ...
