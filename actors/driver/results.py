"""Results of a dynamic run's orders, as its driver has them: read from reports, or made where no process can give one.

In: reports of processes, orders that were never begun. Out: results. Must never happen: a report that raises here, since
its order would have no result.
"""

from __future__ import annotations

import time

from ensemble_ray.actors.link.packing import unpack_report
from ensemble_ray.actors.link.wire import WireReport
from ensemble_ray.errors import EnsembleError, message_of
from ensemble_ray.execute.orders import TaskResult

__all__ = ["ended_here", "read_result"]


def read_result(report: WireReport) -> TaskResult:
    """Return the result behind a report; one that cannot be loaded here is a failed one."""
    try:
        return unpack_report(report)
    except Exception as error:  # noqa: BLE001  whatever loading raised, the order must have its result
        unreadable = EnsembleError(
            f"The result of task '{report.key}' cannot be loaded in this process: {message_of(error)}. "
            "Install the module it comes from here too, or use runtime='inline'"
        )
        unreadable.__cause__ = error
        return ended_here(report.key, report.instance, report.epoch, unreadable)


def ended_here(key: str, instance: str, epoch: int, error: Exception | None) -> TaskResult:
    """Return the result of an order that this process itself ends: failed, or cancelled where there is no error."""
    return TaskResult(
        key=key,
        instance=instance,
        epoch=epoch,
        status="cancelled" if error is None else "failed",
        at=time.time(),
        duration_s=0.0,
        error=error,
    )
