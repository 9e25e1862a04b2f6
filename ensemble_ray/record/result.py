"""Make the output or the error of any run from the results of its tasks and its end. Pure.

A failed run raises the error of its first failure, with the run id and the trace up to it (S-SET-26). A predicate's
error is raised unchanged; in a parallel workflow it is a cause (S-LOOP-53). A failed phase raises a
`TaskExecutionError` (S-PHASE-53). Outputs and traces are not read here, since there may be a million of them.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec
from msgspec import Struct

from ensemble_ray.errors import (
    ConstraintViolationError,
    EnsembleError,
    GraphNoEdgeMatchedError,
    MaxGraphStepsExceededError,
    MaxLoopIterationsExceededError,
    ParallelExecutionError,
    TaskExecutionError,
    ValidationError,
    message_of,
)
from ensemble_ray.errors.texts import own_line, reason_of, task_failure, tasks_failure
from ensemble_ray.plan.plan import MANAGER_KEY, MANAGER_ROLE, EdgeEntry, GraphUnit, LoopUnit, Node, PhaseUnit, Plan
from ensemble_ray.record.units import (
    EndedUnits,
    graph_trace,
    key_of_path,
    level_summaries,
    loop_traces,
    phase_traces,
    unit_outputs,
)
from ensemble_ray.schedule.hierarchy import violations_of
from ensemble_ray.schedule.instructions import UnitFailure
from ensemble_ray.values.error_data import error_from
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.metrics import ExecutionMetrics, metrics_by_key
from ensemble_ray.values.outputs import EnsembleOutput, ExitReason, FailedItem, RunState
from ensemble_ray.values.reviews import OpenReview
from ensemble_ray.values.task_output import TaskOutput, UnitOutputs
from ensemble_ray.values.trace import (
    AgentSummary,
    CaptureMode,
    ErrorTrace,
    ExecutionTrace,
    GraphTrace,
    LoopTrace,
    MapReduceLevelSummary,
    PhaseStatus,
    PhaseTrace,
    TaskTrace,
)
from ensemble_ray.values.value import utc_of


class RunResultHead(Struct, frozen=True, kw_only=True):
    run_id: str
    workflow: str
    name: str = ""
    inputs: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    capture_mode: CaptureMode = CaptureMode.OFF
    trace_id: str | None = None


class RunResults(Struct, frozen=True, kw_only=True):
    outputs: Sequence[TaskOutput] = ()
    raw: str = ""
    traces: Sequence[TaskTrace] = ()  # with and without an output
    agents: Sequence[AgentSummary] = ()  # participants (S-TRC-1)
    metrics: ExecutionMetrics = ExecutionMetrics.EMPTY
    tool_calls: int = 0
    levels: Sequence[MapReduceLevelSummary] = ()
    #: positions of outputs by the hidden ids of their tasks
    positions: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])
    names: Mapping[str, int] = msgspec.field(
        default_factory=dict[str, int]
    )  # positions of outputs by the keys of their tasks
    failed_items: Sequence[FailedItem] = ()  # items without an output, if failures are collected (S-MR-150)
    units: UnitOutputs = msgspec.field(default_factory=UnitOutputs)
    loop_traces: tuple[LoopTrace, ...] = ()
    phases: tuple[PhaseTrace, ...] = ()
    graph_trace: GraphTrace | None = None


class RunEnd(Struct, frozen=True, kw_only=True):
    state: RunState
    exit_reason: ExitReason
    started_at: datetime
    completed_at: datetime
    errors: Sequence[ErrorTrace] = ()
    metadata: Mapping[str, object] = msgspec.field(default_factory=dict[str, object])
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
    """Return the results of a live run or of a record.

    Traces are in the order of the run's trace. `delegated` and `worker_traces` are of a manager's workers.
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
        units=unit_outputs(ended),
        loop_traces=loop_traces(ended),
        phases=phase_traces(ended, traces),
        graph_trace=graph_trace(ended),
    )


def assemble(
    run: RunResultHead, results: RunResults, end: RunEnd, failure: BaseException | None = None
) -> EnsembleOutput:
    trace = make_trace(run, results, end)
    if failure is None:
        output = output_with(trace, results, exit_reason=end.exit_reason, run_id=run.run_id)
        return output.replace(open_reviews=end.open_reviews) if end.open_reviews else output
    if isinstance(failure, EnsembleError):
        failure.trace, failure.run_id = trace, run.run_id
    raise failure


def make_trace(run: RunResultHead, results: RunResults, end: RunEnd) -> ExecutionTrace:
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
        if agent.key != MANAGER_KEY or plan.hierarchy is None
    )


def error_trace(
    error: BaseException, *, at: float, agent_role: str, task_description: str, is_raised: bool = True
) -> ErrorTrace:
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
    """Return the error of a manager without its required workers (S-HIER-50); it belongs to no task."""
    violated = ConstraintViolationError(violations)
    return error_trace(violated, at=at, agent_role=MANAGER_ROLE, task_description="", is_raised=False)


# Errors of a failed run.


def failures_by_label(failed: Iterable[tuple[str, BaseException]]) -> dict[str, BaseException]:
    """Return errors by the descriptions of their tasks; repeated descriptions have a number (S-PAR-25)."""
    causes: dict[str, BaseException] = {}
    counts: dict[str, int] = {}
    for description, error in failed:
        label, count = description, counts.get(description, 1)
        while label in causes:  # a numbered description may equal another task's
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
    is_named = node.level is None and node.key.partition("~")[0] != f"task-{node.index}"
    return node.key if is_named else node.description


# The first failure of a run.


class FailureSeen(Struct, frozen=True, kw_only=True):
    at: float
    error: BaseException
    completed_before: int
    node: Node | None = None
    unit: str = ""

    def as_trace(self) -> ErrorTrace:
        role, description = ("", self.unit) if self.node is None else (self.node.agent_role, self.node.description)
        return error_trace(self.error, at=self.at, agent_role=role, task_description=description)


def failures_seen(
    ended: EndedUnits, tasks: Sequence[FailureSeen], raised: Sequence[tuple[str, BaseException]] = ()
) -> list[FailureSeen]:
    kept = dict(raised)
    units = [
        FailureSeen(
            at=failure.at,
            error=error_of_unit(ended, failure, kept.get(failure.unit)),
            completed_before=failure.completed_before,
            unit=failure.unit,
        )
        for failure in ended.failures
    ]
    return sorted([*tasks, *units], key=lambda failure: failure.at)


def error_of_unit(ended: EndedUnits, failure: UnitFailure, raised: BaseException | None) -> BaseException:
    unit = ended.units[key_of_path(failure.unit)]
    completed = tuple(ended.outputs.values())[: failure.completed_before]
    match failure.reason, unit:
        case "cap", LoopUnit():
            return MaxLoopIterationsExceededError(unit.name, unit.max_iterations, completed)
        case "cap", GraphUnit():
            return MaxGraphStepsExceededError(unit.name, unit.max_steps, _step(ended, 0)[0], completed)
        case "no_edge", GraphUnit():
            state, raw = _step(ended, failure.step)
            edges = [each for each in unit.edges if isinstance(each, EdgeEntry) and each.from_state == state]
            shown = [f"→ {each.to_state} ({'predicate' if each.label is None else each.label})" for each in edges]
            return GraphNoEdgeMatchedError(unit.name, state, raw, shown, completed)
        case "rejected", PhaseUnit():
            node = ended.nodes.get(unit.review or "")
            text = f"Phase '{unit.name}' was rejected by review: {failure.message}"
            return TaskExecutionError(text, node.description if node else "", node.agent_role if node else "")
        case _:
            if raised is not None or not failure.error_type:
                return raised or RuntimeError(failure.message)
            # User code raised it before a crash (S-DUR-39).
            return error_from({"type": failure.error_type, "text": failure.message, "args": [failure.message]})


def _step(ended: EndedUnits, number: int) -> tuple[str, str]:
    found = ended.graph()
    steps = {step.number: step for step in found[1].steps} if found is not None else {}
    step = steps.get(number or max(steps, default=0))
    if step is None:
        return "", ""
    shown = ended.shown_of(step.instance)
    return step.state, shown[-1].output.raw if shown else ""


def failure_of(
    ended: EndedUnits, failures: Sequence[FailureSeen], delegated: Sequence[TaskOutput] = ()
) -> BaseException:
    """Return the error that a failed run raises; without failures, a manager did not meet its constraints.

    `delegated` are outputs of the manager's workers.
    """
    if ended.plan.hierarchy is not None:
        return _failure_of_manager(ended.plan, failures, tuple(delegated))
    if any(isinstance(unit, PhaseUnit) for unit in ended.plan.units):
        return _failure_of_phases(ended, failures)
    if ended.plan.workflow == "parallel" and ended.plan.error_strategy == "continue_on_error":
        completed = tuple(each.output for each in ended.shown_of_completed())
        inside = {key for unit in ended.plan.units if isinstance(unit, LoopUnit) for key in unit.body}
        members = [*(key for key in ended.nodes if key not in inside), *ended.units]
        return _parallel_error(ended, failures, len(members), completed)
    first = failures[0]
    error = _task_error(ended, first) if first.node is not None else first.error
    is_ours = isinstance(error, TaskExecutionError | MaxLoopIterationsExceededError | ValidationError)
    if ended.plan.workflow != "parallel" or is_ours:
        return error
    wrapped = TaskExecutionError(f"Loop '{_name(ended, first)}' failed: {reason_of(error)}")
    wrapped.completed_task_outputs = tuple(ended.outputs.values())[: first.completed_before]
    wrapped.__cause__ = error
    return wrapped


def _failure_of_manager(plan: Plan, failures: Sequence[FailureSeen], delegated: Sequence[TaskOutput]) -> BaseException:
    """Return the manager's error, or else that of a missing required worker (S-HIER-50, S-HIER-60)."""
    if not failures:
        roles = {output.agent_role for output in delegated}
        return ConstraintViolationError(
            () if plan.hierarchy is None else violations_of(plan.hierarchy, roles), delegated
        )
    error = failures[0].error
    return error if isinstance(error, ValidationError) else manager_failure(error, plan.nodes[0].description, delegated)


def manager_failure(
    error: BaseException, task_description: str = "", completed: Sequence[TaskOutput] = ()
) -> TaskExecutionError:
    """Return the error of a run after its manager failed with `error` (S-HIER-60)."""
    text = f"Hierarchical workflow manager failed: {reason_of(error)}"
    wrapped = TaskExecutionError(text, task_description, MANAGER_ROLE, completed)
    wrapped.__cause__ = error
    return wrapped


def _parallel_error(
    ended: EndedUnits, failures: Sequence[FailureSeen], total: int, completed: Sequence[TaskOutput]
) -> ParallelExecutionError:
    labels = (_name(ended, each) if each.node is None else task_label(each.node) for each in failures)
    causes = failures_by_label(zip(labels, (each.error for each in failures), strict=True))
    return ParallelExecutionError(tasks_failure(len(causes), total, causes), completed, causes)


def _name(ended: EndedUnits, failure: FailureSeen) -> str:
    return ended.units[key_of_path(failure.unit)].name


def _task_error(ended: EndedUnits, failure: FailureSeen) -> BaseException:
    node = failure.node
    if node is None or isinstance(failure.error, ValidationError):
        return failure.error
    completed = tuple(ended.outputs.values())[: failure.completed_before]
    label, description = task_label(node), node.description
    return task_error(failure.error, completed, label=label, task_description=description, agent_role=node.agent_role)


def _failure_of_phases(ended: EndedUnits, failures: Sequence[FailureSeen]) -> TaskExecutionError:
    phases = list(ended.phases())
    failed = next(((unit, result) for unit, result in phases if result.status == "failed"), None)
    unit = None if failed is None else failed[0]
    own = list(failures)
    if unit is not None:
        loops = [each for key in unit.members if isinstance(each := ended.units.get(key), LoopUnit)]
        keys = {*unit.members, *(key for loop in loops for key in loop.body), unit.review or ""}
        # The rerun of an earlier phase fails the phase that requested it (S-PHASE-92).
        own = [
            each
            for each in failures
            if (each.node.key in keys if each.node is not None else f"{each.unit}#".startswith(f"{unit.key}#"))
        ] or own
    is_collecting = ended.plan.error_strategy == "continue_on_error"
    error: BaseException
    if unit is not None and unit.workflow == "parallel" and is_collecting and own[0].unit != unit.key:
        error = _parallel_error(ended, own, len(unit.members), ())
    else:
        error = _task_error(ended, own[0])
    if not isinstance(error, TaskExecutionError):
        wrapped = TaskExecutionError(f"Phase failed: {message_of(error)}")
        wrapped.__cause__, error = error, wrapped
    done = [
        each.output for _, result in phases if result.status == "completed" for each in ended.shown_of_phase(result)
    ]
    if failed is not None:
        done += [each.output for each in ended.shown_of_phase(failed[1])]
    error.completed_task_outputs = tuple(done)
    found = {unit.key: PhaseStatus(result.status) for unit, result in phases}
    declared = [unit for unit in ended.plan.units if isinstance(unit, PhaseUnit)]
    error.phase_statuses = {unit.name: found.get(unit.key, PhaseStatus.SKIPPED) for unit in declared}
    return error
