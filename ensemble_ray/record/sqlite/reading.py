"""Read one run's facts from its SQLite file, also while a writer has it open.

All functions block and are meant for threads. A reader never prevents writers from checkpointing their log.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Collection, Generator, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import KINDS_OF_RUN, read_fact
from ensemble_ray.facts.runs import LossAccepted
from ensemble_ray.process.concurrency import no_fork
from ensemble_ray.record.journal import FORMAT, OLDEST_FORMAT, Resolve, body_digest, data_of, missing_text, stored_text
from ensemble_ray.record.sqlite.losses import (
    RECORD,
    Loss,
    find_loss,
    is_dangerous,
    is_short,
    log_of,
    make_deleted_error,
    read_commit_count,
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
    column = "data" if has_data else "'{}'"
    try:
        query = f"SELECT seq, kind, name, at, epoch, {column} FROM facts {where}"  # noqa: S608  our own text
        for seq, kind, name, at, epoch, data in connection.execute(query, tuple(values)):
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
    return getattr(error, "sqlite_errorname", "").partition("_")[2].startswith(("CORRUPT", "NOTADB"))


def unreadable(path: Path, reason: BaseException | str) -> RecordError:
    if isinstance(reason, str) or is_damage(reason):
        found = RecordError(f"The record is damaged: {path} cannot be read ({reason})", str(path))
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
