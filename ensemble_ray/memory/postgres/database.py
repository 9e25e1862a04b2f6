"""MemoryDatabase: connections to the database of a memory, and how patient it is with it. Package: memory.

Memory is asked from threads, several at a time: a few connections are kept, each used by one thread at a time.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING, TypeVar

from ensemble_ray.errors import EnsembleError
from ensemble_ray.memory.postgres.schema import SCHEMA, ensure_tables, has_tables, vector_schema
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.postgres_server import (
    SESSION,
    SET_SESSION,
    advice_for,
    first_line,
    location_of,
    parameters_of,
    try_patiently,
)

if TYPE_CHECKING:
    from ensemble_ray.memory.postgres.schema import Connection

__all__ = ["MemoryDatabase"]

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
