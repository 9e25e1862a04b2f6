"""`SqliteMemory` and `SqliteReflectionStore`: persistent memory in one SQLite file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from ensemble_ray.errors import EnsembleError
from ensemble_ray.memory.lasting import LastingMemory, StoredEntry
from ensemble_ray.memory.store import check_reflection, check_reflection_key
from ensemble_ray.ports import EmbeddingModel
from ensemble_ray.process.forks import abandon, new_lock, new_rlock, no_fork, track, was_quiet
from ensemble_ray.process.private_files import create_private_file
from ensemble_ray.values.memory import MemoryEntry, TaskReflection
from ensemble_ray.values.trace import jsonable

#: This module was a package: `process/moved.py` finds its old modules.
__path__: list[str] = []

#: Version of the tables. A file of a later version is refused.
_VERSION = 1
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
_COLUMNS = "id, content, structured, stored_at, metadata, entry_id"
#: Longest wait for a change by another process, s.
_PATIENCE_S = 60.0
#: Created on first use: a file of `SqliteMemory` alone does not need it.
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
            embedding_model: Finds entries by meaning: a model, `"local"` or `"openai:MODEL"`. None: the most recent entries of
                a scope are found, whatever the query, and there is no long-term memory.

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


class SqliteReflectionStore:
    """Reflections in one file, which several processes may share. Fulfils `ReflectionStore`.

    The file may be the file of a `SqliteMemory`.

    Examples:
        >>> SqliteReflectionStore("/var/lib/team/memory.db").path.name
        'memory.db'
    """

    def __init__(self, path: str | Path) -> None:
        """Set the path. The file is created on first use."""
        self._file = MemoryFile(Path(path).expanduser().absolute())
        self._lock = new_lock()
        self._has_table = False

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def store(self, key: str, reflection: TaskReflection) -> None:
        """Store a reflection and replace an earlier one of that key.

        Raises:
            ValidationError: The key is blank, or the value is not a `TaskReflection`.
            EnsembleError: The file is not a memory file.
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
        """Return the reflection of a key, or None.

        Raises:
            ValidationError: The key is blank.
            EnsembleError: The file is not a memory file.
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
        """Delete the reflection of a key and overwrite its content."""
        self._make_table()
        with self._file.changing() as connection:
            connection.execute("delete from reflections where key = ?", (check_reflection_key(key),))
        self._file.erase_traces()

    def close(self) -> None:
        """Close the file. The next operation opens it again."""
        self._file.close()

    def _make_table(self) -> None:
        with self._lock:
            if self._has_table:
                return
            try:
                with self._file.changing() as connection:
                    connection.execute(_REFLECTIONS)
            except sqlite3.DatabaseError as error:
                raise EnsembleError(f"{self.path} cannot keep reflections: {error}") from error
            self._has_table = True

    def __reduce__(self) -> tuple[Any, ...]:
        return (SqliteReflectionStore, (str(self.path),))

    def __repr__(self) -> str:
        return f"SqliteReflectionStore({str(self.path)!r})"


class MemoryFile:
    """The tables of one file, with one connection per process. Fulfils `MemoryTables`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = new_rlock()
        self._connection: sqlite3.Connection | None = None
        track(self)

    @property
    def location(self) -> str:
        return str(self.path)

    @contextmanager
    def reading(self) -> Generator[sqlite3.Connection]:
        """Yield the connection, to one thread at a time."""
        with self._lock, no_fork():
            yield self._connect()

    @contextmanager
    def changing(self) -> Generator[sqlite3.Connection]:
        """Yield the connection in a transaction, which an error rolls back."""
        with self._lock, no_fork():
            connection = self._connect()
            connection.execute("begin immediate")
            try:
                yield connection
            except BaseException:
                connection.execute("rollback")
                raise
            connection.execute("commit")

    def close(self) -> None:
        with self._lock, no_fork():
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def after_fork(self) -> None:
        """Drop the parent's connection: SQLite would mistake the parent's locks for the child's. Close it only if it was idle."""
        if was_quiet():
            self.close()
        else:
            abandon(self._connection)
            self._connection = None

    # Entries.

    def add(self, scope: str, entry: MemoryEntry, vector: bytes | None) -> None:
        with self.changing() as connection:
            if entry.entry_id:
                taking = connection.execute("insert or ignore into taken values (?, ?)", (scope, entry.entry_id))
                if not taking.rowcount:
                    return
            _insert(connection, scope, entry, vector)

    def newest(self, scope: str, most: int) -> list[MemoryEntry]:
        query = f"select {_COLUMNS} from entries where scope = ? order by id desc limit ?"  # noqa: S608  names of ours
        with self.reading() as connection:
            rows = connection.execute(query, (scope, most)).fetchall()
        return [_to_stored(row).entry for row in reversed(rows)]

    def entries(self, scope: str) -> list[StoredEntry]:
        query = f"select {_COLUMNS} from entries where scope = ? order by id"  # noqa: S608  names of ours
        with self.reading() as connection:
            return [_to_stored(row) for row in connection.execute(query, (scope,))]

    def entries_of(self, rows: Sequence[int]) -> list[MemoryEntry]:
        marks = ", ".join("?" * len(rows))
        query = f"select {_COLUMNS} from entries where id in ({marks})"  # noqa: S608  question marks alone
        with self.reading() as connection:
            found = {stored.row: stored.entry for stored in map(_to_stored, connection.execute(query, list(rows)))}
        return [found[row] for row in rows if row in found]

    def replace(self, scope: str, old: Sequence[int], new: Sequence[tuple[MemoryEntry, bytes | None]]) -> bool:
        with self.changing() as connection:
            if new and not _has_all(connection, old):
                return False
            connection.executemany("delete from entries where id = ?", [(row,) for row in old])
            for entry, vector in new:
                _insert(connection, scope, entry, vector)
        if old:
            self.erase_traces()
        return True

    def clear(self, scope: str) -> None:
        with self.changing() as connection:
            connection.execute("delete from entries where scope = ?", (scope,))
            connection.execute("delete from taken where scope = ?", (scope,))
        self.erase_traces()

    def scopes(self) -> Mapping[str, int]:
        with self.reading() as connection:
            rows = connection.execute("select scope, count(*) from entries group by scope order by scope").fetchall()
        return {cast("str", scope): cast("int", count) for scope, count in rows}

    # Vectors.

    def nearest(self, scope: str, vector: bytes, most: int) -> None:
        pass  # SQLite has no vector search

    def extent(self, scope: str) -> tuple[int, int]:
        query = "select count(*), coalesce(max(id), 0) from entries where scope = ? and vector is not null"
        with self.reading() as connection:
            count, newest = connection.execute(query, (scope,)).fetchone()
        return int(count), int(newest)

    def vectors(self, scope: str, after: int) -> list[tuple[int, bytes]]:
        query = "select id, vector from entries where scope = ? and id > ? and vector is not null order by id"
        with self.reading() as connection:
            return connection.execute(query, (scope, after)).fetchall()

    def without_vector(self, scope: str) -> list[StoredEntry]:
        query = f"select {_COLUMNS} from entries where scope = ? and vector is null order by id"  # noqa: S608  names of ours
        with self.reading() as connection:
            return [_to_stored(row) for row in connection.execute(query, (scope,))]

    def set_vectors(self, vectors: Sequence[tuple[bytes, int]]) -> None:
        with self.changing() as connection:
            connection.executemany("update entries set vector = ? where id = ? and vector is null", vectors)

    def embedding(self, model: str, dimensions: int) -> tuple[str, int]:
        with self.changing() as connection:
            connection.execute("insert or ignore into embedding values (1, ?, ?)", (model, dimensions))
            found: tuple[str, int] = connection.execute("select model, dimensions from embedding").fetchone()
        return found

    def embedding_model(self) -> tuple[str, int] | None:
        with self.reading() as connection:
            found: tuple[str, int] | None = connection.execute("select model, dimensions from embedding").fetchone()
        return found

    # Facts about entities.

    def put_fact(self, name: str, fact: str) -> None:
        with self.changing() as connection:
            connection.execute(
                "insert into entities (name, fact) values (?, ?) on conflict (name) do update set fact = excluded.fact",
                (name, fact),
            )

    def fact(self, name: str) -> str | None:
        with self.reading() as connection:
            row = connection.execute("select fact from entities where name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def facts(self) -> dict[str, str]:
        with self.reading() as connection:
            rows = connection.execute("select name, fact from entities order by id").fetchall()
        return {str(name): str(fact) for name, fact in rows}

    def has_facts(self) -> bool:
        with self.reading() as connection:
            return connection.execute("select 1 from entities limit 1").fetchone() is not None

    def remove_fact(self, name: str) -> None:
        with self.changing() as connection:
            connection.execute("delete from entities where name = ?", (name,))
        self.erase_traces()

    # The file.

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            create_private_file(self.path, b"")  # memory may contain personal data
        try:
            connection = sqlite3.connect(self.path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
            _check_database(connection, self.path)
            connection.execute("pragma journal_mode = wal")
            # A power failure may lose the last changes, but never part of one.
            connection.execute("pragma synchronous = normal")
            connection.execute("pragma secure_delete = on")  # overwrites deleted data
            if connection.execute("pragma user_version").fetchone()[0] < _VERSION:
                connection.executescript(f"begin immediate; {_TABLES} pragma user_version = {_VERSION}; commit;")
        except sqlite3.DatabaseError as error:
            raise EnsembleError(f"{self.path} cannot be used as a memory file: {error}") from error
        return connection

    def erase_traces(self) -> None:
        """Truncate the write-ahead log, which still contains deleted data. If there are readers, the last one does it."""
        with suppress(sqlite3.OperationalError), self.reading() as connection, closing(connection.cursor()) as cursor:
            cursor.execute("pragma wal_checkpoint(truncate)")


def _check_database(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a foreign database, or one of a later version, before any change."""
    version = connection.execute("pragma user_version").fetchone()[0]
    tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
    if tables and not {"entries", "taken", "entities", "embedding"} <= tables:
        connection.close()
        raise EnsembleError(f"{path} cannot be used as a memory file: it is a database of something else")
    if version > _VERSION:
        connection.close()
        raise EnsembleError(f"{path} was written by a later version of ensemble_ray: it cannot be read here")


def _has_all(connection: sqlite3.Connection, rows: Sequence[int]) -> bool:
    found = connection.execute(
        "select count(*) from entries where id in (select value from json_each(?))", (json.dumps(rows),)
    )
    return bool(found.fetchone()[0] == len(rows))


def _insert(connection: sqlite3.Connection, scope: str, entry: MemoryEntry, vector: bytes | None) -> None:
    structured = None if entry.structured_content is None else json.dumps(jsonable(entry.structured_content))
    connection.execute(
        "insert into entries (scope, content, structured, stored_at, metadata, entry_id, vector) values (?, ?, ?, ?, ?, ?, ?)",
        (
            scope,
            _as_stored(entry.content),
            structured,
            None if entry.stored_at is None else entry.stored_at.isoformat(),
            json.dumps(dict(entry.metadata)),
            entry.entry_id,
            vector,
        ),
    )


def _as_stored(text: str) -> str | bytes:
    """Return a text for a column. A text with lone surrogates, which UTF-8 cannot encode, becomes bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def _to_stored(row: tuple[int, str | bytes, str | None, str | None, str, str]) -> StoredEntry:
    number, content, structured, stored_at, metadata, entry_id = row
    entry = MemoryEntry(
        content=content if isinstance(content, str) else content.decode("utf-8", "surrogatepass"),
        structured_content=None if structured is None else json.loads(structured),
        stored_at=None if stored_at is None else datetime.fromisoformat(stored_at),
        metadata=json.loads(metadata),
        entry_id=entry_id,
    )
    return StoredEntry(number, entry)
