"""One run's facts in a SQLite file. Room: record.

In: rendered facts, a group at a time. Out: facts as readers get them. The file itself refuses facts of an older epoch
(two triggers), so that no writer can pass it by. Everything here blocks: it is for threads.
Never: a guess about a damaged file, a file that others may read, a group in part.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble_ray.errors import RecordError
from ensemble_ray.messages import Fact
from ensemble_ray.record.rendering import FORMAT, data_of, missing_text

if TYPE_CHECKING:
    from ensemble_ray.record.rendering import Resolve

__all__ = [
    "RECORD",
    "Row",
    "SqliteFile",
    "cannot_write",
    "is_damage",
    "is_stale",
    "last_of_run",
    "read_all",
    "read_instance",
]

#: The file in a run's directory.
RECORD = "record.sqlite"
#: kind, name, instance, at, epoch, data
Row = tuple[str, str, str, float, int, str]
#: Rows of one statement; a group that fits needs no other, and one statement is a transaction of its own.
_ROWS = 32
#: How long SQLite waits by itself, s; writers take turns before (`commit_lock`), so this is for readers that recover.
_BUSY_S = 10.0
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
            self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=2 * _ROWS
        )
        self._is_on_disk = False
        self._has_full_sync = False
        try:
            _check_version(self._connection, self.path)
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
        return _facts(self._connection, run_id, self.path)

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


def is_damage(error: BaseException) -> bool:
    """Whether an error of SQLite means that the file is none of its, or damaged."""
    return getattr(error, "sqlite_errorname", "").partition("_")[2].startswith(("CORRUPT", "NOTADB"))


def cannot_write(path: Path, error: Exception) -> RecordError:
    """What went wrong with the record, where, and what to do about it."""
    if isinstance(error, RecordError):
        return error
    if is_damage(error):
        return _unreadable(path, error)
    where = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else str(path)
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    found = RecordError(
        f"Cannot write the run's record to {where}: {reason}. "
        "Free space or correct the rights there, or set ENSEMBLE_RAY_HOME to a directory that can be written.",
        where,
    )
    found.__cause__ = error
    return found


def read_all(directory: Path, run_id: str) -> list[Fact]:
    """All committed facts of a run in order; none when nothing was recorded.

    Raises:
        RecordError: the file is damaged, or of a newer format.
    """
    return _read(directory, run_id)


def read_instance(directory: Path, run_id: str, instance: str) -> list[Fact]:
    """The committed facts of one instance, stimuli left out.

    Raises:
        RecordError: the file is damaged, or of a newer format.
    """
    return _read(directory, run_id, "WHERE instance = ? AND kind <> 'stimulus'", (instance,))


def last_of_run(directory: Path, run_id: str, kinds: Sequence[str]) -> Fact | None:
    """The last fact of the run as a whole that is of one of those kinds.

    Raises:
        RecordError: the file is damaged, or of a newer format.
    """
    marks = ", ".join("?" * len(kinds))
    where = f"WHERE seq = (SELECT max(seq) FROM facts WHERE instance = 'run' AND kind IN ({marks}))"  # noqa: S608  marks only
    found = _read(directory, run_id, where, kinds)
    return found[0] if found else None


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


def _read(directory: Path, run_id: str, where: str = "", values: Sequence[object] = ()) -> list[Fact]:
    path, log = directory / RECORD, directory / f"{RECORD}-wal"
    if not path.exists():
        return []
    if not log.exists():
        # Nobody has it open: it is read as it lies there, which is fast, needs no rights and leaves no files behind.
        with (
            contextlib.suppress(sqlite3.Error, RecordError),
            contextlib.closing(_open_to_read(path, "immutable=1")) as at,
        ):
            facts = _checked_facts(at, run_id, path, where, values)
            if not log.exists():
                return facts
    try:
        with _readable(path) as connection:
            return _checked_facts(connection, run_id, path, where, values)
    except sqlite3.Error as error:
        raise _unreadable(path, error) from error


def _checked_facts(
    connection: sqlite3.Connection, run_id: str, path: Path, where: str, values: Sequence[object]
) -> list[Fact]:
    _check_version(connection, path)
    return _facts(connection, run_id, path, where, values)


@contextlib.contextmanager
def _readable(path: Path) -> Generator[sqlite3.Connection]:
    try:
        connection = _open_to_read(path)
    except sqlite3.OperationalError:
        # Reading needs a file for its locks. Where none can be made, as in a directory without rights, a copy is read.
        with tempfile.TemporaryDirectory(prefix="ensemble-ray-") as directory:
            try:
                for each in (path, path.with_name(f"{RECORD}-wal")):
                    if each.exists():
                        shutil.copyfile(each, Path(directory, each.name))
                connection = _open_to_read(Path(directory, path.name))
            except OSError as error:
                raise _unreadable(path, error) from error
            with contextlib.closing(connection):
                yield connection
        return
    with contextlib.closing(connection):
        yield connection


def _open_to_read(path: Path, mode: str = "mode=ro") -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=_BUSY_S, isolation_level=None)
    try:
        connection.execute("SELECT 1 FROM sqlite_schema").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > FORMAT:
        msg = f"The record {path} is of format {version}, this version reads up to {FORMAT}: update ensemble-ray"
        raise RecordError(msg, str(path))
    if version != FORMAT:
        raise _unreadable(path, "it holds no record")


def _facts(
    connection: sqlite3.Connection, run_id: str, path: Path, where: str = "", values: Sequence[object] = ()
) -> list[Fact]:
    resolve = _resolver(connection)
    found: list[Fact] = []
    seq = 0
    try:
        statement = f"SELECT seq, kind, name, at, epoch, data FROM facts {where} ORDER BY seq"  # noqa: S608  our own text
        for seq, kind, name, at, epoch, data in connection.execute(statement, tuple(values)):
            fields = data_of(data, resolve)
            found.append(Fact(run=run_id, kind=kind, name=name, at=at, data=fields, epoch=epoch, seq=seq))
    except (ValueError, TypeError, RecursionError) as error:
        msg = f"The record is damaged: fact {seq} in {path} cannot be read ({error})"
        raise RecordError(msg, str(path)) from error
    except sqlite3.Error as error:
        raise _unreadable(path, error) from error
    return found


def _resolver(connection: sqlite3.Connection) -> Resolve:
    @cache
    def resolve(digest: str) -> str:
        found = connection.execute("SELECT body FROM bodies WHERE sha256 = ?", (digest,)).fetchone()
        if found is None:
            return missing_text(digest)
        body: str | bytes = found[0]
        return body if isinstance(body, str) else body.decode("utf-8", "surrogatepass")

    return resolve


def _as_stored(bodies: Mapping[str, str]) -> Iterable[tuple[str, str | bytes]]:
    for digest, body in bodies.items():
        try:
            body.encode()
        except UnicodeEncodeError:  # halves of surrogate pairs
            yield digest, body.encode("utf-8", "surrogatepass")
        else:
            yield digest, body


def _unreadable(path: Path, reason: BaseException | str) -> RecordError:
    if isinstance(reason, str) or is_damage(reason):
        found = RecordError(f"The record is damaged: {path} cannot be read ({reason})", str(path))
    else:
        found = RecordError(f"Cannot read the record {path}: {reason}", str(path))
    found.__cause__ = reason if isinstance(reason, BaseException) else None
    return found


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
