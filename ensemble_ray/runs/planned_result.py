"""What the tasks of a plan gave, and what their run raises where it failed. Package: runs. Pure.

In: a plan, and the outcome of its run. Out: the parts that `record.result` assembles. Rules: what `run()` raises is decided
here for both runtimes (S-ENG-13, S-ENG-15, S-ENG-60, S-PAR-22, S-PAR-25).
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from ensemble_ray.errors import (
    ConstraintViolationError,
    EnsembleError,
    ParallelExecutionError,
    TaskExecutionError,
    ValidationError,
)
from ensemble_ray.errors.texts import reason_of, tasks_failure
from ensemble_ray.execute.exits import describe_exhaustion
from ensemble_ray.plan.plan import MANAGER_ROLE
from ensemble_ray.record.levels import in_level_order, level_summaries, placed_outcome
from ensemble_ray.record.result import (
    RunEnd,
    RunResults,
    error_trace,
    failures_by_label,
    summaries,
    task_error,
    violation_trace,
)
from ensemble_ray.runs.launching import Conclusion
from ensemble_ray.schedule.hierarchy import violations_of
from ensemble_ray.values.metrics import ExecutionMetrics
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.trace import TaskTrace
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ensemble_ray.execute.outcomes import RunOutcome
    from ensemble_ray.plan.plan import Node, Plan
    from ensemble_ray.values.outputs import TaskOutput
    from ensemble_ray.values.trace import DelegationTrace, ErrorTrace

__all__ = ["conclude", "manager_failure"]


def conclude(plan: Plan, outcome: RunOutcome) -> Conclusion:
    """Return how a run ended and what its tasks gave."""
    outcome = placed_outcome(plan, outcome)
    end = RunEnd(
        state=outcome.state,
        exit_reason=outcome.exit_reason,
        started_at=utc_of(outcome.started_at),
        # Whoever goes on with a run may have another clock than who began it.
        completed_at=utc_of(max(outcome.started_at, outcome.completed_at)),
        errors=tuple(_errors(plan, outcome)),
    )
    failure = _failure_of(plan, outcome) if outcome.state is RunState.FAILED else None
    is_spent = outcome.state is RunState.BUDGET_EXHAUSTED
    warning = describe_exhaustion(each.error for _, each in outcome.unfinished) if is_spent else ""
    return Conclusion(end=end, results=_results_of(plan, outcome), failure=failure, warning=warning)


def _results_of(plan: Plan, outcome: RunOutcome) -> RunResults:
    """Return what the tasks gave, in the order of levels where the plan has any."""
    keyed = [(key, output.trace) for key, output in outcome.completed if output.trace is not None]
    ended = [*((failed.key, failed.failure) for failed in outcome.failures), *outcome.unfinished]
    keyed += [(key, failure.trace) for key, failure in ended if failure.trace is not None]
    ordered = in_level_order(plan, keyed)
    traces = [trace for _, trace in ordered]
    if plan.hierarchy is not None:
        traces += _worker_traces(traces[0] if traces else None, outcome)
    completed = in_level_order(plan, outcome.completed)
    outputs = (*(output for _, output in outcome.delegated), *(output for _, output in completed))
    object_ids = {node.key: node.object_id for node in plan.nodes}
    places = enumerate(completed, start=len(outcome.delegated))
    return RunResults(
        outputs=outputs,
        raw=completed[-1][1].raw if completed else "",
        traces=tuple(traces),
        agents=summaries(plan),
        metrics=ExecutionMetrics.from_outputs(
            [each for trace in traces for each in trace.with_workers()],
            by_task={key: trace.metrics for key, trace in ordered},
        ),
        tool_calls=sum(output.tool_call_count for output in outputs),
        levels=level_summaries(traces) if plan.has_levels else (),
        positions={object_ids[key]: place for place, (key, _) in places},
    )


def _worker_traces(manager: TaskTrace | None, outcome: RunOutcome) -> list[TaskTrace]:
    """Return the traces of a manager's workers in the order in which they were asked (26, ExecutionTrace)."""
    gave = [output.trace for _, output in outcome.delegated if output.trace is not None]
    failed, found = sorted(outcome.failed_delegations, key=_end_of), dict[int, TaskTrace]()
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
    for failed in outcome.failures:
        node, error = _node(plan, failed.key), failed.failure.cause
        yield error_trace(error, at=failed.at, agent_role=node.agent_role, task_description=node.description)
    if violations := _violations(plan, outcome):
        yield violation_trace(violations, outcome.completed_at)


def _violations(plan: Plan, outcome: RunOutcome) -> tuple[str, ...]:
    """Return what a run failed for in which no task did."""
    if plan.hierarchy is None or outcome.state is not RunState.FAILED or outcome.failures:
        return ()
    return violations_of(plan.hierarchy, {output.agent_role for _, output in outcome.delegated})


def _failure_of(plan: Plan, outcome: RunOutcome) -> EnsembleError:
    """Return what a failed run raises."""
    if plan.hierarchy is not None:
        return _failure_of_manager(plan, outcome)
    outputs = tuple(output for _, output in outcome.completed)
    if plan.workflow == "parallel" and plan.error_strategy == "continue_on_error":
        failed = ((_node(plan, each.key).description, each.failure.cause) for each in outcome.failures)
        causes = failures_by_label(failed)
        return ParallelExecutionError(tasks_failure(len(causes), len(plan.nodes), causes), outputs, causes)
    first = outcome.failures[0]
    error = first.failure.cause
    if isinstance(error, ValidationError):
        return error
    node = _node(plan, first.key)
    return task_error(
        error,
        outputs[: first.completed_before],
        label=_label(node),
        task_description=node.description,
        agent_role=node.agent_role,
    )


def _failure_of_manager(plan: Plan, outcome: RunOutcome) -> EnsembleError:
    """Return what a hierarchical run raises: the manager failed, else a required worker is missing (S-HIER-50, S-HIER-60)."""
    outputs: Sequence[TaskOutput] = tuple(output for _, output in outcome.delegated)
    if not outcome.failures:
        return ConstraintViolationError(_violations(plan, outcome), outputs)
    error = outcome.failures[0].failure.cause
    if isinstance(error, ValidationError):
        return error
    return manager_failure(error, plan.nodes[0].description, outputs)


def manager_failure(
    error: BaseException, task_description: str = "", completed: Sequence[TaskOutput] = ()
) -> TaskExecutionError:
    """Return what a run raises whose manager failed with that error (S-HIER-60)."""
    text = f"Hierarchical workflow manager failed: {reason_of(error)}"
    wrapped = TaskExecutionError(text, task_description, MANAGER_ROLE, completed)
    wrapped.__cause__ = error
    return wrapped


def _node(plan: Plan, key: str) -> Node:
    return next(node for node in plan.nodes if node.key == key)


def _label(node: Node) -> str:
    """Return what a person calls a task: its name where it has one, else its description."""
    is_named = node.level is None and node.key.partition("~")[0] != f"task-{node.index}"
    return node.key if is_named else node.description
