"""What is missing from a run's record.

In: an open record and the notes beside it (`commit_count`). Out: what is lost and where, or nothing. The rules:

1. Facts are numbered from 1 without gaps, so a gap is a loss.
2. A record that ends before the last noted commit has lost what is between; after another start of the machine only
   where it ends before the last synchronised one, since a loss of power may take the rest.
3. A record without notes has lost something where commits lie behind the end of its log (`wal_scan`).
4. A loss that somebody accepted is a fact of its own, and is not told again.
Never: a loss told of a record whose writers were only killed; a write.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.runs import LossAccepted
from ensemble_ray.record.rendering import BODY_MARK, accepted_loss, body_digest, stored_text
from ensemble_ray.record.resume.advice import resume_advice
from ensemble_ray.record.sqlite.commit_count import CommitCount, read_count
from ensemble_ray.record.sqlite.wal_scan import LogScan, scan_log

#: The file in a run's directory.
RECORD = "record.sqlite"
#: A reference to a long text, as it stands in JSON text.
_REFERENCE = re.compile(r'"\$body": ?"([0-9a-f]{64})"')
#: Logs that were found in order: path -> what identifies their content. A record without notes is read page by page.
_in_order: dict[str, tuple[int, int, int]] = {}
_REMEMBERED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a record has lost."""

    path: Path
    #: position of the last fact that is left; 0: none
    last: int
    #: position of the last fact that was committed; None: not known
    expected: int | None
    #: facts that are missing before the last one that is left
    gap: int = 0
    #: long texts that facts refer to and that are not there
    texts: int = 0
    #: what is left of the log; None: there is none
    log: LogScan | None = None
    #: whether an effect on the world may have been begun in what is lost
    has_effect: bool = True

    def accept(self, kept: str | None) -> LossAccepted:
        """Return the fact of its acceptance; `kept` is the name of the copy of its log."""
        return LossAccepted(
            last=self.last,
            expected=self.expected,
            gap=self.gap,
            texts=self.texts,
            has_effect=self.has_effect,
            reason=self.describe(),
            kept=kept,
        )

    def describe(self) -> str:
        """Say what is lost, and where."""
        where = f"; {self._describe_log()}" if self.expected is None or self.expected > self.last else ""
        return f"{self._missing()} in {self.path}{where}"

    def error(self) -> RecordError:
        """Make the error that says what is lost, and what to do."""
        run = self.path.parent.name
        advice = (
            f"Restore its files, or go on without what is lost: {resume_advice(run, None, field='allow_loss=True')}. "
            "That does the lost work again, and flags calls that may have been made in it"
            if self.last
            else f"Nothing of it is left. Restore its files, or remove it (ensemble-ray delete {run}) and run anew"
        )
        return RecordError(f"The record is damaged: {self.describe()}. {advice}", str(self.path))

    def _missing(self) -> str:
        parts: list[str] = []
        if self.gap:
            parts.append(f"{self.gap} of the facts up to {self.last} are missing")
        if self.texts:
            parts.append(f"{self.texts} long texts of its facts are missing or altered")
        if self.expected is None:
            parts.append(f"facts behind {self.last} are missing")
        elif self.expected > self.last:
            first = self.last + 1
            which = f"fact {first}" if first == self.expected else f"facts {first} to {self.expected}"
            parts.append(f"{which} of {self.expected} {'is' if first == self.expected else 'are'} missing")
        return ", and ".join(parts)

    def _describe_log(self) -> str:
        log = log_of(self.path)
        if self.log is None:
            return f"there is no log {log.name}"
        if self.log.broken_at is None:
            return f"its log {log.name} ends before them"
        behind = f", with {self.log.commits_behind} commits behind that place" if self.log.commits_behind else ""
        return f"its log {log.name} is damaged at byte {self.log.broken_at}{behind}"


def log_of(path: Path) -> Path:
    """Return the place of a record's write-ahead log."""
    return path.with_name(f"{path.name}-wal")


def make_deleted_error(path: Path) -> RecordError:
    """Make the error that says that a record is gone while somebody writes to it, or facts of it are noted."""
    return RecordError(
        f"The run's record was removed: {path} is not what was written to, or not there. What was recorded is lost with "
        "it. Restore it, or run anew under another run id",
        str(path),
    )


def is_short(connection: sqlite3.Connection, count: CommitCount | None, path: Path) -> bool:
    """Whether an open record may have lost its end; cheap, so that it can be asked at each reading."""
    if count is None:
        return _is_log_damaged(log_of(path))
    (last,) = connection.execute("SELECT max(seq) FROM facts").fetchone()
    return int(last or 0) < count.promised


def find_loss(
    connection: sqlite3.Connection, count: CommitCount | None, path: Path, *, has_texts: bool = False
) -> Loss | None:
    """Return what an open record has lost; None: nothing.

    Args:
        connection: Has it open.
        count: What was noted before the record was read.
        path: The file.
        has_texts: Whether its long texts are looked at too, which reads all of it.
    """
    number, last = connection.execute("SELECT count(*), coalesce(max(seq), 0) FROM facts").fetchone()
    gap = int(last) - int(number)
    is_cut = is_short(connection, count, path)
    accepted = _read_accepted(connection) if gap or is_cut or has_texts else []
    texts = _missing_texts(connection) if has_texts and not accepted else 0
    gap -= sum(loss.gap for _, loss in accepted)
    committed = count.committed if count is not None else None
    if is_cut and accepted and accepted[-1][0] == last and accepted[-1][1].expected == committed:
        is_cut = False  # it was accepted by a process that ended before it could note that
    if gap <= 0 and not is_cut and not texts:
        return None
    return Loss(
        path=path,
        last=int(last),
        expected=committed if is_cut else int(last),
        gap=max(0, gap),
        texts=texts,
        log=_scan(log_of(path)),
        has_effect=gap > 0
        or (is_cut and (count is None or count.effect > int(last)))
        or any(loss.has_effect for _, loss in accepted),
    )


def _read_accepted(connection: sqlite3.Connection) -> list[tuple[int, LossAccepted]]:
    """Positions and data of the losses that are on record, in order."""
    query = "SELECT seq, data FROM facts WHERE instance = ? ORDER BY seq"
    found: list[tuple[int, LossAccepted]] = []
    for seq, text in connection.execute(query, (LossAccepted.FENCE,)):
        found.append((int(seq), accepted_loss(text)))
    return found


def _missing_texts(connection: sqlite3.Connection) -> int:
    """How many of the long texts that facts refer to are not there as they were recorded."""
    wanted: set[str] = set()
    for (text,) in connection.execute("SELECT data FROM facts WHERE instr(data, ?)", (BODY_MARK,)):
        wanted.update(_REFERENCE.findall(str(text)))
    for digest, body in connection.execute("SELECT sha256, body FROM bodies"):
        if digest in wanted and body_digest(stored_text(body)) == digest:
            wanted.discard(digest)
    return len(wanted)


def keep_log(path: Path) -> Path | None:
    """Copy what is left of a record's log aside, since going on replaces it; return where, None: there is none.

    Raises:
        OSError: it cannot be copied.
    """
    log = log_of(path)
    if not log.exists():
        return None
    number = 1
    while (kept := path.with_name(f"{log.name}.lost-{number}")).exists():
        number += 1
    half = kept.with_name(f"{kept.name}.tmp")
    half.unlink(missing_ok=True)
    half.touch(mode=0o600)
    shutil.copyfile(log, half)
    half.replace(kept)
    return kept


def _scan(log: Path) -> LogScan | None:
    try:
        return scan_log(log)
    except OSError:
        return None


def _is_log_damaged(log: Path) -> bool:
    """Whether the log of a record without notes has commits behind its end; somebody may be writing to it meanwhile."""
    key = str(log)
    found = _identity(log)
    if found is None or _in_order.get(key) == found:
        return False
    # A log that begins anew while it is read looks damaged. It does not look so twice in the same way.
    first = _scan(log)
    if first is not None and first.is_damaged and _scan(log) == first and _identity(log) == found:
        return True
    if _identity(log) == found:
        if len(_in_order) >= _REMEMBERED:
            _in_order.clear()
        _in_order[key] = found
    return False


def _identity(log: Path) -> tuple[int, int, int] | None:
    try:
        found = log.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_commit_count(directory: Path) -> CommitCount | None:
    """Return the notes of a run's record.

    Raises:
        RecordError: they cannot be read.
    """
    try:
        return read_count(directory)
    except OSError as error:
        msg = f"Cannot read the record {directory}: {error}"
        raise RecordError(msg, str(directory)) from error
