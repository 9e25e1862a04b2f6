"""MemoryFile: the tables of a memory file, and how processes share it. Package: memory.

In: entries with their vectors, policies of eviction. Out: entries; vectors of a scope. Any thread and any process may use the
same file. A change is one transaction: nobody reads half of it, and a process that is killed leaves the others' file whole.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import cast

from ensemble_ray.errors import EnsembleError
from ensemble_ray.memory.tables import StoredEntry
from ensemble_ray.process.forks import abandon, new_rlock, no_fork, track, was_quiet
from ensemble_ray.process.private_files import create_private_file
from ensemble_ray.values.memory import MemoryEntry
from ensemble_ray.values.trace import jsonable

__all__ = ["MemoryFile"]

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
