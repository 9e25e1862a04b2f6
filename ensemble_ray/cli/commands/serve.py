"""`ensemble-ray serve`: serve teams over HTTP until Ctrl-C.

The command line imports neither Ray nor a web framework: `ensemble_ray.serve` replaces this process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

#: Ray Serve's default port.
_PORT = 8000


def serve(
    targets: Annotated[list[str], typer.Argument(metavar="TARGET...", help="YAML files, or module:attribute.")],
    *,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; default: loopback only.")] = ("127.0.0.1"),
    port: Annotated[int, typer.Option("--port", "-p", help="Port to listen on; 0: any that is free.")] = _PORT,
    replicas: Annotated[int, typer.Option("--replicas", help="Processes that answer requests.")] = 1,
    name: Annotated[
        str, typer.Option("--name", help="Name of the endpoint; runs that it accepted under that name continue.")
    ] = "endpoint",
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", help="Ray namespace of its schedulers; default: ENSEMBLE_RAY_NAMESPACE."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", metavar="NAME", help="A host name that requests may use; repeatable."),
    ] = None,
    cancel_on_disconnect: Annotated[
        bool,
        typer.Option(
            "--cancel-on-disconnect/--no-cancel-on-disconnect",
            help="Whether a run that the OpenAI API started ends with its connection.",
        ),
    ] = True,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option("--allowed-origin", metavar="URL", help="An origin that may send requests; repeatable."),
    ] = None,
    tool: Annotated[
        list[str] | None,
        typer.Option("--tool", metavar="MODULE:ATTRIBUTE", help="A tool that clients may call; repeatable."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="NAME=MODEL", help="A model that requests may choose; repeatable."),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option("--dataset", metavar="NAME=REF", help="A Ray Dataset that requests may map; repeatable."),
    ] = None,
    keys: Annotated[
        str,
        typer.Option("--keys", help="Which requests need a key: auto, required, none."),
    ] = "auto",
) -> None:
    """Serve teams over HTTP on Ray Serve.

    Prints the address when it is ready; Ctrl-C stops it. Joins the cluster of RAY_ADDRESS, or starts one. Addresses other
    than loopback need keys: ensemble-ray keys add.
    """
    from ensemble_ray.access.admission import KeyPolicy
    from ensemble_ray.errors import ValidationError

    if keys not in set(KeyPolicy):
        raise ValidationError(f"--keys: unknown '{keys}'. Known: [{', '.join(KeyPolicy)}]")
    options = {
        "host": host,
        "port": port,
        "name": name,
        "ensembles": targets,
        "replicas": replicas,
        "namespace": namespace,
        "allowed_hosts": allowed_host or [],
        "cancel_on_disconnect": cancel_on_disconnect,
        "allowed_origins": allowed_origin or [],
        "datasets": ",".join(dataset or []),
        "keys": keys,
        "tools": tool or [],
        "models": ",".join(model or []),
    }
    sys.stdout.flush()
    arguments = [sys.executable, "-m", "ensemble_ray.serve", json.dumps(options)]
    os.execv(sys.executable, arguments)  # noqa: S606  this program, with arguments that no shell reads
