"""Write graphs of teams and traces of runs to files for a viewer, and read them back.

The names of exported files contain the time (UTC), and no export overwrites a file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pydantic

from ensemble_ray.definition.fields import Workflow
from ensemble_ray.definition.map_reduce import MapDefinition
from ensemble_ray.errors import IllegalStateError, ValidationError
from ensemble_ray.plan.plan import MANAGER_ROLE
from ensemble_ray.plan.unit_plans import DETERMINISTIC
from ensemble_ray.values.ids import delegated_instance, effect_name, instance_of
from ensemble_ray.values.trace import ExecutionTrace, TaskTrace
from ensemble_ray.values.value import Value, explain, utc_now
from ensemble_ray.visualization.dag_model import DagExporter, DagModel
from ensemble_ray.visualization.declared import dag_flow, map_reduce_flow
from ensemble_ray.visualization.flow import place_flow
from ensemble_ray.visualization.ran import RanStep, ran_flow
from ensemble_ray.visualization.rendering import render_mermaid, render_svg

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from ensemble_ray.definition.ensemble import EnsembleDefinition
    from ensemble_ray.definition.graph import Graph
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.values.outputs import EnsembleOutput
    from ensemble_ray.visualization.flow import Flow


V = TypeVar("V", bound=Value)

#: States of a run whose open tasks are still in progress. In others they were interrupted.
_IN_PROGRESS = frozenset({"running", "waiting"})
_PICTURES = frozenset({".svg", ".mmd"})


def read_dag(path: str | Path) -> DagModel:
    """Return the graph in a file (S-VIZ-70).

    Raises:
        OSError: The file cannot be read.
        ValidationError: The file is not a graph.
    """
    return parse_dag(Path(path).read_text(encoding="utf-8"), name=str(path))


def read_trace(path: str | Path) -> ExecutionTrace:
    """Return the trace in a file (S-VIZ-70).

    Raises:
        OSError: The file cannot be read.
        ValidationError: The file is not a trace.
    """
    return parse_trace(Path(path).read_text(encoding="utf-8"), name=str(path))


def parse_dag(text: str | bytes, *, name: str) -> DagModel:
    """Return the graph in a JSON text.

    Args:
        text: The JSON.
        name: Name of the file in errors.

    Raises:
        ValidationError: The text is not a graph.
    """
    return _parse(DagModel, text, name)


def parse_trace(text: str | bytes, *, name: str) -> ExecutionTrace:
    """Return the trace in a JSON text; see `parse_dag`."""
    return _parse(ExecutionTrace, text, name)


def _parse(kind: type[V], text: str | bytes, name: str) -> V:
    try:
        return kind.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise ValidationError(f"{name}: {explain(error, kind.__name__)}") from error


def trace_steps(trace: ExecutionTrace, plan: Plan | None = None) -> list[RanStep]:
    """Return the steps of a run in the order of their start, for `ran_flow`.

    Args:
        trace: Trace of the run.
        plan: Plan of the same run, with the names of tasks outside of units, which a trace lacks.
    """
    failed = {(error.agent_role, error.task_description) for error in trace.errors}
    names = _Names(plan)
    found: list[RanStep] = []
    for task in sorted(_own_tasks(trace), key=lambda each: each.started_at):
        step = _step(names.name(task), task, is_failed=(task.agent_role, task.task_description) in failed)
        found += [step, *_delegated_steps(step.id, task)]
    return found


class _Names:
    """Names of executions: from the trace, otherwise from the plan, otherwise numbers."""

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
    """Return the tasks of the run. A manager's workers are left out: they are its delegations."""
    if trace.workflow != Workflow.HIERARCHICAL:
        return trace.task_traces
    managers = [task for task in trace.task_traces if task.agent_role == MANAGER_ROLE]
    return managers or trace.task_traces


def _step(name: str, task: TaskTrace, *, is_failed: bool) -> RanStep:
    state = str(task.metadata.get("state", ""))
    status = "completed" if not state else state if state in _IN_PROGRESS else "cancelled"
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


def _delegated_steps(delegating: str, task: TaskTrace) -> Iterator[RanStep]:
    """Yield the delegated work of a task, and of its workers in turn."""
    for number, each in enumerate(task.delegations):
        name = delegated_instance(effect_name(delegating, 0, number))
        yield RanStep(
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
            OSError: The file cannot be written.
        """
        dag = DagExporter.build(ensemble)
        return _write(_folder(output_dir), "ensemble-dag", "dag.json", utc_now(), dag.to_json)

    @staticmethod
    def export_trace(output: EnsembleOutput, output_dir: str | Path) -> Path:
        """Write the trace of a run into a folder, which is created if missing, and return the file.

        Raises:
            ValueError: There is no output, or no folder.
            IllegalStateError: The output has no trace.
            OSError: The file cannot be written.
        """
        trace = _trace_of(output)
        return _write(_folder(output_dir), "ensemble-trace", "trace.json", utc_now(), trace.to_json)

    @classmethod
    def export(
        cls, ensemble: EnsembleDefinition | MapDefinition | Graph, output: EnsembleOutput, output_dir: str | Path
    ) -> DevToolsExport:
        """Write both files. If an argument is invalid, neither is written.

        Raises:
            ValueError, IllegalStateError, NotImplementedError, OSError: See `export_dag` and `export_trace`.
        """
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
            path: The file: `.svg` is a picture, `.mmd` a Mermaid flowchart. Its folders are created.
            plan: Plan of the run in the trace, `team.plan(inputs)`, which contains the dependencies of tasks.

        Raises:
            ValueError: The extension is unknown, or the source is empty.
            IllegalStateError: The layout package is not installed.
            OSError: The file cannot be written.
        """
        target = Path(path)
        if target.suffix not in _PICTURES:
            raise ValueError(f"path must end in .svg or .mmd, got: {path}")
        flow = _flow_of(source, plan)
        text = render_mermaid(flow) if target.suffix == ".mmd" else render_svg(place_flow(flow), title=target.stem)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return target


def _flow_of(source: EnsembleDefinition | MapDefinition | Graph | ExecutionTrace, plan: Plan | None) -> Flow:
    if isinstance(source, ExecutionTrace):
        return ran_flow(trace_steps(source, plan), plan, workflow=source.workflow)
    if isinstance(source, MapDefinition) and not getattr(source, "is_planned", False):
        return map_reduce_flow(source)
    return dag_flow(DagExporter.build(source))


def _trace_of(output: EnsembleOutput | None) -> ExecutionTrace:
    if output is None:
        raise ValueError("output must not be None")
    if output.trace == ExecutionTrace.EMPTY:
        raise IllegalStateError("output has no execution trace attached: it is not the output of a run")
    return output.trace


def _folder(output_dir: str | Path | None) -> Path:
    if output_dir is None:
        raise ValueError("output_dir must not be None")
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(folder: Path, name: str, ending: str, at: datetime, make_text: Callable[[], str]) -> Path:
    """Write a new file. A second one in the same second gets a number."""
    stem, text = f"{name}-{at:%Y%m%d-%H%M%S}", make_text()
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
