"""`ensemble-ray schedules`: lists and controls the schedules of an endpoint."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from urllib.parse import quote

import typer
from typer import Argument

from ensemble_ray.cli.commands.endpoint import Data, EndpointClient
from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.view.terminal import FINE, align, screen_line, show, show_json, write_note
from ensemble_ray.errors import ValidationError

_SHOWN = 100
_UNITS = ((604_800, "w"), (86_400, "d"), (3600, "h"), (60, "m"), (1, "s"))

schedules = typer.Typer(
    help="List the schedules of an endpoint, with their next times, and pause, resume and run them.",
    epilog="Examples: ensemble-ray schedules; ensemble-ray schedules pause letters/nightly; "
    "ensemble-ray schedules history letters/nightly --url https://teams.example.org",
)

ScheduleName = Annotated[str, Argument(metavar="TEAM/NAME", help="The schedule, as the list shows it.")]


@schedules.callback(invoke_without_command=True)
def list_schedules(
    context: typer.Context,
    *,
    url: options.EndpointUrl = None,
    key: options.EndpointKey = None,
    as_json: options.ThemAsJson = False,
) -> None:
    """List the schedules of an endpoint, with their next times, and pause, resume and run them."""
    if context.invoked_subcommand is not None:
        return
    found = EndpointClient(url, key).ask("GET", "/schedules")["schedules"]
    if as_json:
        show_json(found)
    elif found:
        rows = [("schedule", "when", "next", "last", "state"), *map(_row, found)]
        show("\n".join(align(rows)))
    else:
        write_note("No schedule. A team declares them with 'schedules'")


@schedules.command("pause", epilog="Example: ensemble-ray schedules pause letters/nightly")
def pause(
    name: ScheduleName,
    *,
    url: options.EndpointUrl = None,
    key: options.EndpointKey = None,
    as_json: options.ItAsJson = False,
) -> int:
    """Pause a schedule: no run starts until it is resumed."""
    return _control(name, "pause", url, key, as_json=as_json)


@schedules.command("resume", epilog="Example: ensemble-ray schedules resume letters/nightly")
def resume(
    name: ScheduleName,
    *,
    url: options.EndpointUrl = None,
    key: options.EndpointKey = None,
    as_json: options.ItAsJson = False,
) -> int:
    """Resume a paused schedule. The times of the pause are not made up for."""
    return _control(name, "resume", url, key, as_json=as_json)


@schedules.command("run", epilog="Example: ensemble-ray schedules run letters/nightly")
def run_now(
    name: ScheduleName,
    *,
    url: options.EndpointUrl = None,
    key: options.EndpointKey = None,
    as_json: options.ItAsJson = False,
) -> int:
    """Start a run of a schedule now, in addition to its times, and print its id."""
    accepted = EndpointClient(url, key).ask("POST", f"{_path_of(name)}/run", {})
    if as_json:
        show_json(dict(accepted))
    else:
        show(accepted["run_id"])
    return FINE


@schedules.command("history", epilog="Example: ensemble-ray schedules history letters/nightly")
def history(
    name: ScheduleName,
    *,
    url: options.EndpointUrl = None,
    key: options.EndpointKey = None,
    as_json: options.ItAsJson = False,
) -> int:
    """List the newest runs of a schedule, and the times and files for which no run was started."""
    found = EndpointClient(url, key).ask("GET", _path_of(name))
    if as_json:
        show_json(dict(found))
        return FINE
    if not found["history"]:
        write_note(f"{name} has started no run yet")
        return FINE
    rows = [("time", "trigger", "state", "run or reason")]
    for each in found["history"]:
        about = each["run_id"] or screen_line(each["reason"], _SHOWN)
        named = f"{about} ({screen_line(each['file'], _SHOWN)})" if each["file"] else about
        rows.append((_time(each["at"]), each["trigger"], _outcome(each), named))
    show("\n".join(align(rows)))
    return FINE


def _control(name: str, action: str, url: str | None, key: str | None, *, as_json: bool) -> int:
    found = EndpointClient(url, key).ask("POST", f"{_path_of(name)}/{action}", {})
    if as_json:
        show_json(dict(found))
    else:
        show("  ".join(_row(found)))
    return FINE


def _path_of(name: str) -> str:
    team, slash, schedule = name.partition("/")
    if not (team and slash and schedule):
        raise ValidationError(f"'{name}' must be TEAM/NAME, as ensemble-ray schedules lists it")
    return f"/schedules/{quote(team, safe='')}/{quote(schedule, safe='')}"


def _row(found: Data) -> tuple[str, ...]:
    last = found["last"]
    shown = "-" if last is None else f"{_outcome(last)} {_time(last['at'])}"
    state = "paused" if found["is_paused"] else "active"
    if found["waiting"]:
        state += f", {found['waiting']} waiting"
    if found["problem"]:
        state += f": {screen_line(found['problem'], _SHOWN)}"
    upcoming = "-" if found["next_at"] is None else _time(found["next_at"])
    return f"{found['ensemble']}/{found['name']}", _when(found), upcoming, shown, state


def _when(found: Data) -> str:
    if found["cron"] is not None:
        return f"{found['cron']} ({found['timezone']})"
    if found["folder"] is not None:
        return screen_line(f"{found['folder'].rstrip('/')}/{found['pattern']}", _SHOWN)
    seconds = int(found["every_s"])
    size, unit = next(each for each in _UNITS if seconds % each[0] == 0)
    return f"every {seconds // size}{unit}"


def _outcome(fire: Data) -> str:
    if fire["run_id"] is not None:
        return str(fire["status"] or "deleted")
    return "skipped" if fire["times"] == 1 else f"skipped {fire['times']} times"


def _time(text: str) -> str:
    """Return an instant in UTC, to the second."""
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%SZ}"
