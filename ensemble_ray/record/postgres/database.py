"""One PostgreSQL database: how it is reached, how patient we are with it, how its failures are told. Package: record.

In: a URL. Out: connections set up as records need them, and errors that name the place and what to do.
Never: a password in a text of ours; psycopg imported before a database is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from ensemble_ray.errors import RecordError, ValidationError, message_of
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.record.postgres.schema import ensure_schema, flaw_of, has_schema

if TYPE_CHECKING:
    from ensemble_ray.record.postgres.connection import Connection

__all__ = ["Database", "check_driver"]

T = TypeVar("T")

_log = bounded_logger(__name__)
#: Waits between tries to reach the server again, s; the last one repeats.
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
#: Longest wait for an answer of a server that is reached, s; a frozen one must not hold a run for ever.
_ANSWER_S = 60.0
#: How a dead peer is noticed, for what the URL leaves open: after about 15 s in silence, 10 s with data under way.
_REACH = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "application_name": "ensemble_ray",
}
#: What every session is told: commits are on the disk; a client that freezes inside a transaction, or dies with its
#: host, holds its locks for seconds, not for the hours of TCP's defaults.
_SESSION = {
    "synchronous_commit": "on",
    "client_encoding": "UTF8",
    "idle_in_transaction_session_timeout": "10s",
    "lock_timeout": "10s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
}
_SET = "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS s (name, value)"
#: SQLSTATE of failures that pass: lost connections, restarts, too many clients, deadlocks, locks that took long.
_PASSING = ("08", "57P01", "57P02", "57P03", "53300", "40001", "40P01", "55P03", "25P03")
_ADVICE = {
    "53100": "The server's disk is full: free space there",
    "53200": "The server has no memory left",
    "42501": "The user needs the right to create the schema 'ensemble_ray', or to use its tables",
    "25006": "The server only reads: use the URL of the primary",
}


def check_driver() -> None:
    """Refuse where psycopg is not installed.

    Raises:
        ValidationError: says what to install.
    """
    try:
        importlib.import_module("psycopg")
    except ImportError as error:
        msg = "Records in PostgreSQL need the package psycopg: pip install 'ensemble-ray[postgres]'"
        raise ValidationError(msg) from error


class Database:
    """The database of one URL."""

    def __init__(self, url: str, *, patience_s: float) -> None:
        """Read the URL; nothing is connected.

        Raises:
            ValidationError: the driver is not installed, or it is no URL of a database.
        """
        check_driver()
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        self.patience_s = patience_s
        try:
            parameters = {key: value for key, value in conninfo_to_dict(url).items() if value is not None}
        except psycopg.Error:
            msg = "The URL of the store cannot be read: write postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
            raise ValidationError(msg) from None  # the driver's text repeats the URL, with its password
        self._parameters: dict[str, Any] = {**_REACH, **parameters}
        self.place = _describe_place(parameters)

    async def connect(self) -> Connection:
        """Open a connection that commits every statement; the schema is there.

        Raises:
            RecordError: the record there is of a newer format.
            Error: psycopg's; give it to `failure`.
        """
        connection = await self._open()
        try:
            await ensure_schema(connection, self.place)
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
                if not await has_schema(connection, self.place):
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
                has_tables = await has_schema(connection, self.place)
                if flaw := await flaw_of(connection):
                    raise RecordError(f"No run can be recorded in the database {self.place}: {flaw}", self.place)
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
                delay = _BACKOFF_S[min(tries, len(_BACKOFF_S) - 1)]
                if not is_passing(error) or loop.time() + delay > deadline:
                    raise self.failure(error) from error
                if not tries:
                    _log.warning("Lost the database %s, trying again: %s", self.place, _first_line(error))
            tries += 1
            await asyncio.sleep(delay)

    def failure(self, error: BaseException) -> RecordError:
        """Return what went wrong with this database, and what to do."""
        state = getattr(error, "sqlstate", None)
        if is_passing(error):
            advice = "Check that the server runs and that URL, user and password are right"
        else:
            advice = _ADVICE.get(state or "", "The server's log may tell more")
        msg = (
            f"Cannot use the database {self.place}: {_first_line(error)}. "
            f"{advice}. What is recorded stays; a run that this ended can be resumed afterwards"
        )
        return RecordError(msg, self.place)

    async def _open(self) -> Connection:
        import psycopg

        async with asyncio.timeout(_ANSWER_S):
            connection = await psycopg.AsyncConnection.connect(**self._parameters, autocommit=True)
            try:
                await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
                await connection.execute(_SET, [list(_SESSION), list(_SESSION.values())])
            except BaseException:
                await connection.close()
                raise
        return connection


def is_passing(error: BaseException) -> bool:
    """Whether trying again may help."""
    import psycopg

    if isinstance(error, TimeoutError):
        return True
    state = getattr(error, "sqlstate", None)
    if state is None:  # no answer of a server at all
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return str(state).startswith(_PASSING)


def _first_line(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer"
    return message_of(error).strip().splitlines()[0].rstrip(".")


def _describe_place(parameters: dict[str, Any]) -> str:
    """Return the database for people: no user, no password."""
    host, port, name = (
        str(parameters.get("host", "")),
        str(parameters.get("port", "5432")),
        str(parameters.get("dbname", "")),
    )
    if not host or host.startswith("/"):
        return f"postgresql:///{name}" + (f"?host={host}" if host else "")
    return f"postgresql://{host}:{port}/{name}"
