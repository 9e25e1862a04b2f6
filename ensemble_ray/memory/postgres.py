"""`PostgresMemory` and `PostgresReflectionStore`: persistent memory in a PostgreSQL database."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

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
from ensemble_ray.process.postgres_server import SESSION, Connection, PostgresDatabase, value_of
from ensemble_ray.values.memory import MemoryEntry, TaskReflection

#: This module was a package: `process/moved.py` finds its old modules.
__path__: list[str] = []

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
#: created on first use
_REFLECTIONS = "CREATE TABLE ensemble_ray_memory.reflections (key text PRIMARY KEY, body text NOT NULL)"
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
        database = self._database
        database.run(lambda used: database.create_once(used, "reflections", lambda used: used.execute(_REFLECTIONS)))

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


class MemoryDatabase(PostgresDatabase, MemoryTables):
    SCHEMA = "ensemble_ray_memory"
    CREATION_LOCK = 0x6D656D6F72696573
    SESSION: ClassVar[Mapping[str, str]] = {**SESSION, "lock_timeout": "60s", "statement_timeout": "120s"}
    MAX_CONNECTIONS = 4
    PATIENCE_S = 30.0
    NEEDED_BY = "Memories in PostgreSQL need"
    SUBJECT = "memory in"
    ENCODING = "memory needs one with the encoding UTF8"
    NEWER = "The memory in {location} was written by a later version of ensemble_ray: it cannot be read here"
    COLUMNS = "entry"
    #: quoted schema of pgvector, or None if vectors are bytes; set by the first connection
    _vector_schema: str | None = None

    def translate(self, query: str) -> bytes:
        return super().translate(query).replace(b"@", (self._vector_schema or "").encode())  # its name may be `main`

    def change(self, query: str, *values: object) -> None:
        statement = self.translate(query)
        self.run(lambda connection: connection.execute(statement, values))

    def change_scope(self, scope: str, operation: Callable[[Execute], T]) -> T:
        def changing(connection: Connection) -> T:
            def execute(query: str, rows: Sequence[Sequence[object]]) -> int:
                cursor.executemany(self.translate(query), rows)
                return cursor.rowcount

            with connection.cursor() as cursor:
                cursor.execute(_LOCK_SCOPE, [scope])
                return operation(execute)

        return self.transact(changing)

    def add(self, scope: str, entry: MemoryEntry, vector: bytes | None) -> None:
        (text,) = self.entry_columns(entry)

        def adding(connection: Connection) -> None:
            query = f"SELECT main.add_entry(?, ?, ?, {self.vector_mark})"
            connection.execute(self.translate(query), [scope, entry.entry_id, text, self.vector_column(vector)])

        # Without an id, a repetition after a lost connection could add the entry twice.
        self.run(adding, is_repeatable=bool(entry.entry_id))

    def nearest(self, scope: str, vector: bytes, most: int) -> list[MemoryEntry] | None:
        def searching(connection: Connection) -> list[tuple[Any, ...]] | None:
            if self._vector_schema is None:
                return None
            # For unit vectors the inner product is the cosine; the operator returns its negative.
            query = (
                f"SELECT entry FROM (SELECT id, entry, vector OPERATOR(@.<#>) {self.vector_mark} AS away"  # noqa: S608  names of ours
                " FROM main.entries WHERE scope = ? AND vector IS NOT NULL) AS found"
                " WHERE away <= 0 ORDER BY away, id LIMIT ?"
            )
            return connection.execute(self.translate(query), [self.vector_column(vector), scope, most]).fetchall()

        rows = self.run(searching)
        return None if rows is None else [self.entry_of(text) for (text,) in rows]

    @property
    def vector_mark(self) -> str:
        return "?::bytea" if self._vector_schema is None else "?::@.vector"

    def vector_column(self, vector: bytes | None) -> object:
        if vector is None or self._vector_schema is None:
            return vector
        return f"[{','.join(map(repr, array('f', vector)))}]"

    def entry_columns(self, entry: MemoryEntry) -> tuple[object, ...]:
        return (_json_text(data_of(entry)),)

    def entry_of(self, *columns: Any) -> MemoryEntry:
        return entry_from(**json.loads(columns[0]))

    def fact_text(self, fact: str) -> str:
        return _json_text(fact)

    def text_of(self, text: str) -> str:
        return cast("str", json.loads(text))

    def _create(self, connection: Connection) -> None:
        extension = _extension(connection)
        vector_type = "bytea" if extension is None else f"{extension}.vector"
        for statements in (_TABLES, _FUNCTION):
            connection.execute(statements.replace("{vector_type}", vector_type).encode())

    def _greet(self, connection: Connection) -> None:
        row = connection.execute(_COLUMN_TYPE).fetchone()
        self._vector_schema = str(row[0]) if row is not None and row[1] == _EXTENSION else None


def _json_text(data: object) -> str:
    """Return JSON without NUL, in ASCII if the data has lone surrogates, as any UTF-8 database accepts it."""
    text = json.dumps(data, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(data)
    return text


def _extension(connection: Connection) -> str | None:
    """Return the quoted schema of pgvector, or None; create the extension if server and rights permit."""
    import psycopg

    found = value_of(connection, _EXTENSION_SCHEMA)
    if found is None and value_of(connection, _IS_AVAILABLE):
        try:
            with connection.transaction():
                connection.execute("CREATE EXTENSION vector")
        except psycopg.errors.InsufficientPrivilege:
            return None
        found = value_of(connection, _EXTENSION_SCHEMA)
    return None if found is None else str(found)
