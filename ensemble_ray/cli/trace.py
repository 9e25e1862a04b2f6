"""`ensemble-ray trace`: a recorded run as a tree. Room: cli."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.records import as_data, no_runs, own_store, where
from ensemble_ray.cli.terminal import FINE, say, show

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunSummary
    from ensemble_ray.trace import ExecutionTrace

__all__ = ["trace"]

_LISTED = 20
_STYLES = {"run": "bold", "task": "cyan", "model": "", "tool": "magenta", "answer": "dim", "error": "red"}


def trace(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="A run's id or the beginning of it, or 'latest'. Without: the newest runs."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> int:
    """Show a recorded run as a tree.

    With times, tokens and tool calls; also a run that is running or was interrupted.
    """
    import json

    from ensemble_ray.errors import RecordError
    from ensemble_ray.loop import run_blocking
    from ensemble_ray.record.fold import fold_trace

    store = own_store()
    if run is None:
        runs = run_blocking(store.runs())
        if as_json:
            show(json.dumps([as_data(each) for each in runs], indent=2))
        else:
            _list(runs)
        return FINE
    named = run_blocking(store.find(run))
    facts = run_blocking(store.facts(named.run_id))
    if not facts:
        raise RecordError(f"Run '{named.run_id}' has recorded nothing in {named.place}", named.place)
    found = fold_trace(facts)
    if as_json:
        show(found.to_json())
    else:
        _print_tree(found)
    return FINE


def _list(runs: list[RunSummary]) -> None:
    if not runs:
        say(no_runs())
        return
    width = max(len(run.run_id) for run in runs[:_LISTED])
    for run in runs[:_LISTED]:
        created = run.created_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        show(f"{run.run_id:<{width}}  {created}  {run.state.value:<11}  {run.origin}".rstrip())
    if len(runs) > _LISTED:
        say(f"and {len(runs) - _LISTED} older ones in {where()}")


def _print_tree(found: ExecutionTrace) -> None:
    import sys

    from ensemble_ray.record.tree import render_tree, tree_rows

    text = render_tree(found)
    if not sys.stdout.isatty():
        show(text)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for row, line in zip(tree_rows(found), text.split("\n"), strict=True):
        console.print(Text(line, style="bold red" if row.is_bad else _STYLES[row.kind]))
