"""Which task's tokens are a team's answer while it is said. Pure.

Rule: text that a client has seen cannot be taken back. So it is the task that is certainly the last one, and nothing comes between its
model's words and the answer: no check, no type, no person.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble_ray import Ensemble, Task
    from ensemble_ray.plan.plan import Plan


def find_streamed_task(ensemble: Ensemble, plan: Plan) -> str | None:
    """Return the instance of the task whose tokens are the answer; None: there is none (S-SRV-121).

    Args:
        ensemble: What was planned, in this process.
        plan: What will run.
    """
    if plan.units or plan.hierarchy is not None or not plan.nodes:
        return None
    last = plan.nodes[-1]
    if not last.is_streaming or not _is_last(plan):
        return None
    task = next((each for each in ensemble.tasks if each.object_id == last.object_id), None)
    return f"{last.key}#0" if task is not None and _is_said_as_is(task, ensemble) else None


def _is_last(plan: Plan) -> bool:
    """Return whether the last task of the plan waits for all others."""
    if plan.workflow == "sequential":
        return True
    context = {node.key: node.context for node in plan.nodes}
    waited_for: set[str] = set()
    left = [plan.nodes[-1].key]
    while left:
        key = left.pop()
        if key not in waited_for:
            waited_for.add(key)
            left += context.get(key, ())
    return len(waited_for) == len(plan.nodes)


def _is_said_as_is(task: Task, ensemble: Ensemble) -> bool:
    """Return whether what the model says is the task's output, whatever it says."""
    is_checked = task.output_type is not None or bool(task.output_guardrails)
    is_reviewed = ensemble.has_reviews and (task.review is not None or ensemble.review_policy != "never")
    return not is_checked and not is_reviewed
