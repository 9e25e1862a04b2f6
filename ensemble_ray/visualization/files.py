"""Graphs and traces that lie in files, and the steps of a trace. Package: visualization.

In: paths of files that `EnsembleDevTools`, `ensemble-ray plan --dag` and exporters of traces wrote. Out: their values; what a file
lacks has its initial value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pydantic

from ensemble_ray.definition.workflow import Workflow
from ensemble_ray.errors import ValidationError
from ensemble_ray.plan.nodes import DETERMINISTIC
from ensemble_ray.plan.plan import MANAGER_ROLE
from ensemble_ray.values.ids import delegated_instance, effect_name, instance_of
from ensemble_ray.values.trace import ExecutionTrace, TaskTrace
from ensemble_ray.values.value import Value, explain
from ensemble_ray.visualization.dag_model import DagModel
from ensemble_ray.visualization.ran import RanStep

if TYPE_CHECKING:
    from ensemble_ray.plan.plan import Plan

__all__ = ["parse_dag", "parse_trace", "read_dag", "read_trace", "trace_steps"]

V = TypeVar("V", bound=Value)

#: How a run stands whose tasks without an end still go on; in any other they were cut off.
_GOES_ON = frozenset({"running", "waiting"})


def read_dag(path: str | Path) -> DagModel:
    """Return the graph in a file (S-VIZ-70).

    Raises:
        OSError: the file cannot be read.
        ValidationError: it is no graph.
    """
    return parse_dag(Path(path).read_text(encoding="utf-8"), name=str(path))


def read_trace(path: str | Path) -> ExecutionTrace:
    """Return the trace in a file (S-VIZ-70).

    Raises:
        OSError: the file cannot be read.
        ValidationError: it is no trace.
    """
    return parse_trace(Path(path).read_text(encoding="utf-8"), name=str(path))


def parse_dag(text: str | bytes, *, name: str) -> DagModel:
    """Return the graph that a file's text is.

    Args:
        text: JSON.
        name: What errors call the file.

    Raises:
        ValidationError: it is no graph.
    """
    return _parse(DagModel, text, name)


def parse_trace(text: str | bytes, *, name: str) -> ExecutionTrace:
    """Return the trace that a file's text is; see `parse_dag`.

    Raises:
        ValidationError: it is no trace.
    """
    return _parse(ExecutionTrace, text, name)


def _parse(kind: type[V], text: str | bytes, name: str) -> V:
    try:
        return kind.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise ValidationError(f"{name}: {explain(error, kind.__name__)}") from error


def trace_steps(trace: ExecutionTrace, plan: Plan | None = None) -> list[RanStep]:
    """Return what ran, in the order in which it began, as `ran_flow` takes it.

    Args:
        trace: Of a run.
        plan: Of the same run: tells the names of tasks outside of units, which a trace leaves out.
    """
    failed = {(error.agent_role, error.task_description) for error in trace.errors}
    names = _Names(plan)
    found: list[RanStep] = []
    for task in sorted(_own_tasks(trace), key=lambda each: each.started_at):
        step = _step(names.name(task), task, is_failed=(task.agent_role, task.task_description) in failed)
        found += [step, *_handed_on(step.id, task)]
    return found


class _Names:
    """Names of executions: as a trace tells them, else as the plan has the tasks, else by number."""

    def __init__(self, plan: Plan | None) -> None:
        self._keys: dict[tuple[str, str], deque[str]] = {}
        for node in () if plan is None else plan.nodes:
            self._keys.setdefault((node.agent_role, node.description), deque()).append(node.key)
        self._count = 0

    def name(self, task: TaskTrace) -> str:
        known = task.metadata.get("instance")
        if known is not None:
            return str(known)
        self._count += 1
        keys = self._keys.get((task.agent_role, task.task_description))
        return instance_of(keys.popleft() if keys else f"task-{self._count}")


def _own_tasks(trace: ExecutionTrace) -> Iterable[TaskTrace]:
    """Return the tasks of the run; a manager's workers, which stand beside it, are told as its delegations."""
    if trace.workflow != Workflow.HIERARCHICAL:
        return trace.task_traces
    managers = [task for task in trace.task_traces if task.agent_role == MANAGER_ROLE]
    return managers or trace.task_traces


def _step(name: str, task: TaskTrace, *, is_failed: bool) -> RanStep:
    state = str(task.metadata.get("state", ""))
    status = "completed" if not state else state if state in _GOES_ON else "cancelled"
    return RanStep(
        id=name,
        kind=_kind(task),
        title=task.task_description,
        agent=task.agent_role,
        status="failed" if is_failed else status,
        level=task.map_reduce_level,
    )


def _kind(task: TaskTrace) -> str:
    if task.node_type is not None:
        return task.node_type
    if task.agent_role == MANAGER_ROLE:
        return "manager"
    return "handler" if task.agent_role == DETERMINISTIC else "task"


def _handed_on(asker: str, task: TaskTrace) -> Iterator[RanStep]:
    """Yield the work that a task handed on, and what those handed on who did it."""
    for number, each in enumerate(task.delegations):
        name = delegated_instance(effect_name(asker, 0, number))
        yield RanStep(
            id=name,
            kind="delegation",
            title=each.task_description,
            agent=each.worker_role,
            status="completed" if each.succeeded else "failed",
        )
        if each.worker_trace is not None:
            yield from _handed_on(name, each.worker_trace)
