"""Choose the error that a failed run raises: the error of its first failure. Pure.

A cap or a missing edge has its own error. An error of the user's predicate is raised unchanged; in a parallel workflow
it is a cause (S-LOOP-53). A failed phase raises a `TaskExecutionError` (S-PHASE-53).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.errors import (
    ConstraintViolationError,
    GraphNoEdgeMatchedError,
    MaxGraphStepsExceededError,
    MaxLoopIterationsExceededError,
    ParallelExecutionError,
    TaskExecutionError,
    ValidationError,
    message_of,
)
from ensemble_ray.errors.texts import reason_of, tasks_failure
from ensemble_ray.plan.plan import MANAGER_ROLE, EdgeEntry, GraphUnit, LoopUnit, PhaseUnit
from ensemble_ray.record.result import error_trace, failures_by_label, task_error, task_label
from ensemble_ray.record.units import key_of_path
from ensemble_ray.schedule.hierarchy import violations_of
from ensemble_ray.values.error_data import error_from
from ensemble_ray.values.trace import PhaseStatus

if TYPE_CHECKING:
    from ensemble_ray.plan.plan import Node, Plan
    from ensemble_ray.record.units import EndedUnits
    from ensemble_ray.schedule.instructions import PhaseResult, UnitFailure
    from ensemble_ray.values.task_output import TaskOutput
    from ensemble_ray.values.trace import ErrorTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSeen:
    """A failed task of a run, or a unit that failed although no task in it did."""

    at: float
    error: BaseException
    #: number of outputs before the failure
    completed_before: int
    #: the task; None for a unit
    node: Node | None = None
    #: path of the unit; "" for a task
    unit: str = ""

    def as_trace(self) -> ErrorTrace:
        """Return the failure as an entry of a trace."""
        role, description = ("", self.unit) if self.node is None else (self.node.agent_role, self.node.description)
        return error_trace(self.error, at=self.at, agent_role=role, task_description=description)


def failures_seen(
    ended: EndedUnits, tasks: Sequence[FailureSeen], raised: Sequence[tuple[str, BaseException]] = ()
) -> list[FailureSeen]:
    """Return the failures in order.

    Args:
        ended: The units of the run.
        tasks: Its failed tasks.
        raised: Errors of the user's predicates and conditions, by unit.
    """
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
    """Return the error of a unit that failed although none of its tasks did."""
    unit = ended.units[key_of_path(failure.unit)]
    completed = tuple(ended.outputs.values())[: failure.completed_before]
    match failure.reason, unit:
        case "cap", LoopUnit():
            return MaxLoopIterationsExceededError(unit.name, unit.max_iterations, completed)
        case "cap", GraphUnit():
            return MaxGraphStepsExceededError(unit.name, unit.max_steps, _step(ended, 0)[0], completed)
        case "no_edge", GraphUnit():
            state, raw = _step(ended, failure.step)
            return GraphNoEdgeMatchedError(unit.name, state, raw, _edges(unit, state), completed)
        case "rejected", PhaseUnit():
            node = ended.nodes.get(unit.review or "")
            text = f"Phase '{unit.name}' was rejected by review: {failure.message}"
            return TaskExecutionError(text, node.description if node else "", node.agent_role if node else "")
        case _:
            return raised or _recorded_error(failure)


def _recorded_error(failure: UnitFailure) -> BaseException:
    """Return the error that user code raised before a crash, as far as it is recorded (S-DUR-39)."""
    if not failure.error_type:
        return RuntimeError(failure.message)
    return error_from({"type": failure.error_type, "text": failure.message, "args": [failure.message]})


def _step(ended: EndedUnits, number: int) -> tuple[str, str]:
    """Return the state and the text of a step of the graph; of its last step if `number` is 0."""
    found = ended.graph()
    steps = {step.number: step for step in found[1].steps} if found is not None else {}
    step = steps.get(number or max(steps, default=0))
    if step is None:
        return "", ""
    shown = ended.shown_of(step.instance)
    return step.state, shown[-1].output.raw if shown else ""


def _edges(unit: GraphUnit, state: str) -> list[str]:
    edges = [edge for edge in unit.edges if isinstance(edge, EdgeEntry) and edge.from_state == state]
    return [f"→ {edge.to_state} ({'predicate' if edge.label is None else edge.label})" for edge in edges]


def failure_of(
    ended: EndedUnits, failures: Sequence[FailureSeen], delegated: Sequence[TaskOutput] = ()
) -> BaseException:
    """Return the error that a failed run raises.

    Args:
        ended: The units of the run.
        failures: The failures in order; empty if a manager did not meet its constraints.
        delegated: Outputs of the manager's workers.
    """
    if ended.plan.hierarchy is not None:
        return _failure_of_manager(ended.plan, failures, tuple(delegated))
    if any(isinstance(unit, PhaseUnit) for unit in ended.plan.units):
        return _failure_of_phases(ended, failures)
    if ended.plan.workflow == "parallel" and ended.plan.error_strategy == "continue_on_error":
        completed = tuple(each.output for each in ended.shown_of_completed())
        return _parallel_error(ended, failures, len(_members(ended)), completed)
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
    """Return the error of a manager that failed, or else of a missing required worker (S-HIER-50, S-HIER-60)."""
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


def _members(ended: EndedUnits) -> list[str]:
    """Return the keys that a flat plan schedules: its plain tasks and its loops."""
    inside = {key for unit in ended.plan.units if isinstance(unit, LoopUnit) for key in unit.body}
    return [*(key for key in ended.nodes if key not in inside), *ended.units]


def _parallel_error(
    ended: EndedUnits, failures: Sequence[FailureSeen], total: int, completed: Sequence[TaskOutput]
) -> ParallelExecutionError:
    causes = failures_by_label((_label(ended, each), each.error) for each in failures)
    return ParallelExecutionError(tasks_failure(len(causes), total, causes), completed, causes)


def _label(ended: EndedUnits, failure: FailureSeen) -> str:
    return _name(ended, failure) if failure.node is None else task_label(failure.node)


def _name(ended: EndedUnits, failure: FailureSeen) -> str:
    return ended.units[key_of_path(failure.unit)].name


def _task_error(ended: EndedUnits, failure: FailureSeen) -> BaseException:
    node = failure.node
    if node is None or isinstance(failure.error, ValidationError):
        return failure.error
    completed = tuple(ended.outputs.values())[: failure.completed_before]
    label, description = task_label(node), node.description
    return task_error(failure.error, completed, label=label, task_description=description, agent_role=node.agent_role)


# Phases.


def _failure_of_phases(ended: EndedUnits, failures: Sequence[FailureSeen]) -> TaskExecutionError:
    """Return the error of the first failed phase (S-PHASE-53)."""
    phases = list(ended.phases())
    failed = next(((unit, result) for unit, result in phases if result.status == "failed"), None)
    unit = None if failed is None else failed[0]
    # The rerun of an earlier phase fails the phase that requested it (S-PHASE-92).
    own = [each for each in failures if unit is None or _is_of(ended, unit, each)] or list(failures)
    error = _error_of_phase(ended, unit, own)
    if not isinstance(error, TaskExecutionError):
        wrapped = TaskExecutionError(f"Phase failed: {message_of(error)}")
        wrapped.__cause__, error = error, wrapped
    done = [
        each.output for _, result in phases if result.status == "completed" for each in ended.shown_of_phase(result)
    ]
    if failed is not None:
        done += [each.output for each in ended.shown_of_phase(failed[1])]
    error.completed_task_outputs = tuple(done)
    error.phase_statuses = _statuses(ended, [result for _, result in phases])
    return error


def _error_of_phase(ended: EndedUnits, unit: PhaseUnit | None, failures: Sequence[FailureSeen]) -> BaseException:
    is_collecting = ended.plan.error_strategy == "continue_on_error"
    if unit is not None and unit.workflow == "parallel" and is_collecting and failures[0].unit != unit.key:
        return _parallel_error(ended, failures, len(unit.members), ())
    return _task_error(ended, failures[0])


def _is_of(ended: EndedUnits, unit: PhaseUnit, failure: FailureSeen) -> bool:
    if failure.node is None:
        return failure.unit == unit.key or failure.unit.startswith(f"{unit.key}#")
    return failure.node.key in _tasks_of(ended, unit)


def _tasks_of(ended: EndedUnits, unit: PhaseUnit) -> set[str]:
    loops = [each for key in unit.members if isinstance(each := ended.units.get(key), LoopUnit)]
    return {*unit.members, *(key for loop in loops for key in loop.body), unit.review or ""}


def _statuses(ended: EndedUnits, results: Sequence[PhaseResult]) -> dict[str, PhaseStatus]:
    """Return the statuses of phases, in declared order; phases without a result were skipped."""
    found = {key_of_path(result.unit): PhaseStatus(result.status) for result in results}
    phases = [unit for unit in ended.plan.units if isinstance(unit, PhaseUnit)]
    return {unit.name: found.get(unit.key, PhaseStatus.SKIPPED) for unit in phases}
