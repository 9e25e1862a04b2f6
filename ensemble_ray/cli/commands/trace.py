"""`ensemble-ray trace`: show a recorded run as a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.inputs.records import as_data, no_runs, own_store, where
from ensemble_ray.cli.view.pictures import Dag, Mermaid, Pictures, Svg
from ensemble_ray.cli.view.spans import Otlp, WithContent, check_sending, send_run
from ensemble_ray.cli.view.terminal import FINE, say, show, show_json, show_json_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.record.stores import RecordedRun, RunStore
    from ensemble_ray.record.view.map_reduce import MapReduceView
    from ensemble_ray.record.view.tree import TreeRow
    from ensemble_ray.values.trace import ExecutionTrace
    from ensemble_ray.visualization.flow import Flow

_LISTED = 20
_STYLES = {
    "run": "bold",
    "tags": "dim",
    "level": "bold cyan",
    "unit": "bold cyan",
    "verdict": "yellow",
    "task": "cyan",
    "model": "",
    "tool": "magenta",
    "answer": "dim",
    "history": "dim",
    "reasoning": "dim",
    "context": "yellow",
    "review": "magenta",
    "reflection": "dim",
    "directive": "dim",
    "error": "red",
}


def trace(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run's id or its start, or 'latest'. Without: the newest runs."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task", metavar="TASK", help="Only that task, such as map-17 of a map-reduce, or loop:refine#2."
        ),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    svg: Svg = None,
    mermaid: Mermaid = None,
    dag: Dag = None,
    otlp: Otlp = None,
    content: WithContent = False,
) -> int:
    """Show a recorded run as a tree.

    With times, tokens and tool calls; also a running or interrupted run. A map-reduce that creates its tasks while it runs
    is shown by its levels. --svg, --mermaid and --dag write the run as a graph instead; --otlp sends it to an
    OpenTelemetry receiver.

    Exit codes: 1 a part of the record is lost; the rest is shown.
    """
    import contextlib

    from ensemble_ray.errors import EnsembleError, RecordError
    from ensemble_ray.process.forks import run_blocking

    pictures = Pictures(svg=svg, mermaid=mermaid, dag=dag)
    check_sending(
        otlp, has_content=content, has_run=run is not None, is_shown=as_json or task is not None or pictures.is_asked
    )
    store = own_store()
    if run is None:
        runs = run_blocking(store.runs())
        if as_json:
            show_json([as_data(each) for each in runs])
        else:
            _list(runs)
        return FINE
    named = run_blocking(store.find(run))
    if otlp is not None:
        send_run(store, named, otlp, has_content=content)
        return FINE
    if pictures.is_asked:
        _draw_run(store, named, pictures)
        return FINE
    try:
        _show_run(store, named, task, as_json=as_json)
    except RecordError:
        with contextlib.suppress(EnsembleError):  # the first error is raised below
            _show_run(store, named, task, as_json=as_json, is_partial=True)
        raise
    return FINE


def _show_run(
    store: RunStore, named: RecordedRun, task: str | None, *, as_json: bool, is_partial: bool = False
) -> None:
    """Print a run; `is_partial`: the readable part of its record."""
    from ensemble_ray.errors import RecordError
    from ensemble_ray.process.forks import run_blocking
    from ensemble_ray.record.head import locate_errors, read_head
    from ensemble_ray.record.history import RunHistory
    from ensemble_ray.record.trace import trace_of
    from ensemble_ray.record.units import verdicts_of
    from ensemble_ray.record.view.tree import directive_data, directive_rows, directives_in, reflection_rows, tree_rows

    run_id = named.run_id
    head = run_blocking(read_head(store, run_id, is_partial=is_partial))
    if task is None and head.is_dynamic:
        with locate_errors(named.location):
            view = run_blocking(_view(store, named, is_partial=is_partial))
            rows, data = tuple(view.rows()), view.data()
        if as_json:
            show_json(data)
        else:
            _print_tree(rows)
        return
    if task is None:
        facts = run_blocking(store.facts(run_id, is_partial=is_partial))
    else:
        facts = run_blocking(_of_task(store, run_id, task, is_partial=is_partial))
    if not facts:
        raise RecordError(f"Run '{run_id}' has recorded nothing in {named.location}", named.location)
    with locate_errors(named.location):
        history = RunHistory(facts, has_details=True)
        found = trace_of(history)
    if head.tags:
        found = found.replace(metadata={**found.metadata, "tags": dict(head.tags)})
    if head.forked_from is not None:
        found = found.replace(metadata={**found.metadata, "forked_from": head.forked_from._asdict()})
    directives = directives_in(facts)
    if directives:
        found = found.replace(metadata={**found.metadata, **directive_data(directives)})
    if as_json:
        show_json_text(found.to_json())
    else:
        _print_tree(
            (
                *tree_rows(found, tuple(verdicts_of(history.stimuli.groups))),
                *directive_rows(directives),
                *reflection_rows(facts),
            )
        )


def _draw_run(store: RunStore, named: RecordedRun, pictures: Pictures) -> None:
    from ensemble_ray.process.forks import run_blocking
    from ensemble_ray.record.head import locate_errors, read_head
    from ensemble_ray.record.source import recorded_plan
    from ensemble_ray.record.trace import fold_trace
    from ensemble_ray.visualization.dag_model import DagExporter
    from ensemble_ray.visualization.declared import tally_flow
    from ensemble_ray.visualization.dev_tools import trace_steps
    from ensemble_ray.visualization.ran import ran_flow

    def make_trace() -> ExecutionTrace:
        facts = run_blocking(store.facts(named.run_id))
        with locate_errors(named.location):
            return fold_trace(facts)

    def make_flow() -> Flow:
        if head.is_dynamic:
            with locate_errors(named.location):
                return tally_flow(run_blocking(_view(store, named, is_partial=False)).levels)
        trace = make_trace()
        with locate_errors(named.location):
            plan = recorded_plan(head.header.plan) if head.header.plan else None
        return ran_flow(trace_steps(trace, plan), plan, workflow=trace.workflow)

    head = run_blocking(read_head(store, named.run_id))
    pictures.write(f"Run {named.run_id}", make_flow, lambda: DagExporter.build(make_trace()))


async def _view(store: RunStore, run: RecordedRun, *, is_partial: bool) -> MapReduceView:
    from ensemble_ray.record.view.map_reduce import VIEW_KINDS, MapReduceView

    view = MapReduceView(run.run_id, is_running=run.state.is_active)
    async for page in store.read(run.run_id, kinds=VIEW_KINDS, is_partial=is_partial):
        view.apply(page)
    return view


async def _of_task(store: RunStore, run_id: str, task: str, *, is_partial: bool) -> list[Fact]:
    """Return the facts of the run as a whole, and of one task with its delegations.

    Raises:
        ValidationError: The record does not contain such a task.
    """
    from ensemble_ray.errors import ValidationError
    from ensemble_ray.record.head import HEAD_KINDS
    from ensemble_ray.record.view.tree import is_named
    from ensemble_ray.values.ids import RUN, task_instance

    facts: list[Fact] = []
    is_found = False
    async for page in store.read(run_id, is_partial=is_partial):
        for fact in page:
            is_of_task = is_named(task, task_instance(fact.name))
            if is_of_task or (fact.name == RUN and fact.kind in HEAD_KINDS):
                facts.append(fact)
                is_found |= is_of_task
    if not is_found:
        raise ValidationError(f"Run '{run_id}' has recorded nothing of a task '{task}'")
    return facts


def _list(runs: list[RecordedRun]) -> None:
    if not runs:
        say(no_runs())
        return
    width = max(len(run.run_id) for run in runs[:_LISTED])
    for run in runs[:_LISTED]:
        created = run.created_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        show(f"{run.run_id:<{width}}  {created}  {run.state.value:<11}  {run.origin}".rstrip())
    if len(runs) > _LISTED:
        say(f"and {len(runs) - _LISTED} older ones in {where()}")


def _print_tree(rows: Sequence[TreeRow]) -> None:
    import sys

    from ensemble_ray.record.view.tree import render_rows

    text = render_rows(rows)
    if not sys.stdout.isatty():
        show(text)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for row, line in zip(rows, text.split("\n"), strict=True):
        console.print(Text(line, style="bold red" if row.is_bad else _STYLES[row.kind]))
