"""Memory that lasts, in one file of SQLite."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime
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

#: Of the tables below; a file of a later version is refused.
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
#: How long a change waits for another process's, s.
_PATIENCE_S = 60.0


class MemoryFile:
    """One file; a connection of its own in each process. Fulfils `MemoryTables`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = new_rlock()
        self._connection: sqlite3.Connection | None = None
        track(self)

    @property
    def location(self) -> str:
        """The file."""
        return str(self.path)

    @contextmanager
    def reading(self) -> Generator[sqlite3.Connection]:
        """Use the connection in the block; one thread at a time."""
        with self._lock, no_fork():
            yield self._connect()

    @contextmanager
    def changing(self) -> Generator[sqlite3.Connection]:
        """Make one change in the block: all of it, or nothing where the block raises."""
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
        """Let go of the file; it is opened again when it is needed."""
        with self._lock, no_fork():
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def after_fork(self) -> None:
        """Close the parent's connection, which is at rest: SQLite would take the parent's locks for the child's."""
        if was_quiet():
            self.close()
        else:
            abandon(self._connection)
            self._connection = None

    # Entries.

    def add(self, scope: str, entry: MemoryEntry, vector: bytes | None) -> None:
        """Add an entry; one whose id the scope took before is left out."""
        with self.changing() as connection:
            if entry.entry_id:
                taking = connection.execute("insert or ignore into taken values (?, ?)", (scope, entry.entry_id))
                if not taking.rowcount:
                    return
            _insert(connection, scope, entry, vector)

    def newest(self, scope: str, most: int) -> list[MemoryEntry]:
        """Return the newest entries of a scope, the oldest of them first."""
        query = f"select {_COLUMNS} from entries where scope = ? order by id desc limit ?"  # noqa: S608  names of ours
        with self.reading() as connection:
            rows = connection.execute(query, (scope, most)).fetchall()
        return [_to_stored(row).entry for row in reversed(rows)]

    def entries(self, scope: str) -> list[StoredEntry]:
        """Return all entries of a scope, in storing order."""
        query = f"select {_COLUMNS} from entries where scope = ? order by id"  # noqa: S608  names of ours
        with self.reading() as connection:
            return [_to_stored(row) for row in connection.execute(query, (scope,))]

    def entries_of(self, rows: Sequence[int]) -> list[MemoryEntry]:
        """Return the entries of these rows, in this order; those that are gone are left out."""
        marks = ", ".join("?" * len(rows))
        query = f"select {_COLUMNS} from entries where id in ({marks})"  # noqa: S608  question marks alone
        with self.reading() as connection:
            found = {stored.row: stored.entry for stored in map(_to_stored, connection.execute(query, list(rows)))}
        return [found[row] for row in rows if row in found]

    def replace(self, scope: str, old: Sequence[int], new: Sequence[tuple[MemoryEntry, bytes | None]]) -> bool:
        """Delete rows of a scope, and add entries behind the others; False: nothing, since some of the rows were gone."""
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
        """Delete the entries of a scope, and what ids it took."""
        with self.changing() as connection:
            connection.execute("delete from entries where scope = ?", (scope,))
            connection.execute("delete from taken where scope = ?", (scope,))
        self.erase_traces()

    def scopes(self) -> Mapping[str, int]:
        """Return how many entries each scope has."""
        with self.reading() as connection:
            rows = connection.execute("select scope, count(*) from entries group by scope order by scope").fetchall()
        return {cast("str", scope): cast("int", count) for scope, count in rows}

    # Vectors.

    def nearest(self, scope: str, vector: bytes, most: int) -> None:
        """Return None: SQLite cannot search by vectors itself."""

    def extent(self, scope: str) -> tuple[int, int]:
        """Return how many vectors a scope has and the newest one's row: two that are equal have the same vectors."""
        query = "select count(*), coalesce(max(id), 0) from entries where scope = ? and vector is not null"
        with self.reading() as connection:
            count, newest = connection.execute(query, (scope,)).fetchone()
        return int(count), int(newest)

    def vectors(self, scope: str, after: int) -> list[tuple[int, bytes]]:
        """Return rows and vectors of a scope, of the rows behind that one."""
        query = "select id, vector from entries where scope = ? and id > ? and vector is not null order by id"
        with self.reading() as connection:
            return connection.execute(query, (scope, after)).fetchall()

    def without_vector(self, scope: str) -> list[StoredEntry]:
        """Return the entries that were stored without a model."""
        query = f"select {_COLUMNS} from entries where scope = ? and vector is null order by id"  # noqa: S608  names of ours
        with self.reading() as connection:
            return [_to_stored(row) for row in connection.execute(query, (scope,))]

    def set_vectors(self, vectors: Sequence[tuple[bytes, int]]) -> None:
        """Add the vectors of rows that have none."""
        with self.changing() as connection:
            connection.executemany("update entries set vector = ? where id = ? and vector is null", vectors)

    def embedding(self, model: str, dimensions: int) -> tuple[str, int]:
        """Return the model and the length of the file's vectors; these, where it has none yet."""
        with self.changing() as connection:
            connection.execute("insert or ignore into embedding values (1, ?, ?)", (model, dimensions))
            found: tuple[str, int] = connection.execute("select model, dimensions from embedding").fetchone()
        return found

    def embedding_model(self) -> tuple[str, int] | None:
        """Return the model and the length of the file's vectors; None where it has none."""
        with self.reading() as connection:
            found: tuple[str, int] | None = connection.execute("select model, dimensions from embedding").fetchone()
        return found

    # Facts about entities.

    def put_fact(self, name: str, fact: str) -> None:
        """Keep a fact, in place of an earlier one of that name."""
        with self.changing() as connection:
            connection.execute(
                "insert into entities (name, fact) values (?, ?) on conflict (name) do update set fact = excluded.fact",
                (name, fact),
            )

    def fact(self, name: str) -> str | None:
        """Return a fact; None where none is known."""
        with self.reading() as connection:
            row = connection.execute("select fact from entities where name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def facts(self) -> dict[str, str]:
        """Return all facts by name, in order of first put."""
        with self.reading() as connection:
            rows = connection.execute("select name, fact from entities order by id").fetchall()
        return {str(name): str(fact) for name, fact in rows}

    def has_facts(self) -> bool:
        """Return whether there is any."""
        with self.reading() as connection:
            return connection.execute("select 1 from entities limit 1").fetchone() is not None

    def remove_fact(self, name: str) -> None:
        """Delete a fact."""
        with self.changing() as connection:
            connection.execute("delete from entities where name = ?", (name,))
        self.erase_traces()

    # The file.

    def _connect(self) -> sqlite3.Connection:
        """Return this process's connection; a forked child must not use its parent's."""
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            create_private_file(self.path, b"")  # what is remembered may be about people
        try:
            connection = sqlite3.connect(self.path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
            _check_database(connection, self.path)
            connection.execute("pragma journal_mode = wal")
            connection.execute(
                "pragma synchronous = normal"
            )  # a power failure may undo the last changes, never half of one
            connection.execute("pragma secure_delete = on")  # what is deleted is overwritten
            if connection.execute("pragma user_version").fetchone()[0] < _VERSION:
                connection.executescript(f"begin immediate; {_TABLES} pragma user_version = {_VERSION}; commit;")
        except sqlite3.DatabaseError as error:
            raise EnsembleError(f"{self.path} cannot be used as a memory file: {error}") from error
        return connection

    def erase_traces(self) -> None:
        """Empty the write-ahead log, which still has what was deleted; where others read, the last of them does it."""
        with suppress(sqlite3.OperationalError), self.reading() as connection, closing(connection.cursor()) as cursor:
            cursor.execute("pragma wal_checkpoint(truncate)")


def _check_database(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a database that is not this version's, before anything in it is changed."""
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
    """Return a text as a column takes it; one with halves of surrogate pairs, which are no UTF-8, as bytes."""
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
