"""What all tasks of a run share, of its definition and its plan. Pure.

In: a definition as one run sees it, and what was planned. Out: the context that travels to every process; the request that
the run makes to its runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ensemble_ray.definition.fields import OnUnknown
from ensemble_ray.execute.callables import callable_name
from ensemble_ray.execute.orders import RunContext, RunModels
from ensemble_ray.execute.reflection import LocalRunReflections
from ensemble_ray.execute.review.console import ConsoleReviewHandler
from ensemble_ray.execute.review.handlers import LocalReviewer
from ensemble_ray.memory.tools import LocalRunMemory, rules_of
from ensemble_ray.runs.ports import RunRequest
from ensemble_ray.tools.waiting import NoOpToolMetrics
from ensemble_ray.values.delegation import DelegationContext
from ensemble_ray.values.metrics import RunBudget

if TYPE_CHECKING:
    from ensemble_ray.definition.ensemble import EnsembleDefinition
    from ensemble_ray.plan.planner import Planned
    from ensemble_ray.runs.launching import RunScope
    from ensemble_ray.values.trace import CaptureMode, RunTracing


def run_context_of(
    definition: EnsembleDefinition,
    planned: Planned,
    *,
    run_id: str,
    interest: frozenset[str],
    capture_mode: CaptureMode,
    log_fields: Mapping[str, str],
    tracing: RunTracing | None = None,
) -> RunContext:
    """Return the context of a run.

    Args:
        definition: The ensemble as this run sees it.
        planned: What it will do.
        run_id: Its id.
        interest: Listener methods that anybody wants.
        capture_mode: What its trace keeps.
        log_fields: The caller's, carried into every process.
        tracing: What its spans have in common; None: nobody traces it.
    """
    plan, limit = planned.plan, definition.delegation_timeout
    return RunContext(
        run_id=run_id,
        workflow=plan.workflow,
        total_tasks=len(plan.nodes),
        interest=interest,
        capture_mode=capture_mode,
        is_verbose=definition.verbose,
        context_budget=definition.context_budget,
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
            peers=planned.peers,
            max_depth=definition.max_delegation_depth,
            policies=[callable_name(policy) for policy in definition.delegation_policies],
            timeout_s=None if limit is None else limit.total_seconds(),
            retries=definition.delegation_retries,
            most_at_once=definition.max_parallel_tasks,
        ),
        hierarchy=plan.hierarchy,
        memory=rules_of(definition.memory, definition.memory_store),
        review_policy=definition.review_policy if definition.has_reviews else None,
        policy_review=getattr(definition.review_handler, "default_review", None),
        is_detached=definition.is_detached,
        has_reflections=definition.reflection_store is not None or reflects(planned),
        models=RunModels(definition.models),
        tracing=tracing,
    )


def reflects(planned: Planned) -> bool:
    """Return whether a task of the plan is reflected on."""
    return any(task.reflection_config is not None for task in planned.tasks.values())


def request_of(
    scope: RunScope, definition: EnsembleDefinition, planned: Planned, *, capture_mode: CaptureMode
) -> RunRequest:
    """Return what a run asks its runtime with.

    Args:
        scope: The run.
        definition: The rules of its tasks.
        planned: What is known of them.
        capture_mode: What its trace keeps.
    """
    handler = None if definition.is_detached else definition.review_handler
    if isinstance(handler, ConsoleReviewHandler):
        handler.warn_without_terminal()
    context = run_context_of(
        definition,
        planned,
        run_id=scope.run_id,
        interest=scope.events.interest,
        capture_mode=capture_mode,
        log_fields=scope.log_fields,
        tracing=scope.tracing,
    )
    store = definition.find_reflection_store(task.reflection_config for task in planned.tasks.values())
    return RunRequest(
        run_id=scope.run_id,
        origin=scope.origin,
        context=context,
        events=scope.events,
        tool_metrics=definition.tool_metrics or NoOpToolMetrics(),
        on_unknown=definition.on_unknown,
        reviewer=None if handler is None else LocalReviewer(handler),
        store=scope.store_address,
        cancelled=scope.cancelled,
        memory=None if context.memory is None else LocalRunMemory(definition.memory, definition.memory_store),
        reflections=None if store is None else LocalRunReflections(store),
    )
