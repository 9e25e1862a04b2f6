"""Connections to PostgreSQL: parameters, tables of one schema, retries, and messages about failures without a password."""

from __future__ import annotations

import importlib
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from ensemble_ray.errors import EnsembleError, ValidationError, message_of
from ensemble_ray.process.concurrency import abandon, new_lock, track
from ensemble_ray.process.context import bounded_logger

if TYPE_CHECKING:
    import psycopg

Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"  # the driver types rows as tuples of any values

T = TypeVar("T")

_log = bounded_logger(__name__)

BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # between attempts to reach the server; the last one repeats
#: A dead peer is detected after about 15 s of silence, or 10 s with unacknowledged data.
_REACH = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "application_name": "ensemble_ray",
}
#: Commits are on disk. A client that freezes inside a transaction, or dies with its host, holds its locks for seconds;
#: TCP's defaults are hours.
SESSION: Mapping[str, str] = {
    "synchronous_commit": "on",
    "client_encoding": "UTF8",
    "idle_in_transaction_session_timeout": "10s",
    "lock_timeout": "10s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
}
#: Parameters are names and values.
SET_SESSION = "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS s (name, value)"
#: Whether a schema has a table. `to_regclass` answers from a cache that a wait for a lock does not refresh.
HAS_TABLE = """
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = %s
)
"""
_HAS_SCHEMA = "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = %s)"
#: SQLSTATE of temporary failures: lost connections, restarts, too many clients, deadlocks, lock timeouts.
_PASSING = ("08", "57P01", "57P02", "57P03", "53300", "40001", "40P01", "55P03", "25P03")
_ADVICE = {
    "53100": "The server's disk is full: free space there",
    "53200": "The server has no memory left",
    "25006": "The server only reads: use the URL of the primary",
}


def parameters_of(url: str, *, needed_by: str) -> dict[str, Any]:
    """`needed_by` starts the message about a missing driver."""
    try:
        importlib.import_module("psycopg")
    except ImportError as error:
        raise ValidationError(f"{needed_by} the package psycopg: pip install 'ensemble-ray[postgres]'") from error
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        given = {key: value for key, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.Error:
        # The driver's text contains the URL with its password.
        raise ValidationError(
            "The URL of the store cannot be read: write postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        ) from None
    return {**_REACH, **given}


def location_of(parameters: Mapping[str, Any]) -> str:
    host, name = str(parameters.get("host", "")), str(parameters.get("dbname", ""))
    if not host or host.startswith("/"):
        return f"postgresql:///{name}" + (f"?host={host}" if host else "")
    return f"postgresql://{host}:{parameters.get('port', '5432')}/{name}"


def is_passing(error: BaseException) -> bool:
    import psycopg

    if isinstance(error, TimeoutError):
        return True
    state = getattr(error, "sqlstate", None)
    if state is None:  # the server did not answer
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return str(state).startswith(_PASSING)


def advice_for(error: BaseException, *, schema: str) -> str:
    if is_passing(error):
        return "Check that the server runs and that URL, user and password are right"
    state = str(getattr(error, "sqlstate", None) or "")
    if state == "42501":
        return f"The user needs the right to create the schema '{schema}', or to use its tables"
    return _ADVICE.get(state, "See the server's log")


def first_line(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer"
    return message_of(error).strip().splitlines()[0].rstrip(".")


class PostgresDatabase(ABC):
    """The tables of one schema. Connections are reopened when they are lost. All calls block.

    Statements that it translates name tables in the schema `main` and mark values by `?`, as SQLite does.
    """

    SCHEMA: ClassVar[str]
    VERSION: ClassVar[int] = 1  # of the tables
    #: key of the advisory lock for the creation of tables; an arbitrary number
    CREATION_LOCK: ClassVar[int]
    SESSION: ClassVar[Mapping[str, str]]
    MAX_CONNECTIONS: ClassVar[int] = 1
    PATIENCE_S: ClassVar[float]
    #: parts of messages
    NEEDED_BY: ClassVar[str]
    SUBJECT: ClassVar[str]
    ENCODING: ClassVar[str]
    NEWER: ClassVar[str]

    def __init__(self, url: str) -> None:
        self._parameters = parameters_of(url, needed_by=self.NEEDED_BY)
        self.location = location_of(self._parameters)
        self._idle: list[Connection] = []
        self._lock = new_lock()
        self._places = BoundedSemaphore(self.MAX_CONNECTIONS)
        track(self)

    def after_fork(self) -> None:
        """Leave the connections to the parent: closing them would end its sessions."""
        abandon(*self._idle)
        self._idle, self._places = [], BoundedSemaphore(self.MAX_CONNECTIONS)

    def run(self, operation: Callable[[Connection], T], *, is_repeatable: bool = True) -> T:
        """Run an operation, and repeat it when a lost server is back, unless the server may have committed it."""
        import psycopg

        deadline = time.monotonic() + self.PATIENCE_S
        tries = 0
        while True:
            is_begun = False
            try:
                with self._connection() as connection:
                    is_begun = True
                    return operation(connection)
            except (psycopg.Error, TimeoutError) as error:
                delay = BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
                may_repeat = is_repeatable or not is_begun
                if not is_passing(error) or not may_repeat or time.monotonic() + delay > deadline:
                    raise self._failure(error) from error
                if not tries:
                    _log.warning("Lost the database %s, trying again: %s", self.location, first_line(error))
            tries += 1
            time.sleep(delay)

    def transact(self, operation: Callable[[Connection], T], *, is_repeatable: bool = True) -> T:
        def transaction(connection: Connection) -> T:
            with connection.transaction():
                return operation(connection)

        return self.run(transaction, is_repeatable=is_repeatable)

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        statement = self.translate(query)
        return self.run(lambda connection: connection.execute(statement, values).fetchall())

    def translate(self, query: str) -> bytes:
        return query.replace("?", "%s").replace("main.", f"{self.SCHEMA}.").encode()

    def create_once(self, connection: Connection, table: str, create: Callable[[Connection], object]) -> None:
        """Create tables in one transaction, unless the schema has `table`."""
        query = (HAS_TABLE, self.SCHEMA, table)
        if value_of(connection, *query):  # existing tables need no right to create them
            return
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [self.CREATION_LOCK])
            if not value_of(connection, *query):  # no other process was faster
                create(connection)

    def is_made(self) -> bool:
        import psycopg

        try:
            with self._open() as connection:
                if not value_of(connection, HAS_TABLE, self.SCHEMA, "version"):
                    return False
                self._check_version(connection)
                return True
        except psycopg.Error as error:
            raise self._failure(error) from error

    def close(self) -> None:
        with self._places:
            while (connection := self._idle_connection()) is not None:
                connection.close()

    @abstractmethod
    def _create(self, connection: Connection) -> None:
        """Create the tables in the schema, except `version`."""

    def _greet(self, connection: Connection) -> None:  # noqa: B027  most need nothing
        """Prepare a new connection, whose tables exist."""

    @contextmanager
    def _connection(self) -> Generator[Connection]:
        with self._places:
            connection = self._idle_connection() or self._connect()
            try:
                yield connection
            finally:
                if connection.closed:
                    connection.close()
                else:
                    with self._lock:
                        self._idle.append(connection)

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
            self.create_once(connection, "version", self._make)
            self._check_version(connection)
            self._greet(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _make(self, connection: Connection) -> None:
        if (encoding := value_of(connection, "SELECT current_setting('server_encoding')")) != "UTF8":
            raise EnsembleError(f"The database {self.location} has the encoding {encoding}: {self.ENCODING}")
        if not value_of(connection, _HAS_SCHEMA, self.SCHEMA):  # an existing schema needs no right to create one
            connection.execute(f"CREATE SCHEMA {self.SCHEMA}".encode())
        self._create(connection)
        connection.execute(self.translate("CREATE TABLE main.version (version integer NOT NULL)"))
        connection.execute(self.translate("INSERT INTO main.version VALUES (?)"), [self.VERSION])

    def _check_version(self, connection: Connection) -> None:
        version = value_of(connection, self.translate("SELECT max(version) FROM main.version"))
        if not isinstance(version, int) or version > self.VERSION:
            raise EnsembleError(self.NEWER.format(location=self.location, version=version, known=self.VERSION))

    def _open(self) -> Connection:
        import psycopg

        connection = psycopg.connect(**self._parameters, autocommit=True)
        try:
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            connection.execute(SET_SESSION, [list(self.SESSION), list(self.SESSION.values())])
        except BaseException:
            connection.close()
            raise
        return connection

    def _failure(self, error: BaseException) -> EnsembleError:
        advice = advice_for(error, schema=self.SCHEMA)
        return EnsembleError(f"Cannot use the {self.SUBJECT} {self.location}: {first_line(error)}. {advice}")


def value_of(connection: Connection, query: str | bytes, *values: object) -> object:
    """Return the first value of the first row, or None."""
    row = connection.execute(query if isinstance(query, bytes) else query.encode(), values or None).fetchone()
    return None if row is None else row[0]
