"""Open runs of one process, their queue, and their outcomes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray import IllegalStateError, RecordError, RunState
from ensemble_ray.facts.runs import OWN_ERRORS, RecordedCause, RecordedError
from ensemble_ray.record.following import LiveEvents
from ensemble_ray.record.head import read_head
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.open_reviews import fold_gates
from ensemble_ray.record.trace import fold_output, raised_by
from ensemble_ray.runs.map_reduce.recovery import load_failure
from ensemble_ray.serve.failures import code_of, failure_of, is_refusal, status_of_name
from ensemble_ray.serve.schemas import Failure, FinishedRun, OpenReview, RunDetail, RunStatus, RunSummary

if TYPE_CHECKING:
    from ensemble_ray import EnsembleOutput
    from ensemble_ray.record.head import RunHead
    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.runs.handle import Run
    from ensemble_ray.serve.driving.ledger import LedgerEntry
    from ensemble_ray.serve.schemas import NewRun
    from ensemble_ray.serve.team import ServedTeam
    from ensemble_ray.values.reviews import OpenReview as RecordedReview


_STATUSES = {
    RunState.PENDING: RunStatus.RUNNING,
    RunState.RUNNING: RunStatus.RUNNING,
    RunState.WAITING: RunStatus.WAITING,
    RunState.COMPLETED: RunStatus.COMPLETED,
    RunState.FAILED: RunStatus.FAILED,
    RunState.CANCELLED: RunStatus.CANCELLED,
    RunState.BUDGET_EXHAUSTED: RunStatus.BUDGET_EXHAUSTED,
    RunState.INTERRUPTED: RunStatus.INTERRUPTED,
}
_IN_RECORD = "The record of the run says more"


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveRun:
    """An accepted run that has not ended."""

    entry: LedgerEntry
    team: ServedTeam
    asked: NewRun
    #: streamed tokens of its models; closed when its outcome is stored
    live: LiveEvents = field(default_factory=LiveEvents)
    #: None before it starts in this process
    run: Run | None = None
    #: whether it is in the ledger
    is_kept: bool = False
    #: whether it has started, here or in another process
    has_begun: bool = False
    #: whether it waits for people, outside of the queue
    is_aside: bool = False
    #: set by a decision at this endpoint, until the run resumes
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    #: whether a client requested its end
    is_cancelled: bool = False
    #: final state, once `done` is set
    ended: RunDetail | None = None
    #: set when its outcome is stored
    done: asyncio.Event = field(default_factory=asyncio.Event)
    #: drives the run
    task: asyncio.Task[None] | None = None


class RunQueue:
    """Queue of one team's runs. `on_change` is called after each change of a count."""

    def __init__(self, most: int, on_change: Callable[[RunQueue], None]) -> None:
        self._most = most
        self._on_change = on_change
        self._running = 0
        self._waiting = 0
        #: in order of arrival; each future wakes only its own run
        self._queue: OrderedDict[ActiveRun, asyncio.Future[bool]] = OrderedDict()

    @property
    def running(self) -> int:
        """Number of running runs."""
        return self._running

    @property
    def queued(self) -> int:
        """Number of queued runs."""
        return len(self._queue)

    @property
    def waiting(self) -> int:
        """Number of runs that wait for people, outside of the queue."""
        return self._waiting

    @contextmanager
    def aside(self, active: ActiveRun) -> Generator[None]:
        """Count a run as waiting for people."""
        active.is_aside = True
        self._waiting += 1
        self._on_change(self)
        try:
            yield
        finally:
            active.is_aside = False
            self._waiting -= 1
            self._on_change(self)

    async def acquire(self, active: ActiveRun) -> bool:
        """Wait for the turn of a run; False: it was cancelled before."""
        if active.is_cancelled:
            return False
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue[active] = turn
        self._call_next()
        try:
            return await turn
        except asyncio.CancelledError:
            if self._queue.pop(active, None) is None and not turn.cancelled() and turn.result():
                self.release()  # its turn came at the same moment
            raise

    def release(self) -> None:
        """End the turn of a run."""
        self._running -= 1
        self._call_next()

    def cancel(self, active: ActiveRun) -> None:
        """Mark a run as cancelled, and remove it from the queue."""
        active.is_cancelled = True
        turn = self._queue.pop(active, None)
        if turn is not None:
            turn.set_result(False)
            self._on_change(self)

    def _call_next(self) -> None:
        while self._queue and self._running < self._most:
            _, turn = self._queue.popitem(last=False)
            if not turn.done():
                self._running += 1
                turn.set_result(True)
        self._on_change(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a run."""

    status: RunStatus
    result: FinishedRun | None = None
    error: Failure | None = None


def status_of_state(state: RunState) -> RunStatus:
    return _STATUSES[state]


def outcome_of_output(state: RunState, output: EnsembleOutput) -> Outcome:
    return Outcome(status=status_of_state(state), result=FinishedRun.of(output))


def outcome_of_error(error: BaseException, run_id: str) -> Outcome:
    status = RunStatus.REJECTED if is_refusal(error) else RunStatus.FAILED
    return Outcome(status=status, error=failure_of(error, run_id))


def outcome_of_defect(error: BaseException, run_id: str) -> Outcome:
    """Return the outcome of a run that raised an unexpected error. Its text is only logged."""
    return Outcome(status=RunStatus.FAILED, error=_defect(type(error).__name__, run_id, "The endpoint's log says more"))


async def recorded_outcome(store: RunStore, run_id: str) -> Outcome | None:
    """Return the recorded outcome of a run; None: it has no end and can be resumed.

    Raises:
        RecordError: the record is damaged.
    """
    head = await read_head(store, run_id)
    match head.state:
        case RunState.INTERRUPTED | RunState.WAITING:
            return None
        case RunState.FAILED:
            return Outcome(status=RunStatus.FAILED, error=await _recorded_failure(store, head, run_id))
        case RunState.COMPLETED if head.is_dynamic:
            return None  # a resumed run returns its output without another call
        case state:
            try:
                return outcome_of_output(state, fold_output(await store.facts(run_id)))
            except (IllegalStateError, RecordError):  # an incomplete dynamic run has no output
                return Outcome(status=status_of_state(state))


async def open_reviews(store: RunStore, run_id: str) -> list[OpenReview]:
    """Return the open gates of a run, in order of creation."""
    gates = [gate.review() for gate in fold_gates(await store.gates_of(run_id)) if gate.is_open]
    return [as_open_review(each) for each in gates]


def as_open_review(gate: RecordedReview) -> OpenReview:
    return OpenReview(
        run_id=gate.run_id,
        gate_id=gate.gate_id,
        timing=gate.timing.value,
        task_description=gate.task_description,
        task_output=gate.task_output,
        prompt=gate.prompt or "",
        required_role=gate.required_role,
        created_at=gate.created_at,
        expires_at=gate.expires_at,
    )


def _defect(name: str, run_id: str, where: str) -> Failure:
    return Failure(
        error="InternalError",
        code="INTERNAL_ERROR",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        message=f"{name} in the code of the team. {where}",
        run_id=run_id,
    )


async def _recorded_failure(store: RunStore, head: RunHead, run_id: str) -> Failure:
    own = head.own_error if head.is_dynamic else None
    if own is not None and not own.key:
        raised = None
    elif head.is_dynamic:
        raised = await load_failure(store, run_id)
    else:
        raised = raised_by(RunHistory(await store.facts(run_id), has_details=True))
    if raised is not None:
        is_own = isinstance(raised, OWN_ERRORS)
        return failure_of(raised, run_id) if is_own else _defect(type(raised).__name__, run_id, _IN_RECORD)
    first = head.errors[0] if head.errors else RecordedError("", "TaskExecutionError", "The run failed", is_own=True)
    name = first.error_type.rpartition(".")[2]
    if not first.is_own:
        return _defect(name, run_id, _IN_RECORD)
    shown: list[RecordedCause | RecordedError] = [*first.causes, *head.errors[1:]]
    return Failure(
        error=name,
        code=code_of(name),
        status=status_of_name(name),
        message=first.message,
        run_id=run_id,
        causes=[f"{each.error_type}: {each.message}" for each in shown if each.is_own],
    )


def summary_of(entry: LedgerEntry, *, is_active: bool) -> RunSummary:
    """Return a run for a list. A run without an end and an owner is interrupted."""
    is_left = not entry.status.is_final and not is_active
    return RunSummary(
        run_id=entry.run_id,
        status=RunStatus.INTERRUPTED if is_left else entry.status,
        ensemble=entry.ensemble,
        tags=dict(entry.tags),
        created_at=entry.created_at,
        ended_at=entry.ended_at,
    )


def detail_of(
    entry: LedgerEntry,
    *,
    status: RunStatus,
    ended_at: datetime | None = None,
    outcome: Outcome | None = None,
    reviews: Sequence[OpenReview] = (),
) -> RunDetail:
    """Return a run with its outcome or its open gates."""
    return RunDetail(
        run_id=entry.run_id,
        status=status,
        ensemble=entry.ensemble,
        tags=dict(entry.tags),
        created_at=entry.created_at,
        ended_at=ended_at,
        result=None if outcome is None else outcome.result,
        error=None if outcome is None else outcome.error,
        reviews=[*reviews],
    )
