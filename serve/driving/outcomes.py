"""What became of a run: its result or its error, from its output, from what it raised, or from its record."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray import IllegalStateError, RecordError, RunState
from ensemble_ray.facts.runs import OWN_ERRORS, RecordedCause, RecordedError
from ensemble_ray.record.head import read_head
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.open_reviews import fold_gates
from ensemble_ray.record.trace import fold_output, raised_by
from ensemble_ray.runs.map_reduce.recorded_end import load_failure
from ensemble_ray.serve.failures import code_of, failure_of, is_refusal, status_of_name
from ensemble_ray.serve.run_schemas import OpenReview, RunStatus
from ensemble_ray.serve.schemas import Failure, FinishedRun

if TYPE_CHECKING:
    from ensemble_ray import EnsembleOutput
    from ensemble_ray.record.head import RunHead
    from ensemble_ray.record.stores import RunStore
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
