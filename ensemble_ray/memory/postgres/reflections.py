"""PostgresReflectionStore: reflections in a PostgreSQL database, beside whatever else is remembered there. Package: memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ensemble_ray.memory.postgres.database import MemoryDatabase
from ensemble_ray.memory.postgres.schema import ensure_reflections
from ensemble_ray.memory.reflections import check_reflection, check_reflection_key
from ensemble_ray.values.reflection import TaskReflection

if TYPE_CHECKING:
    from ensemble_ray.memory.postgres.schema import Connection

__all__ = ["PostgresReflectionStore"]

T = TypeVar("T")


class PostgresReflectionStore:
    """Keeps reflections in a database, which the processes of several machines share. Fulfils `ReflectionStore`.

    The database may be that of a `PostgresMemory`.

    Examples:
        >>> PostgresReflectionStore("postgresql://me:secret@db.example.org/team").location
        'postgresql://db.example.org:5432/team'
    """

    def __init__(self, dsn: str) -> None:
        """Make one; the tables are made when they are first used.

        Args:
            dsn: The database: `postgresql://USER:PASSWORD@HOST:PORT/DATABASE`. The password is never shown.

        Raises:
            ValidationError: it is no URL of a database, or the driver is not installed.
        """
        self._dsn = dsn
        self._database = MemoryDatabase(dsn)
        self._has_table = False

    @property
    def location(self) -> str:
        """The database, without user and password."""
        return self._database.location

    def store(self, key: str, reflection: TaskReflection) -> None:
        """Keep a reflection, in place of the one that has that key.

        Raises:
            ValidationError: the key is blank, or it is no reflection.
            EnsembleError: the server cannot be reached, or refuses.
        """
        key = check_reflection_key(key)
        check_reflection(reflection)
        values = (_key_text(key), json.dumps(reflection.to_data()))

        def storing(connection: Connection) -> None:
            connection.execute(
                "INSERT INTO ensemble_ray_memory.reflections (key, body) VALUES (%s, %s)"
                " ON CONFLICT (key) DO UPDATE SET body = excluded.body",
                values,
            )

        self._run(storing)

    def retrieve(self, key: str) -> TaskReflection | None:
        """Return the reflection of a key; None where there is none.

        Raises:
            ValidationError: the key is blank.
            EnsembleError: the server cannot be reached, or refuses.
        """
        text = _key_text(check_reflection_key(key))

        def reading(connection: Connection) -> tuple[Any, ...] | None:
            query = "SELECT body FROM ensemble_ray_memory.reflections WHERE key = %s"
            return connection.execute(query, [text]).fetchone()

        row = self._run(reading)
        return None if row is None else TaskReflection(**json.loads(row[0]))

    def reflections(self) -> Mapping[str, TaskReflection]:
        """Return all reflections by key."""

        def reading(connection: Connection) -> list[tuple[Any, ...]]:
            query = 'SELECT key, body FROM ensemble_ray_memory.reflections ORDER BY key COLLATE "C"'
            return connection.execute(query).fetchall()

        return {json.loads(key): TaskReflection(**json.loads(body)) for key, body in self._run(reading)}

    def remove(self, key: str) -> None:
        """Delete the reflection of a key."""
        text = _key_text(check_reflection_key(key))

        def removing(connection: Connection) -> None:
            connection.execute("DELETE FROM ensemble_ray_memory.reflections WHERE key = %s", [text])

        self._run(removing)

    def close(self) -> None:
        """Close its connections; they are opened again when they are needed."""
        self._database.close()

    def _run(self, operation: Callable[[Connection], T]) -> T:
        """Do something in the table of reflections; doing it twice is the same as doing it once."""

        def with_table(connection: Connection) -> T:
            if not self._has_table:
                ensure_reflections(connection)
                self._has_table = True
            return operation(connection)

        return self._database.run(with_table)

    def __reduce__(self) -> tuple[Any, ...]:
        return (PostgresReflectionStore, (self._dsn,))

    def __repr__(self) -> str:
        return f"PostgresReflectionStore({self.location!r})"


def _key_text(key: str) -> str:
    """Return a key as JSON: PostgreSQL's texts refuse NUL."""
    return json.dumps(key)
