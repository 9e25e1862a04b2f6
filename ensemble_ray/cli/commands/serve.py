"""`ensemble-ray serve`, `keys` and `mcp`. `ensemble_ray.serve` replaces this process, which imports no web framework."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Mapping
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
    help="Create, change, list and revoke the keys of an endpoint's callers, and show their usage.",
    no_args_is_help=True,
    epilog="Examples: ensemble-ray keys add ann --rights run,read --teams letters; ensemble-ray keys revoke ann",
)

QuotaOption = Annotated[
    list[str] | None,
    Option("--quota", metavar="WHAT=N/day", help="Limit per day: runs=100/day, tokens=1M/day, cost=5/day; repeatable."),
]
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
    quota: QuotaOption = None,
    roles: Annotated[str, Option("--roles", metavar="ROLE,...", help="Roles for reviews.")] = "",
    as_json: options.ItAsJson = False,
) -> int:
    """Create a key, and show it once.

    It is valid immediately, without a restart. With the first key, every request to an endpoint of this home needs one.
    """
    from ensemble_ray.access.admission import new_key, parse_rate, parse_rights, parse_roles
    from ensemble_ray.access.key_store import open_keys
    from ensemble_ray.access.quotas import parse_quotas
    from ensemble_ray.values.value import utc_now

    text, key = new_key(
        name,
        rights=parse_rights(rights.split(",")),
        teams=teams.split(","),
        rate=None if rate is None else parse_rate(rate),
        created_at=utc_now(),
        quotas=parse_quotas(quota or ()),
        roles=parse_roles(roles.split(",")),
    )
    store = open_keys()
    store.add(key)
    if as_json:
        show_json({"key": text, **_as_data(key)})
    else:
        show(text)
    write_note(f"This is the only time that the key of '{name}' is shown. Its digest is stored in {store.location}")
    return FINE


@keys.command("set", epilog="Example: ensemble-ray keys set ann --quota tokens=2M/day --roles lead,legal")
def set_key(
    name: Name,
    *,
    teams: Annotated[
        str | None, Option("--teams", metavar="TEAM,...", help="Teams that the key may use; '*' for all.")
    ] = None,
    rights: Annotated[
        str | None, Option("--rights", metavar="RIGHT,...", help="Rights of the key: run, read, review, admin.")
    ] = None,
    rate: Annotated[
        str | None, Option("--rate", metavar="N/PERIOD", help="Limit of requests: 10/s, 60/min, 1000/h, or none.")
    ] = None,
    quota: QuotaOption = None,
    roles: Annotated[str | None, Option("--roles", metavar="ROLE,...", help="Roles for reviews; '' for none.")] = None,
    as_json: options.ItAsJson = False,
) -> int:
    """Change a key. Only named options change it, from the next request on."""
    from ensemble_ray.access.admission import changed_key, parse_rate, parse_rights, parse_roles
    from ensemble_ray.access.key_store import open_keys
    from ensemble_ray.access.quotas import parse_quotas

    changes: dict[str, object] = {}
    if rate is not None:
        changes["rate"] = None if rate.strip() == "none" else parse_rate(rate)
    if roles is not None:
        changes["roles"] = parse_roles(roles.split(","))
    chosen = None if rights is None else parse_rights(rights.split(","))
    named = None if teams is None else teams.split(",")
    if not changes and chosen is None and named is None and not quota:
        raise ValidationError("No change. Name one with --quota, --roles, --rate, --rights or --teams")

    def change(key: ApiKey) -> ApiKey:
        from msgspec.structs import replace

        return replace(
            changed_key(key, rights=chosen, teams=named), **changes, quotas=parse_quotas(quota or (), key.quotas)
        )

    key = open_keys().change(name, change)
    if as_json:
        show_json(_as_data(key))
    else:
        show(f"Changed the key of '{name}' (...{key.last_four})")
    return FINE


@keys.command("ls", epilog="Example: ensemble-ray keys ls --json")
def list_keys(*, as_json: options.ItAsJson = False) -> int:
    """List the keys: names, last characters, rights, teams, rates, ages, quotas, roles."""
    from ensemble_ray.access.key_store import open_keys
    from ensemble_ray.access.quotas import render_quotas
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
        limits = ",".join(render_quotas(key.quotas)) or "-", ",".join(sorted(key.roles)) or "-"
        rows.append((key.name, f"...{key.last_four}", ",".join(sorted(key.rights)), teams, *ends, *limits))
    show("\n".join(align(rows)))
    return FINE


@keys.command("usage", epilog="Example: ensemble-ray keys usage --url https://teams.example.org")
def show_usage(
    *, url: options.EndpointUrl = None, key: options.EndpointKey = None, as_json: options.ThemAsJson = False
) -> int:
    """Show what keys used today at an endpoint that runs: with the right admin all keys of its teams, else the own one."""
    from ensemble_ray.cli.commands.endpoint import EndpointClient

    found = EndpointClient(url, key).ask("GET", "/quota")["keys"]
    if as_json:
        show_json(found)
    elif found:
        rows = [("key", "day", *(each["quantity"] for each in found[0]["quotas"]))]
        rows += [(each["key"], each["day"], *map(_used, each["quotas"])) for each in found]
        show("\n".join(align(rows)))
    else:
        write_note("This endpoint has no keys, so it counts no usage")
    return FINE


def _used(quota: Mapping[str, str | None]) -> str:
    limit = "" if quota["limit"] is None else f" of {quota['limit']}"
    reserved = "" if quota["reserved"] == "0" else f" ({quota['reserved']} reserved)"
    return f"{quota['used']}{limit}{reserved}"


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
    from ensemble_ray.access.quotas import render_quotas

    return {
        "name": key.name,
        "last_four": key.last_four,
        "rights": sorted(key.rights),
        "teams": None if key.teams is None else sorted(key.teams),
        "rate": None if key.rate is None else render_rate(key.rate),
        "created_at": key.created_at.isoformat(),
        "quotas": render_quotas(key.quotas),
        "roles": sorted(key.roles),
    }
