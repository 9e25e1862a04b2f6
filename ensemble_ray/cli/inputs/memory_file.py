"""The memory file that commands work on, and the model that its vectors are of. Package: cli."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ensemble_ray.memory.sqlite.file import MemoryFile
    from ensemble_ray.ports.memory import EmbeddingModel

__all__ = ["MEMORY_VARIABLE", "MemoryPath", "memory_file", "model_of"]

MEMORY_VARIABLE = "ENSEMBLE_RAY_MEMORY"
#: The file where nothing names one.
_DEFAULT = "memory.db"

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


def memory_file(path: str | None) -> MemoryFile:
    """Return the file that an option names, or the environment; it is there already.

    Raises:
        ValidationError: there is no such file.
    """
    from ensemble_ray.errors import ValidationError
    from ensemble_ray.memory.sqlite.file import MemoryFile  # the help does not need it

    found = Path(path or os.environ.get(MEMORY_VARIABLE, "").strip() or _DEFAULT).expanduser().absolute()
    if not found.is_file():
        raise ValidationError(
            f"There is no memory file {found}. Name the file of your SqliteMemory: --file PATH, or export "
            f"{MEMORY_VARIABLE}=PATH"
        )
    return MemoryFile(found)


def model_of(file: MemoryFile) -> EmbeddingModel | None:
    """Return the model that the file's vectors are of; None where it has none, or one that is not the library's.

    Raises:
        ValidationError: what the model needs is not installed.
    """
    from ensemble_ray.memory.embedding_models import LocalEmbeddingModel, resolve_embedding_model

    found = file.embedding_model()
    if found is None:
        return None
    kind, _, name = found[0].partition(" ")
    if kind == LocalEmbeddingModel.__name__:
        return LocalEmbeddingModel()
    return resolve_embedding_model(f"openai:{name}") if kind == "OpenAIEmbeddingModel" else None
