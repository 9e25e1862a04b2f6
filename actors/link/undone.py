"""Results of tasks that no process did, or that none can report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ensemble_ray.execute.orders import TaskFailure, TaskResult

if TYPE_CHECKING:
    from ensemble_ray.actors.link.wire import WireOrder
    from ensemble_ray.execute.orders import TaskOrder, TaskStatus

__all__ = ["make_undone_result"]


def make_undone_result(
    order: TaskOrder | WireOrder, error: BaseException | None, status: TaskStatus = "failed"
) -> TaskResult:
    """Return the result of a task that ends here."""
    return TaskResult(
        key=order.key,
        instance=order.instance,
        epoch=order.epoch,
        status=status,
        at=time.time(),
        failure=None if error is None else TaskFailure(error=error),
    )
