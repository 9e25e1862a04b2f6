"""What the tasks of a plan gave, and what their run raises where it failed. Pure.

In: a plan, and the outcome of its run. Out: the parts that `record.result` assembles. Rules: what `run()` raises is decided
here for both runtimes (S-ENG-13, S-ENG-15, S-ENG-60, S-PAR-22, S-PAR-25).
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from ensemble_ray.errors import (
    BudgetExhaustedError,
)
from ensemble_ray.execute.scope import describe_exhaustion
from ensemble_ray.record.failures import FailureSeen, failure_of, failures_seen
from ensemble_ray.record.levels import in_level_order, placed_outcome
from ensemble_ray.record.result import RunEnd, RunResults, error_trace, planned_results, summaries, violation_trace
from ensemble_ray.record.units import EndedUnits
from ensemble_ray.runs.launching import Conclusion
from ensemble_ray.schedule.hierarchy import violations_of
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.trace import TaskTrace
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ensemble_ray.execute.orders import RunOutcome
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.values.trace import DelegationTrace, ErrorTrace


def conclude(plan: Plan, outcome: RunOutcome) -> Conclusion:
    """Return how a run ended and what its tasks gave."""
    outcome = placed_outcome(plan, outcome)
    ended = EndedUnits(
        plan=plan, results=outcome.units, failures=outcome.unit_failures, outputs=dict(outcome.completed)
    )
    failures = _failures(ended, outcome)
    end = RunEnd(
        state=outcome.state,
        exit_reason=outcome.exit_reason,
        started_at=utc_of(outcome.started_at),
        # Whoever goes on with a run may have another clock than who began it.
        completed_at=utc_of(max(outcome.started_at, outcome.completed_at)),
        errors=tuple(_errors(plan, outcome, failures)),
        open_reviews=outcome.open_reviews,
    )
    has_failed = outcome.state in {RunState.FAILED, RunState.INTERRUPTED}
    failure = failure_of(ended, failures, [output for _, output in outcome.delegated]) if has_failed else None
    warning = ""
    if outcome.state is RunState.BUDGET_EXHAUSTED:
        warning = describe_exhaustion(each.error for _, each in outcome.unfinished)
    elif outcome.state is RunState.INTERRUPTED:
        warning = "The run was interrupted, since a model's account has no credit. Resume it when the account has some"
    return Conclusion(end=end, results=_results_of(plan, outcome, ended), failure=failure, warning=warning)


def _results_of(plan: Plan, outcome: RunOutcome, ended: EndedUnits) -> RunResults:
    """Return what the tasks gave, in the order of levels where the plan has any."""
    by_instance = [(instance, output.trace) for instance, output in ended.outputs.items() if output.trace is not None]
    left = [*((failed.instance, failed.failure) for failed in outcome.failures), *outcome.unfinished]
    by_instance += [(instance, failure.trace) for instance, failure in left if failure.trace is not None]
    traces = in_level_order(plan, by_instance)
    manager = traces[0][1] if traces else None
    return planned_results(
        ended,
        traces,
        summaries(plan),
        delegated=[output for _, output in outcome.delegated],
        worker_traces=() if plan.hierarchy is None else _worker_traces(manager, outcome),
        object_ids={node.key: node.object_id for node in plan.nodes},
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


def _failures(ended: EndedUnits, outcome: RunOutcome) -> list[FailureSeen]:
    tasks = [
        FailureSeen(
            at=failed.at,
            error=failed.failure.cause,
            completed_before=failed.completed_before,
            node=ended.nodes[node_key(failed.instance)],
        )
        for failed in outcome.failures
    ]
    return failures_seen(ended, tasks, [(unit, failure.cause) for unit, failure in outcome.raised])


def _errors(plan: Plan, outcome: RunOutcome, failures: Sequence[FailureSeen]) -> Iterator[ErrorTrace]:
    for failed in failures:
        yield failed.as_trace()
    if violations := _violations(plan, outcome):
        yield violation_trace(violations, outcome.completed_at)
    if outcome.state is RunState.BUDGET_EXHAUSTED:
        nodes = {node.key: node for node in plan.nodes}
        for instance, failure in outcome.unfinished:
            if isinstance(failure.error, BudgetExhaustedError):
                node = nodes.get(node_key(instance))
                role, description = ("", "") if node is None else (node.agent_role, node.description)
                yield error_trace(failure.error, at=outcome.completed_at, agent_role=role, task_description=description)
                return


def _violations(plan: Plan, outcome: RunOutcome) -> tuple[str, ...]:
    """Return what a run failed for in which no task did."""
    if plan.hierarchy is None or outcome.state is not RunState.FAILED or outcome.failures:
        return ()
    return violations_of(plan.hierarchy, {output.agent_role for _, output in outcome.delegated})
