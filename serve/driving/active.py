"""Runs of one process that are not over, and their turns."""

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


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveRun:
    """A run that was accepted and is not over."""

    entry: LedgerEntry
    team: ServedTeam
    asked: NewRun
    #: what its models say just now, where the team streams; closed when its outcome is kept
    live: LiveEvents = field(default_factory=LiveEvents)
    #: None: it has not begun here
    run: Run | None = None
    #: whether the ledger has it
    is_kept: bool = False
    #: whether it had its turn, here or in another process
    has_begun: bool = False
    #: whether it waits for people, and has no turn meanwhile
    is_aside: bool = False
    #: set when somebody has decided at a gate of it at this endpoint, until it goes on
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    #: whether somebody asked for its end
    is_cancelled: bool = False
    #: its last state, when `done` is set
    ended: RunDetail | None = None
    #: set when its outcome is kept
    done: asyncio.Event = field(default_factory=asyncio.Event)
    #: does the work
    task: asyncio.Task[None] | None = None


class Turns:
    """Runs of one team: so many at a time, the others one after the other."""

    def __init__(self, most: int, on_change: Callable[[Turns], None]) -> None:
        """Begin without a run.

        Args:
            most: Runs at a time.
            on_change: Called when there are more or fewer that run or wait.
        """
        self._most = most
        self._on_change = on_change
        self._running = 0
        self._waiting = 0
        #: first come, first served; each hears of its own turn alone, however many wait
        self._queue: OrderedDict[ActiveRun, asyncio.Future[bool]] = OrderedDict()

    @property
    def running(self) -> int:
        """How many run."""
        return self._running

    @property
    def queued(self) -> int:
        """How many wait for their turn."""
        return len(self._queue)

    @property
    def waiting(self) -> int:
        """How many wait for people, and need no turn."""
        return self._waiting

    @contextmanager
    def aside(self, active: ActiveRun) -> Generator[None]:
        """Count a run that waits for people, as long as it does."""
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
                self.release()  # it was called just now
            raise

    def release(self) -> None:
        """Take notice that a run is over."""
        self._running -= 1
        self._call_next()

    def cancel(self, active: ActiveRun) -> None:
        """Let a run that waits go."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    status: RunStatus
    result: FinishedRun | None = None
    error: Failure | None = None


def status_of_state(state: RunState) -> RunStatus:
    """Return what clients call a state."""
    return _STATUSES[state]


def outcome_of_output(state: RunState, output: EnsembleOutput) -> Outcome:
    """Return the outcome of a run that gave an output."""
    return Outcome(status=status_of_state(state), result=FinishedRun.of(output))


def outcome_of_error(error: BaseException, run_id: str) -> Outcome:
    """Return the outcome of a run that raised."""
    status = RunStatus.REJECTED if is_refusal(error) else RunStatus.FAILED
    return Outcome(status=status, error=failure_of(error, run_id))


def outcome_of_defect(error: BaseException, run_id: str) -> Outcome:
    """Return the outcome of a run that raised what no run raises; its text is for the operator's log."""
    return Outcome(status=RunStatus.FAILED, error=_defect(type(error).__name__, run_id, "The endpoint's log says more"))


async def recorded_outcome(store: RunStore, run_id: str) -> Outcome | None:
    """Return the outcome of a run that ended while nobody here waited for it; None: it has no end, and can go on.

    Raises:
        RecordError: its record is damaged.
    """
    head = await read_head(store, run_id)
    match head.state:
        case RunState.INTERRUPTED | RunState.WAITING:
            return None
        case RunState.FAILED:
            return Outcome(status=RunStatus.FAILED, error=await _recorded_failure(store, head, run_id))
        case RunState.COMPLETED if head.is_dynamic:
            return None  # going on gives its output, without doing anything
        case state:
            try:
                return outcome_of_output(state, fold_output(await store.facts(run_id)))
            except (IllegalStateError, RecordError):  # of a part of a dynamic run no output is made
                return Outcome(status=status_of_state(state))


async def open_reviews(store: RunStore, run_id: str) -> list[OpenReview]:
    """Return the gates of a run that wait for somebody, in the order in which they were opened."""
    gates = [gate.review() for gate in fold_gates(await store.gates_of(run_id)) if gate.is_open]
    return [as_open_review(each) for each in gates]


def as_open_review(gate: RecordedReview) -> OpenReview:
    """Return an open gate as it travels."""
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
    """Return a run as lists show it; one that has not ended and that nobody works on is interrupted."""
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
    """Return a run with what became of it, or with the gates at which it waits."""
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
