"""Makes a run's output, or its error, of how it ended. Package: record. Pure.

Rules: what `run()` raises is decided here for both runtimes (S-ENG-13, S-ENG-15, S-ENG-60, S-PAR-22, S-PAR-25); every
error carries the trace up to the failure and the run id (S-SET-26).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from ensemble_ray.error_texts import reason_of, task_failure, tasks_failure
from ensemble_ray.errors import (
    ConstraintViolationError,
    EnsembleError,
    ParallelExecutionError,
    TaskExecutionError,
    ValidationError,
    message_of,
)
from ensemble_ray.metrics import ExecutionMetrics
from ensemble_ray.outputs import EnsembleOutput, RunState, TaskOutput
from ensemble_ray.plan.plan import MANAGER_KEY, MANAGER_ROLE
from ensemble_ray.record.levels import in_level_order, level_summaries, placed_outcome
from ensemble_ray.schedule.hierarchy import violations_of
from ensemble_ray.trace import AgentSummary, CaptureMode, DelegationTrace, ErrorTrace, ExecutionTrace, TaskTrace
from ensemble_ray.values import utc_of

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import RunOutcome, TaskFailure
    from ensemble_ray.plan.plan import Node, Plan

__all__ = ["assemble", "failure_of", "manager_failure", "summaries", "violation_trace"]


def summaries(plan: Plan) -> tuple[AgentSummary, ...]:
    """Who takes part in a plan (S-TRC-1)."""
    return tuple(
        AgentSummary(
            role=agent.role,
            goal=agent.goal,
            background=agent.background,
            tool_names=agent.tool_names,
            allow_delegation=agent.allow_delegation,
        )
        for agent in plan.agents
        if agent.key != MANAGER_KEY or plan.hierarchy is None  # the manager is nobody's agent
    )


def _trace_of(plan: Plan, outcome: RunOutcome, capture_mode: CaptureMode, trace_id: str | None) -> ExecutionTrace:
    # Whoever goes on with a run may have another clock than who began it.
    started, completed = utc_of(outcome.started_at), utc_of(max(outcome.started_at, outcome.completed_at))
    keyed = [(key, output.trace) for key, output in outcome.completed if output.trace is not None]
    keyed += [(failure.key, failure.trace) for failure in outcome.failures if failure.trace is not None]
    ordered = in_level_order(plan, [*keyed, *outcome.unfinished])
    traces = [trace for _, trace in ordered]
    if plan.hierarchy is not None:
        traces += _workers(traces[0] if traces else None, outcome)
    metrics = ExecutionMetrics.from_outputs(
        [each for trace in traces for each in trace.with_workers()],
        by_task={key: trace.metrics for key, trace in ordered},
    )
    return ExecutionTrace(
        capture_mode=capture_mode,
        ensemble_id=outcome.run_id,
        workflow=plan.shown_workflow,
        started_at=started,
        completed_at=completed,
        total_duration=completed - started,
        inputs=dict(plan.inputs),
        agents=summaries(plan),
        task_traces=tuple(traces),
        metrics=metrics,
        total_cost_estimate=metrics.total_cost_estimate,
        map_reduce_levels=level_summaries(traces) if plan.has_levels else (),
        errors=tuple(_errors(plan, outcome)),
        trace_id=trace_id,
        metadata={} if outcome.state is RunState.COMPLETED else {"state": outcome.state.value},
    )


def _workers(manager: TaskTrace | None, outcome: RunOutcome) -> list[TaskTrace]:
    """The traces of a manager's workers in the order in which they were asked (26, ExecutionTrace)."""
    gave = [output.trace for output in outcome.delegated if output.trace is not None]
    failed, found = sorted(outcome.lost_work, key=_end_of), dict[int, TaskTrace]()
    attempts = () if manager is None else manager.delegations
    # Those who were asked for the same are told apart by who was done first.
    for attempt, each in sorted(enumerate(attempts), key=lambda entry: _end_of(entry[1])):
        pool = gave if each.succeeded else failed
        asked = (each.worker_role, each.task_description)
        place = next((n for n, one in enumerate(pool) if (one.agent_role, one.task_description) == asked), None)
        if place is not None:
            found[attempt] = pool.pop(place)
    return [*(found[attempt] for attempt in sorted(found)), *gave, *failed]


def _end_of(trace: TaskTrace | DelegationTrace) -> datetime:
    return trace.completed_at


def _errors(plan: Plan, outcome: RunOutcome) -> Iterator[ErrorTrace]:
    for failure in outcome.failures:
        yield _error_trace(_node(plan, failure.key), failure)
    if violations := _violations(plan, outcome):
        yield violation_trace(violations, outcome.completed_at)


def violation_trace(violations: Sequence[str], at: float) -> ErrorTrace:
    """The error of a run whose manager completed without its required workers (S-HIER-50); no task has it."""
    error = ConstraintViolationError(violations)
    return ErrorTrace(
        agent_role=MANAGER_ROLE,
        task_description="",
        error_type=type(error).__name__,
        message=message_of(error),
        occurred_at=utc_of(at),
    )


def _violations(plan: Plan, outcome: RunOutcome) -> tuple[str, ...]:
    """What a run failed for in which no task did."""
    if plan.hierarchy is None or outcome.state is not RunState.FAILED or outcome.failures:
        return ()
    return violations_of(plan.hierarchy, {output.agent_role for output in outcome.delegated})


def _node(plan: Plan, key: str) -> Node:
    return next(node for node in plan.nodes if node.key == key)


def _error_trace(node: Node, failure: TaskFailure) -> ErrorTrace:
    error = failure.error
    return ErrorTrace(
        agent_role=node.agent_role,
        task_description=node.description,
        error_type=type(error).__name__,
        message=message_of(error),
        stack_trace="".join(traceback.format_exception(error)),
        occurred_at=utc_of(failure.at),
    )


def assemble(
    plan: Plan, outcome: RunOutcome, *, capture_mode: CaptureMode = CaptureMode.OFF, trace_id: str | None = None
) -> EnsembleOutput:
    """The output of a run that did not fail.

    Raises:
        EnsembleError: the run failed; which class is `failure_of`'s decision.
    """
    outcome = placed_outcome(plan, outcome)
    trace = _trace_of(plan, outcome, capture_mode, trace_id)
    outputs = (*outcome.delegated, *(output for _, output in outcome.completed))
    if outcome.state is RunState.FAILED:
        error = failure_of(plan, outcome, outputs)
        error.trace = trace
        error.run_id = outcome.run_id
        raise error
    completed = in_level_order(plan, outcome.completed)
    outputs = (*outcome.delegated, *(output for _, output in completed))
    object_ids = {node.key: node.object_id for node in plan.nodes}
    return EnsembleOutput(
        raw=completed[-1][1].raw if completed else "",
        task_outputs=outputs,
        total_duration=trace.total_duration if outputs else timedelta(),
        total_tool_calls=sum(output.tool_call_count for output in outputs),
        exit_reason=outcome.exit_reason,
        metrics=trace.metrics,
        trace=trace,
        run_id=outcome.run_id,
    ).with_positions({object_ids[key]: place for place, (key, _) in enumerate(completed, start=len(outcome.delegated))})


def failure_of(plan: Plan, outcome: RunOutcome, outputs: Sequence[TaskOutput]) -> EnsembleError:
    """What a failed run raises."""
    if plan.workflow == "parallel" and plan.error_strategy == "continue_on_error":
        causes: dict[str, BaseException] = {}
        for failure in outcome.failures:
            description = _node(plan, failure.key).description
            same = sum(key == description or key.startswith(f"{description} #") for key in causes)
            causes[f"{description} #{same + 1}" if same else description] = failure.error
        return ParallelExecutionError(tasks_failure(len(causes), len(plan.nodes), causes), outputs, causes)
    if plan.hierarchy is not None:
        return _failure_of_manager(plan, outcome)
    first = outcome.failures[0]
    completed = tuple(outputs[: first.completed_before])
    error = first.error
    if isinstance(error, ValidationError):
        return error
    if isinstance(error, TaskExecutionError):
        error.completed_task_outputs = completed
        return error
    node = _node(plan, first.key)
    text = task_failure(_label(node), error)
    wrapped = TaskExecutionError(text, node.description, node.agent_role, completed)
    wrapped.__cause__ = error
    return wrapped


def _label(node: Node) -> str:
    """What a person calls a task: its name where it has one, else its description."""
    is_named = node.level is None and node.key.partition("~")[0] != f"task-{node.index}"
    return node.key if is_named else node.description


def _failure_of_manager(plan: Plan, outcome: RunOutcome) -> EnsembleError:
    """What a hierarchical run raises: the manager failed, else a required worker is missing (S-HIER-50, S-HIER-60)."""
    if not outcome.failures:
        return ConstraintViolationError(_violations(plan, outcome), tuple(outcome.delegated))
    error = outcome.failures[0].error
    if isinstance(error, ValidationError):
        return error
    return manager_failure(error, plan.nodes[0].description, tuple(outcome.delegated))


def manager_failure(
    error: BaseException, task_description: str = "", completed: Sequence[TaskOutput] = ()
) -> TaskExecutionError:
    """What a run raises whose manager failed with that error (S-HIER-60)."""
    text = f"Hierarchical workflow manager failed: {reason_of(error)}"
    wrapped = TaskExecutionError(text, task_description, MANAGER_ROLE, completed)
    wrapped.__cause__ = error
    return wrapped
