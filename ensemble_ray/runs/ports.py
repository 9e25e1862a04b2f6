"""Ports between runs and runtimes, and who owns a run. A run with items or factories is coordinated by its caller (decision 0007)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec
from msgspec import Struct

from ensemble_ray.definition.fields import Durability, OnUnknown
from ensemble_ray.errors import RecordError, message_of
from ensemble_ray.events import Event
from ensemble_ray.execute.memory import LocalRunReflections
from ensemble_ray.execute.orders import RunContext, RunOutcome, TaskResult
from ensemble_ray.execute.scope import Spending
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.memory.tools import LocalRunMemory
from ensemble_ray.plan.planner import Planned
from ensemble_ray.ports import Journal, Reviewer, RunEventSink, ToolMetrics
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.open_reviews import Obstacle, fold_gates, obstacle_at
from ensemble_ray.record.stores import OwnedRun, RunStore, StoreAddress
from ensemble_ray.runs.coordinator import Executor
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.reviews import OpenReview, RunDirective


class SubmissionReason(Enum):
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
        """Whether only its owner's process was replaced, so a cancellation stays in effect."""
        return self is SubmissionReason.RESTARTED

    def without_answer(self) -> SubmissionReason:
        """Return the submission to repeat if it may not have arrived."""
        return self if self.is_recorded else SubmissionReason.RESUBMITTED

    def resolve(self, *, is_recorded: bool) -> SubmissionReason:
        """Return the reason that applies after a check of the record."""
        if self is not SubmissionReason.RESUBMITTED:
            return self
        return SubmissionReason.RESTARTED if is_recorded else SubmissionReason.FIRST


Deliver: TypeAlias = Callable[[Sequence[TaskResult]], None]


class RunRequest(Struct, frozen=True, kw_only=True):
    run_id: str
    origin: str = ""  # "": a program began the run
    context: RunContext
    events: RunEventSink  # in this process
    tool_metrics: ToolMetrics
    on_unknown: OnUnknown | Callable[..., object] = OnUnknown.TELL_MODEL  # (S-DUR-24)
    reviewer: Reviewer | None = None  # None: no reviewer
    store: StoreAddress | None = None  # None: not recorded
    cancelled: asyncio.Event = msgspec.field(default_factory=asyncio.Event)  # set before a runtime starts, too
    memory: LocalRunMemory | None = None  # in this process; None: it has none
    reflections: LocalRunReflections | None = None  # in this process; None: no store, or not needed


class PlannedWork(Struct, frozen=True, kw_only=True):
    """A run that is planned as a whole."""

    planned: Planned
    header: PlanRecorded  # without its time; empty if the run is not recorded
    preliminary: Sequence[Fact] = ()  # calls of a synthesizer before scheduling (S-SET-46)
    delegation_policies: Sequence[object] = ()  # called in order for every delegation
    submission: SubmissionReason = SubmissionReason.FIRST
    contents: Sequence[bytes] = ()  # of attachments, to be stored in the record


class SubmittedRun(Protocol):
    async def wait(self) -> RunOutcome:
        """Return when the run has ended and the sink has all its events."""
        ...

    async def cancel(self) -> None:
        """Request the end of the run; `wait` returns within seconds."""

    async def inject(self, directive: RunDirective) -> bool:
        """Record a directive for later tasks; return False if the run has ended. May raise EnsembleError."""
        ...


class ExecutorSession(Executor, Protocol):
    """The executor of a run that this process coordinates."""

    @property
    def failed(self) -> asyncio.Future[None]:
        """Fails if the session is broken, for example if the cluster is gone; otherwise never done."""
        ...

    @property
    def most_processes(self) -> int | None:
        """Most processes per kind of agent; None: only this process."""
        ...

    @property
    def spending(self) -> Spending | None:
        """Budget of this process's own requests; None: no budget."""
        ...

    def emit(self, event: Event) -> None:
        """Send an event to listeners after all events of delivered tasks; never waits."""

    async def close(self) -> None:
        """Wait until the sink has all events of delivered tasks, then release all resources."""


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


_log = bounded_logger(__name__)
GRACE_S = 3.0  # for a cancelled task, s; afterwards the run ends without it
CANCEL_POLL_S = 1.0  # interval of checks for a cancel request, s


async def claim_run(
    store: RunStore, run_id: str, *, origin: object, durability: str, submission: SubmissionReason
) -> OwnedRun:
    """Begin or claim the record, and mark the run as running. Raises `RunExistsError`, `RecordError`."""
    is_buffered, state = durability == Durability.RUN, RunState.RUNNING
    if submission.is_recorded:
        return await store.claim(run_id, is_buffered=is_buffered, by_force=submission.takes_over, state=state)
    return await store.begin(run_id, origin=str(origin or ""), is_buffered=is_buffered, state=state)


async def release_run(owned: OwnedRun | None) -> None:
    """Release a run that could not begin, so that it can be resumed; the caller raises the cause."""
    if owned is not None:
        with contextlib.suppress(RecordError):
            await owned.close(RunState.INTERRUPTED)


async def watch_for_cancel(owned: OwnedRun, run_id: str, cancel: Callable[[], Awaitable[None]]) -> None:
    """Wait for a cancel request, then call `cancel` (S-DUR-52)."""
    while True:
        await asyncio.sleep(CANCEL_POLL_S)
        try:
            if await owned.is_cancel_asked():
                break
        except RecordError as error:  # a lasting error also fails the writes of the run's own facts
            _log.warning("Run %s: cannot check for a cancel request: %s", run_id, message_of(error))
    await cancel()


_POLL_S = 0.5  # interval of checks while tasks wait, s


class DecisionWatch:
    """Reports each decided gate of suspended tasks once (S-REV-124)."""

    def __init__(self, store: RunStore, run_id: str, waiting: Callable[[], Mapping[str, Sequence[OpenReview]]]) -> None:
        """`waiting` returns the open gates of suspended tasks, by instance."""
        self._store = store
        self._run_id = run_id
        self._waiting = waiting
        self._reported: set[str] = set()

    async def watch(self, resume_tasks: Callable[[Sequence[str]], None]) -> None:
        """Report, until cancelled, tasks with a decided or expired gate."""
        while True:
            await asyncio.sleep(_POLL_S)
            if ready := await self._find({Obstacle.DECIDED, Obstacle.EXPIRED}):
                resume_tasks(ready)

    async def find_decided(self) -> Sequence[str]:
        return await self._find({Obstacle.DECIDED})

    async def _find(self, settled_by: Collection[Obstacle]) -> Sequence[str]:
        if not self._list_unreported():
            return ()
        try:
            gates = fold_gates(await self._store.gates_of(self._run_id))
        except RecordError as error:  # a lasting error also fails the writes of the run's own facts
            _log.warning("Run %s: cannot see whether its reviews were decided: %s", self._run_id, message_of(error))
            return ()
        now = time.time()
        settled = {gate.gate_id for gate in gates if obstacle_at(gate, at=now, is_owned=False) in settled_by}
        ready = [instance for instance, gate_ids in self._list_unreported().items() if gate_ids & settled]
        if ready:
            self._reported |= settled
        return ready

    def _list_unreported(self) -> Mapping[str, set[str]]:
        """Return ids of open, unreported gates, by task."""
        waiting = self._waiting().items()
        found = {instance: {each.gate_id for each in gates} - self._reported for instance, gates in waiting}
        return {instance: gate_ids for instance, gate_ids in found.items() if gate_ids}
