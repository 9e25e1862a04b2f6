"""`PostgresMemory` and `PostgresReflectionStore`: persistent memory in a PostgreSQL database."""

from __future__ import annotations

import json
import os
import select
from array import array
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ensemble_ray.errors import EnsembleError
from ensemble_ray.memory.lasting import LastingMemory, LastingReflectionStore, MemoryTables, StoredEntry
from ensemble_ray.ports import EmbeddingModel
from ensemble_ray.process.postgres_server import (
    SESSION,
    SET_SESSION,
    advice_for,
    first_line,
    location_of,
    parameters_of,
    try_patiently,
)
from ensemble_ray.values.memory import MemoryEntry, TaskReflection
from ensemble_ray.values.trace import jsonable

if TYPE_CHECKING:
    import psycopg

    #: a row is a tuple of any column values, as the driver types it
    Connection = psycopg.Connection[tuple[Any, ...]]

#: This module was a package: `process/moved.py` finds its old modules.
__path__: list[str] = []


T = TypeVar("T")

_PATIENCE_S = 30.0
_MAX_CONNECTIONS = 4
_SESSION = {**SESSION, "lock_timeout": "60s", "statement_timeout": "120s"}

SCHEMA = "ensemble_ray_memory"
_VERSION = 1  # of the tables
#: Key of the advisory lock for the creation of tables; an arbitrary number.
_CREATION_LOCK = 0x6D656D6F72696573
_EXTENSION = "vector"

_TABLES = """
CREATE TABLE ensemble_ray_memory.entries (
    id bigserial PRIMARY KEY,
    scope text NOT NULL,
    entry text NOT NULL,
    vector {vector_type}
);
CREATE INDEX entries_by_scope ON ensemble_ray_memory.entries (scope, id);
CREATE INDEX entries_without_vector ON ensemble_ray_memory.entries (scope, id) WHERE vector IS NULL;
CREATE TABLE ensemble_ray_memory.taken (scope text NOT NULL, entry_id text NOT NULL, PRIMARY KEY (scope, entry_id));
CREATE TABLE ensemble_ray_memory.entities (id bigserial PRIMARY KEY, name text NOT NULL UNIQUE, fact text NOT NULL);
CREATE TABLE ensemble_ray_memory.embedding (
    id integer PRIMARY KEY CHECK (id = 1), model text NOT NULL, dimensions integer NOT NULL
);
CREATE TABLE ensemble_ray_memory.version (version integer NOT NULL);
"""
#: Adds an entry unless its scope accepted its id before. The lock of the scope makes rows visible in the order of their
#: numbers: a reader that has seen a row has seen all earlier ones.
_FUNCTION = """
CREATE FUNCTION ensemble_ray_memory.add_entry(to_scope text, with_id text, new_entry text, new_vector {vector_type})
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(1835363693, hashtext(to_scope));
    IF with_id <> '' THEN
        INSERT INTO ensemble_ray_memory.taken VALUES (to_scope, with_id) ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            RETURN;
        END IF;
    END IF;
    INSERT INTO ensemble_ray_memory.entries (scope, entry, vector) VALUES (to_scope, new_entry, new_vector);
END $$;
"""
#: Reads the catalogue's tables. `to_regclass` answers from a cache that a wait for a lock does not refresh.
_EXISTS = """
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = 'ensemble_ray_memory' AND c.relname = 'version'
)
"""
#: created on first use
_REFLECTIONS = "CREATE TABLE ensemble_ray_memory.reflections (key text PRIMARY KEY, body text NOT NULL)"
_HAS_REFLECTIONS = _EXISTS.replace("'version'", "'reflections'")
_HAS_SCHEMA = "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'ensemble_ray_memory')"
_IS_AVAILABLE = "SELECT EXISTS (SELECT FROM pg_catalog.pg_available_extensions WHERE name = 'vector')"
_EXTENSION_SCHEMA = """
SELECT quote_ident(n.nspname) FROM pg_catalog.pg_extension e JOIN pg_catalog.pg_namespace n ON n.oid = e.extnamespace
WHERE e.extname = 'vector'
"""
_COLUMN_TYPE = """
SELECT quote_ident(n.nspname), t.typname FROM pg_catalog.pg_attribute a
JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
JOIN pg_catalog.pg_namespace of_table ON of_table.oid = c.relnamespace
JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
WHERE of_table.nspname = 'ensemble_ray_memory' AND c.relname = 'entries' AND a.attname = 'vector'
"""
_LOCK_SCOPE = "SELECT pg_advisory_xact_lock(1835363693, hashtext(%s))"
_DELETE = "DELETE FROM ensemble_ray_memory.entries WHERE scope = %s AND id = ANY(%s)"


class PostgresMemory(LastingMemory):
    """Memory in a database, which processes on several machines may share.

    The object is a store of scopes. `long_term` and `entities` are long-term memory and facts in the same database. A server
    with the extension pgvector searches by meaning itself; otherwise this process reads the vectors and searches.

    Examples:
        >>> PostgresMemory("postgresql://me:secret@db.example.org/team").location
        'postgresql://db.example.org:5432/team'
    """

    def __init__(self, dsn: str, *, embedding_model: EmbeddingModel | str | None = None) -> None:
        """Parse the URL and resolve the model. The tables are created on first use.

        Args:
            dsn: The database: `postgresql://USER:PASSWORD@HOST:PORT/DATABASE`. The password is never shown.
            embedding_model: Finds entries by meaning: a model, `"local"` or `"openai:MODEL"`. None: the newest entries of a
                scope are found, and there is no long-term memory.

        Raises:
            ValidationError: The URL is invalid, the model is unknown, or a package is missing.
        """
        self._dsn = dsn
        super().__init__(MemoryDatabase(dsn), embedding_model)

    @property
    def location(self) -> str:
        """URL of the database without user and password."""
        return self._tables.location

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(PostgresMemory, embedding_model=self._model), (self._dsn,)

    def __repr__(self) -> str:
        return f"PostgresMemory({self.location!r})"


class PostgresReflectionStore(LastingReflectionStore):
    """Reflections in a database, which processes on several machines may share. Fulfils `ReflectionStore`.

    The database may be the database of a `PostgresMemory`.

    Examples:
        >>> PostgresReflectionStore("postgresql://me:secret@db.example.org/team").location
        'postgresql://db.example.org:5432/team'
    """

    def __init__(self, dsn: str) -> None:
        """Parse the URL `postgresql://USER:PASSWORD@HOST:PORT/DATABASE`. The tables are created on first use."""
        self._dsn = dsn
        self._database = MemoryDatabase(dsn)
        super().__init__(self._database)

    @property
    def location(self) -> str:
        """URL of the database without user and password."""
        return self._database.location

    def _make_table(self) -> None:
        def making(connection: Connection) -> None:
            if _ask(connection, _HAS_REFLECTIONS):  # an existing table needs no right to create one
                return
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%s)", [_CREATION_LOCK])
                if not _ask(connection, _HAS_REFLECTIONS):  # no other process was faster
                    connection.execute(_REFLECTIONS)

        self._database.run(making)

    def _put(self, key: str, reflection: TaskReflection) -> None:
        self._database.change(
            "insert into main.reflections (key, body) values (?, ?) on conflict (key) do update set body = excluded.body",
            *(key, json.dumps(reflection.to_data())),
        )

    def _key_text(self, key: str) -> str:
        return json.dumps(key)  # a text in PostgreSQL cannot contain NUL

    def __reduce__(self) -> tuple[Any, ...]:
        return (PostgresReflectionStore, (self._dsn,))

    def __repr__(self) -> str:
        return f"PostgresReflectionStore({self.location!r})"


class MemoryDatabase(MemoryTables):
    def __init__(self, dsn: str) -> None:
        self._parameters = parameters_of(dsn, needed_by="Memories in PostgreSQL need")
        self.location = location_of(self._parameters)
        #: quoted schema of pgvector, or None if vectors are bytes; set by the first connection
        self._vector_schema: str | None = None
        self._reset_connections()

    def run(self, operation: Callable[[Connection], T], *, is_repeatable: bool = True) -> T:
        """Run an operation, and repeat it when a lost server is back, unless the server may have committed it."""
        if self._process_id != os.getpid():  # a forked child must not use the connections of its parent
            self._reset_connections()

        def attempt(begin: Callable[[], None]) -> T:
            with self._places:
                connection = self._idle_connection() or self._connect()
                begin()
                try:
                    return operation(connection)
                finally:
                    if connection.closed or connection.broken:
                        connection.close()
                    else:
                        with self._lock:
                            self._idle.append(connection)

        return try_patiently(
            attempt, location=self.location, patience_s=_PATIENCE_S, is_repeatable=is_repeatable, failure=self._failure
        )

    def is_made(self) -> bool:
        import psycopg

        try:
            with self._open() as connection:
                return _has_tables(connection, self.location)
        except psycopg.Error as error:
            raise self._failure(error) from error

    def close(self) -> None:
        while (connection := self._idle_connection()) is not None:
            connection.close()

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self.run(lambda connection: connection.execute(_translate(query), values).fetchall())

    def change(self, query: str, *values: object) -> None:
        self.run(lambda connection: connection.execute(_translate(query), values))

    def add(self, scope: str, entry: MemoryEntry, vector: bytes | None) -> None:
        text = _entry_text(entry)

        def adding(connection: Connection) -> None:
            query = f"SELECT ensemble_ray_memory.add_entry(%s, %s, %s, {self._vector_mark})"
            connection.execute(query.encode(), [scope, entry.entry_id, text, self._as_stored(vector)])

        # Without an id, a repetition after a lost connection could add the entry twice.
        self.run(adding, is_repeatable=bool(entry.entry_id))

    def select(self, condition: str, *values: object) -> list[StoredEntry]:
        rows = self.rows(f"SELECT id, entry FROM main.entries WHERE {condition}", *values)  # noqa: S608  texts of ours
        return [StoredEntry(int(row), _entry_of(text)) for row, text in rows]

    def replace(self, scope: str, old: Sequence[int], new: Sequence[tuple[MemoryEntry, bytes | None]]) -> bool:
        texts = [_entry_text(entry) for entry, _ in new]

        def replacing(connection: Connection) -> bool:
            with connection.transaction() as transaction:
                connection.execute(_LOCK_SCOPE, [scope])
                deleted = connection.execute(_DELETE, [scope, list(old)]).rowcount
                if new and deleted != len(old):
                    from psycopg import Rollback

                    raise Rollback(transaction)
                query = f"INSERT INTO ensemble_ray_memory.entries (scope, entry, vector) VALUES (%s, %s, {self._vector_mark})"  # noqa: S608  a type of ours
                for text, (_, vector) in zip(texts, new, strict=True):
                    connection.execute(query.encode(), [scope, text, self._as_stored(vector)])
                return True
            return False

        return self.run(replacing)

    def clear(self, scope: str) -> None:
        def clearing(connection: Connection) -> None:
            with connection.transaction():
                connection.execute(_LOCK_SCOPE, [scope])
                connection.execute("DELETE FROM ensemble_ray_memory.entries WHERE scope = %s", [scope])
                connection.execute("DELETE FROM ensemble_ray_memory.taken WHERE scope = %s", [scope])

        self.run(clearing)

    def nearest(self, scope: str, vector: bytes, most: int) -> list[MemoryEntry] | None:
        def searching(connection: Connection) -> list[tuple[Any, ...]] | None:
            if (schema := self._vector_schema) is None:
                return None
            # For unit vectors the inner product is the cosine; the operator returns its negative.
            query = (
                f"SELECT entry FROM (SELECT id, entry, vector OPERATOR({schema}.<#>) {self._vector_mark} AS away"  # noqa: S608  names of ours
                " FROM ensemble_ray_memory.entries WHERE scope = %s AND vector IS NOT NULL) AS found"
                " WHERE away <= 0 ORDER BY away, id LIMIT %s"
            )
            return connection.execute(query.encode(), [self._as_stored(vector), scope, most]).fetchall()

        rows = self.run(searching)
        return None if rows is None else [_entry_of(text) for (text,) in rows]

    def set_vectors(self, vectors: Sequence[tuple[bytes, int]]) -> None:
        def setting(connection: Connection) -> None:
            query = (
                f"UPDATE ensemble_ray_memory.entries SET vector = {self._vector_mark} WHERE id = %s AND vector IS NULL"  # noqa: S608  a type of ours
            )
            with connection.transaction(), connection.cursor() as cursor:
                cursor.executemany(query.encode(), [(self._as_stored(vector), row) for vector, row in vectors])

        self.run(setting)

    @property
    def _vector_mark(self) -> str:
        return "%s::bytea" if self._vector_schema is None else f"%s::{self._vector_schema}.vector"

    def _as_stored(self, vector: bytes | None) -> object:
        if vector is None or self._vector_schema is None:
            return vector
        return f"[{','.join(map(repr, array('f', vector)))}]"

    def fact_text(self, fact: str) -> str:
        return _json_text(fact)

    def text_of(self, text: str) -> str:
        return cast("str", json.loads(text))

    def _reset_connections(self) -> None:
        # A reference to the parent's connections stays, so that the garbage collector does not close them here.
        self._inherited: object = getattr(self, "_idle", None)
        self._idle: list[Connection] = []
        self._lock = Lock()
        self._places = BoundedSemaphore(_MAX_CONNECTIONS)
        self._process_id = os.getpid()

    def _idle_connection(self) -> Connection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not connection.closed:
                waiting = select.poll()  # the server sends data on an idle connection only to end it
                waiting.register(connection.fileno(), select.POLLIN)
                if not waiting.poll(0):
                    return connection
            connection.close()

    def _connect(self) -> Connection:
        connection = self._open()
        try:
            _ensure_tables(connection, self.location)
            row = connection.execute(_COLUMN_TYPE).fetchone()
            self._vector_schema = str(row[0]) if row is not None and row[1] == _EXTENSION else None
        except BaseException:
            connection.close()
            raise
        return connection

    def _open(self) -> Connection:
        import psycopg

        connection = psycopg.connect(**self._parameters, autocommit=True)
        try:
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            connection.execute(SET_SESSION, [list(_SESSION), list(_SESSION.values())])
        except BaseException:
            connection.close()
            raise
        return connection

    def _failure(self, error: BaseException) -> EnsembleError:
        advice = advice_for(error, schema=SCHEMA)
        return EnsembleError(f"Cannot use the memory in {self.location}: {first_line(error)}. {advice}")


def _entry_text(entry: MemoryEntry) -> str:
    structured = entry.structured_content
    return _json_text(
        {
            "content": entry.content,
            "structured": None if structured is None else jsonable(structured),
            "stored_at": None if entry.stored_at is None else entry.stored_at.isoformat(),
            "metadata": dict(entry.metadata),
            "entry_id": entry.entry_id,
        }
    )


def _json_text(data: object) -> str:
    """Return JSON without NUL, in ASCII if the data has lone surrogates, as any UTF-8 database accepts it."""
    text = json.dumps(data, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(data)
    return text


def _translate(query: str) -> bytes:
    return query.replace("?", "%s").replace("main.", "ensemble_ray_memory.").encode()


def _entry_of(text: str) -> MemoryEntry:
    data = cast("dict[str, Any]", json.loads(text))
    at = cast("str | None", data["stored_at"])
    return MemoryEntry(
        content=data["content"],
        structured_content=data["structured"],
        stored_at=None if at is None else datetime.fromisoformat(at),
        metadata=data["metadata"],
        entry_id=data["entry_id"],
    )


def _has_tables(connection: Connection, location: str) -> bool:
    if not _ask(connection, _EXISTS):
        return False
    version = _ask(connection, "SELECT max(version) FROM ensemble_ray_memory.version")
    if not isinstance(version, int) or version > _VERSION:
        raise EnsembleError(
            f"The memory in {location} was written by a later version of ensemble_ray: it cannot be read here"
        )
    return True


def _ensure_tables(connection: Connection, location: str) -> None:
    if _has_tables(connection, location):
        return
    encoding = _ask(connection, "SELECT current_setting('server_encoding')")
    if encoding != "UTF8":
        raise EnsembleError(
            f"The database {location} has the encoding {encoding}: memory needs one with the encoding UTF8"
        )
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_CREATION_LOCK])
        if _has_tables(connection, location):  # another process was faster
            return
        if not _ask(connection, _HAS_SCHEMA):  # an existing schema needs no right to create one
            connection.execute("CREATE SCHEMA ensemble_ray_memory")
        extension = _extension(connection)
        vector_type = "bytea" if extension is None else f"{extension}.vector"
        for statements in (_TABLES, _FUNCTION):
            connection.execute(statements.replace("{vector_type}", vector_type).encode())
        connection.execute("INSERT INTO ensemble_ray_memory.version VALUES (%s)", [_VERSION])


def _extension(connection: Connection) -> str | None:
    """Return the quoted schema of pgvector, or None; create the extension if server and rights permit."""
    import psycopg

    found = _ask(connection, _EXTENSION_SCHEMA)
    if found is None and _ask(connection, _IS_AVAILABLE):
        try:
            with connection.transaction():
                connection.execute("CREATE EXTENSION vector")
        except psycopg.errors.InsufficientPrivilege:
            return None
        found = _ask(connection, _EXTENSION_SCHEMA)
    return None if found is None else str(found)


def _ask(connection: Connection, query: str) -> object:
    row = connection.execute(query.encode()).fetchone()
    return None if row is None else row[0]
