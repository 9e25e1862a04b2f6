"""Graphs and traces that lie in files, and the steps of a trace. Package: visualization.

In: paths of files that `EnsembleDevTools`, `ensemble-ray plan --dag` and exporters of traces wrote. Out: their values; what a file
lacks has its initial value.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pydantic

from ensemble_ray.plan.nodes import DETERMINISTIC
from ensemble_ray.plan.plan import MANAGER_KEY
from ensemble_ray.values.ids import delegating_call, node_key
from ensemble_ray.values.trace import ExecutionTrace, TaskTrace
from ensemble_ray.values.value import Value, explain
from ensemble_ray.visualization.dag_model import DagModel
from ensemble_ray.visualization.ran import RanStep

__all__ = ["read_dag", "read_trace", "trace_steps"]

V = TypeVar("V", bound=Value)

#: States of tasks that a trace tells; one that began and has no end is told as running.
_STATES = frozenset({"cancelled", "exited", "failed", "skipped", "waiting"})


def read_dag(path: str | Path) -> DagModel:
    """Return the graph in a file (S-VIZ-70).

    Raises:
        OSError: the file cannot be read.
        ValidationError: it is no graph.
    """
    return _read(DagModel, path)


def read_trace(path: str | Path) -> ExecutionTrace:
    """Return the trace in a file (S-VIZ-70).

    Raises:
        OSError: the file cannot be read.
        ValidationError: it is no trace.
    """
    return _read(ExecutionTrace, path)


def _read(kind: type[V], path: str | Path) -> V:
    text = Path(path).read_text(encoding="utf-8")
    try:
        return kind.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise explain(error, f"{path} is no {kind.__name__}") from error


def trace_steps(trace: ExecutionTrace) -> list[RanStep]:
    """Return what ran, in the order in which it began, as `ran_flow` takes it."""
    failed = {(error.agent_role, error.task_description) for error in trace.errors}
    found = sorted(_with_workers(trace), key=lambda each: each[1].started_at)
    return [_step(name, task, failed) for name, task in found]


def _with_workers(trace: ExecutionTrace) -> Iterator[tuple[str, TaskTrace]]:
    """Yield tasks and the work that they handed on, by the names of their executions."""
    for position, task in enumerate(trace.task_traces):
        for each in task.with_workers():
            yield str(each.metadata.get("instance", f"task-{position + 1}#0")), each


def _step(name: str, task: TaskTrace, failed: set[tuple[str, str]]) -> RanStep:
    state = str(task.metadata.get("state", ""))
    status = (state if state in _STATES else "running") if state else "completed"
    if (task.agent_role, task.task_description) in failed:
        status = "failed"
    return RanStep(
        id=name,
        kind=_kind(name, task),
        title=task.task_description,
        agent=task.agent_role,
        status=status,
        level=task.map_reduce_level,
    )


def _kind(name: str, task: TaskTrace) -> str:
    if delegating_call(name) is not None:
        return "delegation"
    if task.node_type is not None:
        return task.node_type
    if node_key(name) == MANAGER_KEY:
        return "manager"
    return "handler" if task.agent_role == DETERMINISTIC else "task"
