"""Write and read one run's SQLite file. All functions block.

Two triggers in the file refuse facts of an older epoch, so that no writer can bypass the check.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar, cast
from zlib import crc32

from ensemble_ray.errors import RecordError
from ensemble_ray.errors.texts import brief
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import KINDS_OF_RUN, read_fact
from ensemble_ray.facts.runs import LossAccepted
from ensemble_ray.process.concurrency import abandon, no_fork, track, was_quiet
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.journal import FORMAT, OLDEST_FORMAT, Resolve, body_digest, data_of, missing_text, stored_text
from ensemble_ray.record.sqlite.losses import (
    COUNT,
    RECORD,
    CountFile,
    Loss,
    drop_position,
    find_loss,
    index_of,
    is_dangerous,
    is_short,
    is_sound,
    log_of,
    make_deleted_error,
    read_commit_count,
    read_count,
    remember,
)

T = TypeVar("T")

BUSY_S = 10.0  # How long SQLite waits for a lock, s. Writers use `COMMIT_LOCK`; readers that recover a log wait here.
_TRIES = 5


def read_all(directory: Path, run_id: str, *, is_partial: bool = False) -> list[Fact]:
    if not is_partial and (loss := loss_in(directory)) is not None:
        raise loss.error()
    return _read(directory, run_id, is_partial=is_partial)


def loss_in(directory: Path, *, has_texts: bool = False) -> Loss | None:
    """Return the loss of a run's record, if any. `has_texts`: check its long texts too."""
    count, path = read_commit_count(directory), directory / RECORD

    def find(connection: sqlite3.Connection) -> Loss | None:
        return find_loss(connection, count, path, has_texts=has_texts)

    return read_from(directory, find, None, is_partial=True)


def read_instance(directory: Path, run_id: str, instance: str) -> list[Fact]:
    """Return the committed facts of one instance without stimuli, and the facts of accepted losses."""
    return _read(directory, run_id, "WHERE instance IN (?, ?) AND kind <> 'stimulus'", (instance, LossAccepted.FENCE))


def read_answer(directory: Path, run_id: str, name: str) -> Fact[ModelAnswered] | None:
    """Return the last committed answer with that name."""
    found = _read(
        directory, run_id, "WHERE instance = ? AND name = ? AND kind = 'model'", (name.rsplit("/", 2)[0], name)
    )
    return cast("Fact[ModelAnswered]", found[-1]) if found else None


def read_content(directory: Path, digest: str) -> bytes | None:
    def read(connection: sqlite3.Connection) -> bytes | None:
        found = connection.execute("SELECT body FROM bodies WHERE sha256 = ?", (digest,)).fetchone()
        body = None if found is None else found[0]
        return body.encode() if isinstance(body, str) else body  # a long text of a fact may be the same

    return read_from(directory, read, None)


def last_of_run(directory: Path, run_id: str, kinds: Sequence[str]) -> Fact | None:
    marks = ", ".join("?" * len(kinds))
    where = f"WHERE seq = (SELECT max(seq) FROM facts WHERE instance = 'run' AND kind IN ({marks}))"  # noqa: S608  marks only
    found = _read(directory, run_id, where, kinds)
    return found[0] if found else None


def last_seq(directory: Path, kinds: Collection[str] | None, *, is_partial: bool = False) -> int:
    """Return the position of the last committed fact of these kinds (None: any kind), or 0."""
    if not is_partial and (loss := loss_in(directory)) is not None:
        raise loss.error()
    where, values = _of_kinds(kinds)

    def last(connection: sqlite3.Connection) -> int:
        query = f"SELECT seq FROM facts WHERE 1 {where} ORDER BY seq DESC LIMIT 1"  # noqa: S608  marks only
        found = connection.execute(query, values).fetchone()
        return 0 if found is None else int(found[0])

    return read_from(directory, last, 0, is_partial=is_partial)


def read_page(
    directory: Path,
    run_id: str,
    after: int,
    size: int,
    *,
    kinds: Collection[str] | None,
    has_data: bool,
    is_partial: bool = False,
) -> list[Fact]:
    where, values = _of_kinds(kinds)
    where = f"WHERE seq > ? {where} ORDER BY seq LIMIT {size:d}"
    path = directory / RECORD

    def page(connection: sqlite3.Connection) -> list[Fact]:
        return facts_in(connection, run_id, path, where, (after, *values), has_data=has_data, is_partial=is_partial)

    return read_from(directory, page, [], is_partial=is_partial)


def facts_in(
    connection: sqlite3.Connection,
    run_id: str,
    path: Path,
    where: str = "ORDER BY seq",
    values: Sequence[object] = (),
    *,
    has_data: bool = True,
    is_partial: bool = False,
) -> list[Fact]:
    """Return facts from an open file that `where` selects. `is_partial` replaces a missing text by a note."""
    resolve = _resolver(connection, is_partial=is_partial)
    found: list[Fact] = []
    seq = 0
    columns = "'{}', NULL"
    if has_data:
        columns = "data, crc" if check_version(connection, path) >= _CHECKSUMS else "data, NULL"
    try:
        query = f"SELECT seq, kind, name, instance, at, epoch, {columns} FROM facts {where}"  # noqa: S608  our own text
        for number, kind, name, instance, at, epoch, data, checksum in connection.execute(query, tuple(values)):
            previous, seq = seq, number
            _check_unaltered((kind, name, instance, at, epoch, data), checksum, is_in_order=number > previous)
            fields = data_of(data, resolve)
            found.append(read_fact(run=run_id, kind=kind, name=name, at=at, data=fields, epoch=epoch, seq=seq))
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordError(f"The record is damaged: fact {seq} in {path} cannot be read ({error})", str(path)) from error
    except sqlite3.Error as error:
        raise unreadable(path, error) from error
    return found


def check_version(connection: sqlite3.Connection, path: Path) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > FORMAT:
        raise RecordError(
            f"The record {path} is of format {version}, this version reads up to {FORMAT}: update ensemble-ray",
            str(path),
        )
    if version < OLDEST_FORMAT:
        raise unreadable(path, "it holds no record")
    return int(version)


def is_damage(error: BaseException) -> bool:
    name: str = getattr(error, "sqlite_errorname", "")  # none if Python cannot decode a text, as after a flipped bit
    return name.partition("_")[2].startswith(("CORRUPT", "NOTADB")) or str(error).startswith(
        "Could not decode to UTF-8"
    )


def unreadable(path: Path, reason: BaseException | str) -> RecordError:
    if isinstance(reason, str) or is_damage(reason):
        found = RecordError(f"The record is damaged: {path} cannot be read ({brief(str(reason))})", str(path))
    else:
        found = RecordError(f"Cannot read the record {path}: {reason}", str(path))
    found.__cause__ = reason if isinstance(reason, BaseException) else None
    return found


def _of_kinds(kinds: Collection[str] | None) -> tuple[str, tuple[str, ...]]:
    if kinds is None:
        return "", ()
    # The index of instances finds facts of the run, independent of the number of other facts.
    of_run = "AND instance = 'run' " if set(kinds) <= KINDS_OF_RUN else ""
    return f"{of_run}AND kind IN ({', '.join('?' * len(kinds))})", tuple(kinds)


def _read(
    directory: Path, run_id: str, where: str = "", values: Sequence[object] = (), *, is_partial: bool = False
) -> list[Fact]:
    path = directory / RECORD
    ordered = f"{where} ORDER BY seq"

    def facts(connection: sqlite3.Connection) -> list[Fact]:
        return facts_in(connection, run_id, path, ordered, values, is_partial=is_partial)

    return read_from(directory, facts, [], is_partial=is_partial)


@no_fork()
def read_from(directory: Path, read: Callable[[sqlite3.Connection], T], nothing: T, *, is_partial: bool = False) -> T:
    path = directory / RECORD
    log = log_of(path)
    count = read_commit_count(directory)  # before the file, which then contains all noted facts
    if not path.exists():
        if count is not None and count.committed and directory.is_dir():
            raise make_deleted_error(path)
        return nothing

    def whole(connection: sqlite3.Connection) -> T:
        check_version(connection, path)
        if not is_partial and is_short(connection, count, path):
            loss = find_loss(connection, count, path)
            if loss is not None:
                raise loss.error()
        return read(connection)

    if not log.exists():
        # No process has it open: read it as immutable, which is fast, needs no write access and creates no files.
        with (
            contextlib.suppress(sqlite3.Error, RecordError),
            contextlib.closing(_open_to_read(path, "immutable=1")) as at,
        ):
            found = whole(at)
            if not log.exists():
                return found
    try:
        with _readable(path) as connection:
            return whole(connection)
    except sqlite3.Error as error:
        raise unreadable(path, error) from error


@contextlib.contextmanager
def _readable(path: Path) -> Generator[sqlite3.Connection]:
    connection: sqlite3.Connection | None = None
    if not is_dangerous(path):
        with contextlib.suppress(sqlite3.OperationalError):
            connection = _open_to_read(path)
    if connection is not None:
        with contextlib.closing(connection):
            yield connection
        return
    # Reading needs a lock file. If it cannot be created, for example in a read-only directory, read a copy.
    with tempfile.TemporaryDirectory(prefix="ensemble-ray-") as directory:
        try:
            _copy(path, Path(directory))
            connection = _open_to_read(Path(directory, path.name))
        except OSError as error:
            raise unreadable(path, error) from error
        with contextlib.closing(connection):
            yield connection


def _copy(path: Path, directory: Path) -> None:
    files = (path, log_of(path))
    for tries_left in reversed(range(_TRIES)):
        before = [_stamp(each) for each in files]
        try:
            for each, found in zip(files, before, strict=True):
                if found is None:
                    Path(directory, each.name).unlink(missing_ok=True)
                else:
                    shutil.copyfile(each, directory / each.name)
        except FileNotFoundError:  # its last writer closed it and removed the log
            if not tries_left:
                raise
            continue
        # Frames added to the log do no harm. A checkpoint into the file, or a restarted log, does.
        after = [_stamp(each) for each in files]
        if before[0] == after[0] and (before[1] is None) is (after[1] is None):
            return


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


def _open_to_read(path: Path, mode: str = "mode=ro") -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=BUSY_S, isolation_level=None)
    try:
        connection.execute("SELECT 1 FROM sqlite_schema").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _resolver(connection: sqlite3.Connection, *, is_partial: bool) -> Resolve:
    @cache
    def resolve(digest: str) -> str:
        found = connection.execute("SELECT body FROM bodies WHERE sha256 = ?", (digest,)).fetchone()
        text = "" if found is None else stored_text(found[0])
        if text and body_digest(text) == digest:
            return text
        accepted = "SELECT 1 FROM facts WHERE instance = ? LIMIT 1"
        if is_partial or connection.execute(accepted, (LossAccepted.FENCE,)).fetchone() is not None:
            return missing_text(digest)
        raise ValueError(f"its text {digest[:16]} is {'missing' if found is None else 'not what was recorded'}")

    return resolve


_log = bounded_logger(__name__)

Row = tuple[str, str, str, float, int, str]  # kind, name, instance, at, epoch, data
_Part = tuple[str, tuple[int, int], int]  # Path of a file, its device and inode, its least size in bytes
_ROWS = 32  # Rows of one INSERT statement. A group that fits needs no explicit transaction.
_STALE = "stale epoch"
_CHECKSUMS = 4  # The first format whose facts have checksums.
LOOK_S = 0.02  # Shortest time between two checks that the file exists, s. A check takes a tenth of a commit's time.
_NEWEST = "(SELECT max(epoch) FROM epochs WHERE instance IN ('run', NEW.instance))"
_SCHEMA = f"""
CREATE TABLE facts (
  seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, instance TEXT NOT NULL,
  at REAL NOT NULL, epoch INTEGER NOT NULL, data TEXT NOT NULL, crc INTEGER
);
CREATE INDEX facts_of_instance ON facts (instance);
CREATE INDEX facts_of_gates ON facts (kind) WHERE kind IN ('review', 'review_decision');
CREATE TABLE bodies (sha256 TEXT PRIMARY KEY, body NOT NULL);
CREATE TABLE epochs (instance TEXT PRIMARY KEY, epoch INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER refuse_older_epoch BEFORE INSERT ON facts WHEN NEW.epoch < {_NEWEST}
BEGIN SELECT RAISE(ABORT, '{_STALE}'); END;
CREATE TRIGGER note_newer_epoch AFTER INSERT ON facts WHEN NEW.epoch > coalesce({_NEWEST}, 0)
BEGIN INSERT OR REPLACE INTO epochs VALUES (NEW.instance, NEW.epoch); END;
PRAGMA user_version={FORMAT};
"""  # noqa: S608  our own constants


class SqliteFile:
    """A run's file, opened by one writer. A caller that writes must hold the run's commit lock."""

    @no_fork()
    def __init__(self, directory: Path, *, allows_loss: bool = False) -> None:
        self.path = directory / RECORD
        is_new = not self.path.exists()
        # Check before opening for writing, which could remove the evidence of the loss.
        may_have_loss = (directory / COUNT).exists() if is_new else self.path.is_file()
        if not allows_loss and may_have_loss and (loss := loss_in(directory)) is not None:
            raise loss.error()
        if is_new:
            _make(self.path)
        self._connection = sqlite3.connect(
            self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=2 * _ROWS
        )
        remember(self.path)
        track(self)
        self._is_on_disk = False
        self._synchronous = "OFF" if is_new else "NORMAL"  # the first commit would wait for the disk
        self._looked_at = 0.0
        self._is_left = False
        self._last = 0
        self._count: CountFile | None = None
        self._files: tuple[_Part, ...] = ()
        try:
            version = check_version(self._connection, self.path)
            self._connection.execute(f"PRAGMA synchronous={self._synchronous}")
            if version < FORMAT:  # earlier versions must not read what is added from now on
                with self._connection:
                    self._connection.execute("BEGIN IMMEDIATE")
                    if version < _CHECKSUMS:
                        self._connection.execute("ALTER TABLE facts ADD COLUMN crc INTEGER")
                    self._write_something()
            self._count = CountFile(directory)
            if not allows_loss and not is_new:
                self._correct_count(directory, self._count)
            log = log_of(self.path)
            found = [(path, path.stat()) for path in (self.path, log, index_of(self.path))]
            self._files = tuple(
                (str(path), (stat.st_dev, stat.st_ino), 0 if path == log else stat.st_size) for path, stat in found
            )
        except BaseException:
            self.close()
            raise

    def add(
        self,
        rows: Sequence[Row],
        bodies: Mapping[str, str | bytes],
        *,
        is_synced: bool = False,
        has_effect: bool = False,
    ) -> None:
        """Add a group atomically; texts that the file contains already are skipped.

        With `is_synced`, the group and all earlier facts are on the disk when this returns. `has_effect`: the group begins an
        effect on the world. A newer epoch for a fact's instance raises a `sqlite3.IntegrityError` (`is_stale`).
        """
        if rows and len(rows) <= _ROWS and not bodies:
            with self._commit(is_synced=is_synced, has_effect=has_effect):
                self._insert(rows)
            return
        with self.transaction(is_synced=is_synced, has_effect=has_effect):
            self.add_in_transaction(rows, bodies)
            if not rows:  # SQLite synchronises only if there is a write
                self._write_something()

    def add_in_transaction(self, rows: Sequence[Row], bodies: Mapping[str, str | bytes]) -> None:
        if bodies:
            self._connection.executemany("INSERT OR IGNORE INTO bodies VALUES (?, ?)", _as_stored(bodies))
        for begin in range(0, len(rows), _ROWS):
            self._insert(rows[begin : begin + _ROWS])

    def reset_count(self) -> None:
        if self._count is not None:
            self._count.reset(self._last)

    def _correct_count(self, directory: Path, count: CountFile) -> None:
        noted = read_count(directory)
        (last,) = self._connection.execute("SELECT coalesce(max(seq), 0) FROM facts").fetchone()
        if noted is None or noted.committed <= last:
            return
        if not noted.is_same_boot:
            _log.warning(
                "%s: facts %d to %d had not reached the disk when the machine restarted; their work runs again",
                self.path, last + 1, noted.committed,
            )  # fmt: skip
        count.reset(last)

    def check_there(self, *, is_last: bool = False) -> None:
        """Refuse to write to a file that readers cannot find any more. `is_last` checks in any case."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S and not is_last:
            return
        self._looked_at = now
        try:
            self._look()
        except (OSError, RecordError):
            self._leave_if_dangerous()
            raise

    def _look(self) -> None:
        for path, known, least_bytes in self._files:
            try:
                found = os.stat(path)  # noqa: PTH116  runs for every commit; three times as fast as `Path.stat`
            except FileNotFoundError:
                raise make_deleted_error(self.path) from None
            if (found.st_dev, found.st_ino) != known or found.st_size < least_bytes:
                raise make_deleted_error(self.path)
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, "it has become read-only while it was written to", path)

    @contextlib.contextmanager
    def transaction(self, *, is_synced: bool = False, has_effect: bool = False) -> Generator[None]:
        with self._commit(is_synced=is_synced, has_effect=has_effect):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # some errors have rolled back already
                    self._connection.execute("ROLLBACK")
                raise

    def epochs(self) -> dict[str, int]:
        return dict(self._connection.execute("SELECT instance, epoch FROM epochs"))

    def facts_named(self, run_id: str, instance: str, name: str) -> list[Fact]:
        where = "WHERE instance = ? AND name = ? ORDER BY seq"
        return facts_in(self._connection, run_id, self.path, where, (instance, name))

    def raise_epoch(self, instance: str, epoch: int) -> None:
        self._connection.execute("INSERT OR REPLACE INTO epochs VALUES (?, ?)", (instance, epoch))

    def after_fork(self) -> None:
        """Close the parent's idle connection: SQLite would treat the parent's locks as the child's."""
        if self._count is not None:
            self._count.close()
        if was_quiet() and is_sound(self.path):
            self._connection.close()
        else:
            abandon(self._connection)
        self._is_left = True

    @no_fork()
    def close(self) -> None:
        """Close the file. The last writer to close it merges its log into it."""
        if self._count is not None:
            self._count.close()
        self._leave_if_dangerous()
        if self._is_left:
            return
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")  # here SQLite releases the GIL
        self._connection.close()
        drop_position(self.path)

    def _leave_if_dangerous(self) -> None:
        """Abandon the connection if closing it would crash this process."""
        if not self._is_left and not is_sound(self.path):
            self._is_left = True
            abandon(self._connection)

    def _write_something(self) -> None:
        self._connection.execute(f"PRAGMA user_version={FORMAT}")

    def _synchronise(self, synchronous: str) -> None:
        if synchronous != self._synchronous:
            self._connection.execute(f"PRAGMA synchronous={synchronous}")
            self._synchronous = synchronous

    def _insert(self, rows: Sequence[Row]) -> None:
        values = [value for row in rows for value in (*row, _checksum(row))]
        cursor = self._connection.execute(_insert_of(len(rows)), values)
        self._last = cursor.lastrowid or 0

    @contextlib.contextmanager
    def _commit(self, *, is_synced: bool, has_effect: bool) -> Generator[None]:
        with no_fork():
            yield from self._committing(is_synced=is_synced, has_effect=has_effect)

    def _committing(self, *, is_synced: bool, has_effect: bool) -> Generator[None]:
        self.check_there()
        self._last = 0
        if is_synced:
            self._synchronise("FULL")
        elif self._synchronous == "FULL":
            self._synchronise("NORMAL")
        yield
        if self._synchronous == "OFF":
            self._synchronise("NORMAL")
        if self._last and self._count is not None:
            self._count.note(self._last, has_effect=has_effect)
        if is_synced and not self._is_on_disk:
            # The file and the directories above it were created without waiting for the disk.
            _, in_log, in_file = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if in_log != in_file:  # a reader of an older snapshot blocks the checkpoint
                os.sync()
            for directory in (self.path.parent, self.path.parent.parent):
                descriptor = os.open(directory, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            self._is_on_disk = True
        if is_synced and self._last and self._count is not None:
            self._count.note_synced(self._last)


def is_stale(error: sqlite3.Error) -> bool:
    return isinstance(error, sqlite3.IntegrityError) and str(error) == _STALE


def cannot_write(path: Path, error: Exception) -> RecordError:
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


def _checksum(row: Row) -> int:
    """Return the checksum of a fact: SQLite does not notice an altered page of its main file."""
    kind, name, instance, at, epoch, data = row
    return crc32(f"{kind}\0{name}\0{instance}\0{float(at)!r}\0{epoch}\0{data}".encode())


def _check_unaltered(row: Row, checksum: object, *, is_in_order: bool) -> None:
    """Check a read fact, which has no checksum if its format had none."""
    if not is_in_order or (checksum is not None and checksum != _checksum(row)):
        raise ValueError("it was altered: its number or its checksum is wrong")


def _make(path: Path) -> None:
    half = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, _empty_record())
    finally:
        os.close(descriptor)
    half.replace(path)


@cache
def _empty_record() -> bytes:
    """Return the bytes of a file without facts. Copying them takes a third of the time of creating the tables."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.executescript(_SCHEMA)
        content = bytearray(connection.serialize())
    content[18:20] = b"\x02\x02"  # write and read version of the file format: with a write-ahead log
    return bytes(content)


def _as_stored(bodies: Mapping[str, str | bytes]) -> Iterable[tuple[str, str | bytes]]:
    for digest, body in bodies.items():
        if isinstance(body, bytes):
            yield digest, body
            continue
        try:
            body.encode()
        except UnicodeEncodeError:
            yield digest, body.encode("utf-8", "surrogatepass")
        else:
            yield digest, body


@cache
def _insert_of(rows: int) -> str:
    values = ", ".join(["(?, ?, ?, ?, ?, ?, ?)"] * rows)
    return f"INSERT INTO facts (kind, name, instance, at, epoch, data, crc) VALUES {values}"  # noqa: S608  marks only
