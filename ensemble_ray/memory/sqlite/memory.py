"""SqliteMemory: scopes, long-term memory and entities in one file (S-MEM-116 to S-MEM-121). Package: memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ensemble_ray.memory.lasting import LastingMemory
from ensemble_ray.memory.sqlite.file import MemoryFile
from ensemble_ray.ports.memory import EmbeddingModel

__all__ = ["SqliteMemory"]


class SqliteMemory(LastingMemory):
    """Memory in one file, which processes share and which outlasts them.

    It is a store of scopes; `long_term` and `entities` are the other two kinds of memory, in the same file.

    Examples:
        >>> SqliteMemory("/var/lib/team/memory.db").path.name
        'memory.db'
    """

    def __init__(self, path: str | Path, *, embedding_model: EmbeddingModel | str | None = None) -> None:
        """Make one; the file is made when it is first used.

        Args:
            path: The file.
            embedding_model: Finds entries by meaning: a model, `"local"` or `"openai:MODEL"`. None: the most recent entries of
                a scope are found, whatever the query, and there is no long-term memory.

        Raises:
            ValidationError: the model is unknown, or what it needs is not installed.
        """
        self._file = MemoryFile(Path(path).expanduser().absolute())
        super().__init__(self._file, embedding_model)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def __reduce__(self) -> tuple[Any, ...]:
        return (_open, (str(self.path), self._model))

    def __repr__(self) -> str:
        return f"SqliteMemory({str(self.path)!r})"


def _open(path: str, model: EmbeddingModel | None) -> SqliteMemory:
    return SqliteMemory(path, embedding_model=model)
