"""PostgresMemory: scopes, long-term memory and entities in a PostgreSQL database (S-MEM-140 to S-MEM-144). Package: memory."""

from __future__ import annotations

from typing import Any

from ensemble_ray.memory.lasting import LastingMemory
from ensemble_ray.memory.postgres.database import MemoryDatabase
from ensemble_ray.memory.postgres.tables import PostgresTables
from ensemble_ray.ports.memory import EmbeddingModel

__all__ = ["PostgresMemory"]


class PostgresMemory(LastingMemory):
    """Memory in a database, which the processes of several machines share.

    It is a store of scopes; `long_term` and `entities` are the other two kinds of memory, in the same database. Where the server
    has the extension pgvector it finds entries by meaning itself; else the process that asks does.

    Examples:
        >>> PostgresMemory("postgresql://me:secret@db.example.org/team").location
        'postgresql://db.example.org:5432/team'
    """

    def __init__(self, dsn: str, *, embedding_model: EmbeddingModel | str | None = None) -> None:
        """Make one; the tables are made when they are first used.

        Args:
            dsn: The database: `postgresql://USER:PASSWORD@HOST:PORT/DATABASE`. The password is never shown.
            embedding_model: Finds entries by meaning: a model, `"local"` or `"openai:MODEL"`. None: the most recent entries of
                a scope are found, whatever the query, and there is no long-term memory.

        Raises:
            ValidationError: it is no URL of a database, the model is unknown, or what one of them needs is not installed.
        """
        self._dsn = dsn
        super().__init__(PostgresTables(MemoryDatabase(dsn)), embedding_model)

    @property
    def location(self) -> str:
        """The database, without user and password."""
        return self._tables.location

    def __reduce__(self) -> tuple[Any, ...]:
        return (_open, (self._dsn, self._model))

    def __repr__(self) -> str:
        return f"PostgresMemory({self.location!r})"


def _open(dsn: str, model: EmbeddingModel | None) -> PostgresMemory:
    return PostgresMemory(dsn, embedding_model=model)
