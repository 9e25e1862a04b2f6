"""`ensemble-ray serve`, `keys` and `mcp`. `ensemble_ray.serve` replaces this process, which imports no web framework."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.inputs.records import age_of
from ensemble_ray.cli.view.terminal import FINE, align, show, show_json, write_note
from ensemble_ray.errors import ValidationError

if TYPE_CHECKING:
    from ensemble_ray.access.admission import ApiKey

_PORT = 8000


def serve(
    targets: options.Targets,
    *,
    host: Annotated[str, Option("--host", help="Address to listen on; default: loopback only.")] = ("127.0.0.1"),
    port: Annotated[int, Option("--port", "-p", help="Port to listen on; 0: any that is free.")] = _PORT,
    replicas: Annotated[int, Option("--replicas", help="Processes that answer requests.")] = 1,
    name: Annotated[
        str, Option("--name", help="Name of the endpoint; runs that it accepted under that name continue.")
    ] = "endpoint",
    namespace: Annotated[
        str | None, Option("--namespace", help="Ray namespace of its schedulers; default: ENSEMBLE_RAY_NAMESPACE.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        Option("--allowed-host", metavar="NAME", help="A host name that requests may use; repeatable."),
    ] = None,
    cancel_on_disconnect: Annotated[
        bool,
        Option(
            "--cancel-on-disconnect/--no-cancel-on-disconnect",
            help="Whether a run that the OpenAI API started ends with its connection.",
        ),
    ] = True,
    allowed_origin: Annotated[
        list[str] | None,
        Option("--allowed-origin", metavar="URL", help="An origin that may send requests; repeatable."),
    ] = None,
    tool: Annotated[
        list[str] | None, Option("--tool", metavar="MODULE:ATTRIBUTE", help="A tool that clients may call; repeatable.")
    ] = None,
    model: Annotated[
        list[str] | None, Option("--model", metavar="NAME=MODEL", help="A model that requests may choose; repeatable.")
    ] = None,
    dataset: Annotated[
        list[str] | None,
        Option("--dataset", metavar="NAME=REF", help="A Ray Dataset that requests may map; repeatable."),
    ] = None,
    keys: Annotated[str, Option("--keys", help="Which requests need a key: auto, required, none.")] = "auto",
    webhook: Annotated[
        list[str] | None,
        Option("--webhook", metavar="TEAM=URL", help="A receiver of the events of a team's runs; repeatable."),
    ] = None,
    webhook_host: Annotated[
        list[str] | None,
        Option("--webhook-host", metavar="NAME", help="A host that webhooks may reach; repeatable."),
    ] = None,
    watch: Annotated[bool, Option("--watch", help="Load changed team files by itself, for new runs.")] = False,
    drain_s: Annotated[
        float,
        Option("--drain-s", metavar="S", help="Drain up to S seconds before it stops; a second Ctrl-C skips this."),
    ] = 0.0,
) -> None:
    """Serve teams over HTTP on Ray Serve.

    Prints the address when it is ready; Ctrl-C stops it. Joins the cluster of RAY_ADDRESS, or starts one. Addresses other
    than loopback need keys: ensemble-ray keys add.
    """
    from ensemble_ray.access.admission import KeyPolicy

    if keys not in set(KeyPolicy):
        raise ValidationError(f"--keys: unknown '{keys}'. Known: [{', '.join(KeyPolicy)}]")
    if not 0 <= drain_s < math.inf:
        raise ValidationError(f"--drain-s must be 0 or more seconds, got: {drain_s:g}")
    endpoint = {
        "host": host, "port": port, "name": name, "ensembles": targets, "replicas": replicas, "namespace": namespace,
        "allowed_hosts": allowed_host or [], "cancel_on_disconnect": cancel_on_disconnect,
        "allowed_origins": allowed_origin or [], "datasets": ",".join(dataset or []), "keys": keys, "tools": tool or [],
        "models": ",".join(model or []), "webhooks": webhook or [], "webhook_hosts": webhook_host or [], "watch": watch, "drain_s": drain_s,
    }  # fmt: skip
    sys.stdout.flush()
    arguments = [sys.executable, "-m", "ensemble_ray.serve", json.dumps(endpoint)]
    os.execv(sys.executable, arguments)  # noqa: S606  this program, with arguments that no shell reads


def mcp(
    targets: options.Targets,
    *,
    runtime: options.RuntimeChoice = None,
    llm: Annotated[
        str | None,
        Option(
            "--llm", metavar="MODEL", help="A model in place of every other: openai:NAME, openai-responses:NAME, local."
        ),
    ] = None,
) -> int:
    """Serve teams as tools of an MCP server, over standard input and output.

    Each team is a tool named after its file, whose arguments are the team's inputs. Ends when its input ends.

    Exit codes: 2 a team is wrong, or a package is missing.
    """
    if find_spec("mcp") is None:
        raise ValidationError("MCP needs the package mcp, which is not installed: pip install 'ensemble-ray[mcp]'")

    from ensemble_ray.cli.inputs.arguments import check_team_keys_here
    from ensemble_ray.cli.team_tools import TeamTools
    from ensemble_ray.teamfile import load_ensemble

    teams = [(target, load_ensemble(target, llm=llm)) for target in targets]
    check_team_keys_here(dict(teams), runtime)
    tools = TeamTools(runtime=None if runtime is None else runtime.value)
    for target, team in teams:
        tools.add(target, team)
    asyncio.run(tools.serve())
    return FINE


keys = typer.Typer(
    help="Create, list and revoke the keys of an endpoint's callers.",
    no_args_is_help=True,
    epilog="Examples: ensemble-ray keys add ann --rights run,read --teams letters; ensemble-ray keys revoke ann",
)

Name = Annotated[str, Argument(metavar="NAME", help="Name of the caller.", show_default=False)]


@keys.command("add", epilog="Example: ensemble-ray keys add ann --rights run,read --teams letters,orders --rate 60/min")
def add_key(
    name: Name,
    *,
    teams: Annotated[
        str, Option("--teams", metavar="TEAM,...", help="Teams that the key may use; '*' for all.", show_default=False)
    ],
    rights: Annotated[
        str, Option("--rights", metavar="RIGHT,...", help="Rights of the key: run, read, review, admin.")
    ] = "run,read",
    rate: Annotated[
        str | None, Option("--rate", metavar="N/PERIOD", help="Limit of requests: 10/s, 60/min, 1000/h.")
    ] = None,
    as_json: options.ItAsJson = False,
) -> int:
    """Create a key, and show it once.

    It is valid immediately, without a restart. With the first key, every request to an endpoint of this home needs one.
    """
    from ensemble_ray.access.admission import new_key, parse_rate, parse_rights
    from ensemble_ray.access.key_store import open_keys
    from ensemble_ray.values.value import utc_now

    chosen, limit = parse_rights(rights.split(",")), None if rate is None else parse_rate(rate)
    text, key = new_key(name, rights=chosen, teams=teams.split(","), rate=limit, created_at=utc_now())
    store = open_keys()
    store.add(key)
    if as_json:
        show_json({"key": text, **_as_data(key)})
    else:
        show(text)
    write_note(f"This is the only time that the key of '{name}' is shown. Its digest is stored in {store.location}")
    return FINE


@keys.command("ls", epilog="Example: ensemble-ray keys ls --json")
def list_keys(*, as_json: options.ItAsJson = False) -> int:
    """List the keys: names, last characters, rights, teams, rates."""
    from ensemble_ray.access.key_store import open_keys
    from ensemble_ray.values.value import utc_now

    store = open_keys()
    found = store.read()
    if as_json:
        show_json([_as_data(key) for key in found or ()])
        return FINE
    if not found:
        write_note(f"There is no key in {store.location}. Make one: ensemble-ray keys add NAME --teams TEAM,...")
        return FINE
    now = utc_now()
    rows: list[tuple[str, ...]] = []
    for key, data in ((each, _as_data(each)) for each in found):
        teams = "*" if key.teams is None else ",".join(sorted(key.teams))
        ends = str(data["rate"] or "-"), age_of(key.created_at, now)
        rows.append((key.name, f"...{key.last_four}", ",".join(sorted(key.rights)), teams, *ends))
    show("\n".join(align(rows)))
    return FINE


@keys.command("revoke", epilog="Example: ensemble-ray keys revoke ann")
def revoke_key(name: Name) -> int:
    """Revoke a key: its next request is refused, and its open responses end within seconds."""
    from ensemble_ray.access.key_store import open_keys

    key = open_keys().revoke(name)
    show(f"Revoked the key of '{name}' (...{key.last_four})")
    return FINE


def _as_data(key: ApiKey) -> dict[str, object]:
    """Return a key as JSON data, without its digest."""
    from ensemble_ray.access.admission import render_rate

    return {
        "name": key.name,
        "last_four": key.last_four,
        "rights": sorted(key.rights),
        "teams": None if key.teams is None else sorted(key.teams),
        "rate": None if key.rate is None else render_rate(key.rate),
        "created_at": key.created_at.isoformat(),
    }
