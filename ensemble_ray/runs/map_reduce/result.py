"""What the tasks of a map-reduce gave, and what the run raises where it failed.

In: how it ended, and its outputs. Out: the parts that `record.result` assembles, with one trace over all levels (S-MR-90 to
S-MR-93), or the error that `run()` raises (S-MR-100 to S-MR-106). Never: a body read here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.coordinator.map_reduce.ports import MapReduceFailure
from ensemble_ray.errors import BudgetExhaustedError, EnsembleError, ParallelExecutionError, ValidationError
from ensemble_ray.errors.texts import tasks_failure
from ensemble_ray.facts.runs import OWN_FAILURES
from ensemble_ray.record.result import (
    RunEnd,
    RunResults,
    error_trace,
    failures_by_label,
    task_error,
)
from ensemble_ray.runs.launching import Conclusion
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.coordinator.map_reduce.outputs import MapReduceOutputs
    from ensemble_ray.coordinator.map_reduce.ports import MapReduceEnd
    from ensemble_ray.values.outputs import FailedItem
    from ensemble_ray.values.task_output import TaskOutput


def conclude(
    ended: MapReduceEnd, task_outputs: MapReduceOutputs, failed_items: Sequence[FailedItem] = (), *, goes_on: bool
) -> Conclusion:
    """Return how a run ended and what its tasks gave.

    Args:
        ended: How it ended.
        task_outputs: What its tasks gave.
        failed_items: Items that were left out, where they are collected.
        goes_on: Whether failed tasks are left out; else the first of them is the error.
    """
    started, completed = task_outputs.span or (
        utc_of(ended.started_at),
        utc_of(max(ended.started_at, ended.completed_at)),
    )
    end = RunEnd(
        state=ended.ending.state,
        exit_reason=ended.ending.exit_reason,
        started_at=started,
        completed_at=completed,
        errors=tuple(
            error_trace(each.error, at=each.at, agent_role=each.agent_role, task_description=each.task_description)
            for each in list_reasons(ended)
        ),
    )
    outputs, last = task_outputs.outputs, task_outputs.last
    results = RunResults(
        outputs=outputs,
        raw="" if last is None else task_outputs.output(*last).raw,
        traces=task_outputs.traces,
        agents=task_outputs.agents,
        metrics=task_outputs.metrics,
        tool_calls=task_outputs.tool_calls,
        levels=task_outputs.levels,
        failed_items=failed_items,
    )
    failure = failure_of(ended, outputs, goes_on=goes_on) if ended.ending.state is RunState.FAILED else None
    return Conclusion(end=end, results=results, failure=failure, warning=ended.warning)


def list_reasons(ended: MapReduceEnd) -> Sequence[MapReduceFailure]:
    """Return why a run failed: the error of the run itself first, if there is one, then those of its tasks."""
    own: BaseException | None = BudgetExhaustedError(ended.warning) if ended.warning else None
    if ended.ending.failure in OWN_FAILURES:
        if ended.refusal is not None:
            return (ended.refusal, *ended.failures)
        own = ended.cause or _no_items()
    if own is None:
        return ended.failures
    first = MapReduceFailure(key="", level=0, at=ended.completed_at, task_description="", agent_role="", error=own)
    return (first, *ended.failures)


def _no_items() -> ValidationError:
    return ValidationError("items must not be None or empty")


def failure_of(ended: MapReduceEnd, outputs: Sequence[TaskOutput], *, goes_on: bool) -> BaseException:
    """Return what a failed run raises."""
    if ended.refusal is not None:
        return _first(ended.refusal, outputs)
    if ended.cause is not None:
        return ended.cause
    if ended.ending.failure == "empty":
        return _no_items()
    level = max((failure.level for failure in ended.failures), default=0)
    here = [failure for failure in ended.failures if failure.level == level]
    if ended.ending.failure == "all_maps" or (goes_on and level):
        return _several(here, ended.failed_maps if not level else len(here), outputs)
    return _first(here[0], outputs)


def _several(failures: Sequence[MapReduceFailure], count: int, outputs: Sequence[TaskOutput]) -> ParallelExecutionError:
    """Return an error with all failures of a level, or the first hundred of them."""
    causes = failures_by_label((failure.task_description, failure.error) for failure in failures)
    error = ParallelExecutionError(tasks_failure(count, count, causes), (), causes, count, len(outputs))
    error.completed_task_outputs = outputs
    return error


def _first(failure: MapReduceFailure, outputs: Sequence[TaskOutput]) -> EnsembleError:
    return task_error(
        failure.error,
        outputs,
        label=failure.task_description,
        task_description=failure.task_description,
        agent_role=failure.agent_role,
    )
