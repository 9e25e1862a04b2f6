"""KeyFile: the keys of the endpoints of one home, in one file that only its owner may read.

In: keys. Out: the same, to every process that reads the file. It gets its content in one step, so that no reader sees half of it, and
two that write wait for each other. Once made it stays, also without a key: an endpoint that had keys never opens again by itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ensemble_ray.access.keys import ApiKey, read_document, with_key, without_key, write_document
from ensemble_ray.errors import EnsembleError, ValidationError
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
from ensemble_ray.process.private_files import read_private_file, replace_private_file
from ensemble_ray.record.stores import Ownership, StoreAddress

_MOST_BYTES = 1_048_576
#: How often, and after which pause, s, a file is asked for that another process is writing.
_TRIES, _PAUSE_S = 50, 0.1


class KeyFile:
    """The keys of a home.

    Args:
        home: Directory of the records (`ENSEMBLE_RAY_HOME`).
    """

    def __init__(self, home: Path) -> None:
        self.path = home / "endpoint" / "keys.json"

    @property
    def location(self) -> str:
        """Where the keys are."""
        return str(self.path)

    def stamp(self) -> tuple[int, int, int] | None:
        """Return what changes whenever the file does; None: there is none."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> Sequence[ApiKey] | None:
        """Return the keys, the oldest first; None: none was ever made here.

        Raises:
            EnsembleError: the file cannot be used: it is damaged, or not its owner's alone.
        """
        try:
            content = read_private_file(self.path, most_bytes=_MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EnsembleError(f"The keys in {self.path} cannot be read: {error.strerror}") from error
        try:
            return read_document(content)
        except (ValueError, ValidationError) as error:
            raise EnsembleError(
                f"The keys in {self.path} cannot be read: the file is damaged ({type(error).__name__}). "
                "What to do: bring it back from a backup, or remove it and make the keys anew"
            ) from None

    def add(self, key: ApiKey) -> None:
        """Keep a key; see `KeyStore.add`."""
        with self._lock():
            self._write(with_key(self.read() or [], key))

    def revoke(self, name: str) -> ApiKey:
        """Let go of a key; see `KeyStore.revoke`."""
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


#: Differs whenever the keys do.
KeyStamp = tuple[int, ...]


class KeyStore(Protocol):
    """The keys of the endpoints of one home, or of one database. Every call blocks for a moment."""

    @property
    def location(self) -> str:
        """Where they are, for people: a path, or a database without its password."""
        ...

    def stamp(self) -> KeyStamp | None:
        """Return what changes whenever the keys do; None: none was ever made.

        Raises:
            EnsembleError: they cannot be looked at.
        """
        ...

    def read(self) -> Sequence[ApiKey] | None:
        """Return the keys, the oldest first; None: none was ever made.

        Raises:
            EnsembleError: they cannot be used: they are damaged, or not their owner's alone.
        """
        ...

    def add(self, key: ApiKey) -> None:
        """Keep a key.

        Raises:
            ValidationError: there is one of that name, or there are too many.
            EnsembleError: as in `read`, or another process is writing all the time.
        """
        ...

    def revoke(self, name: str) -> ApiKey:
        """Let go of a key, and return what was kept of it.

        Raises:
            ValidationError: there is none of that name.
            EnsembleError: as in `add`.
        """
        ...


def open_keys(address: StoreAddress | None = None) -> KeyStore:
    """Return the keys that hold where runs are recorded at that address; nothing is opened before it is used.

    Args:
        address: Of the records; None: as the environment says.
    """
    address = address or StoreAddress.of()
    file = KeyFile(Path(address.home))
    if not address.url:
        return file

    return KeyTable(address.url, file=file)


if TYPE_CHECKING:
    import psycopg

    #: rows are tuples of whatever the columns hold; that is how the driver types them
    Connection = psycopg.Connection[tuple[Any, ...]]


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


class KeyTable:
    """The keys of a database.

    Args:
        url: The database.
        file: Where they would be without it.
    """

    def __init__(self, url: str, *, file: KeyFile) -> None:
        self._url = url
        self._file = file

    @cached_property
    def _database(self) -> EndpointDatabase:
        return EndpointDatabase(self._url)  # a wrong URL is an error of whoever asks first

    @property
    def location(self) -> str:
        """Where the keys are."""
        return self._database.location

    def stamp(self) -> tuple[int, ...] | None:
        """Return what changes whenever the keys do; see `KeyStore.stamp`."""
        found = self._database.run(_version)
        if found is None:
            self._check_file()
            return None
        return (found,)

    def read(self) -> Sequence[ApiKey] | None:
        """Return the keys, the oldest first; see `KeyStore.read`."""
        found = self._database.run(_content)
        if found is None:
            self._check_file()
            return None
        return self._keys_of(found)

    def add(self, key: ApiKey) -> None:
        """Keep a key; see `KeyStore.add`."""
        self._change(lambda keys: (None, with_key(keys, key)))

    def revoke(self, name: str) -> ApiKey:
        """Let go of a key; see `KeyStore.revoke`."""
        return self._change(lambda keys: without_key(keys, name, location=self.location))

    def _change(self, change: Callable[[Sequence[ApiKey]], tuple[T, list[ApiKey]]]) -> T:
        """Change the keys in one transaction; others that change them wait for it."""

        def operation(connection: Connection) -> T:
            connection.execute("LOCK TABLE ensemble_ray_endpoint.keys IN SHARE ROW EXCLUSIVE MODE")
            found = _content(connection)
            value, keys = change([] if found is None else self._keys_of(found))
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
                f"The keys in {self.location} cannot be read: they are damaged ({type(error).__name__}). What to do: bring "
                "them back from a backup of the database, or empty the table ensemble_ray_endpoint.keys and make them anew"
            ) from None

    def _check_file(self) -> None:
        """Refuse to go on without keys where there are some in a file, which hold no more.

        Raises:
            EnsembleError: there is such a file.
        """
        if self._file.stamp() is not None:
            raise EnsembleError(
                f"No key was made in {self.location} yet, and those in {self._file.location} hold no more, since runs are recorded in "
                "that database. What to do: make keys with ensemble-ray keys add NAME --teams TEAM,..., and remove the file"
            )


def _version(connection: Connection) -> int | None:
    """Return how often the keys were changed; None: none was ever made."""
    row = connection.execute("SELECT version FROM ensemble_ray_endpoint.keys").fetchone()
    return None if row is None else int(row[0])


def _content(connection: Connection) -> str | None:
    row = connection.execute("SELECT content FROM ensemble_ray_endpoint.keys").fetchone()
    return None if row is None else str(row[0])
