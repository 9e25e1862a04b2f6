"""The recorded runs and the memory that commands work on, as the environment and options name them."""

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


RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, its start, or 'latest'.", show_default=False)]
#: Seconds of each unit of an age, largest first.
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def own_store() -> RunStore:
    """Return the store that the environment names.

    Raises:
        ValidationError: No store supports the URL, or an extra is not installed.
    """
    from ensemble_ray.record.opening import store_at
    from ensemble_ray.record.stores import StoreAddress  # the help does not need them

    return store_at(StoreAddress.of())


def where() -> str:
    """Describe the location of the records, never with a password."""
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
        "run_id": run.run_id,
        "state": run.state.value,
        "created_at": run.created_at.isoformat(),
        "origin": run.origin,
        "place": run.location,
        "owner": run.owner,
    }


def age_of(created_at: datetime, now: datetime) -> str:
    """Return the age in its largest unit."""
    seconds = max(0, int((now - created_at).total_seconds()))
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{seconds // size} {unit}"


#: The next step for a run in that state.
_NEXT: Mapping[str, str] = {
    "interrupted": "Resume it: {resume}",
    "waiting": "When it is decided: {resume}",
    "cancelled": "Resume it: {resume}",
    "budget_exhausted": "Resume it with a larger budget (max_tokens or max_cost): {resume}",
}
#: The next step for a failed map-reduce that creates its tasks while it runs (S-MR-163).
_AGAIN = "Resume it, which tries again what failed: {resume}"


async def _next_of(run: RecordedRun) -> str:
    """Return the next step for a run, or an empty string. A run may be resumable only from its own program."""
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
    return f"Reuse its results: {fork}" if fork else ""


def say_where(run_id: str) -> None:
    """Report the location of a run's record, the command that shows it, and how to resume an incomplete run."""
    from ensemble_ray.errors import EnsembleError, message_of
    from ensemble_ray.process.forks import run_blocking

    try:
        found = run_blocking(own_store().summary(run_id))
        advice = "" if found is None else run_blocking(_next_of(found))
    except EnsembleError as error:  # the run itself is done
        say(f"Record: cannot be looked at: {message_of(error)}")
        return
    if found is None:
        say("Record: none")
        return
    lines = [f"Record: {found.location}", f"Show it: {own_command()} trace {run_id}"]
    say("\n".join([*lines, advice] if advice else lines))


MEMORY_VARIABLE = "ENSEMBLE_RAY_MEMORY"
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
    """Return the existing memory in the file or database that an option or the environment names.

    Raises:
        ValidationError: The file does not exist, the database has no memory, or both options are set.
        EnsembleError: The database is unreachable.
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
    """Return the embedding model of the stored vectors; None without vectors, or if the library does not have that model.

    Raises:
        ValidationError: Packages of the model are not installed.
    """
    from ensemble_ray.memory.embedding_models import LocalEmbeddingModel, resolve_embedding_model

    found = tables.embedding_model()
    if found is None:
        return None
    kind, _, name = found[0].partition(" ")
    if kind == LocalEmbeddingModel.__name__:
        return LocalEmbeddingModel()
    return resolve_embedding_model(f"openai:{name}") if kind == "OpenAIEmbeddingModel" else None
