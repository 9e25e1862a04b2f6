"""Graphs of teams and traces of runs as files for a viewer. No export overwrites a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pydantic

from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.fields import Workflow
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.map_reduce import MapDefinition
from ensemble_ray.errors import IllegalStateError, ValidationError
from ensemble_ray.plan.plan import MANAGER_ROLE, Plan
from ensemble_ray.plan.unit_plans import DETERMINISTIC
from ensemble_ray.values.ids import delegated_instance, effect_name, instance_of
from ensemble_ray.values.outputs import EnsembleOutput
from ensemble_ray.values.trace import ExecutionTrace, TaskTrace
from ensemble_ray.values.value import Value, explain, utc_now
from ensemble_ray.visualization.dag_model import DagExporter, DagModel
from ensemble_ray.visualization.declared import dag_flow, map_reduce_flow
from ensemble_ray.visualization.flow import FlowNode, place_flow
from ensemble_ray.visualization.ran import ran_flow
from ensemble_ray.visualization.rendering import render_mermaid, render_svg

V = TypeVar("V", bound=Value)

#: Their open tasks are in progress; in other states they were interrupted.
_IN_PROGRESS = frozenset({"running", "waiting"})
_PICTURES = frozenset({".svg", ".mmd"})


def parse_file(kind: type[V], text: str | bytes, *, name: str) -> V:
    """`name` is the file's name in errors (S-VIZ-70)."""
    try:
        return kind.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise ValidationError(f"{name}: {explain(error, kind.__name__)}") from error


def trace_steps(trace: ExecutionTrace, plan: Plan | None = None) -> list[FlowNode]:
    """Return the steps of a run in the order of their start, for `ran_flow`.

    A trace may lack the names of tasks outside of units: they come from the plan, or are numbered.
    """
    failed = {(error.agent_role, error.task_description) for error in trace.errors}
    keys: dict[tuple[str, str], deque[str]] = {}
    for node in () if plan is None else plan.nodes:
        keys.setdefault((node.agent_role, node.description), deque()).append(node.key)
    unnamed = 0
    found: list[FlowNode] = []
    tasks = trace.task_traces
    if trace.workflow == Workflow.HIERARCHICAL:  # a manager's workers are its delegations
        tasks = tuple(task for task in tasks if task.agent_role == MANAGER_ROLE) or tasks
    for task in sorted(tasks, key=lambda each: each.started_at):
        name = task.metadata.get("instance")
        if name is None:
            unnamed += 1
            planned = keys.get((task.agent_role, task.task_description))
            name = instance_of(planned.popleft() if planned else f"task-{unnamed}")
        is_failed = (task.agent_role, task.task_description) in failed
        found += [_step(str(name), task, is_failed=is_failed), *_delegated_steps(str(name), task)]
    return found


def _step(name: str, task: TaskTrace, *, is_failed: bool) -> FlowNode:
    state = str(task.metadata.get("state", ""))
    status = "completed" if not state else state if state in _IN_PROGRESS else "cancelled"
    kind = "manager" if task.agent_role == MANAGER_ROLE else "handler" if task.agent_role == DETERMINISTIC else "task"
    return FlowNode(
        id=name,
        kind=task.node_type or kind,
        title=task.task_description,
        agent=task.agent_role,
        status="failed" if is_failed else status,
        level=task.map_reduce_level,
    )


def _delegated_steps(delegating: str, task: TaskTrace) -> Iterator[FlowNode]:
    for number, each in enumerate(task.delegations):
        name = delegated_instance(effect_name(delegating, 0, number))
        yield FlowNode(
            id=name,
            kind="delegation",
            title=each.task_description,
            agent=each.worker_role,
            status="completed" if each.succeeded else "failed",
        )
        if each.worker_trace is not None:
            yield from _delegated_steps(name, each.worker_trace)


class DevToolsExport(Value):
    """The files that `EnsembleDevTools.export` wrote."""

    dag_path: Path
    trace_path: Path

    def describe(self) -> str:
        """Return the paths in two lines of text."""
        return f"Graph: {self.dag_path}\nTrace: {self.trace_path}"


class EnsembleDevTools:
    """Writes files for a viewer, and pictures."""

    @staticmethod
    def build_dag(ensemble: EnsembleDefinition | MapDefinition | Graph) -> DagModel:
        """Return the graph of a team; see `DagExporter.build`."""
        return DagExporter.build(ensemble)

    @staticmethod
    def export_dag(ensemble: EnsembleDefinition | MapDefinition | Graph, output_dir: str | Path) -> Path:
        """Write the graph of a team into a folder, which is created if missing, and return the file.

        Raises:
            ValueError: The team is empty, or there is no folder.
            NotImplementedError: The map-reduce creates its tasks during the run.
        """
        dag = DagExporter.build(ensemble)
        return _write(output_dir, "ensemble-dag", "dag.json", dag.to_json)

    @staticmethod
    def export_trace(output: EnsembleOutput, output_dir: str | Path) -> Path:
        """Write the trace of a run into a folder, which is created if missing, and return the file.

        Raises:
            ValueError: There is no output, or no folder.
            IllegalStateError: The output has no trace.
        """
        trace = _trace_of(output)
        return _write(output_dir, "ensemble-trace", "trace.json", trace.to_json)

    @classmethod
    def export(
        cls, ensemble: EnsembleDefinition | MapDefinition | Graph, output: EnsembleOutput, output_dir: str | Path
    ) -> DevToolsExport:
        """Write both files. If an argument is invalid, neither is written; see `export_dag` and `export_trace` for errors."""
        DagExporter.build(ensemble)
        _trace_of(output)
        dag_path = cls.export_dag(ensemble, output_dir)
        return DevToolsExport(dag_path=dag_path, trace_path=cls.export_trace(output, output_dir))

    @staticmethod
    def draw(
        source: EnsembleDefinition | MapDefinition | Graph | ExecutionTrace,
        path: str | Path,
        *,
        plan: Plan | None = None,
    ) -> Path:
        """Draw a team or a run into a file, which is replaced, and return the file.

        Args:
            source: A team, a graph, or `output.trace`.
            path: `.svg` is a picture, `.mmd` a Mermaid flowchart. Folders are created.
            plan: Plan of the run in the trace, `team.plan(inputs)`, which contains the dependencies of tasks.

        Raises:
            ValueError: The extension is unknown, or the source is empty.
            IllegalStateError: The layout package is not installed.
        """
        target = Path(path)
        if target.suffix not in _PICTURES:
            raise ValueError(f"path must end in .svg or .mmd, got: {path}")
        if isinstance(source, ExecutionTrace):
            flow = ran_flow(trace_steps(source, plan), plan, workflow=source.workflow)
        elif isinstance(source, MapDefinition) and not getattr(source, "is_planned", False):
            flow = map_reduce_flow(source)
        else:
            flow = dag_flow(DagExporter.build(source))
        is_text = target.suffix == ".mmd"
        text = render_mermaid(flow) if is_text else render_svg(flow, place_flow(flow), title=target.stem)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return target


def _trace_of(output: EnsembleOutput | None) -> ExecutionTrace:
    if output is None:
        raise ValueError("output must not be None")
    if output.trace == ExecutionTrace.EMPTY:
        raise IllegalStateError("output has no execution trace attached: it is not the output of a run")
    return output.trace


def _write(output_dir: str | Path | None, name: str, ending: str, make_text: Callable[[], str]) -> Path:
    """Write a new file. A second one in the same second gets a number."""
    if output_dir is None:
        raise ValueError("output_dir must not be None")
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    stem, text = f"{name}-{utc_now():%Y%m%d-%H%M%S}", make_text()
    path, number = folder / f"{stem}.{ending}", 1
    while True:
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            number += 1
            path = folder / f"{stem}-{number}.{ending}"
        else:
            return path
