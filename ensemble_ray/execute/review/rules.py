"""Which gates of a task fire (S-REV-13 to S-REV-18). Package: execute. Pure.

Rules:
1. Without somebody to ask no gate fires (S-REV-15), and a task that says `Review.skip()` has none.
2. A task's own gate fires; the policy only adds gates behind tasks that say nothing (S-REV-13).
3. Only tasks of the plan have gates: a manager's and delegated work have the questions that their tools ask (S-REV-18).
4. The last task is that of a sequential list of tasks. In other workflows, and inside loops, phases and graphs, there is
   none (S-REV-17, S-REV-80).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.values.reviews import Review, ReviewPolicy

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import RunContext, TaskOrder

__all__ = ["review_after", "review_before"]

_BY_POLICY = Review()


def review_before(order: TaskOrder, context: RunContext) -> Review | None:
    """Return the gate before a task; None: nobody is asked."""
    review = order.task.before_review
    return None if review is None or review.is_skip or not _has_gates(order, context) else review


def review_after(order: TaskOrder, context: RunContext) -> Review | None:
    """Return the gate behind a task; None: nobody is asked."""
    if not _has_gates(order, context):
        return None
    review = order.task.review
    if review is not None:
        return None if review.is_skip else review
    match context.review_policy:
        case ReviewPolicy.AFTER_EVERY_TASK:
            return context.policy_review or _BY_POLICY
        case ReviewPolicy.AFTER_LAST_TASK:
            return (context.policy_review or _BY_POLICY) if _is_last(order, context) else None
        case _:
            return None


def _has_gates(order: TaskOrder, context: RunContext) -> bool:
    return context.review_policy is not None and context.hierarchy is None and not order.depth


def _is_last(order: TaskOrder, context: RunContext) -> bool:
    is_of_list = "/" not in order.instance  # a path leads into a unit
    total = context.total_tasks if order.total_tasks is None else order.total_tasks
    return context.workflow == "sequential" and is_of_list and order.index == total
