"""What runs and runtimes are to each other. Contracts and values only.

A run is asked of a runtime in one form, `RunRequest`. What differs is where it is coordinated: a plan travels, so a whole
run is submitted, and goes on without its caller; items and factories cannot travel, so their run is coordinated in the
caller's process, and opens a session that takes orders (decision 0007).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from ensemble_ray.definition.fields import OnUnknown
from ensemble_ray.execute.orders import TaskOrder
from ensemble_ray.runs.coordinator import Executor

if TYPE_CHECKING:
    from ensemble_ray.events import Event
    from ensemble_ray.execute.orders import RunContext, RunOutcome, TaskResult
    from ensemble_ray.execute.reflection import LocalRunReflections
    from ensemble_ray.execute.scope import Spending
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.memory.tools import LocalRunMemory
    from ensemble_ray.plan.planner import Planned
    from ensemble_ray.ports import Journal, Reviewer, RunEventSink, ToolMetrics
    from ensemble_ray.record.stores import StoreAddress
    from ensemble_ray.values.reviews import RunDirective


class SubmissionReason(Enum):
    """Why a run is submitted; see the table of this module."""

    FIRST = "first"
    RESUMED = "resumed"
    TAKEN_OVER = "taken_over"
    RESUBMITTED = "resubmitted"
    RESTARTED = "restarted"

    @classmethod
    def of_resume(cls, *, takes_over: bool) -> SubmissionReason:
        """Return the submission of a run that a person wants to go on."""
        return cls.TAKEN_OVER if takes_over else cls.RESUMED

    @property
    def is_recorded(self) -> bool:
        """Whether the run goes on from its record."""
        return self in {SubmissionReason.RESUMED, SubmissionReason.TAKEN_OVER, SubmissionReason.RESTARTED}

    @property
    def takes_over(self) -> bool:
        """Whether the run is taken from an owner that still holds it."""
        return self is SubmissionReason.TAKEN_OVER

    @property
    def is_restart(self) -> bool:
        """Whether only its owner's process was replaced; nobody wished it to go on, so a cancellation stands."""
        return self is SubmissionReason.RESTARTED

    def without_answer(self) -> SubmissionReason:
        """Return what to submit when nobody knows whether this submission arrived."""
        return self if self.is_recorded else SubmissionReason.RESUBMITTED

    def resolve(self, *, is_recorded: bool) -> SubmissionReason:
        """Return what it comes to, now that the record was looked at."""
        if self is not SubmissionReason.RESUBMITTED:
            return self
        return SubmissionReason.RESTARTED if is_recorded else SubmissionReason.FIRST


#: Takes results of orders, several at a time.
Deliver: TypeAlias = "Callable[[Sequence[TaskResult]], None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What every run asks a runtime with."""

    run_id: str
    #: where its definition came from; empty: a program began it
    origin: str = ""
    #: what all its tasks share
    context: RunContext
    #: takes the run's events in this process
    events: RunEventSink
    tool_metrics: ToolMetrics
    #: how a person or a callable is asked what became of an effect (S-DUR-24)
    on_unknown: OnUnknown | Callable[..., object] = OnUnknown.TELL_MODEL
    #: asks at review gates; None: there is nobody to ask
    reviewer: Reviewer | None = None
    #: where the run is recorded; None: nowhere
    store: StoreAddress | None = None
    #: set when the run is cancelled: a runtime that is only being started need not be waited for
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    #: its memory, in this process; None: it has none
    memory: LocalRunMemory | None = None
    #: what is learned of its tasks, in this process; None: there is no store, and no task of its plan needs one
    reflections: LocalRunReflections | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWork:
    """What a run does that is planned as a whole, with all that its coordinator needs."""

    planned: Planned
    #: the record's first fact, but for its time; an empty one for a run that is recorded nowhere
    header: PlanRecorded
    #: effects of before scheduling: calls of an LLM-based synthesizer (S-SET-46)
    preliminary: Sequence[Fact] = ()
    #: asked in order about each delegation
    delegation_policies: Sequence[object] = ()
    submission: SubmissionReason = SubmissionReason.FIRST


class SubmittedRun(Protocol):
    """A planned run that a runtime has."""

    async def wait(self) -> RunOutcome:
        """Return when the run ended and all its events were handed to the sink."""
        ...

    async def cancel(self) -> None:
        """Ask the run to end; `wait` returns within seconds."""
        ...

    async def inject(self, directive: RunDirective) -> bool:
        """Tell the tasks that start from now on, and return when that is on record; False: the run has ended.

        Raises:
            EnsembleError: it cannot be recorded, or whoever coordinates the run cannot be reached.
        """
        ...


class ExecutorSession(Executor[TaskOrder], Protocol):
    """The executor of a run that is coordinated in this process, from its opening to its end."""

    @property
    def failed(self) -> asyncio.Future[None]:
        """Never done, unless nothing more can be done here: then it has the error, such as that the cluster is gone."""
        ...

    @property
    def most_processes(self) -> int | None:
        """How many processes a kind of agents may get; None: this one is all there is."""
        ...

    @property
    def spending(self) -> Spending | None:
        """What this process's own requests for the run may spend, such as those that make agents; None: no budget."""
        ...

    def emit(self, event: Event) -> None:
        """Tell listeners of what this process knows, behind all events of delivered tasks; never waits."""
        ...

    async def close(self) -> None:
        """Release everything, when all events of delivered tasks were handed to the sink; deliver nothing any more."""
        ...


@runtime_checkable
class Runtime(Protocol):
    """Where runs live: this process, or actors on a cluster."""

    @property
    def name(self) -> str:
        """What `connect` knows it by, for the record: a run is resumed where it ran."""
        ...

    @property
    def store_address(self) -> StoreAddress:
        """Where its runs are recorded."""
        ...

    async def submit(self, request: RunRequest, work: PlannedWork) -> SubmittedRun:
        """Begin a planned run, or go on with one.

        Raises:
            ValidationError: something that must travel cannot.
            CancelledError: the run was cancelled before it began.
        """
        ...

    async def open_session(self, request: RunRequest, *, journal: Journal, deliver: Deliver) -> ExecutorSession:
        """Open an executor for tasks that are made while their run goes on.

        Args:
            request: The run.
            journal: What this process writes the run's facts with.
            deliver: Called with the result of each order, once, on the library's loop; with several at a time.

        Raises:
            ValidationError: something that must travel cannot.
            CancelledError: the run was cancelled before the session was open.
        """
        ...

    async def close(self) -> None:
        """Release everything that the runtime keeps warm."""
        ...
