"""Graphs that commands write: SVG, Mermaid or JSON; `-` is standard output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.view.terminal import say, show

if TYPE_CHECKING:
    from ensemble_ray.visualization.dag_model import DagModel
    from ensemble_ray.visualization.flow import Flow

_STDOUT = "-"

Svg = Annotated[str | None, typer.Option("--svg", metavar="FILE", help="Draw it as an SVG file; - is standard output.")]
Mermaid = Annotated[
    str | None, typer.Option("--mermaid", metavar="FILE", help="Write it as a Mermaid flowchart; - is standard output.")
]
Dag = Annotated[
    str | None, typer.Option("--dag", metavar="FILE", help="Write it as JSON (.dag.json); - is standard output.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    svg: str | None
    mermaid: str | None
    dag: str | None

    @property
    def is_asked(self) -> bool:
        return any(each is not None for each in (self.svg, self.mermaid, self.dag))

    def write(self, title: str, make_flow: Callable[[], Flow], make_dag: Callable[[], DagModel]) -> None:
        """Write the requested files.

        Raises:
            OSError: A file cannot be written.
            NotImplementedError: The graph has no such form.
        """
        if self.dag is not None:
            _write(self.dag, make_dag().to_json())
        if self.mermaid is not None:
            from ensemble_ray.visualization.rendering import render_mermaid  # the help does not need it

            _write(self.mermaid, render_mermaid(make_flow()))
        if self.svg is not None:
            from ensemble_ray.visualization.flow import place_flow
            from ensemble_ray.visualization.rendering import render_svg

            _write(self.svg, render_svg(place_flow(make_flow()), title=title))


def _write(target: str, text: str) -> None:
    if target == _STDOUT:
        show(text.rstrip("\n"))
        return
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    say(f"Wrote {path}")
