"""Parts of a trace that are read from a record as they stand there. Package: record. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.facts.lenient import as_mapping, as_sequence, as_text
from ensemble_ray.values.trace import AgentSummary, ErrorTrace, TaskTrace
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ensemble_ray.plan.plan import Node
    from ensemble_ray.record.task_fold import TaskFold

__all__ = ["agent_summary", "error_of_task"]


def error_of_task(fold: TaskFold, node: Node | None) -> ErrorTrace:
    """Return what a trace says of a failed task, by its place in the plan."""
    failure = fold.failure
    if failure is None:
        msg = "only failed tasks have an error"
        raise IllegalStateError(msg)
    trace = failure.data.trace
    if isinstance(trace, TaskTrace):
        role, description = trace.agent_role, trace.task_description
    else:
        seen = as_mapping(trace)
        role = as_text(seen.get("agent_role"), "" if node is None else node.agent_role)
        description = as_text(seen.get("task_description"), fold.key if node is None else node.description)
    return ErrorTrace(
        agent_role=role,
        task_description=description,
        error_type=failure.data.error_type,
        message=failure.data.message,
        stack_trace=failure.data.stack_trace or "",
        occurred_at=utc_of(failure.at),
    )


def agent_summary(data: Mapping[str, object]) -> AgentSummary:
    """Return who took part, of the data in a run's first fact."""
    background = data.get("background")
    return AgentSummary(
        role=as_text(data.get("role")),
        goal=as_text(data.get("goal")),
        background=background if isinstance(background, str) else None,
        tool_names=tuple(str(name) for name in as_sequence(data.get("tool_names"))),
        allow_delegation=data.get("allow_delegation") is True,
    )
