"""Stores of API keys: a private file, or a table in PostgreSQL.

A store stays, even without keys: an endpoint that had keys never admits requests without one again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar, cast

from ensemble_ray.access.admission import (
    ApiKey,
    read_document,
    with_change,
    with_key,
    without_key,
    write_document,
)
from ensemble_ray.errors import EnsembleError, ValidationError
from ensemble_ray.process.postgres_server import SESSION, Connection, PostgresDatabase, value_of
from ensemble_ray.process.private_files import read_private_file, replace_private_file
from ensemble_ray.record.stores import Ownership, StoreAddress

T = TypeVar("T")
KeyStamp = tuple[int, ...]
_MOST_FILE_BYTES = 1_048_576
#: Attempts to lock the file, and pause, s.
_TRIES, _PAUSE_S = 50, 0.1
#: Columns of an accepted run, in the file of an endpoint too.
RUN_COLUMNS = {
    "run_id": "text NOT NULL",
    "key": "text",
    "digest": "text NOT NULL",
    "ensemble": "text NOT NULL",
    "request": "text NOT NULL",
    "tags": "text NOT NULL",
    "tasks": "integer",
    "workflow": "text NOT NULL",
    "status": "text NOT NULL",
    "created_at": "text NOT NULL",
    "ended_at": "text",
    "outcome": "text",
}
#: Names in `tags` are JSON, because a text here cannot contain NUL.
_TABLES = """
CREATE TABLE ensemble_ray_endpoint.endpoints (name text PRIMARY KEY, epoch bigint NOT NULL, driver text NOT NULL);
CREATE TABLE ensemble_ray_endpoint.runs (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    endpoint text NOT NULL REFERENCES ensemble_ray_endpoint.endpoints (name) ON DELETE CASCADE,
    {columns},
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
"""


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

    def change(self, name: str, change: Callable[[ApiKey], ApiKey]) -> ApiKey:
        """Replace a key by a changed one of the same name, and return that. `ValidationError`: there is none of that name."""
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

    def change(self, name: str, change: Callable[[ApiKey], ApiKey]) -> ApiKey:
        with self._lock():
            changed, keys = with_change(self.read() or [], name, change, location=self.location)
            self._write(keys)
        return changed

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
        version = self._read("version")
        return None if version is None else (cast("int", version),)

    def read(self) -> Sequence[ApiKey] | None:
        content = self._read("content")
        return None if content is None else self._keys_of(str(content))

    def add(self, key: ApiKey) -> None:
        self._change(lambda keys: (None, with_key(keys, key)))

    def revoke(self, name: str) -> ApiKey:
        return self._change(lambda keys: without_key(keys, name, location=self.location))

    def change(self, name: str, change: Callable[[ApiKey], ApiKey]) -> ApiKey:
        return self._change(lambda keys: with_change(keys, name, change, location=self.location))

    def _change(self, change: Callable[[Sequence[ApiKey]], tuple[T, list[ApiKey]]]) -> T:
        def operation(connection: Connection) -> T:
            connection.execute("LOCK TABLE ensemble_ray_endpoint.keys IN SHARE ROW EXCLUSIVE MODE")
            content = value_of(connection, "SELECT content FROM ensemble_ray_endpoint.keys")
            value, keys = change([] if content is None else self._keys_of(str(content)))
            connection.execute(
                "INSERT INTO ensemble_ray_endpoint.keys AS k VALUES (1, 1, %s) "
                "ON CONFLICT (id) DO UPDATE SET version = k.version + 1, content = excluded.content",
                [write_document(keys)],
            )
            return value

        return self._database.transact(operation, is_repeatable=False)

    def _keys_of(self, content: str) -> list[ApiKey]:
        try:
            return read_document(content)
        except (ValueError, ValidationError) as error:
            raise EnsembleError(
                f"The keys in {self.location} cannot be read: they are damaged ({type(error).__name__}). Restore "
                "them from a backup, or empty the table ensemble_ray_endpoint.keys and create the keys again"
            ) from None

    def _read(self, column: str) -> object:
        """Return a value of the table, or None. Keys in the file are an error: they are not valid for the database."""
        found = next((value for (value,) in self._database.rows(f"SELECT {column} FROM main.keys")), None)  # noqa: S608  columns of ours
        if found is None and self._file.stamp() is not None:
            raise EnsembleError(
                f"There is no key in {self.location}, and the keys in {self._file.location} are not valid, because runs are "
                "recorded in that database. Create keys with ensemble-ray keys add NAME --teams TEAM,..., and remove the file"
            )
        return found


class EndpointDatabase(PostgresDatabase):
    """`greet` is called with every new connection."""

    SCHEMA = "ensemble_ray_endpoint"
    CREATION_LOCK = 0x656E64706F696E74
    SESSION: ClassVar[Mapping[str, str]] = {**SESSION, "statement_timeout": "30s"}
    PATIENCE_S = 20.0
    NEEDED_BY = "An endpoint's keys and runs in PostgreSQL need"
    SUBJECT = "database"
    ENCODING = "endpoints need one with UTF8"
    NEWER = (
        "The endpoint tables in {location} have version {version}, but this ensemble-ray supports version {known}: "
        "upgrade it, or use another database"
    )

    def __init__(self, url: str, *, greet: Callable[[Connection], None] | None = None) -> None:
        super().__init__(url)
        self._greeting = greet

    def _create(self, connection: Connection) -> None:
        columns = {**RUN_COLUMNS, "created_at": 'text COLLATE "C" NOT NULL'}
        connection.execute(_TABLES.format(columns=", ".join(map(" ".join, columns.items()))).encode())

    def _greet(self, connection: Connection) -> None:
        if self._greeting is not None:
            self._greeting(connection)
