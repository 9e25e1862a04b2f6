"""`SqliteMemory` and `SqliteReflectionStore`: persistent memory in one SQLite file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ensemble_ray.errors import EnsembleError
from ensemble_ray.memory.lasting import (
    Execute,
    LastingMemory,
    LastingReflectionStore,
    MemoryTables,
    T,
    data_of,
    entry_from,
)
from ensemble_ray.ports import EmbeddingModel
from ensemble_ray.process.concurrency import abandon, new_rlock, no_fork, track, was_quiet
from ensemble_ray.process.private_files import create_private_file
from ensemble_ray.values.memory import MemoryEntry, TaskReflection

#: This module was a package: `process/moved.py` finds its old modules.
__path__: list[str] = []

_VERSION = 1  # of the tables
_TABLES = """
create table if not exists entries (
    id integer primary key autoincrement,
    scope text not null,
    content text not null,
    structured text,
    stored_at text,
    metadata text not null,
    entry_id text not null,
    vector blob
);
create index if not exists entries_by_scope on entries (scope, id);
create index if not exists entries_with_vector on entries (scope, id) where vector is not null;
create index if not exists entries_without_vector on entries (scope, id) where vector is null;
create table if not exists taken (scope text not null, entry_id text not null, primary key (scope, entry_id)) without rowid;
create table if not exists entities (id integer primary key autoincrement, name text not null unique, fact text not null);
create table if not exists embedding (id integer primary key check (id = 1), model text not null, dimensions integer not null);
"""
_PATIENCE_S = 60.0
#: created on first use
_REFLECTIONS = "create table if not exists reflections (key text primary key, run_count integer not null, body text not null) without rowid"


class SqliteMemory(LastingMemory):
    """Memory in one file, which several processes may share.

    The object is a store of scopes. `long_term` and `entities` are long-term memory and facts in the same file.

    Examples:
        >>> SqliteMemory("/var/lib/team/memory.db").path.name
        'memory.db'
    """

    def __init__(self, path: str | Path, *, embedding_model: EmbeddingModel | str | None = None) -> None:
        """Resolve the model. The file is created on first use.

        Args:
            path: The file.
            embedding_model: Finds entries by meaning: a model, `"local"` or `"openai:MODEL"`. None: the newest entries of a
                scope are found, and there is no long-term memory.

        Raises:
            ValidationError: The model is unknown, or a package is missing.
        """
        self._file = MemoryFile(Path(path).expanduser().absolute())
        super().__init__(self._file, embedding_model)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SqliteMemory, embedding_model=self._model), (str(self.path),)

    def __repr__(self) -> str:
        return f"SqliteMemory({str(self.path)!r})"


class SqliteReflectionStore(LastingReflectionStore):
    """Reflections in one file, which several processes may share. Fulfils `ReflectionStore`.

    The file may be the file of a `SqliteMemory`.

    Examples:
        >>> SqliteReflectionStore("/var/lib/team/memory.db").path.name
        'memory.db'
    """

    def __init__(self, path: str | Path) -> None:
        """Set the path. The file is created on first use."""
        self._file = MemoryFile(Path(path).expanduser().absolute())
        super().__init__(self._file)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def _make_table(self) -> None:
        try:
            self._file.change(_REFLECTIONS)
        except sqlite3.DatabaseError as error:
            raise EnsembleError(f"{self.path} cannot keep reflections: {error}") from error

    def _put(self, key: str, reflection: TaskReflection) -> None:
        self._file.change(
            "insert into reflections (key, run_count, body) values (?, ?, ?) "
            "on conflict (key) do update set run_count = excluded.run_count, body = excluded.body",
            *(key, reflection.run_count, json.dumps(reflection.to_data())),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (SqliteReflectionStore, (str(self.path),))

    def __repr__(self) -> str:
        return f"SqliteReflectionStore({str(self.path)!r})"


class MemoryFile(MemoryTables):
    COLUMNS = "content, structured, stored_at, metadata, entry_id"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.location = str(path)
        self._lock = new_rlock()
        self._connection: sqlite3.Connection | None = None
        track(self)

    @contextmanager
    def _using(self) -> Generator[sqlite3.Connection]:
        with self._lock, no_fork():
            if self._connection is None:
                self._connection = self._open()
            yield self._connection

    @contextmanager
    def _changing(self) -> Generator[sqlite3.Connection]:
        with self._using() as connection:
            connection.execute("begin immediate")
            try:
                yield connection
            except BaseException:
                connection.execute("rollback")
                raise
            connection.execute("commit")

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._using() as connection:
            return connection.execute(query, values).fetchall()

    def change(self, query: str, *values: object) -> None:
        with self._changing() as connection:
            connection.execute(query, values)

    def change_scope(self, scope: str, operation: Callable[[Execute], T]) -> T:  # noqa: ARG002  the whole file is locked
        with self._changing() as connection:
            return operation(lambda query, rows: connection.executemany(query, rows).rowcount)

    def close(self) -> None:
        with self._lock, no_fork():
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def after_fork(self) -> None:
        """Drop the parent's connection, whose locks SQLite would mistake for the child's. Close it only if it was idle."""
        if was_quiet():
            self.close()
        else:
            abandon(self._connection)
            self._connection = None

    def erase_traces(self) -> None:
        """Truncate the write-ahead log, which still contains deleted data. If there are readers, the last one does it."""
        with suppress(sqlite3.OperationalError), self._using() as connection, closing(connection.cursor()) as cursor:
            cursor.execute("pragma wal_checkpoint(truncate)")

    def add(self, scope: str, entry: MemoryEntry, vector: bytes | None) -> None:
        accept = "insert into taken values (?, ?) on conflict do nothing"

        def adding(execute: Execute) -> None:
            if not entry.entry_id or execute(accept, [(scope, entry.entry_id)]):
                self.insert(execute, scope, [(entry, vector)])

        self.change_scope(scope, adding)

    def entry_columns(self, entry: MemoryEntry) -> tuple[object, ...]:
        data = data_of(entry)
        content: str | bytes = entry.content
        try:
            entry.content.encode()
        except UnicodeEncodeError:  # UTF-8 cannot encode lone surrogates
            content = entry.content.encode("utf-8", "surrogatepass")
        structured = None if data["structured"] is None else json.dumps(data["structured"])
        return content, structured, data["stored_at"], json.dumps(data["metadata"]), entry.entry_id

    def entry_of(self, *columns: Any) -> MemoryEntry:
        content, structured, stored_at, metadata, entry_id = columns
        return entry_from(
            content=content if isinstance(content, str) else content.decode("utf-8", "surrogatepass"),
            structured=None if structured is None else json.loads(structured),
            stored_at=stored_at,
            metadata=json.loads(metadata),
            entry_id=entry_id,
        )

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            create_private_file(self.path, b"")  # memory may contain personal data
        try:
            connection = sqlite3.connect(self.path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
            version = connection.execute("pragma user_version").fetchone()[0]
            tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
            if tables and not {"entries", "taken", "entities", "embedding"} <= tables:
                connection.close()
                raise EnsembleError(f"{self.path} cannot be used as a memory file: it is a database of something else")
            if version > _VERSION:
                connection.close()
                raise EnsembleError(
                    f"{self.path} was written by a later version of ensemble_ray: it cannot be read here"
                )
            connection.execute("pragma journal_mode = wal")
            # A power failure may lose the last changes, but never part of one.
            connection.execute("pragma synchronous = normal")
            connection.execute("pragma secure_delete = on")  # overwrites deleted data
            if connection.execute("pragma user_version").fetchone()[0] < _VERSION:
                connection.executescript(f"begin immediate; {_TABLES} pragma user_version = {_VERSION}; commit;")
        except sqlite3.DatabaseError as error:
            raise EnsembleError(f"{self.path} cannot be used as a memory file: {error}") from error
        return connection
