"""`ensemble-ray keys`: the API keys of endpoints, stored in this home or in the database of `ENSEMBLE_RAY_STORE`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.inputs.records import age_of
from ensemble_ray.cli.view.terminal import FINE, say, show, show_json

if TYPE_CHECKING:
    from ensemble_ray.access.key_store import KeyStore
    from ensemble_ray.access.keys import ApiKey

keys = typer.Typer(
    help="Create, list and revoke the keys of an endpoint's callers.",
    no_args_is_help=True,
    epilog="Examples: ensemble-ray keys add ann --rights run,read --teams letters; ensemble-ray keys revoke ann",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the caller.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


@keys.command("add", epilog="Example: ensemble-ray keys add ann --rights run,read --teams letters,orders --rate 60/min")
def add_key(
    name: Name,
    *,
    teams: Annotated[
        str,
        typer.Option(
            "--teams", metavar="TEAM,...", help="Teams that the key may use; '*' for all.", show_default=False
        ),
    ],
    rights: Annotated[
        str, typer.Option("--rights", metavar="RIGHT,...", help="Rights of the key: run, read, review, admin.")
    ] = "run,read",
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="N/PERIOD", help="Limit of requests: 10/s, 60/min, 1000/h.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Create a key, and show it once.

    It is valid immediately, without a restart. With the first key, every request to an endpoint of this home needs one.
    """
    from ensemble_ray.access.keys import new_key, parse_rate, parse_rights
    from ensemble_ray.values.value import utc_now

    text, key = new_key(
        name,
        rights=parse_rights(rights.split(",")),
        teams=teams.split(","),
        rate=None if rate is None else parse_rate(rate),
        created_at=utc_now(),
    )
    store = _open_keys()
    store.add(key)
    if as_json:
        show_json({"key": text, **_as_data(key)})
    else:
        show(text)
    say(f"This is the only time that the key of '{name}' is shown. Its digest is stored in {store.location}")
    return FINE


@keys.command("ls", epilog="Example: ensemble-ray keys ls --json")
def list_keys(*, as_json: AsJson = False) -> int:
    """List the keys: names, last characters, rights, teams, rates."""
    from ensemble_ray.access.keys import render_rate
    from ensemble_ray.values.value import utc_now

    store = _open_keys()
    found = store.read()
    if as_json:
        show_json([_as_data(key) for key in found or ()])
        return FINE
    if not found:
        say(f"There is no key in {store.location}. Make one: ensemble-ray keys add NAME --teams TEAM,...")
        return FINE
    now = utc_now()
    rows = [
        (
            key.name,
            f"...{key.last_four}",
            ",".join(sorted(key.rights)),
            "*" if key.teams is None else ",".join(sorted(key.teams)),
            "-" if key.rate is None else render_rate(key.rate),
            age_of(key.created_at, now),
        )
        for key in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        show("  ".join(f"{each:<{width}}" for each, width in zip(row, widths, strict=True)).rstrip())
    return FINE


@keys.command("revoke", epilog="Example: ensemble-ray keys revoke ann")
def revoke_key(name: Name) -> int:
    """Revoke a key: its next request is refused, and its open responses end within seconds."""
    key = _open_keys().revoke(name)
    show(f"Revoked the key of '{name}' (...{key.last_four})")
    return FINE


def _open_keys() -> KeyStore:
    from ensemble_ray.access.key_store import open_keys

    return open_keys()


def _as_data(key: ApiKey) -> dict[str, object]:
    """Return a key as JSON data, without its digest."""
    from ensemble_ray.access.keys import render_rate

    return {
        "name": key.name,
        "last_four": key.last_four,
        "rights": sorted(key.rights),
        "teams": None if key.teams is None else sorted(key.teams),
        "rate": None if key.rate is None else render_rate(key.rate),
        "created_at": key.created_at.isoformat(),
    }
