"""Memory that lasts, in a PostgreSQL database."""

from __future__ import annotations

import json
import os
import select
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ensemble_ray.errors import EnsembleError
from ensemble_ray.memory.lasting import LastingMemory, StoredEntry
from ensemble_ray.memory.store import check_reflection, check_reflection_key
from ensemble_ray.ports import EmbeddingModel
from ensemble_ray.process.context import bounded_logger
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

    #: rows are tuples of whatever the columns hold; that is how the driver types them
    Connection = psycopg.Connection[tuple[Any, ...]]


SCHEMA = "ensemble_ray_memory"
#: Of the tables below; later ones are refused.
_VERSION = 1
#: Key of the lock under which the tables are made; any number that nobody else uses.
_MAKING = 0x6D656D6F72696573
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
#: Adds an entry unless its scope took its id before. The lock of the scope makes rows visible in the order of their
#: numbers: who has seen a row has seen all before it.
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
#: Asked of the catalogue's tables, not of `to_regclass`: that answers from a cache which a wait for a lock does not renew.
_EXISTS = """
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = 'ensemble_ray_memory' AND c.relname = 'version'
)
"""
#: Made when it is first needed: databases of `PostgresMemory` need not have it.
_REFLECTIONS = "CREATE TABLE ensemble_ray_memory.reflections (key text PRIMARY KEY, body text NOT NULL)"
_HAS_REFLECTIONS = _EXISTS.replace("'version'", "'reflections'")
_HAS_SCHEMA = "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'ensemble_ray_memory')"
_IS_OFFERED = "SELECT EXISTS (SELECT FROM pg_catalog.pg_available_extensions WHERE name = 'vector')"
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


def has_tables(connection: Connection, location: str) -> bool:
    """Return whether anything was ever remembered there.

    Raises:
        EnsembleError: by a later version of the library.
    """
    if not _ask(connection, _EXISTS):
        return False
    version = _ask(connection, "SELECT max(version) FROM ensemble_ray_memory.version")
    if not isinstance(version, int) or version > _VERSION:
        raise EnsembleError(
            f"The memory in {location} was written by a later version of ensemble_ray: it cannot be read here"
        )
    return True


def ensure_tables(connection: Connection, location: str) -> None:
    """Make the tables unless they are there; several processes may do so at once.

    Raises:
        EnsembleError: they are of a later version, or the database cannot hold texts.
    """
    if has_tables(connection, location):
        return
    encoding = _ask(connection, "SELECT current_setting('server_encoding')")
    if encoding != "UTF8":
        raise EnsembleError(
            f"The database {location} has the encoding {encoding}: memory needs one with the encoding UTF8"
        )
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
        if has_tables(connection, location):  # somebody was faster
            return
        if not _ask(connection, _HAS_SCHEMA):  # else the right to make schemas is not needed
            connection.execute("CREATE SCHEMA ensemble_ray_memory")
        extension = _extension(connection)
        vector_type = "bytea" if extension is None else f"{extension}.vector"
        for statements in (_TABLES, _FUNCTION):
            connection.execute(statements.replace("{vector_type}", vector_type).encode())
        connection.execute("INSERT INTO ensemble_ray_memory.version VALUES (%s)", [_VERSION])


def ensure_reflections(connection: Connection) -> None:
    """Make the table of reflections beside those of memory unless it is there; several processes may do so at once."""
    if _ask(connection, _HAS_REFLECTIONS):  # else the right to make tables is not needed
        return
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
        if not _ask(connection, _HAS_REFLECTIONS):
            connection.execute(_REFLECTIONS)


def vector_schema(connection: Connection) -> str | None:
    """Return the quoted schema of pgvector, which the tables use; None: their vectors are bytes."""
    row = connection.execute(_COLUMN_TYPE).fetchone()
    return str(row[0]) if row is not None and row[1] == _EXTENSION else None


def _extension(connection: Connection) -> str | None:
    """Return the quoted schema of pgvector, which is created where the server has it and the user may; None: there is none."""
    import psycopg

    found = _ask(connection, _EXTENSION_SCHEMA)
    if found is None and _ask(connection, _IS_OFFERED):
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


T = TypeVar("T")

_log = bounded_logger(__name__)
#: How long a server that cannot be reached is waited for, s.
_PATIENCE_S = 30.0
#: Most connections of a process.
_MOST_CONNECTIONS = 4
#: Beyond what sessions of records are told: an answer that takes longer is an error.
_SESSION = {**SESSION, "lock_timeout": "60s", "statement_timeout": "120s"}


class MemoryDatabase:
    """The database of one URL, with the tables of memory in it."""

    def __init__(self, dsn: str) -> None:
        """Read the URL; nothing is connected.

        Raises:
            ValidationError: the driver is not installed, or it is no URL of a database.
        """
        self._parameters = parameters_of(dsn, needed_by="Memories in PostgreSQL need")
        self.location = location_of(self._parameters)
        #: the quoted schema of pgvector; None: vectors are bytes; known with the first connection
        self.vector_schema: str | None = None
        self._forget_connections()

    def run(self, operation: Callable[[Connection], T], *, is_repeatable: bool = True) -> T:
        """Do something with a connection; where the server is lost, again as soon as it is back.

        Args:
            operation: What is done.
            is_repeatable: Whether doing it twice is the same as doing it once. Else it is not done again: whether the server
                did it before it was lost, nobody knows.

        Raises:
            EnsembleError: the server cannot be reached, or refuses.
        """
        if self._process_id != os.getpid():  # a forked child must not use its parent's
            self._forget_connections()

        def attempt(begin: Callable[[], None]) -> T:
            with self._places:
                connection = self._idle_connection() or self._connect()
                begin()
                try:
                    return operation(connection)
                finally:
                    self._put_back(connection)

        return try_patiently(
            attempt, location=self.location, patience_s=_PATIENCE_S, is_repeatable=is_repeatable, failure=self._failure
        )

    def is_made(self) -> bool:
        """Return whether anything was ever remembered there; nothing is changed.

        Raises:
            EnsembleError: it cannot be reached, or is of a later version.
        """
        import psycopg

        try:
            with self._open() as connection:
                return has_tables(connection, self.location)
        except psycopg.Error as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Close the connections that nobody uses; they are opened again when they are needed."""
        while (connection := self._idle_connection()) is not None:
            connection.close()

    def _forget_connections(self) -> None:
        """Begin without connections. Those of a parent process stay referred to, so that nobody closes them here."""
        self._inherited: object = getattr(self, "_idle", None)
        self._idle: list[Connection] = []
        self._lock = Lock()
        self._places = BoundedSemaphore(_MOST_CONNECTIONS)
        self._process_id = os.getpid()

    def _idle_connection(self) -> Connection | None:
        """Return a connection that nobody uses; one that the server ended meanwhile is let go of. None: there is none."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if _is_open(connection):
                return connection
            connection.close()

    def _put_back(self, connection: Connection) -> None:
        if connection.closed or connection.broken:
            connection.close()
            return
        with self._lock:
            self._idle.append(connection)

    def _connect(self) -> Connection:
        connection = self._open()
        try:
            ensure_tables(connection, self.location)
            self.vector_schema = vector_schema(connection)
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


def _is_open(connection: Connection) -> bool:
    """Return whether a connection that nobody uses is silent: a server has only its end to tell there. Nothing is asked."""
    if connection.closed:
        return False
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN)
    return not waiting.poll(0)


_LOCK_SCOPE = "SELECT pg_advisory_xact_lock(1835363693, hashtext(%s))"
_DELETE = "DELETE FROM ensemble_ray_memory.entries WHERE scope = %s AND id = ANY(%s)"


class PostgresTables:
    """The tables of one database. Fulfils `MemoryTables`."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database

    @property
    def location(self) -> str:
        """The database, without user and password."""
        return self._database.location

    def close(self) -> None:
        """Close its connections; they are opened again when they are needed."""
        self._database.close()

    # Entries.

    def add(self, scope: str, entry: MemoryEntry, vector: bytes | None) -> None:
        """Add an entry; one whose id the scope took before is left out."""
        text = _entry_text(entry)

        def adding(connection: Connection) -> None:
            query = f"SELECT ensemble_ray_memory.add_entry(%s, %s, %s, {self._vector_mark})"
            connection.execute(query.encode(), [scope, entry.entry_id, text, self._as_stored(vector)])

        # Without an id nobody can tell whether a lost server has it.
        self._database.run(adding, is_repeatable=bool(entry.entry_id))

    def newest(self, scope: str, most: int) -> list[MemoryEntry]:
        """Return the newest entries of a scope, the oldest of them first."""
        rows = self._all(
            "SELECT entry FROM ensemble_ray_memory.entries WHERE scope = %s ORDER BY id DESC LIMIT %s", scope, most
        )
        return [_entry_of(text) for (text,) in reversed(rows)]

    def entries(self, scope: str) -> list[StoredEntry]:
        """Return all entries of a scope, in storing order."""
        rows = self._all("SELECT id, entry FROM ensemble_ray_memory.entries WHERE scope = %s ORDER BY id", scope)
        return [StoredEntry(int(row), _entry_of(text)) for row, text in rows]

    def entries_of(self, rows: Sequence[int]) -> list[MemoryEntry]:
        """Return the entries of these rows, in this order; those that are gone are left out."""
        query = "SELECT id, entry FROM ensemble_ray_memory.entries WHERE id = ANY(%s)"
        found: dict[int, str] = dict(self._all(query, list(rows)))
        return [_entry_of(found[row]) for row in rows if row in found]

    def replace(self, scope: str, old: Sequence[int], new: Sequence[tuple[MemoryEntry, bytes | None]]) -> bool:
        """Delete rows of a scope, and add entries behind the others; False: nothing, since some of the rows were gone."""
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

        return self._database.run(replacing)

    def clear(self, scope: str) -> None:
        """Delete the entries of a scope, and what ids it took."""

        def clearing(connection: Connection) -> None:
            with connection.transaction():
                connection.execute(_LOCK_SCOPE, [scope])
                connection.execute("DELETE FROM ensemble_ray_memory.entries WHERE scope = %s", [scope])
                connection.execute("DELETE FROM ensemble_ray_memory.taken WHERE scope = %s", [scope])

        self._database.run(clearing)

    def scopes(self) -> Mapping[str, int]:
        """Return how many entries each scope has, by name."""
        rows = self._all(
            'SELECT scope, count(*) FROM ensemble_ray_memory.entries GROUP BY scope ORDER BY scope COLLATE "C"'
        )
        return {str(scope): int(count) for scope, count in rows}

    # Vectors.

    def nearest(self, scope: str, vector: bytes, most: int) -> list[MemoryEntry] | None:
        """Return the entries nearest to a vector, none beyond a right angle, nearest first; None: without pgvector."""
        database = self._database

        def searching(connection: Connection) -> list[tuple[Any, ...]] | None:
            if (schema := database.vector_schema) is None:
                return None
            # Vectors have the length 1: the inner product is the cosine. The operator gives it with the other sign.
            query = (
                f"SELECT entry FROM (SELECT id, entry, vector OPERATOR({schema}.<#>) {self._vector_mark} AS away"  # noqa: S608  names of ours
                " FROM ensemble_ray_memory.entries WHERE scope = %s AND vector IS NOT NULL) AS found"
                " WHERE away <= 0 ORDER BY away, id LIMIT %s"
            )
            return connection.execute(query.encode(), [self._as_stored(vector), scope, most]).fetchall()

        rows = database.run(searching)
        return None if rows is None else [_entry_of(text) for (text,) in rows]

    def extent(self, scope: str) -> tuple[int, int]:
        """Return how many vectors a scope has and the newest one's row: two that are equal have the same vectors."""
        ((count, newest),) = self._all(
            "SELECT count(*), coalesce(max(id), 0) FROM ensemble_ray_memory.entries WHERE scope = %s AND vector IS NOT NULL",
            scope,
        )
        return int(count), int(newest)

    def vectors(self, scope: str, after: int) -> list[tuple[int, bytes]]:
        """Return rows and vectors of a scope, of the rows behind that one."""
        rows = self._all(
            "SELECT id, vector FROM ensemble_ray_memory.entries WHERE scope = %s AND id > %s AND vector IS NOT NULL ORDER BY id",
            scope,
            after,
        )
        return [(int(row), bytes(vector)) for row, vector in rows]

    def without_vector(self, scope: str) -> list[StoredEntry]:
        """Return the entries that were stored without a model."""
        rows = self._all(
            "SELECT id, entry FROM ensemble_ray_memory.entries WHERE scope = %s AND vector IS NULL ORDER BY id", scope
        )
        return [StoredEntry(int(row), _entry_of(text)) for row, text in rows]

    def set_vectors(self, vectors: Sequence[tuple[bytes, int]]) -> None:
        """Add the vectors of rows that have none."""

        def giving(connection: Connection) -> None:
            query = (
                f"UPDATE ensemble_ray_memory.entries SET vector = {self._vector_mark} WHERE id = %s AND vector IS NULL"  # noqa: S608  a type of ours
            )
            with connection.transaction(), connection.cursor() as cursor:
                cursor.executemany(query.encode(), [(self._as_stored(vector), row) for vector, row in vectors])

        self._database.run(giving)

    def embedding(self, model: str, dimensions: int) -> tuple[str, int]:
        """Return the model and the length of the vectors; these, where there are none yet."""
        self._change(
            "INSERT INTO ensemble_ray_memory.embedding VALUES (1, %s, %s) ON CONFLICT DO NOTHING", model, dimensions
        )
        found = self.embedding_model()
        return (model, dimensions) if found is None else found

    def embedding_model(self) -> tuple[str, int] | None:
        """Return the model and the length of the vectors; None where there are none."""
        rows = self._all("SELECT model, dimensions FROM ensemble_ray_memory.embedding")
        return cast("tuple[str, int]", rows[0]) if rows else None

    # Facts about entities.

    def put_fact(self, name: str, fact: str) -> None:
        """Keep a fact, in place of an earlier one of that name."""
        self._change(
            "INSERT INTO ensemble_ray_memory.entities (name, fact) VALUES (%s, %s)"
            " ON CONFLICT (name) DO UPDATE SET fact = excluded.fact",
            name,
            _json_text(fact),
        )

    def fact(self, name: str) -> str | None:
        """Return a fact; None where none is known."""
        rows = self._all("SELECT fact FROM ensemble_ray_memory.entities WHERE name = %s", name)
        return cast("str", json.loads(rows[0][0])) if rows else None

    def facts(self) -> dict[str, str]:
        """Return all facts by name, in order of first put."""
        rows = self._all("SELECT name, fact FROM ensemble_ray_memory.entities ORDER BY id")
        return {str(name): cast("str", json.loads(fact)) for name, fact in rows}

    def has_facts(self) -> bool:
        """Return whether there is any."""
        return bool(self._all("SELECT 1 FROM ensemble_ray_memory.entities LIMIT 1"))

    def remove_fact(self, name: str) -> None:
        """Delete a fact."""
        self._change("DELETE FROM ensemble_ray_memory.entities WHERE name = %s", name)

    # How values travel.

    @property
    def _vector_mark(self) -> str:
        """What stands for a vector in a statement."""
        schema = self._database.vector_schema
        return "%s::bytea" if schema is None else f"%s::{schema}.vector"

    def _as_stored(self, vector: bytes | None) -> object:
        """Return a vector as the tables take it."""
        if vector is None or self._database.vector_schema is None:
            return vector
        return f"[{','.join(map(repr, array('f', vector)))}]"

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        def reading(connection: Connection) -> list[tuple[Any, ...]]:
            return connection.execute(query.encode(), values).fetchall()

        return self._database.run(reading)

    def _change(self, query: str, *values: object) -> None:
        def changing(connection: Connection) -> None:
            connection.execute(query.encode(), values)

        self._database.run(changing)


def _entry_text(entry: MemoryEntry) -> str:
    structured = entry.structured_content
    data = {
        "content": entry.content,
        "structured": None if structured is None else jsonable(structured),
        "stored_at": None if entry.stored_at is None else entry.stored_at.isoformat(),
        "metadata": dict(entry.metadata),
        "entry_id": entry.entry_id,
    }
    return _json_text(data)


def _json_text(data: object) -> str:
    """Return data as JSON that any UTF-8 database takes: NUL is always escaped in it, halves of surrogate pairs where there are any."""
    text = json.dumps(data, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(data)
    return text


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
