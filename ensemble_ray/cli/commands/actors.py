"""`ensemble-ray actors`: the processes of active runs, their nodes, agents and work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.inputs.records import own_store
from ensemble_ray.cli.view.terminal import FINE, say, screen_line, show, show_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ensemble_ray.studio.schemas import Actors, ProcessInfo

_REQUIRED_PACKAGE = "graphlay"
#: Characters of a cell, and of a name in it.
_CELL, _NAME = 60, 40
_NOTE = 1000
#: Steps and agents of a process that a row names.
_NAMED = 3


def actors(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="Only processes of that run: its id, the start of its id, or 'latest'."),
    ] = None,
    *,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="ADDRESS",
            help="The cluster to ask, such as 10.0.0.1:6379.",
            show_default="RAY_ADDRESS, else those of this machine's runs",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> int:
    """List the processes of active runs: node, agents, tasks, queues, then limits and endpoints.

    Records name the owners of runs; the cluster names the processes of agents.
    """
    from importlib.util import find_spec

    from ensemble_ray.errors import ValidationError
    from ensemble_ray.process.config import Settings
    from ensemble_ray.process.forks import run_blocking

    if find_spec(_REQUIRED_PACKAGE) is None:
        raise ValidationError(
            f"'actors' needs a package that is not installed ({_REQUIRED_PACKAGE}): pip install 'ensemble-ray[studio]'"
        )
    from ensemble_ray.studio.processes import look_at_actors

    store = own_store()
    run_id = None if run is None else run_blocking(store.find(run)).run_id
    cluster = (address or Settings.from_environment().ray_address).strip()
    found = run_blocking(look_at_actors(store, run_id, cluster=cluster))
    if as_json:
        show_json(found.model_dump(mode="json"))
        return FINE
    for line in actor_lines(found):
        show(line)
    if found.note:
        say(screen_line(found.note, _NOTE))
    return FINE


def actor_lines(found: Actors) -> Sequence[str]:
    """Return tables of the processes of each node, of limits and of endpoints, without empty tables."""
    lines: list[str] = []
    head = ("kind", "process", "pid", "agents", "doing", "waiting", "restarts", "memory")
    for node in found.nodes:
        name = screen_line(" ".join(each for each in (node.node, node.address) if each), _CELL)
        lines += [name, *_table([head, *(_row(each) for each in node.processes)]), ""]
    if found.limiters:
        rows = [
            (
                screen_line(each.name, _CELL),
                f"{each.requests} in {each.period_s:g} s",
                str(each.queue),
                str(each.permits),
            )
            for each in found.limiters
        ]
        lines += [*_table([("limit", "allows", "waiting", "permits"), *rows]), ""]
    if found.breakers:
        rows = [
            (screen_line(each.name, _CELL), each.state.replace("_", " "), str(each.queue), str(each.sent))
            for each in found.breakers
        ]
        lines += [*_table([("endpoint", "breaker", "waiting", "on their way"), *rows]), ""]
    return lines[:-1]


def _row(process: ProcessInfo) -> tuple[str, ...]:
    agents = list(dict.fromkeys(agent for run in process.runs for agent in run.agents))
    hidden = sum(run.more_agents for run in process.runs)
    steps = [task.step + (" (waits)" if task.since is None else "") for task in process.in_flight]
    state = "" if process.state == "ready" else f" ({process.state})"
    return (
        process.kind + state,
        screen_line(process.name, _NAME),
        _number(process.pid),
        _names(agents, hidden),
        _names(steps, process.more_in_flight),
        _number(process.queue),
        _number(process.restarts),
        "-" if process.memory_mb is None else f"{process.memory_mb:.0f} MB",
    )


def _names(names: Sequence[str], hidden: int) -> str:
    shown = [screen_line(each, _NAME) for each in names[:_NAMED]]
    more = len(names) - len(shown) + hidden
    return ", ".join([*shown, *([f"+{more}"] if more else [])]) or "-"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
