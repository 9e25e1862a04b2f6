"""The recorded runs that commands work on: those of `ENSEMBLE_RAY_HOME` or `ENSEMBLE_RAY_STORE`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.view.terminal import own_command, say

if TYPE_CHECKING:
    from datetime import datetime

    from ensemble_ray.memory.lasting import MemoryTables
    from ensemble_ray.ports import EmbeddingModel
    from ensemble_ray.record.stores import RecordedRun, RunStore


RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's id, the beginning of it, or 'latest'.", show_default=False)
]
#: Seconds of each unit of an age, largest first.
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def own_store() -> RunStore:
    """Return the store that the environment names.

    Raises:
        ValidationError: no store speaks that URL, or its extra is not installed.
    """
    from ensemble_ray.record.opening import store_at
    from ensemble_ray.record.stores import StoreAddress  # the help does not need them

    return store_at(StoreAddress.of())


def where() -> str:
    """Describe where its runs are, for people; never with a password."""
    from ensemble_ray.record.runs import runs_directory
    from ensemble_ray.record.stores import StoreAddress

    address = StoreAddress.of()
    if not address.url:
        from pathlib import Path

        return str(runs_directory(Path(address.home)))
    location = address.url.partition("://")[2].partition("?")[0]  # a query may hold a password too
    return f"the database {location.rpartition('@')[2]}"


def no_runs() -> str:
    """Return what is said where nothing was recorded."""
    return f"There are no runs in {where()}. Make one: {own_command()} demo"


def as_data(run: RecordedRun) -> dict[str, object]:
    """Return a run of a list as JSON data."""
    return {
        "run_id": run.run_id,
        "state": run.state.value,
        "created_at": run.created_at.isoformat(),
        "origin": run.origin,
        "place": run.location,
        "owner": run.owner,
    }


def age_of(created_at: datetime, now: datetime) -> str:
    """Return how long ago that was, in its largest unit."""
    seconds = max(0, int((now - created_at).total_seconds()))
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{seconds // size} {unit}"


#: What can be done with a run that stands so.
_NEXT: Mapping[str, str] = {
    "interrupted": "Resume it: {resume}",
    "waiting": "When it is decided: {resume}",
    "cancelled": "Resume it: {resume}",
    "budget_exhausted": "Go on with a larger budget (max_tokens or max_cost): {resume}",
}
#: The same of a failed map-reduce whose tasks were made while it ran (S-MR-163).
_AGAIN = "Resume it, which tries again what failed: {resume}"


async def _next_of(run: RecordedRun) -> str:
    """Return what can be done with a run; empty: nothing. Only the program that began a run may have its definition."""
    from ensemble_ray.record.head import read_head
    from ensemble_ray.record.map_reduce_fold import refusal_of
    from ensemble_ray.record.stores import read_fork_advice, resume_advice

    is_spent = run.state.value == "budget_exhausted"
    field = "max_tokens=N" if is_spent else ""
    resume = resume_advice(run.run_id, run.origin, field=field, command=own_command())
    if run.state.value != "failed":
        return _NEXT.get(run.state.value, "").format(resume=resume)
    if (head := await read_head(own_store(), run.run_id)).is_dynamic:
        return "" if refusal_of(head) else _AGAIN.format(resume=resume)
    fork = await read_fork_advice(own_store(), run.run_id, run.origin, command=own_command())
    return f"Use what it did: {fork}" if fork else ""


def say_where(run_id: str) -> None:
    """Say where a run's record lies, which command shows it, and how it goes on if it did not complete."""
    from ensemble_ray.errors import EnsembleError, message_of
    from ensemble_ray.process.forks import run_blocking

    try:
        found = run_blocking(own_store().summary(run_id))
        advice = "" if found is None else run_blocking(_next_of(found))
    except EnsembleError as error:  # the run is done; that its record cannot be looked at is only said
        say(f"Record: cannot be looked at: {message_of(error)}")
        return
    if found is None:
        say("Record: none was kept")
        return
    lines = [f"Record: {found.location}", f"Show it: {own_command()} trace {run_id}"]
    say("\n".join([*lines, advice] if advice else lines))


MEMORY_VARIABLE = "ENSEMBLE_RAY_MEMORY"
#: The file where nothing names one.
_DEFAULT = "memory.db"
_SCHEMES = ("postgresql://", "postgres://")

MemoryPath = Annotated[
    str | None,
    typer.Option(
        "--file",
        "-f",
        metavar="PATH",
        help="The file of a SqliteMemory; default: ENSEMBLE_RAY_MEMORY, else memory.db in the current directory.",
        show_default=False,
    ),
]
MemoryUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="The database of a PostgresMemory, postgresql://...; ENSEMBLE_RAY_MEMORY may be such a URL too, with its password.",
        show_default=False,
    ),
]


def memory_tables(path: str | None, url: str | None) -> MemoryTables:
    """Return what is remembered in the file or the database that an option names, or the environment; it is there already.

    Raises:
        ValidationError: there is no such file, nothing was ever remembered in the database, or both are named.
        EnsembleError: the database cannot be reached.
    """
    from ensemble_ray.errors import ValidationError

    if path and url:
        raise ValidationError("Name one of --file and --store")
    named = path or url or os.environ.get(MEMORY_VARIABLE, "").strip() or _DEFAULT
    if url or (not path and named.startswith(_SCHEMES)):
        return _database(named)
    from ensemble_ray.memory.sqlite import MemoryFile  # the help does not need it

    found = Path(named).expanduser().absolute()
    if not found.is_file():
        raise ValidationError(
            f"There is no memory file {found}. Name the file of your SqliteMemory, or the database of your PostgresMemory: "
            f"--file PATH, --store URL, or export {MEMORY_VARIABLE}=PATH"
        )
    return MemoryFile(found)


def _database(url: str) -> MemoryTables:
    from ensemble_ray.errors import ValidationError
    from ensemble_ray.memory.postgres import MemoryDatabase, PostgresTables

    database = MemoryDatabase(url)
    if not database.is_made():
        raise ValidationError(
            f"There is no memory in {database.location}. Name the database of your PostgresMemory: --store URL"
        )
    return PostgresTables(database)


def model_of(tables: MemoryTables) -> EmbeddingModel | None:
    """Return the model that the vectors are of; None where there are none, or where it is not the library's.

    Raises:
        ValidationError: what the model needs is not installed.
    """
    from ensemble_ray.memory.embedding_models import LocalEmbeddingModel, resolve_embedding_model

    found = tables.embedding_model()
    if found is None:
        return None
    kind, _, name = found[0].partition(" ")
    if kind == LocalEmbeddingModel.__name__:
        return LocalEmbeddingModel()
    return resolve_embedding_model(f"openai:{name}") if kind == "OpenAIEmbeddingModel" else None
