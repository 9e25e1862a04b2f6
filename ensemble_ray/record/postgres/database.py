"""Connect to a PostgreSQL database, create its tables, and translate the driver's errors.

No message contains a password. psycopg is imported with the first connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ensemble_ray.errors import RecordError
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.postgres_server import (
    BACKOFF_S,
    HAS_TABLE,
    SESSION,
    SET_SESSION,
    advice_for,
    first_line,
    is_passing,
    location_of,
    parameters_of,
)
from ensemble_ray.record.stores import resume_advice

if TYPE_CHECKING:
    import psycopg

Connection: TypeAlias = "psycopg.AsyncConnection[tuple[Any, ...]]"  # The driver types rows as tuples of any values.
FORMAT = 3  # Version of these tables; readers refuse a newer one.
SCHEMA = "ensemble_ray"
_MAKING = 0x656E73656D626C65  # Key of the advisory lock for creating the tables: an arbitrary unused number.

#: Data and bodies are text and bytes: `json` refuses some model outputs, such as large numbers and deep nesting.
_TABLES = """
CREATE SCHEMA IF NOT EXISTS ensemble_ray;
CREATE TABLE ensemble_ray.format (version integer NOT NULL);
CREATE TABLE ensemble_ray.runs (
    run_id text PRIMARY KEY,
    begun uuid NOT NULL,
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
CREATE INDEX facts_of_gates ON ensemble_ray.facts (run_id) WHERE kind IN ('review', 'review_decision');
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
#: Adds a group to a run. Returns the refused entries with instance and newest epoch, or one row of nulls if the run
#: does not exist or was created again. An entry is accepted or refused as a whole. A separate statement acquires the
#: lock, because each statement sees the commits before its own start. Repeating a call has no effect: a writer numbers
#: its facts, and `writers` contains its last number.
_FUNCTION = """
CREATE FUNCTION ensemble_ray.append_facts(
    of_run text, of_begun uuid, by_writer uuid,
    entries bigint[], numbers bigint[], kinds text[], names text[], instances text[], ats double precision[],
    epochs bigint[], data text[], digests bytea[], texts bytea[]
) RETURNS TABLE (entry bigint, instance text, newest bigint) LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    run_epoch bigint;
    highest_of_run bigint;
    last_seq bigint;
    already bigint;
    refused bigint[];
BEGIN
    SELECT r.epoch INTO run_epoch FROM ensemble_ray.runs r WHERE r.run_id = of_run AND r.begun = of_begun FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN QUERY SELECT NULL::bigint, NULL::text, NULL::bigint;
        RETURN;
    END IF;
    SELECT coalesce(max(f.seq), 0) INTO last_seq FROM ensemble_ray.facts f WHERE f.run_id = of_run;
    SELECT coalesce(max(w.written), 0) INTO already
        FROM ensemble_ray.writers w WHERE w.run_id = of_run AND w.writer = by_writer;

    RETURN QUERY
        SELECT g.entry, g.instance, greatest(run_epoch, e.epoch)
        FROM unnest(entries, instances, epochs) AS g (entry, instance, epoch)
        LEFT JOIN ensemble_ray.epochs e ON e.run_id = of_run AND e.instance = g.instance
        WHERE g.epoch < greatest(run_epoch, e.epoch);
    IF FOUND THEN
        SELECT array_agg(DISTINCT g.entry) INTO refused
            FROM unnest(entries, instances, epochs) AS g (entry, instance, epoch)
            LEFT JOIN ensemble_ray.epochs e ON e.run_id = of_run AND e.instance = g.instance
            WHERE g.epoch < greatest(run_epoch, e.epoch);
    END IF;

    INSERT INTO ensemble_ray.bodies SELECT of_run, b.* FROM unnest(digests, texts) AS b ON CONFLICT DO NOTHING;
    INSERT INTO ensemble_ray.facts
        SELECT of_run, last_seq + row_number() OVER (ORDER BY g.number),
            g.kind, g.name, g.instance, g.at, g.epoch, g.data
        FROM unnest(entries, numbers, kinds, names, instances, ats, epochs, data)
            AS g (entry, number, kind, name, instance, at, epoch, data)
        WHERE g.number > already AND (refused IS NULL OR g.entry <> ALL (refused));

    SELECT max(g.epoch) INTO highest_of_run FROM unnest(entries, instances, epochs) AS g (entry, instance, epoch)
        WHERE g.instance = 'run' AND (refused IS NULL OR g.entry <> ALL (refused));
    IF highest_of_run > run_epoch THEN
        run_epoch := highest_of_run;
        UPDATE ensemble_ray.runs r SET epoch = run_epoch WHERE r.run_id = of_run;
    END IF;
    INSERT INTO ensemble_ray.epochs AS e
        SELECT of_run, g.instance, max(g.epoch)
        FROM unnest(entries, instances, epochs) AS g (entry, instance, epoch)
        WHERE g.epoch > run_epoch AND (refused IS NULL OR g.entry <> ALL (refused))
        GROUP BY g.instance
        ON CONFLICT (run_id, instance) DO UPDATE SET epoch = greatest(e.epoch, excluded.epoch);
    INSERT INTO ensemble_ray.writers AS w VALUES (of_run, by_writer, (SELECT max(n) FROM unnest(numbers) AS n))
        ON CONFLICT (run_id, writer) DO UPDATE SET written = greatest(w.written, excluded.written);
END $$;
"""
#: Encoding, whether the server is read-only, and whether the user may create the schema and write to its tables.
_RIGHTS = """
SELECT current_setting('server_encoding'),
    pg_is_in_recovery() OR current_setting('default_transaction_read_only') = 'on',
    has_database_privilege(current_database(), 'CREATE'),
    (SELECT bool_and(has_table_privilege(c.oid, 'INSERT') AND has_table_privilege(c.oid, 'UPDATE'))
        FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'ensemble_ray' AND c.relkind = 'r' AND c.relname <> 'format')
"""


_RAISE_FORMAT = "INSERT INTO ensemble_ray.format VALUES (%s)"  # The newest row counts.


async def has_schema(connection: Connection, location: str) -> int:
    """Return the version of the tables; 0 if there are none."""
    cursor = await connection.execute(HAS_TABLE, [SCHEMA, "format"])
    row = await cursor.fetchone()
    if row is None or not row[0]:
        return 0
    cursor = await connection.execute("SELECT max(version) FROM ensemble_ray.format")
    row = await cursor.fetchone()
    version = row[0] if row else None
    if not isinstance(version, int) or version > FORMAT:
        raise RecordError(
            f"The records in {location} are of format {version}, this version of ensemble-ray knows {FORMAT}: "
            "upgrade it, or use another database",
            location,
        )
    return version


async def flaw_of(connection: Connection) -> str:
    """Return why runs cannot be recorded in the database, with or without its tables; empty if they can."""
    row = await (await connection.execute(_RIGHTS)).fetchone()
    encoding, is_read_only, may_create, may_write = row or ("?", False, False, None)
    if is_read_only:
        return "the server is read-only: use the URL of the primary"
    if may_write is False:
        return "the user may not write to the tables of the schema 'ensemble_ray'"
    if may_write is None and encoding != "UTF8":
        return f"it has the encoding {encoding}, and records need UTF8"
    if may_write is None and not may_create:
        return "the user may not create the schema 'ensemble_ray'"
    return ""


async def ensure_schema(connection: Connection, location: str) -> None:
    """Create missing tables. Several processes may call this concurrently."""
    if version := await has_schema(connection, location):
        if version < FORMAT:  # earlier versions must not read what is added from now on
            await connection.execute(_RAISE_FORMAT, [FORMAT])
        return
    cursor = await connection.execute("SELECT current_setting('server_encoding')")
    row = await cursor.fetchone()
    if row != ("UTF8",):
        raise RecordError(
            f"The database {location} has the encoding {row and row[0]}: records need one with the encoding UTF8",
            location,
        )
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
        if await has_schema(connection, location):
            return
        await connection.execute(_TABLES)
        await connection.execute(_FUNCTION)
        await connection.execute(_RAISE_FORMAT, [FORMAT])


#: Created with the first offered answer: most databases have none.
_ANSWERS = """
CREATE TABLE IF NOT EXISTS ensemble_ray.answers (
    digest text PRIMARY KEY, run_id text NOT NULL, name text NOT NULL, at double precision NOT NULL
);
CREATE INDEX IF NOT EXISTS answers_of_run ON ensemble_ray.answers (run_id);
"""


async def has_answers(connection: Connection) -> bool:
    row = await (await connection.execute("SELECT to_regclass('ensemble_ray.answers') IS NOT NULL")).fetchone()
    return row is not None and bool(row[0])


async def create_answers(connection: Connection) -> None:
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
        await connection.execute(_ANSWERS)


T = TypeVar("T")

_log = bounded_logger(__name__)
_ANSWER_S = 60.0  # Longest wait for a connected server, s: a frozen one must not block a run forever.


class Database:
    def __init__(self, url: str, *, patience_s: float) -> None:
        self.patience_s = patience_s
        self._parameters: dict[str, Any] = parameters_of(url, needed_by="Records in PostgreSQL need")
        self.location = location_of(self._parameters)

    async def connect(self) -> Connection:
        """Open a connection in autocommit mode, and create the schema if it is missing."""
        connection = await self._open()
        try:
            await ensure_schema(connection, self.location)
        except BaseException:
            await connection.close()
            raise
        return connection

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncGenerator[Connection | None]:
        """Open a connection for reads in one snapshot; yield None if there are no tables of records."""
        with self.translated_errors():
            connection = await self._open()
            try:
                if not await has_schema(connection, self.location):
                    yield None
                    return
                async with connection.transaction():
                    await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                    yield connection
            finally:
                await connection.close()

    async def examine(self) -> int | None:
        """Return the number of recorded runs; None without tables. Changes no data."""
        with self.translated_errors():
            connection = await self._open()
            try:
                has_tables = await has_schema(connection, self.location)
                if flaw := await flaw_of(connection):
                    raise RecordError(f"No run can be recorded in the database {self.location}: {flaw}", self.location)
                if not has_tables:
                    return None
                row = await (await connection.execute("SELECT count(*) FROM ensemble_ray.runs")).fetchone()
                return 0 if row is None else int(row[0])
            finally:
                await connection.close()

    @contextlib.contextmanager
    def translated_errors(self) -> Generator[None]:
        import psycopg

        try:
            yield
        except (psycopg.Error, TimeoutError) as error:
            raise self.failure(error) from error

    async def patiently(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Repeat an operation while the server cannot be reached, for at most `patience_s`."""
        import psycopg

        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.patience_s
        tries = 0
        while True:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    return await operation()
            except (psycopg.Error, TimeoutError) as error:
                delay = BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
                if not is_passing(error) or loop.time() + delay > deadline:
                    raise self.failure(error) from error
                if not tries:
                    _log.warning("Lost the database %s, trying again: %s", self.location, first_line(error))
            tries += 1
            await asyncio.sleep(delay)

    def failure(self, error: BaseException) -> RecordError:
        advice = advice_for(error, schema=SCHEMA)
        msg = (
            f"Cannot use the database {self.location}: {first_line(error)}. "
            f"{advice}. The record stays. A run that ended because of this can be resumed afterwards: {resume_advice('RUN', None)}, with "
            f"ENSEMBLE_RAY_STORE set to the URL of {self.location}"
        )
        return RecordError(msg, self.location)

    async def _open(self) -> Connection:
        import psycopg

        async with asyncio.timeout(_ANSWER_S):
            connection = await psycopg.AsyncConnection.connect(**self._parameters, autocommit=True)
            try:
                await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
                await connection.execute(SET_SESSION, [list(SESSION), list(SESSION.values())])
            except BaseException:
                await connection.close()
                raise
        return connection
