"""One run's facts in a SQLite file. Room: record.

In: rendered facts, a group at a time. Out: a file that holds them; `sqlite_reading` reads it. The file itself refuses
facts of an older epoch (two triggers), so that no writer can pass it by. Everything here blocks: it is for threads.
Never: a guess about a damaged file, a file that others may read, a group in part.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble_ray.errors import RecordError
from ensemble_ray.record.rendering import FORMAT
from ensemble_ray.record.sqlite_reading import BUSY_S, RECORD, check_version, facts_in, is_damage, unreadable

if TYPE_CHECKING:
    from ensemble_ray.messages import Fact

__all__ = ["RECORD", "Row", "SqliteFile", "cannot_write", "is_stale"]

#: kind, name, instance, at, epoch, data
Row = tuple[str, str, str, float, int, str]
#: Rows of one statement; a group that fits needs no other, and one statement is a transaction of its own.
_ROWS = 32
_STALE = "stale epoch"
_NEWEST = "(SELECT max(epoch) FROM epochs WHERE instance IN ('run', NEW.instance))"
_SCHEMA = f"""
CREATE TABLE facts (
  seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, instance TEXT NOT NULL,
  at REAL NOT NULL, epoch INTEGER NOT NULL, data TEXT NOT NULL
);
CREATE INDEX facts_of_instance ON facts (instance);
CREATE TABLE bodies (sha256 TEXT PRIMARY KEY, body NOT NULL);
CREATE TABLE epochs (instance TEXT PRIMARY KEY, epoch INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER refuse_older_epoch BEFORE INSERT ON facts WHEN NEW.epoch < {_NEWEST}
BEGIN SELECT RAISE(ABORT, '{_STALE}'); END;
CREATE TRIGGER note_newer_epoch AFTER INSERT ON facts WHEN NEW.epoch > coalesce({_NEWEST}, 0)
BEGIN INSERT OR REPLACE INTO epochs VALUES (NEW.instance, NEW.epoch); END;
PRAGMA user_version={FORMAT};
"""  # noqa: S608  our own constants


class SqliteFile:
    """A run's file as one writer has it open. Whoever calls it to write holds the run's commit lock."""

    def __init__(self, directory: Path) -> None:
        """Open the file in a run's directory; it is made when it is missing.

        Raises:
            RecordError: it is of a newer format.
            OSError, sqlite3.Error: it cannot be opened.
        """
        self.path = directory / RECORD
        is_new = not self.path.exists()
        if is_new:
            _make(self.path)
        self._connection = sqlite3.connect(
            self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=2 * _ROWS
        )
        self._is_on_disk = False
        self._has_full_sync = False
        try:
            check_version(self._connection, self.path)
            if is_new:  # the first write begins the log, and would wait for the disk
                self._connection.execute("PRAGMA synchronous=OFF")
                self._write_something()
            self._connection.execute("PRAGMA synchronous=NORMAL")
        except BaseException:
            self._connection.close()
            raise

    def add(self, rows: Sequence[Row], bodies: Mapping[str, str], *, is_synced: bool = False) -> None:
        """Add a group, all of it or nothing.

        Args:
            rows: The facts in order.
            bodies: Long texts by their hashes; those that are there already are passed over.
            is_synced: Whether the disk itself must have it, and everything before it, on return.

        Raises:
            sqlite3.IntegrityError: a newer epoch of a fact's instance is there (`is_stale`).
            sqlite3.Error: it cannot be written.
        """
        if rows and len(rows) <= _ROWS and not bodies:
            with self._synchronised(is_synced=is_synced):
                self._insert(rows)
            return
        with self.transaction(is_synced=is_synced):
            self.add_in_transaction(rows, bodies)
            if not rows:  # without anything to write, nothing would be synchronised
                self._write_something()

    def add_in_transaction(self, rows: Sequence[Row], bodies: Mapping[str, str]) -> None:
        """As `add`, inside a transaction of the caller's."""
        if bodies:
            self._connection.executemany("INSERT OR IGNORE INTO bodies VALUES (?, ?)", _as_stored(bodies))
        for begin in range(0, len(rows), _ROWS):
            self._insert(rows[begin : begin + _ROWS])

    @contextlib.contextmanager
    def transaction(self, *, is_synced: bool = False) -> Generator[None]:
        """What is done inside is committed as a whole."""
        with self._synchronised(is_synced=is_synced):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # some errors have rolled back already
                    self._connection.execute("ROLLBACK")
                raise

    def epochs(self) -> dict[str, int]:
        """The newest epoch of each instance that has one above 0; of the run as a whole under `run`."""
        return dict(self._connection.execute("SELECT instance, epoch FROM epochs"))

    def raise_epoch(self, instance: str, epoch: int) -> None:
        """From now on facts of that instance (`run`: of all) need that epoch or a newer one."""
        self._connection.execute("INSERT OR REPLACE INTO epochs VALUES (?, ?)", (instance, epoch))

    def facts(self, run_id: str) -> list[Fact]:
        """All facts in order.

        Raises:
            RecordError: the file is damaged.
        """
        return facts_in(self._connection, run_id, self.path)

    def close(self) -> None:
        """Let go of the file. The last one to do so brings its log into it."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")  # here it lets other threads run
        self._connection.close()

    def _write_something(self) -> None:
        self._connection.execute(f"PRAGMA user_version={FORMAT}")

    def _insert(self, rows: Sequence[Row]) -> None:
        self._connection.execute(_insert_of(len(rows)), [value for row in rows for value in row])

    @contextlib.contextmanager
    def _synchronised(self, *, is_synced: bool) -> Generator[None]:
        if is_synced is not self._has_full_sync:
            self._connection.execute(f"PRAGMA synchronous={'FULL' if is_synced else 'NORMAL'}")
            self._has_full_sync = is_synced
        yield
        if is_synced and not self._is_on_disk:
            # The file was made without waiting for the disk, and so were the directories above it.
            _, in_log, in_file = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if in_log != in_file:  # a reader of an older state is in the way
                os.sync()
            for directory in (self.path.parent, self.path.parent.parent):
                _synchronise(directory)
            self._is_on_disk = True


def is_stale(error: sqlite3.Error) -> bool:
    """Whether the file refused facts of an older epoch."""
    return isinstance(error, sqlite3.IntegrityError) and str(error) == _STALE


def cannot_write(path: Path, error: Exception) -> RecordError:
    """What went wrong with the record, where, and what to do about it."""
    if isinstance(error, RecordError):
        return error
    if is_damage(error):
        return unreadable(path, error)
    where = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else str(path)
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    found = RecordError(
        f"Cannot write the run's record to {where}: {reason}. "
        "Free space or correct the rights there, or set ENSEMBLE_RAY_HOME to a directory that can be written.",
        where,
    )
    found.__cause__ = error
    return found


def _make(path: Path) -> None:
    """Make an empty record, whole or not at all, for its owner only."""
    half = path.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        half.unlink()
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, _empty_record())
    finally:
        os.close(descriptor)
    half.replace(path)


@cache
def _empty_record() -> bytes:
    """The bytes of a file without facts: copying them takes a third of the time of making the tables each time."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.executescript(_SCHEMA)
        content = bytearray(connection.serialize())
    content[18:20] = b"\x02\x02"  # the file format's versions for writing and reading: with a write-ahead log
    return bytes(content)


def _as_stored(bodies: Mapping[str, str]) -> Iterable[tuple[str, str | bytes]]:
    for digest, body in bodies.items():
        try:
            body.encode()
        except UnicodeEncodeError:  # halves of surrogate pairs
            yield digest, body.encode("utf-8", "surrogatepass")
        else:
            yield digest, body


@cache
def _insert_of(rows: int) -> str:
    values = ", ".join(["(?, ?, ?, ?, ?, ?)"] * rows)
    return f"INSERT INTO facts (kind, name, instance, at, epoch, data) VALUES {values}"  # noqa: S608  marks only


def _synchronise(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
