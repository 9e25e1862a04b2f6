"""How a run ended, as its caller sees it. Package: runs. Pure. In: what a coordinator kept. Out: a `RunOutcome`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.execute.exits import describe_exhaustion
from ensemble_ray.execute.orders import RunOutcome, TaskFailure
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.coordinator.planned import PlannedEnd
    from ensemble_ray.execute.orders import TaskResult
    from ensemble_ray.values.outputs import TaskOutput

__all__ = ["outcome_of"]


def outcome_of(run_id: str, ended: PlannedEnd[TaskOutput, TaskResult]) -> RunOutcome:
    """Return the outcome of a run whose outputs and failures are objects."""
    is_spent = ended.state is RunState.BUDGET_EXHAUSTED
    return RunOutcome(
        run_id=run_id,
        state=ended.state,
        exit_reason=ended.exit_reason,
        started_at=ended.started_at,
        completed_at=ended.completed_at,
        completed=tuple(ended.completed),
        delegated=tuple(output for _, output in ended.delegated),
        failures=tuple(
            TaskFailure(
                key=failed.key,
                at=failed.at,
                error=failed.failure.error or RuntimeError("task failed without an error"),
                completed_before=failed.completed_before,
                trace=failed.failure.trace,
            )
            for failed in ended.failures
        ),
        failed_delegations=tuple(ended.failed_delegations),
        warning=describe_exhaustion(result.error for result in ended.unfinished) if is_spent else "",
        unfinished=tuple((result.key, result.trace) for result in ended.unfinished if result.trace is not None),
    )
