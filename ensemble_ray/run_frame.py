"""What all tasks of a run share, of its definition and its plan. Floor: above runtime. Pure.

In: a definition as one run sees it, and what was planned. Out: the frame that travels to every house; and the events of a
manager that could not even be told what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from ensemble_ray.definition.durability import OnUnknown
from ensemble_ray.events import Event, TaskFailedEvent, TaskStartEvent
from ensemble_ray.execute.callables import callable_name
from ensemble_ray.execute.orders import RunFrame
from ensemble_ray.plan.plan import MANAGER_KEY, MANAGER_ROLE
from ensemble_ray.values.amounts import RunBudget
from ensemble_ray.values.delegation import DelegationContext
from ensemble_ray.values.ids import instance_of

if TYPE_CHECKING:
    from ensemble_ray.definition.ensemble import EnsembleDefinition
    from ensemble_ray.plan.planner import Planned
    from ensemble_ray.values.trace import CaptureMode

__all__ = ["failed_manager_events", "frame_of"]


def frame_of(
    definition: EnsembleDefinition,
    planned: Planned,
    *,
    run_id: str,
    interest: frozenset[str],
    capture_mode: CaptureMode,
    log_fields: Mapping[str, str],
) -> RunFrame:
    """The frame of a run.

    Args:
        definition: The ensemble as this run sees it.
        planned: What it will do.
        run_id: Its id.
        interest: Listener methods that anybody wants.
        capture_mode: What its trace keeps.
        log_fields: The caller's, carried into every process.
    """
    plan, limit = planned.plan, definition.delegation_timeout
    return RunFrame(
        run_id=run_id,
        workflow=plan.workflow,
        total_tasks=len(plan.nodes),
        interest=interest,
        capture_mode=capture_mode,
        is_verbose=definition.verbose,
        max_tool_output_length=definition.max_tool_output_length,
        tool_log_truncate_length=definition.tool_log_truncate_length,
        log_fields=log_fields,
        cost=definition.cost_configuration,
        budget=RunBudget.of(definition.max_tokens, definition.max_cost),
        has_tool_metrics=definition.tool_metrics is not None,
        durability=definition.durability,
        on_unknown=definition.on_unknown if isinstance(definition.on_unknown, OnUnknown) else OnUnknown.ASK,
        retry=definition.retry,
        on_incomplete=definition.on_incomplete,
        delegation=DelegationContext(
            colleagues=planned.colleagues,
            max_depth=definition.max_delegation_depth,
            policies=[callable_name(policy) for policy in definition.delegation_policies],
            timeout_s=None if limit is None else limit.total_seconds(),
            retries=definition.delegation_retries,
            most_at_once=definition.max_parallel_tasks,
        ),
        hierarchy=plan.hierarchy,
    )


def failed_manager_events(run_id: str, cause: BaseException) -> tuple[Event, Event]:
    """The events of a manager whose prompts could not be made: a task that began and failed (S-HIER-13, S-HIER-60)."""
    instance = instance_of(MANAGER_KEY)
    return (
        TaskStartEvent(
            run_id=run_id,
            instance=instance,
            task_description="",
            agent_role=MANAGER_ROLE,
            task_index=1,
            total_tasks=1,
        ),
        TaskFailedEvent(
            run_id=run_id,
            instance=instance,
            task_description="",
            agent_role=MANAGER_ROLE,
            task_index=1,
            total_tasks=1,
            cause=cause,
            duration=timedelta(),
        ),
    )
