"""The output of a map-reduce, or its error. Room: fed.

In: how it ended, and its bodies. Out: one `EnsembleOutput` with one trace over all levels (S-MR-90 to S-MR-93), or the
error that `run()` raises (S-MR-100 to S-MR-106). Nothing is read from the body store here: sequences over it are handed on.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.error_texts import task_failure, tasks_failure
from ensemble_ray.errors import (
    EnsembleError,
    ParallelExecutionError,
    TaskExecutionError,
    ValidationError,
    message_of,
)
from ensemble_ray.outputs import EnsembleOutput, RunState
from ensemble_ray.trace import CaptureMode, ErrorTrace, ExecutionTrace
from ensemble_ray.values import utc_of

if TYPE_CHECKING:
    from ensemble_ray.coordinator.map_reduce.outputs import MapReduceOutputs
    from ensemble_ray.coordinator.map_reduce.ports import MapReduceEnd, MapReduceFailure
    from ensemble_ray.outputs import FailedItem, TaskOutput

__all__ = ["FedFrame", "assemble_fed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FedFrame:
    """What of a run stands in its trace whatever it did."""

    run_id: str
    workflow: str
    inputs: Mapping[str, str]
    capture_mode: CaptureMode
    trace_id: str | None
    #: failed tasks are left out; else the first of them is the error
    goes_on: bool


def assemble_fed(
    frame: FedFrame, ended: MapReduceEnd, bodies: MapReduceOutputs, failed_items: Sequence[FailedItem] = ()
) -> EnsembleOutput:
    """The output of a run that did not fail.

    Raises:
        Exception: what the source or a factory raised, unchanged (S-MR-106, S-MR-123).
        EnsembleError: a task's failure ended the run.
    """
    trace = _trace(frame, ended, bodies)
    if ended.ending.state is RunState.FAILED:
        error = _failure(frame, ended, bodies)
        if isinstance(error, EnsembleError):
            error.trace, error.run_id = trace, frame.run_id
        raise error
    last = bodies.last
    return EnsembleOutput(
        raw="" if last is None else bodies.output(*last).raw,
        task_outputs=bodies.outputs,
        total_duration=trace.total_duration,
        total_tool_calls=bodies.tool_calls,
        exit_reason=ended.ending.exit_reason,
        metrics=trace.metrics,
        trace=trace,
        run_id=frame.run_id,
        failed_items=failed_items,
    )


def _trace(frame: FedFrame, ended: MapReduceEnd, bodies: MapReduceOutputs) -> ExecutionTrace:
    started, completed = bodies.span or (utc_of(ended.started_at), utc_of(max(ended.started_at, ended.completed_at)))
    metrics = bodies.metrics
    return ExecutionTrace(
        capture_mode=frame.capture_mode,
        ensemble_id=frame.run_id,
        workflow=frame.workflow,
        started_at=started,
        completed_at=completed,
        total_duration=completed - started,
        inputs=frame.inputs,
        agents=bodies.agents,
        task_traces=bodies.traces,
        metrics=metrics,
        total_cost_estimate=metrics.total_cost_estimate,
        errors=tuple(_error_trace(failure) for failure in ended.failures),
        trace_id=frame.trace_id,
        map_reduce_levels=bodies.levels,
        metadata={} if ended.ending.state is RunState.COMPLETED else {"state": ended.ending.state.value},
    )


def _error_trace(failure: MapReduceFailure) -> ErrorTrace:
    return ErrorTrace(
        agent_role=failure.agent_role,
        task_description=failure.task_description,
        error_type=type(failure.error).__name__,
        message=message_of(failure.error),
        stack_trace="".join(traceback.format_exception(failure.error)),
        occurred_at=utc_of(failure.at),
    )


def _failure(frame: FedFrame, ended: MapReduceEnd, bodies: MapReduceOutputs) -> BaseException:
    if ended.refusal is not None:
        return _first(ended.refusal, bodies.outputs)
    if ended.cause is not None:
        return ended.cause
    if ended.ending.failure == "empty":
        return ValidationError("items must not be None or empty")
    level = max((failure.level for failure in ended.failures), default=0)
    here = [failure for failure in ended.failures if failure.level == level]
    if ended.ending.failure == "all_maps" or (frame.goes_on and level):
        return _several(here, ended.failed_maps if not level else len(here), bodies.outputs)
    return _first(here[0], bodies.outputs)


def _several(failures: Sequence[MapReduceFailure], count: int, outputs: Sequence[TaskOutput]) -> ParallelExecutionError:
    """All failures of a level, or the first hundred of them."""
    causes: dict[str, BaseException] = {}
    for failure in failures:
        same = sum(key.partition(" #")[0] == failure.task_description for key in causes)
        causes[f"{failure.task_description} #{same + 1}" if same else failure.task_description] = failure.error
    error = ParallelExecutionError(tasks_failure(count, count, causes), (), causes, count, len(outputs))
    error.completed_task_outputs = outputs
    return error


def _first(failure: MapReduceFailure, outputs: Sequence[TaskOutput]) -> EnsembleError:
    error = failure.error
    if not isinstance(error, TaskExecutionError):
        error = TaskExecutionError(
            task_failure(failure.task_description, error), failure.task_description, failure.agent_role
        )
        error.__cause__ = failure.error
    error.completed_task_outputs = outputs
    return error
