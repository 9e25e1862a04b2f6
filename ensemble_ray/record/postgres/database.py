"""One PostgreSQL database: how it is reached, how patient we are with it, how its failures are told.

In: a URL. Out: connections set up as records need them, and errors that name the place and what to do.
Never: a password in a text of ours; psycopg imported before a database is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from ensemble_ray.errors import RecordError
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.postgres_server import (
    BACKOFF_S,
    SESSION,
    SET_SESSION,
    advice_for,
    first_line,
    is_passing,
    location_of,
    parameters_of,
)
from ensemble_ray.record.postgres.schema import SCHEMA, ensure_schema, flaw_of, has_schema
from ensemble_ray.record.resume.advice import resume_advice

if TYPE_CHECKING:
    from ensemble_ray.record.postgres.connection import Connection

T = TypeVar("T")

_log = bounded_logger(__name__)
#: Longest wait for an answer of a server that is reached, s; a frozen one must not hold a run for ever.
_ANSWER_S = 60.0


class Database:
    """The database of one URL."""

    def __init__(self, url: str, *, patience_s: float) -> None:
        """Read the URL; nothing is connected.

        Raises:
            ValidationError: the driver is not installed, or it is no URL of a database.
        """
        self.patience_s = patience_s
        self._parameters: dict[str, Any] = parameters_of(url, needed_by="Records in PostgreSQL need")
        self.location = location_of(self._parameters)

    async def connect(self) -> Connection:
        """Open a connection that commits every statement; the schema is there.

        Raises:
            RecordError: the record there is of a newer format.
            Error: psycopg's; give it to `failure`.
        """
        connection = await self._open()
        try:
            await ensure_schema(connection, self.location)
        except BaseException:
            await connection.close()
            raise
        return connection

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncGenerator[Connection | None]:
        """Open a connection for a moment; None when nothing was ever recorded in that database. One snapshot for all reads.

        Raises:
            RecordError: the database cannot be read.
        """
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
        """Return how many runs are recorded there; None where the tables are still to be made. Nothing is changed.

        Raises:
            RecordError: it cannot be reached, no run can be recorded there, or what is there is of a newer format.
        """
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
        """Raise the driver's errors as ours."""
        import psycopg

        try:
            yield
        except (psycopg.Error, TimeoutError) as error:
            raise self.failure(error) from error

    async def patiently(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Repeat an operation while the server cannot be reached, for as long as we are patient.

        Raises:
            RecordError: it cannot be reached, or refuses.
        """
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
        """Return what went wrong with this database, and what to do."""
        advice = advice_for(error, schema=SCHEMA)
        msg = (
            f"Cannot use the database {self.location}: {first_line(error)}. "
            f"{advice}. What is recorded stays. A run that this ended can be resumed afterwards: {resume_advice('RUN', None)}, with "
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
