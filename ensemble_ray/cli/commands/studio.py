"""`ensemble-ray studio` and `actors`."""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.inputs.records import own_store
from ensemble_ray.cli.view.terminal import FINE, align, screen_line, show, show_json, write_note
from ensemble_ray.errors import ValidationError
from ensemble_ray.process.concurrency import run_blocking

if TYPE_CHECKING:
    from ensemble_ray.studio.schemas import Actors, ProcessInfo

_PORT = 7328


def studio(
    *,
    host: Annotated[
        str, Option("--host", help="Address to listen on; beyond loopback every request needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, Option("--port", "-p", help="Port to listen on; 0: any that is free.")] = _PORT,
    home: Annotated[
        Path | None, Option("--home", help="Home with the runs to show.", show_default="ENSEMBLE_RAY_HOME")
    ] = None,
    records: Annotated[
        str | None, Option("--records", metavar="URL", help="A database with the runs to show, in place of files.")
    ] = None,
    address: Annotated[
        str | None,
        Option(
            "--address",
            metavar="ADDRESS",
            help="The cluster whose processes are shown, such as 10.0.0.1:6379.",
            show_default="RAY_ADDRESS, else those of this machine's runs",
        ),
    ] = None,
    files: Annotated[
        Path | None, Option("--files", metavar="DIR", help="Also show graphs (.dag.json) and traces of this folder.")
    ] = None,
    no_actions: Annotated[
        bool, Option("--no-actions", help="Read only: the page cannot cancel, resume, fork or decide.")
    ] = False,
    is_open: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
) -> int:
    """Look at runs in the browser: their work, their errors, and the reviews that they wait for.

    Shows all recorded runs, active ones too, wherever they started; with --files also graphs and traces of a folder.
    Prints the address when it is ready; Ctrl-C stops it.

    Exit codes: 1 the port is not available, 2 wrong options.
    """
    from ensemble_ray.record.stores import StoreAddress
    from ensemble_ray.studio import check_installed

    check_installed("Studio")
    if home is not None and records is not None:
        raise ValidationError("--home and --records name two places: choose one")
    from ensemble_ray.studio.server import StudioServer

    server = StudioServer(
        StoreAddress.of(home, records), host=host, port=port, has_actions=not no_actions, cluster=address, files=files
    )
    server.start()
    try:
        show(f"Studio: {server.url}")
        write_note("Ctrl-C stops it.")
        if is_open:
            webbrowser.open(server.url)
        threading.Event().wait()
    except KeyboardInterrupt:
        write_note("Stopped.")
    finally:
        server.stop()
    return FINE


_CELL, _NAME = 60, 40  # characters of a cell, and of a name in it
_NOTE = 1000
_NAMED = 3  # steps and agents of a process that a row names


def actors(
    run: Annotated[
        str | None,
        Argument(metavar="[RUN]", help="Only processes of that run: its id, the start of its id, or 'latest'."),
    ] = None,
    *,
    address: Annotated[
        str | None,
        Option(
            "--address",
            metavar="ADDRESS",
            help="The cluster to ask, such as 10.0.0.1:6379.",
            show_default="RAY_ADDRESS, else those of this machine's runs",
        ),
    ] = None,
    as_json: options.ThemAsJson = False,
) -> int:
    """List the processes of active runs: node, agents, tasks, queues, then limits and endpoints.

    Records name the owners of runs; the cluster names the processes of agents.
    """
    from ensemble_ray.process.config import Settings

    if find_spec("graphlay") is None:
        raise ValidationError(
            "'actors' needs a package that is not installed (graphlay): pip install 'ensemble-ray[studio]'"
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
        write_note(screen_line(found.note, _NOTE))
    return FINE


def actor_lines(found: Actors) -> Sequence[str]:
    """Omit empty tables."""
    lines: list[str] = []
    head = ("kind", "process", "pid", "agents", "doing", "waiting", "restarts", "memory")
    for node in found.nodes:
        name = screen_line(" ".join(each for each in (node.node, node.address) if each), _CELL)
        lines += [name, *_table(head, map(_row, node.processes)), ""]
    if found.limiters:
        limits = [
            (screen_line(one.name, _CELL), f"{one.requests} in {one.period_s:g} s", str(one.queue), str(one.permits))
            for one in found.limiters
        ]
        lines += [*_table(("limit", "allows", "waiting", "permits"), limits), ""]
    if found.breakers:
        rows = [
            (screen_line(one.name, _CELL), one.state.replace("_", " "), str(one.queue), str(one.sent))
            for one in found.breakers
        ]
        lines += [*_table(("endpoint", "breaker", "waiting", "on their way"), rows), ""]
    return lines[:-1]


def _row(process: ProcessInfo) -> tuple[str, ...]:
    agents = list(dict.fromkeys(agent for run in process.runs for agent in run.agents))
    hidden = sum(run.more_agents for run in process.runs)
    steps = [task.step + (" (waits)" if task.since is None else "") for task in process.in_flight]
    state = "" if process.state == "ready" else f" ({process.state})"
    work = _names(agents, hidden), _names(steps, process.more_in_flight)
    pid, queue, restarts = (
        "-" if each is None else str(each) for each in (process.pid, process.queue, process.restarts)
    )
    memory = "-" if process.memory_mb is None else f"{process.memory_mb:.0f} MB"
    return (process.kind + state, screen_line(process.name, _NAME), pid, *work, queue, restarts, memory)


def _names(names: Sequence[str], hidden: int) -> str:
    shown = [screen_line(each, _NAME) for each in names[:_NAMED]]
    more = len(names) - len(shown) + hidden
    return ", ".join([*shown, *([f"+{more}"] if more else [])]) or "-"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"  {line}" for line in align([head, *rows])]
