"""Stores of API keys: a private file, or a table in PostgreSQL.

A store stays, even without keys: an endpoint that had keys never admits requests without one again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ensemble_ray.access.admission import ApiKey, read_document, with_key, without_key, write_document
from ensemble_ray.errors import EnsembleError, ValidationError
from ensemble_ray.process import postgres_server
from ensemble_ray.process.concurrency import abandon, new_lock, track
from ensemble_ray.process.private_files import read_private_file, replace_private_file
from ensemble_ray.record.stores import Ownership, StoreAddress

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[tuple[Any, ...]]

T = TypeVar("T")
KeyStamp = tuple[int, ...]
_MOST_FILE_BYTES = 1_048_576
#: Attempts to lock the file, and pause, s.
_TRIES, _PAUSE_S = 50, 0.1
PATIENCE_S = 20.0
_SESSION = {**postgres_server.SESSION, "statement_timeout": "30s"}
_SCHEMA = "ensemble_ray_endpoint"
_VERSION = 1
#: An arbitrary number.
_CREATION_LOCK = 0x656E64706F696E74
#: Names in `tags` are JSON, because a text here cannot contain NUL.
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
#: `to_regclass` would read a cache, which waiting for a lock does not refresh.
_EXISTS = """
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = 'ensemble_ray_endpoint' AND c.relname = 'version'
)
"""
_SELECT_VERSION = "SELECT version FROM ensemble_ray_endpoint.keys"
_SELECT_CONTENT = "SELECT content FROM ensemble_ray_endpoint.keys"
_HAS_SCHEMA = "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'ensemble_ray_endpoint')"


class KeyStore(Protocol):
    """The keys of one home directory or database. All calls block.

    They raise `EnsembleError` if the store is damaged, cannot be reached, or can be read by other users.
    """

    @property
    def location(self) -> str:
        """Path of the file, or URL of the database without its password."""
        ...

    def stamp(self) -> KeyStamp | None:
        """Return a value that changes with the keys; None: no key was ever created."""
        ...

    def read(self) -> Sequence[ApiKey] | None:
        """Return the keys, the oldest first; None: no key was ever created."""
        ...

    def add(self, key: ApiKey) -> None:
        """Store a key. `ValidationError`: its name is in use, or there are too many."""
        ...

    def revoke(self, name: str) -> ApiKey:
        """Delete a key and return it. `ValidationError`: there is none of that name."""
        ...


def open_keys(address: StoreAddress | None = None) -> KeyStore:
    """Return the store next to the records at an address. It is opened on first use."""
    address = address or StoreAddress.of()
    file = KeyFile(Path(address.home))
    return KeyTable(address.url, file=file) if address.url else file


class KeyFile:
    """The keys of a home directory, in a private file that a write replaces in one step."""

    def __init__(self, home: Path) -> None:
        self.path = home / "endpoint" / "keys.json"

    @property
    def location(self) -> str:
        return str(self.path)

    def stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> Sequence[ApiKey] | None:
        try:
            content = read_private_file(self.path, most_bytes=_MOST_FILE_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EnsembleError(f"The keys in {self.path} cannot be read: {error.strerror}") from error
        try:
            return read_document(content)
        except (ValueError, ValidationError) as error:
            raise EnsembleError(
                f"The keys in {self.path} cannot be read: the file is damaged ({type(error).__name__}). "
                "Restore it from a backup, or remove it and create the keys again"
            ) from None

    def add(self, key: ApiKey) -> None:
        with self._lock():
            self._write(with_key(self.read() or [], key))

    def revoke(self, name: str) -> ApiKey:
        with self._lock():
            gone, left = without_key(self.read() or [], name, location=self.location)
            self._write(left)
        return gone

    def _write(self, keys: Sequence[ApiKey]) -> None:
        replace_private_file(self.path, write_document(keys).encode())

    @contextlib.contextmanager
    def _lock(self) -> Generator[None]:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = Ownership(self.path.with_suffix(".lock"))
        for _ in range(_TRIES):
            if lock.acquire():
                break
            time.sleep(_PAUSE_S)
        else:
            raise EnsembleError(f"{self.path} is being written by {lock.owner() or 'another process'}: try again")
        try:
            yield
        finally:
            lock.release()


class KeyTable:
    """The keys of a database. `file` is the store that would be used without it."""

    def __init__(self, url: str, *, file: KeyFile) -> None:
        self._url = url
        self._file = file

    @cached_property
    def _database(self) -> EndpointDatabase:
        return EndpointDatabase(self._url)  # a wrong URL is an error on first use

    @property
    def location(self) -> str:
        return self._database.location

    def stamp(self) -> tuple[int, ...] | None:
        version = self._read(_SELECT_VERSION)
        return None if version is None else (int(version),)

    def read(self) -> Sequence[ApiKey] | None:
        content = self._read(_SELECT_CONTENT)
        return None if content is None else self._keys_of(content)

    def add(self, key: ApiKey) -> None:
        self._change(lambda keys: (None, with_key(keys, key)))

    def revoke(self, name: str) -> ApiKey:
        return self._change(lambda keys: without_key(keys, name, location=self.location))

    def _change(self, change: Callable[[Sequence[ApiKey]], tuple[T, list[ApiKey]]]) -> T:
        def operation(connection: Connection) -> T:
            connection.execute("LOCK TABLE ensemble_ray_endpoint.keys IN SHARE ROW EXCLUSIVE MODE")
            content = _value(connection, _SELECT_CONTENT)
            value, keys = change([] if content is None else self._keys_of(content))
            connection.execute(
                "INSERT INTO ensemble_ray_endpoint.keys AS k VALUES (1, 1, %s) "
                "ON CONFLICT (id) DO UPDATE SET version = k.version + 1, content = excluded.content",
                [write_document(keys)],
            )
            return value

        return self._database.run(operation, is_repeatable=False)

    def _keys_of(self, content: str) -> list[ApiKey]:
        try:
            return read_document(content)
        except (ValueError, ValidationError) as error:
            raise EnsembleError(
                f"The keys in {self.location} cannot be read: they are damaged ({type(error).__name__}). Restore "
                "them from a backup, or empty the table ensemble_ray_endpoint.keys and create the keys again"
            ) from None

    def _read(self, query: str) -> Any:
        """Return a value of the table, or None. Keys in the file are an error: they are not valid for the database."""
        found = self._database.run(lambda connection: _value(connection, query))
        if found is None and self._file.stamp() is not None:
            raise EnsembleError(
                f"There is no key in {self.location}, and the keys in {self._file.location} are not valid, because runs are "
                "recorded in that database. Create keys with ensemble-ray keys add NAME --teams TEAM,..., and remove the file"
            )
        return found


class EndpointDatabase:
    """A connection that reopens when it is lost. `greet` is called with every new connection."""

    def __init__(self, url: str, *, greet: Callable[[Connection], None] | None = None) -> None:
        needed_by = "An endpoint's keys and runs in PostgreSQL need"
        self._parameters = postgres_server.parameters_of(url, needed_by=needed_by)
        self.location = postgres_server.location_of(self._parameters)
        self._greet = greet
        self._using = new_lock()
        self._connection: Connection | None = None
        track(self)

    def after_fork(self) -> None:
        # Closing it would end the parent's session.
        abandon(self._connection)
        self._connection = None

    def run(
        self, operation: Callable[[Connection], T], *, is_repeatable: bool = True, patience_s: float = PATIENCE_S
    ) -> T:
        """Run an operation in a transaction, and repeat it after the server was lost.

        An operation that is not repeatable runs once, because a lost server may have committed it.
        """

        def attempt(begin: Callable[[], None]) -> T:
            with self._using:
                connection = self._connect()
                begin()
                with connection.transaction():
                    return operation(connection)

        def failure(error: BaseException) -> EnsembleError:
            why, advice = postgres_server.first_line(error), postgres_server.advice_for(error, schema=_SCHEMA)
            return EnsembleError(f"Cannot use the database {self.location}: {why}. {advice}")

        return postgres_server.try_patiently(
            attempt, location=self.location, patience_s=patience_s, is_repeatable=is_repeatable, failure=failure
        )

    def close(self) -> None:
        with self._using:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _connect(self) -> Connection:
        import psycopg

        if self._connection is not None and not self._connection.closed:
            return self._connection
        connection = psycopg.connect(**self._parameters, autocommit=True)
        try:
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            connection.execute(postgres_server.SET_SESSION, [list(_SESSION), list(_SESSION.values())])
            _ensure_tables(connection, self.location)
            if self._greet is not None:
                self._greet(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection


def _ensure_tables(connection: Connection, location: str) -> None:
    """Create the tables unless they exist. Several processes may do so concurrently."""
    if _has_tables(connection, location):
        return
    if (encoding := _value(connection, "SELECT current_setting('server_encoding')")) != "UTF8":
        raise EnsembleError(f"The database {location} has the encoding {encoding}: endpoints need one with UTF8")
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_CREATION_LOCK])
        if _has_tables(connection, location):
            return
        if not _value(connection, _HAS_SCHEMA):  # the user may lack the right
            connection.execute("CREATE SCHEMA ensemble_ray_endpoint")
        connection.execute(_TABLES)
        connection.execute("INSERT INTO ensemble_ray_endpoint.version VALUES (%s)", [_VERSION])


def _has_tables(connection: Connection, location: str) -> bool:
    if not _value(connection, _EXISTS):
        return False
    version = _value(connection, "SELECT max(version) FROM ensemble_ray_endpoint.version")
    if not isinstance(version, int) or version > _VERSION:
        raise EnsembleError(
            f"The endpoint tables in {location} have version {version}, but this ensemble-ray supports version {_VERSION}: "
            "upgrade it, or use another database"
        )
    return True


def _value(connection: Connection, query: Any) -> Any:  # the driver's type allows literal texts only
    row = connection.execute(query).fetchone()
    return None if row is None else row[0]
