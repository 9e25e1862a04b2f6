"""`ensemble-ray studio`: serve a page with all recorded runs until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ensemble_ray.cli.view.terminal import FINE, say, show

_PORT = 7328


def studio(
    *,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; beyond loopback every request needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", help="Port to listen on; 0: any that is free.")] = _PORT,
    home: Annotated[
        Path | None, typer.Option("--home", help="Home with the runs to show.", show_default="ENSEMBLE_RAY_HOME")
    ] = None,
    records: Annotated[
        str | None,
        typer.Option("--records", metavar="URL", help="A database with the runs to show, in place of files."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="ADDRESS",
            help="The cluster whose processes are shown, such as 10.0.0.1:6379.",
            show_default="RAY_ADDRESS, else those of this machine's runs",
        ),
    ] = None,
    files: Annotated[
        Path | None,
        typer.Option("--files", metavar="DIR", help="Also show graphs (.dag.json) and traces of this folder."),
    ] = None,
    no_actions: Annotated[
        bool, typer.Option("--no-actions", help="Read only: the page cannot cancel, resume, fork or decide.")
    ] = False,
    is_open: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> int:
    """Look at runs in the browser: their work, their errors, and the reviews that they wait for.

    Shows all recorded runs, active ones too, wherever they started; with --files also graphs and traces of a folder.
    Prints the address when it is ready; Ctrl-C stops it.

    Exit codes: 1 the port is not available, 2 wrong options.
    """
    import threading
    import webbrowser

    from ensemble_ray.errors import ValidationError
    from ensemble_ray.record.stores import StoreAddress
    from ensemble_ray.studio import check_installed

    check_installed("Studio")
    if home is not None and records is not None:
        raise ValidationError("--home and --records name two places: choose one")
    from ensemble_ray.studio.server import StudioServer

    server = StudioServer(
        StoreAddress.of(home, records),
        host=host,
        port=port,
        has_actions=not no_actions,
        cluster=address,
        files=files,
    )
    server.start()
    try:
        show(f"Studio: {server.url}")
        say("Ctrl-C stops it.")
        if is_open:
            webbrowser.open(server.url)
        threading.Event().wait()
    except KeyboardInterrupt:
        say("Stopped.")
    finally:
        server.stop()
    return FINE
