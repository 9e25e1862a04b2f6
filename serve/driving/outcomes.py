"""What became of a run: its result or its error, from its output, from what it raised, or from its record."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray import IllegalStateError, RecordError, RunState
from ensemble_ray.record.head import read_head
from ensemble_ray.record.open_reviews import fold_gates
from ensemble_ray.record.trace import fold_output
from ensemble_ray.serve.failures import code_of, failure_of, is_refusal, is_shown
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
    return Outcome(status=RunStatus.FAILED, error=_defect(type(error).__name__, run_id))


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
            return Outcome(status=RunStatus.FAILED, error=_recorded_failure(head, run_id))
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


def _defect(name: str, run_id: str) -> Failure:
    return Failure(
        error="InternalError",
        code="INTERNAL_ERROR",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        message=f"{name} in the code of the team. The endpoint's log says more",
        run_id=run_id,
    )


def _recorded_failure(head: RunHead, run_id: str) -> Failure:
    errors = head.errors
    first = errors[0] if errors else None
    name = first.error_type.rpartition(".")[2] if first is not None and first.error_type else "TaskExecutionError"
    if not is_shown(name):
        return _defect(name, run_id)
    causes = [] if first is None else [(each.error_type, each.message) for each in first.causes]
    causes += [(each.error_type, each.message) for each in errors[1:]]
    return Failure(
        error=name,
        code=code_of(name),
        status=HTTPStatus.BAD_GATEWAY,
        message=first.message if first is not None else "The run failed",
        run_id=run_id,
        causes=[f"{kind}: {text}" for kind, text in causes if is_shown(kind)],
    )
