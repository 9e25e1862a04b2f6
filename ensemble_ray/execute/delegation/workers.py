"""What the workers of a manager gave, as its own result tells of it. Package: execute. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.values.outputs import TaskOutput
    from ensemble_ray.values.trace import TaskTrace

__all__ = ["outputs_of_workers", "traces_of_failed_workers"]


def outputs_of_workers(scope: TaskScope) -> tuple[tuple[str, TaskOutput], ...]:
    """Return the outputs of a manager's workers, by role, in the order in which they were done (S-HIER-6)."""
    if not scope.is_manager:
        return ()
    outputs = [(each.output.agent_role, each.output) for each in scope.effects.delegations if each.output is not None]
    return tuple(sorted(outputs, key=lambda pair: pair[1].completed_at))


def traces_of_failed_workers(scope: TaskScope) -> tuple[TaskTrace, ...]:
    """Return the traces of a manager's workers that failed; their tokens were spent (S-TRC-43)."""
    if not scope.is_manager:
        return ()
    return tuple(each.trace for each in scope.effects.delegations if each.output is None and each.trace is not None)
