"""Results of tasks that no process did, or that none can report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from ensemble_ray.execute.orders import TaskResult

if TYPE_CHECKING:
    from ensemble_ray.actors.link.wire import WireOrder
    from ensemble_ray.execute.orders import TaskOrder

__all__ = ["undone"]


def undone(
    order: TaskOrder | WireOrder, error: BaseException | None, status: Literal["failed", "cancelled"] = "failed"
) -> TaskResult:
    """Return the result of a task that ends here."""
    return TaskResult(
        key=order.key,
        instance=order.instance,
        epoch=order.epoch,
        status=status,
        at=time.time(),
        duration_s=0.0,
        error=error,
    )
