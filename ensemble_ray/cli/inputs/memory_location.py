"""The memory that commands work on, a file or a database, and the model that its vectors are of. Package: cli."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ensemble_ray.memory.tables import MemoryTables
    from ensemble_ray.ports.memory import EmbeddingModel

__all__ = ["MEMORY_VARIABLE", "MemoryPath", "MemoryUrl", "memory_tables", "model_of"]

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
    from ensemble_ray.memory.sqlite.file import MemoryFile  # the help does not need it

    found = Path(named).expanduser().absolute()
    if not found.is_file():
        raise ValidationError(
            f"There is no memory file {found}. Name the file of your SqliteMemory, or the database of your PostgresMemory: "
            f"--file PATH, --store URL, or export {MEMORY_VARIABLE}=PATH"
        )
    return MemoryFile(found)


def _database(url: str) -> MemoryTables:
    from ensemble_ray.errors import ValidationError
    from ensemble_ray.memory.postgres.database import MemoryDatabase
    from ensemble_ray.memory.postgres.tables import PostgresTables

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
