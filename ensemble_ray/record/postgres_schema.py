"""The tables of records in PostgreSQL. Room: record.

In: a connection. Out: a schema `ensemble_ray` of this format, made on first use by whichever process comes first.
Never: a table of anybody else's, a newer format written by an older library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.errors import RecordError

if TYPE_CHECKING:
    from ensemble_ray.record.postgres_database import Connection

__all__ = ["FORMAT", "SCHEMA", "ensure_schema", "has_schema"]

#: Version of these tables; a newer one is refused.
FORMAT = 1
SCHEMA = "ensemble_ray"
#: Key of the lock under which the tables are made; any number that nobody else uses.
_MAKING = 0x656E73656D626C65

#: Data and bodies are text and bytes, not `json`: that type refuses some of what a model may say, such as numbers
#: beyond its range and deep nesting, and a record must take everything.
_TABLES = """
CREATE SCHEMA IF NOT EXISTS ensemble_ray;
CREATE TABLE ensemble_ray.format (version integer NOT NULL);
CREATE TABLE ensemble_ray.runs (
    run_id text PRIMARY KEY,
    created_at timestamptz NOT NULL,
    origin text NOT NULL,
    state text NOT NULL,
    epoch bigint NOT NULL DEFAULT 0,
    owner text NOT NULL DEFAULT '',
    cancel_asked boolean NOT NULL DEFAULT false
) WITH (fillfactor = 70);
CREATE TABLE ensemble_ray.facts (
    run_id text NOT NULL,
    seq bigint NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    instance text NOT NULL,
    at double precision NOT NULL,
    epoch bigint NOT NULL,
    data text NOT NULL,
    PRIMARY KEY (run_id, seq)
);
CREATE INDEX facts_of_instance ON ensemble_ray.facts (run_id, instance);
CREATE TABLE ensemble_ray.bodies (
    run_id text NOT NULL,
    sha256 bytea NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (run_id, sha256)
);
CREATE TABLE ensemble_ray.epochs (
    run_id text NOT NULL,
    instance text NOT NULL,
    epoch bigint NOT NULL,
    PRIMARY KEY (run_id, instance)
);
CREATE TABLE ensemble_ray.writers (
    run_id text NOT NULL,
    writer uuid NOT NULL,
    written bigint NOT NULL,
    PRIMARY KEY (run_id, writer)
) WITH (fillfactor = 70);
"""
_EXISTS = "SELECT to_regclass('ensemble_ray.format') IS NOT NULL"


async def has_schema(connection: Connection, place: str) -> bool:
    """Whether anything was ever recorded there.

    Raises:
        RecordError: it is of a newer format.
    """
    cursor = await connection.execute(_EXISTS)
    row = await cursor.fetchone()
    if row is None or not row[0]:
        return False
    cursor = await connection.execute("SELECT max(version) FROM ensemble_ray.format")
    row = await cursor.fetchone()
    version = row[0] if row else None
    if not isinstance(version, int) or version > FORMAT:
        msg = (
            f"The records in {place} are of format {version}, this version of ensemble-ray knows {FORMAT}: "
            "upgrade it, or use another database"
        )
        raise RecordError(msg, place)
    return True


async def ensure_schema(connection: Connection, place: str) -> None:
    """Make the tables unless they are there; several processes may do so at once.

    Raises:
        RecordError: they are of a newer format, or the database cannot hold texts.
    """
    if await has_schema(connection, place):
        return
    cursor = await connection.execute("SELECT current_setting('server_encoding')")
    row = await cursor.fetchone()
    if row != ("UTF8",):
        msg = f"The database {place} has the encoding {row and row[0]}: records need one with the encoding UTF8"
        raise RecordError(msg, place)
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
        if await has_schema(connection, place):  # somebody was faster
            return
        await connection.execute(_TABLES)
        await connection.execute("INSERT INTO ensemble_ray.format VALUES (%s)", [FORMAT])
