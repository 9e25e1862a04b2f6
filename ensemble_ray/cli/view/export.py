"""Graphs of plans and runs as files, and spans of runs for an OpenTelemetry receiver."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Struct
from typer import Option

from ensemble_ray.cli.view.terminal import show, write_note
from ensemble_ray.errors import EnsembleError, ValidationError
from ensemble_ray.process.concurrency import run_blocking

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RecordedRun, RunStore
    from ensemble_ray.visualization.dag_model import DagModel
    from ensemble_ray.visualization.flow import Flow

Svg = Annotated[str | None, Option("--svg", metavar="FILE", help="Draw it as an SVG file; - is standard output.")]
Mermaid = Annotated[
    str | None, Option("--mermaid", metavar="FILE", help="Write it as a Mermaid flowchart; - is standard output.")
]
Dag = Annotated[str | None, Option("--dag", metavar="FILE", help="Write it as JSON (.dag.json); - is standard output.")]


class Pictures(Struct, frozen=True, kw_only=True):
    svg: str | None
    mermaid: str | None
    dag: str | None

    @property
    def is_asked(self) -> bool:
        return any(each is not None for each in (self.svg, self.mermaid, self.dag))

    def write(self, title: str, make_flow: Callable[[], Flow], make_dag: Callable[[], DagModel]) -> None:
        if self.dag is not None:
            _write(self.dag, make_dag().to_json())
        if self.mermaid is not None:
            from ensemble_ray.visualization.dev_tools import render_mermaid

            _write(self.mermaid, render_mermaid(make_flow()))
        if self.svg is not None:
            from ensemble_ray.visualization.dev_tools import render_svg
            from ensemble_ray.visualization.flow import place_flow

            flow = make_flow()
            _write(self.svg, render_svg(flow, place_flow(flow), title=title))


def _write(target: str, text: str) -> None:
    if target == "-":
        show(text.rstrip("\n"))
        return
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    write_note(f"Wrote {path}")


Otlp = Annotated[
    str | None,
    Option(
        "--otlp",
        metavar="URL",
        help="Send its spans to that OTLP/HTTP receiver, such as http://localhost:4318; 'env': to that of OTEL_EXPORTER_OTLP_ENDPOINT.",
    ),
]
WithContent = Annotated[
    bool, Option("--content", help="With --otlp: send prompts, answers, arguments and results, too.")
]


def check_sending(url: str | None, *, has_content: bool, has_run: bool, is_shown: bool) -> None:
    if url is None and has_content:
        raise ValidationError("--content says what --otlp sends. What to do: add --otlp URL, or leave --content out")
    if url is not None and is_shown:
        advice = "leave --json, --task, --svg, --mermaid and --dag out"
        raise ValidationError(f"--otlp sends a whole run, and shows no output. What to do: {advice}")
    if url is not None and not has_run:
        advice = "name it, such as: ensemble-ray trace latest --otlp URL"
        raise ValidationError(f"--otlp sends one run. What to do: {advice}")


def send_run(store: RunStore, named: RecordedRun, url: str, *, has_content: bool) -> None:
    from ensemble_ray.events.telemetry.listener import missing_packages
    from ensemble_ray.events.telemetry.spans import content_mode
    from ensemble_ray.llm.failures import flaw_of, shown_url
    from ensemble_ray.record.head import locate_errors
    from ensemble_ray.record.view.exporters import recorded_spans

    receiver = None if url == "env" else url
    if receiver is not None and (flaw := flaw_of(receiver)):
        raise ValidationError(f"--otlp {flaw}")
    content = content_mode(True if has_content else None, os.environ)
    try:
        from ensemble_ray.events.telemetry.otlp import UnsentError, own_resource, readable, receiver_here, send_spans
    except ModuleNotFoundError as error:
        raise missing_packages(error) from error
    facts = run_blocking(store.facts(named.run_id))
    with locate_errors(named.location):
        spans = recorded_spans(facts, content)
    resource = own_resource()
    where = shown_url(receiver_here() if receiver is None else receiver)
    try:
        send_spans([readable(each, resource) for each in spans], receiver)
    except UnsentError as error:
        raise EnsembleError(
            f"The receiver of spans at {where} cannot be reached or refuses them: {error}. "
            "What to do: name an OTLP/HTTP receiver, such as a collector at http://localhost:4318"
        ) from error
    write_note(f"{len(spans)} spans of run {named.run_id} were sent to {where}")
