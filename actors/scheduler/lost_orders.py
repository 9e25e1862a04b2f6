"""What is reported of an order whose own process can report nothing any more: result, error, event. Used by process groups."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from ensemble_ray.actors.link.events import pack_event
from ensemble_ray.actors.link.failures import last_line
from ensemble_ray.actors.link.packing import pack_result
from ensemble_ray.actors.link.undone import make_undone_result
from ensemble_ray.errors import AgentExecutionError, EnsembleError
from ensemble_ray.events import TaskFailedEvent
from ensemble_ray.plan.redispatch import MOST_DEATHS

if TYPE_CHECKING:
    from ensemble_ray.actors.link.wire import WireOrder, WireResult
    from ensemble_ray.execute.orders import RunContext

__all__ = ["cause_of", "lost_event", "lost_result"]


def cause_of(error: BaseException) -> BaseException:
    """Return the error behind Ray's wrapper."""
    inner = getattr(error, "cause", None)
    return inner if isinstance(inner, BaseException) else error


def lost_result(order: WireOrder, error: BaseException, *, deaths: int, is_stopped: bool) -> WireResult:
    """Return the result of an order: failed, or cancelled where somebody wants it to end.

    Args:
        order: The order.
        error: What became of its process.
        deaths: How many processes died with it.
        is_stopped: Whether somebody wants it to end.
    """
    return pack_result(
        make_undone_result(order, _failure(order, error, deaths), "cancelled" if is_stopped else "failed")
    )


def lost_event(order: WireOrder, error: BaseException, *, deaths: int, context: RunContext) -> bytes:
    """Return the failed event of a task whose own process can send none any more (S-EVT-10)."""
    total = order.total_tasks
    event = TaskFailedEvent(
        run_id=context.run_id,
        instance=order.instance,
        task_description=order.description,
        agent_role=order.agent_role,
        task_index=order.index,
        total_tasks=context.total_tasks if total is None else total,
        cause=_failure(order, error, deaths),
        duration=timedelta(),
    )
    return pack_event(event)


def _failure(order: WireOrder, error: BaseException, deaths: int) -> BaseException:
    """Return why a task failed that its own process can report no more."""
    if isinstance(error, EnsembleError):
        return error
    often = "" if deaths < MOST_DEATHS else f" {MOST_DEATHS} times with this task"
    text = f"Agent '{order.agent_role}': its process died{often} ({last_line(error)})"
    return AgentExecutionError(text, order.agent_role, order.description)
