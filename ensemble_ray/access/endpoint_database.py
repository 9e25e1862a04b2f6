"""EndpointDatabase: what endpoints keep in PostgreSQL, where records lie there too. Package: access.

In: a URL. Out: one connection, opened anew when it is lost, and tables in a schema of their own, made on first use. Each operation
is one transaction. Every call blocks: it is for threads. Never: a password in a text of ours; a table of a newer version written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ensemble_ray.errors import EnsembleError
from ensemble_ray.process.forks import abandon, new_lock, track
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
    import psycopg

    #: rows are tuples of whatever the columns hold; that is how the driver types them
    Connection = psycopg.Connection[tuple[Any, ...]]

__all__ = ["PATIENCE_S", "EndpointDatabase"]

T = TypeVar("T")

_SCHEMA = "ensemble_ray_endpoint"
#: Of the tables below; later ones are refused.
_VERSION = 1
#: Key of the lock under which the tables are made; any number that nobody else uses.
_MAKING = 0x656E64706F696E74
#: How long a server that cannot be reached is waited for, s.
PATIENCE_S = 20.0
#: Beyond what sessions of records are told: an answer that takes longer is an error.
_SESSION = {**SESSION, "statement_timeout": "30s"}

#: Requests, outcomes and keys are JSON in texts; names in `tags` are JSON, too, since a text here knows no NUL.
_TABLES = """
CREATE TABLE ensemble_ray_endpoint.endpoints (name text PRIMARY KEY, epoch bigint NOT NULL, driver text NOT NULL);
CREATE TABLE ensemble_ray_endpoint.runs (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    endpoint text NOT NULL REFERENCES ensemble_ray_endpoint.endpoints (name) ON DELETE CASCADE,
    run_id text NOT NULL,
    key text,
    digest text NOT NULL,
    ensemble text NOT NULL,
    request text NOT NULL,
    tags text NOT NULL,
    tasks integer,
    workflow text NOT NULL,
    status text NOT NULL,
    created_at text COLLATE "C" NOT NULL,
    ended_at text,
    outcome text,
    UNIQUE (endpoint, run_id),
    UNIQUE (endpoint, key)
);
CREATE INDEX runs_by_status ON ensemble_ray_endpoint.runs (endpoint, status, seq);
CREATE TABLE ensemble_ray_endpoint.tags (
    seq bigint NOT NULL REFERENCES ensemble_ray_endpoint.runs (seq) ON DELETE CASCADE,
    name text NOT NULL,
    value text NOT NULL
);
CREATE INDEX tags_of_run ON ensemble_ray_endpoint.tags (seq);
CREATE TABLE ensemble_ray_endpoint.keys (
    id integer PRIMARY KEY CHECK (id = 1), version bigint NOT NULL, content text NOT NULL
);
CREATE TABLE ensemble_ray_endpoint.version (version integer NOT NULL);
"""
#: Asked of the catalogue's tables, not of `to_regclass`: that answers from a cache which a wait for a lock does not renew.
_EXISTS = """
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = 'ensemble_ray_endpoint' AND c.relname = 'version'
)
"""
_HAS_SCHEMA = "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'ensemble_ray_endpoint')"


class EndpointDatabase:
    """The database of one URL, for one user of it.

    Args:
        url: The database.
        greet: Called with each new connection before it is used; what it raises is the error of the operation.

    Raises:
        ValidationError: the driver is not installed, or it is no URL of a database.
    """

    def __init__(self, url: str, *, greet: Callable[[Connection], None] | None = None) -> None:
        self._parameters = parameters_of(url, needed_by="An endpoint's keys and runs in PostgreSQL need")
        self.location = location_of(self._parameters)
        self._greet = greet
        self._using = new_lock()
        self._connection: Connection | None = None
        track(self)

    def after_fork(self) -> None:
        """Begin without a connection: closing the parent's would end its session."""
        abandon(self._connection)
        self._connection = None

    def run(
        self, operation: Callable[[Connection], T], *, is_repeatable: bool = True, patience_s: float = PATIENCE_S
    ) -> T:
        """Do something in one transaction; where the server is lost, again as soon as it is back.

        Args:
            operation: What is done.
            is_repeatable: Whether doing it twice is the same as doing it once. Else it is not done again: whether the server
                did it before it was lost, nobody knows.
            patience_s: How long a server that cannot be reached is waited for.

        Raises:
            EnsembleError: the server cannot be reached, or refuses.
        """

        def attempt(begin: Callable[[], None]) -> T:
            with self._using:
                connection = self._connect()
                begin()
                with connection.transaction():
                    return operation(connection)

        return try_patiently(
            attempt, location=self.location, patience_s=patience_s, is_repeatable=is_repeatable, failure=self._failure
        )

    def close(self) -> None:
        """Close the connection; it is opened again when it is needed."""
        with self._using:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _connect(self) -> Connection:
        """Return the connection; a broken one is made again."""
        import psycopg

        if self._connection is not None and not self._connection.closed:
            return self._connection
        connection = psycopg.connect(**self._parameters, autocommit=True)
        try:
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            connection.execute(SET_SESSION, [list(_SESSION), list(_SESSION.values())])
            _ensure_tables(connection, self.location)
            if self._greet is not None:
                self._greet(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _failure(self, error: BaseException) -> EnsembleError:
        advice = advice_for(error, schema=_SCHEMA)
        return EnsembleError(f"Cannot use the database {self.location}: {first_line(error)}. {advice}")


def _ensure_tables(connection: Connection, location: str) -> None:
    """Make the tables unless they are there; several processes may do so at once.

    Raises:
        EnsembleError: they are of a later version, or the database cannot hold texts.
    """
    if _has_tables(connection, location):
        return
    if (encoding := _value(connection, "SELECT current_setting('server_encoding')")) != "UTF8":
        raise EnsembleError(f"The database {location} has the encoding {encoding}: endpoints need one with UTF8")
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
        if _has_tables(connection, location):  # somebody was faster
            return
        if not _value(connection, _HAS_SCHEMA):  # else the right to make schemas is not needed
            connection.execute("CREATE SCHEMA ensemble_ray_endpoint")
        connection.execute(_TABLES)
        connection.execute("INSERT INTO ensemble_ray_endpoint.version VALUES (%s)", [_VERSION])


def _has_tables(connection: Connection, location: str) -> bool:
    if not _value(connection, _EXISTS):
        return False
    version = _value(connection, "SELECT max(version) FROM ensemble_ray_endpoint.version")
    if not isinstance(version, int) or version > _VERSION:
        raise EnsembleError(
            f"What endpoints keep in {location} is of version {version}, this version of ensemble-ray knows {_VERSION}: "
            "upgrade it, or use another database"
        )
    return True


def _value(
    connection: Connection, query: Any
) -> object:  # the driver takes literal texts alone, and says so in its types
    row = connection.execute(query).fetchone()
    return None if row is None else row[0]
