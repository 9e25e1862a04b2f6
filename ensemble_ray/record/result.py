"""Make the output or the error of any run from the results of its tasks and its end. Pure.

Every error has the run id and the trace up to the failure (S-SET-26). Outputs and traces are passed on as sequences and
not read here, since a run may have a million of them.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from ensemble_ray.errors import ConstraintViolationError, EnsembleError, TaskExecutionError, message_of
from ensemble_ray.errors.texts import own_line, task_failure
from ensemble_ray.plan.plan import MANAGER_KEY, MANAGER_ROLE
from ensemble_ray.record.levels import level_summaries
from ensemble_ray.record.units import unit_results
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.metrics import ExecutionMetrics, metrics_by_key
from ensemble_ray.values.outputs import EnsembleOutput, ExitReason, FailedItem, RunState
from ensemble_ray.values.task_output import TaskOutput, UnitOutputs
from ensemble_ray.values.trace import (
    AgentSummary,
    CaptureMode,
    ErrorTrace,
    ExecutionTrace,
    GraphTrace,
    LoopTrace,
    MapReduceLevelSummary,
    PhaseTrace,
    TaskTrace,
)
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from ensemble_ray.plan.plan import Node, Plan
    from ensemble_ray.record.units import EndedUnits
    from ensemble_ray.values.reviews import OpenReview


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResultHead:
    """Facts about a run in its trace that do not depend on its tasks."""

    run_id: str
    workflow: str
    #: name of the team; empty if it has none
    name: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    capture_mode: CaptureMode = CaptureMode.OFF
    trace_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResults:
    """The results of the tasks so far."""

    #: in the caller's order
    outputs: Sequence[TaskOutput] = ()
    #: text of the last output; "" if there is none
    raw: str = ""
    #: of tasks with and without an output
    traces: Sequence[TaskTrace] = ()
    #: the participants (S-TRC-1)
    agents: Sequence[AgentSummary] = ()
    metrics: ExecutionMetrics = ExecutionMetrics.EMPTY
    tool_calls: int = 0
    levels: Sequence[MapReduceLevelSummary] = ()
    #: positions of outputs by the hidden ids of their tasks
    positions: Mapping[str, int] = field(default_factory=dict[str, int])
    #: positions of outputs by the keys of their tasks
    names: Mapping[str, int] = field(default_factory=dict[str, int])
    #: items of a map without an output, if failures are collected (S-MR-150)
    failed_items: Sequence[FailedItem] = ()
    #: histories of loops, phases and a graph
    units: UnitOutputs = field(default_factory=UnitOutputs)
    loop_traces: tuple[LoopTrace, ...] = ()
    phases: tuple[PhaseTrace, ...] = ()
    graph_trace: GraphTrace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended."""

    state: RunState
    exit_reason: ExitReason
    started_at: datetime
    completed_at: datetime
    errors: Sequence[ErrorTrace] = ()
    #: additional metadata of the trace
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])
    #: gates that a run waits for
    open_reviews: Sequence[OpenReview] = ()


def planned_results(
    ended: EndedUnits,
    traces: Sequence[tuple[str, TaskTrace]],
    agents: Sequence[AgentSummary],
    *,
    delegated: Sequence[TaskOutput] = (),
    worker_traces: Sequence[TaskTrace] = (),
    object_ids: Mapping[str, str],
) -> RunResults:
    """Return the results of a plan's tasks, for a live run and for its record.

    Args:
        ended: The units of the run, and the outputs of its tasks.
        traces: Traces of tasks by instance, in the order of the run's trace.
        agents: The participants.
        delegated: Outputs of a manager's workers.
        worker_traces: Traces of these workers.
        object_ids: Hidden ids of the tasks, by key.
    """
    shown = ended.list_visible()
    outputs = (*delegated, *(output for _, output in shown))
    names = {key: place for place, (key, _) in enumerate(shown, start=len(delegated))}
    every = (*(trace for _, trace in traces), *worker_traces)
    return RunResults(
        outputs=outputs,
        raw=shown[-1].output.raw if shown else "",
        traces=every,
        agents=agents,
        metrics=ExecutionMetrics.from_outputs(
            [each for trace in every for each in trace.with_workers()],
            by_task=metrics_by_key((node_key(instance) or instance, trace.metrics) for instance, trace in traces),
        ),
        tool_calls=sum(output.tool_call_count for output in outputs),
        levels=level_summaries(every),
        positions={object_ids[key]: place for key, place in names.items() if key in object_ids},
        names=names,
        **unit_results(ended, traces),
    )


def assemble(
    run: RunResultHead, results: RunResults, end: RunEnd, failure: BaseException | None = None
) -> EnsembleOutput:
    """Return the output of a run, or raise its `failure` with the trace attached."""
    trace = make_trace(run, results, end)
    if failure is None:
        output = output_with(trace, results, exit_reason=end.exit_reason, run_id=run.run_id)
        return output.replace(open_reviews=end.open_reviews) if end.open_reviews else output
    if isinstance(failure, EnsembleError):
        failure.trace, failure.run_id = trace, run.run_id
    raise failure


def make_trace(run: RunResultHead, results: RunResults, end: RunEnd) -> ExecutionTrace:
    """Return the trace of a run so far."""
    state = {} if end.state is RunState.COMPLETED else {"state": end.state.value}
    return ExecutionTrace(
        capture_mode=run.capture_mode,
        ensemble_id=run.run_id,
        ensemble_name=run.name or None,
        workflow=run.workflow,
        started_at=end.started_at,
        completed_at=end.completed_at,
        total_duration=end.completed_at - end.started_at,
        inputs=run.inputs,
        agents=results.agents,
        task_traces=results.traces,
        metrics=results.metrics,
        total_cost_estimate=results.metrics.total_cost_estimate,
        errors=tuple(end.errors),
        trace_id=run.trace_id,
        map_reduce_levels=tuple(results.levels),
        loop_traces=results.loop_traces,
        phases=results.phases,
        graph_trace=results.graph_trace,
        metadata={**state, **end.metadata},
    )


def output_with(trace: ExecutionTrace, results: RunResults, *, exit_reason: ExitReason, run_id: str) -> EnsembleOutput:
    """Return the output of a run with this trace."""
    return EnsembleOutput(
        raw=results.raw,
        task_outputs=results.outputs,
        total_duration=trace.total_duration if results.outputs else timedelta(),
        total_tool_calls=results.tool_calls,
        exit_reason=exit_reason,
        metrics=trace.metrics,
        trace=trace,
        run_id=run_id,
        failed_items=results.failed_items,
    ).with_positions(results.positions, results.units, results.names)


def not_begun(run_id: str, exit_reason: ExitReason) -> EnsembleOutput:
    """Return the output of a run that ended before it started: it has no record and no trace."""
    return EnsembleOutput(exit_reason=exit_reason, run_id=run_id)


# Parts of a run's trace.


def summaries(plan: Plan) -> tuple[AgentSummary, ...]:
    """Return the agents that take part in a plan (S-TRC-1)."""
    return tuple(
        AgentSummary(
            role=agent.role,
            goal=agent.goal,
            background=agent.background,
            tool_names=agent.tool_names,
            allow_delegation=agent.allow_delegation,
        )
        for agent in plan.agents
        if agent.key != MANAGER_KEY or plan.hierarchy is None  # the manager is not an agent of the user
    )


def error_trace(
    error: BaseException, *, at: float, agent_role: str, task_description: str, is_raised: bool = True
) -> ErrorTrace:
    """Return the trace entry of an error; `is_raised` says whether it has a stack."""
    return ErrorTrace(
        agent_role=agent_role,
        task_description=task_description,
        error_type=type(error).__name__,
        message=message_of(error),
        stack_trace="".join(traceback.format_exception(error)) if is_raised else "",
        place=own_line(error) if is_raised else "",
        occurred_at=utc_of(at),
    )


def violation_trace(violations: Sequence[str], at: float) -> ErrorTrace:
    """Return the error of a manager that completed without its required workers (S-HIER-50); it belongs to no task."""
    violated = ConstraintViolationError(violations)
    return error_trace(violated, at=at, agent_role=MANAGER_ROLE, task_description="", is_raised=False)


# Errors of a failed run.


def failures_by_label(failed: Iterable[tuple[str, BaseException]]) -> dict[str, BaseException]:
    """Return errors by the descriptions of their tasks; repeated descriptions have a number (S-PAR-25)."""
    causes: dict[str, BaseException] = {}
    counts: dict[str, int] = {}
    for description, error in failed:
        label, count = description, counts.get(description, 1)
        while label in causes:  # a numbered description may equal the description of another task
            count += 1
            label = f"{description} #{count}"
        counts[description] = count
        causes[label] = error
    return causes


def task_error(
    error: BaseException, completed: Sequence[TaskOutput], *, label: str, task_description: str, agent_role: str
) -> TaskExecutionError:
    """Return the error of a run after a failed task: the task's own if it is a `TaskExecutionError` (S-ENG-13)."""
    if not isinstance(error, TaskExecutionError):
        failed = TaskExecutionError(task_failure(label, error), task_description, agent_role)
        failed.__cause__, error = error, failed
    error.completed_task_outputs, error.task_name = completed, label
    return error


def task_label(node: Node) -> str:
    """Return the label of a task for users: its name, or else its description."""
    is_named = node.level is None and node.key.partition("~")[0] != f"task-{node.index}"
    return node.key if is_named else node.description
