"""EnsembleDevTools: graphs of teams and traces of runs as files for a viewer. Package: visualization.

In: a team, and the output of a run. Out: files whose names bear the time, UTC, of which none is ever written over; pictures where
they are asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ensemble_ray.definition.map_reduce import MapDefinition
from ensemble_ray.errors import IllegalStateError
from ensemble_ray.values.trace import ExecutionTrace
from ensemble_ray.values.value import Value, utc_now
from ensemble_ray.visualization.declared import dag_flow
from ensemble_ray.visualization.exporter import DagExporter
from ensemble_ray.visualization.files import trace_steps
from ensemble_ray.visualization.flow import place_flow
from ensemble_ray.visualization.map_reduce import map_reduce_flow
from ensemble_ray.visualization.mermaid import render_mermaid
from ensemble_ray.visualization.ran import ran_flow
from ensemble_ray.visualization.svg import render_svg

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from ensemble_ray.definition.ensemble import EnsembleDefinition
    from ensemble_ray.definition.graph import Graph
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.values.outputs import EnsembleOutput
    from ensemble_ray.visualization.dag_model import DagModel
    from ensemble_ray.visualization.flow import Flow

__all__ = ["DevToolsExport", "EnsembleDevTools"]

_DRAWN = frozenset({".svg", ".mmd"})


class DevToolsExport(Value):
    """What `EnsembleDevTools.export` wrote."""

    dag_path: Path
    trace_path: Path

    def describe(self) -> str:
        """Return in two lines where the files are."""
        return f"Graph: {self.dag_path}\nTrace: {self.trace_path}"


class EnsembleDevTools:
    """Writes what a viewer shows, and pictures."""

    @staticmethod
    def build_dag(ensemble: EnsembleDefinition | MapDefinition | Graph) -> DagModel:
        """Return the graph of a team; as `DagExporter.build`."""
        return DagExporter.build(ensemble)

    @staticmethod
    def export_dag(ensemble: EnsembleDefinition | MapDefinition | Graph, output_dir: str | Path) -> Path:
        """Write the graph of a team into a folder, which is made where it is missing, and return the file.

        Raises:
            ValueError: there is nothing to draw, or no folder.
            NotImplementedError: a map-reduce whose tasks are made while it runs.
            OSError: the file cannot be written.
        """
        dag = DagExporter.build(ensemble)
        return _write(_folder(output_dir), "ensemble-dag", "dag.json", utc_now(), dag.to_json)

    @staticmethod
    def export_trace(output: EnsembleOutput, output_dir: str | Path) -> Path:
        """Write the trace of a run into a folder, which is made where it is missing, and return the file.

        Raises:
            ValueError: there is no output, or no folder.
            IllegalStateError: the output has no trace.
            OSError: the file cannot be written.
        """
        trace = _trace_of(output)
        return _write(_folder(output_dir), "ensemble-trace", "trace.json", utc_now(), trace.to_json)

    @classmethod
    def export(
        cls, ensemble: EnsembleDefinition | MapDefinition | Graph, output: EnsembleOutput, output_dir: str | Path
    ) -> DevToolsExport:
        """Write both, and return where they are; where an argument is refused, neither is written.

        Raises:
            ValueError, IllegalStateError, NotImplementedError, OSError: as `export_dag` and `export_trace`.
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
        """Draw a team as it is declared, or a run as it ran, and return the file; one that is there is replaced.

        Args:
            source: A team or a graph; or `output.trace`.
            path: Where; `.svg` is a picture, `.mmd` a Mermaid flowchart. Its folders are made.
            plan: Of the run that the trace is of, `team.plan(inputs)`: tells which task waited for which.

        Raises:
            ValueError: the name ends otherwise, or there is nothing to draw.
            IllegalStateError: the package that finds places for the nodes is not installed.
            OSError: the file cannot be written.
        """
        target = Path(path)
        if target.suffix not in _DRAWN:
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
    """Write a new file; a second one of the same second gets a number."""
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
