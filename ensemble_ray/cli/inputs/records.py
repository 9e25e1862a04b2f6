"""The recorded runs that commands work on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ensemble_ray.cli.view.terminal import own_command, write_note

if TYPE_CHECKING:
    from datetime import datetime

    from ensemble_ray.record.stores import RecordedRun, RunStore

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def own_store() -> RunStore:
    from ensemble_ray.record.opening import store_at
    from ensemble_ray.record.stores import StoreAddress

    return store_at(StoreAddress.of())


def where() -> str:
    """Never with a password."""
    from ensemble_ray.record.runs import runs_directory
    from ensemble_ray.record.stores import StoreAddress

    address = StoreAddress.of()
    if not address.url:
        return str(runs_directory(Path(address.home)))
    location = address.url.partition("://")[2].partition("?")[0]  # a query may contain a password too
    return f"the database {location.rpartition('@')[2]}"


def no_runs() -> str:
    return f"There are no runs in {where()}. Make one: {own_command()} demo"


def as_data(run: RecordedRun) -> dict[str, object]:
    return {
        "run_id": run.run_id, "state": run.state.value, "created_at": run.created_at.isoformat(), "origin": run.origin,
        "place": run.location, "owner": run.owner,
    }  # fmt: skip


def age_of(created_at: datetime, now: datetime) -> str:
    seconds = max(0, int((now - created_at).total_seconds()))
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{seconds // size} {unit}"


def say_where(run_id: str) -> None:
    """Report the location of a run's record, and how to show and resume it."""
    from ensemble_ray.errors import EnsembleError, message_of
    from ensemble_ray.process.concurrency import run_blocking
    from ensemble_ray.record.failure import read_next_step

    try:
        found = run_blocking(own_store().summary(run_id))
        step = None if found is None else run_blocking(read_next_step(own_store(), found, command=own_command()))
    except EnsembleError as error:
        write_note(f"Record: cannot be looked at: {message_of(error)}")
        return
    if found is None:
        write_note("Record: none")
        return
    lines = [f"Record: {found.location}", f"Show it: {own_command()} trace {run_id}"]
    write_note("\n".join([*lines, str(step)] if step else lines))
