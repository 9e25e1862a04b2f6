"""The tables of memory in PostgreSQL. Package: memory.

In: a connection. Out: a schema `ensemble_ray_memory` of this version, made on first use by whichever process comes first.
Never: a table of anybody else's, a later version written by an older library.

Vectors are of the type `vector` where the server has pgvector when the tables are made, else bytes, which are searched by the
process that asks. An entry is JSON in a text: PostgreSQL's own types refuse some of what a model may say, such as NUL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ensemble_ray.errors import EnsembleError

if TYPE_CHECKING:
    import psycopg

    #: rows are tuples of whatever the columns hold; that is how the driver types them
    Connection = psycopg.Connection[tuple[Any, ...]]

__all__ = ["SCHEMA", "ensure_reflections", "ensure_tables", "has_tables", "vector_schema"]

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
