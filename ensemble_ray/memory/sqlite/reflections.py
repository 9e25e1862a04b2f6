"""SqliteReflectionStore: reflections in a memory file, beside whatever else is remembered there. Package: memory."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ensemble_ray.errors import EnsembleError
from ensemble_ray.memory.reflections import check_reflection, check_reflection_key
from ensemble_ray.memory.sqlite.file import MemoryFile
from ensemble_ray.process.forks import new_lock
from ensemble_ray.values.reflection import TaskReflection

__all__ = ["SqliteReflectionStore"]

#: Made when it is first needed: files of `SqliteMemory` need not have it.
_TABLE = "create table if not exists reflections (key text primary key, run_count integer not null, body text not null) without rowid"


class SqliteReflectionStore:
    """Keeps reflections in one file, which several processes may use at a time. Fulfils `ReflectionStore`.

    The file may be that of a `SqliteMemory`.

    Examples:
        >>> SqliteReflectionStore("/var/lib/team/memory.db").path.name
        'memory.db'
    """

    def __init__(self, path: str | Path) -> None:
        """Make one; the file is made when it is first used."""
        self._file = MemoryFile(Path(path).expanduser().absolute())
        self._lock = new_lock()
        self._has_table = False

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def store(self, key: str, reflection: TaskReflection) -> None:
        """Keep a reflection, in place of the one that has that key.

        Raises:
            ValidationError: the key is blank, or it is no reflection.
            EnsembleError: the file is none of ours.
        """
        key = check_reflection_key(key)
        check_reflection(reflection)
        self._make_table()
        with self._file.changing() as connection:
            connection.execute(
                "insert into reflections (key, run_count, body) values (?, ?, ?) "
                "on conflict (key) do update set run_count = excluded.run_count, body = excluded.body",
                (key, reflection.run_count, json.dumps(reflection.to_data())),
            )

    def retrieve(self, key: str) -> TaskReflection | None:
        """Return the reflection of a key; None where there is none.

        Raises:
            ValidationError: the key is blank.
            EnsembleError: the file is none of ours.
        """
        key = check_reflection_key(key)
        self._make_table()
        with self._file.reading() as connection:
            row = connection.execute("select body from reflections where key = ?", (key,)).fetchone()
        return None if row is None else TaskReflection(**json.loads(row[0]))

    def reflections(self) -> Mapping[str, TaskReflection]:
        """Return all reflections by key."""
        self._make_table()
        with self._file.reading() as connection:
            rows = connection.execute("select key, body from reflections order by key").fetchall()
        return {str(key): TaskReflection(**json.loads(body)) for key, body in rows}

    def remove(self, key: str) -> None:
        """Delete the reflection of a key; what was deleted is overwritten."""
        self._make_table()
        with self._file.changing() as connection:
            connection.execute("delete from reflections where key = ?", (check_reflection_key(key),))
        self._file.erase_traces()

    def close(self) -> None:
        """Let go of the file; it is opened again when it is needed."""
        self._file.close()

    def _make_table(self) -> None:
        with self._lock:
            if self._has_table:
                return
            try:
                with self._file.changing() as connection:
                    connection.execute(_TABLE)
            except sqlite3.DatabaseError as error:
                raise EnsembleError(f"{self.path} cannot keep reflections: {error}") from error
            self._has_table = True

    def __reduce__(self) -> tuple[Any, ...]:
        return (SqliteReflectionStore, (str(self.path),))

    def __repr__(self) -> str:
        return f"SqliteReflectionStore({str(self.path)!r})"
