"""Find the facts that are missing from a run's record.

1. Facts are numbered from 1 without gaps, so a gap is a loss.
2. If a record ends before the last noted commit, the facts between them are lost. After a restart of the machine, only
   synchronised facts count: a power loss may remove later ones.
3. A record without notes has lost facts if its log contains commits behind its end (`scan_log`).
4. An accepted loss is itself a fact, and is not reported again.

A killed writer never causes a loss. Reading never writes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import sys
import time
from array import array
from functools import cache
from pathlib import Path
from zlib import crc32

from msgspec import Struct

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.runs import LossAccepted
from ensemble_ray.process.concurrency import new_lock
from ensemble_ray.record.journal import BODY_MARK, REFERENCE, accepted_loss, body_digest, stored_text
from ensemble_ray.record.stores import resume_advice

COUNT = "record.count"
_NOTE_BYTES = 64
_COMMITTED, _SYNCED, _EFFECT = range(3)  # places of the notes on the last such commit
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TRIES = 5
_PAUSE_S = 0.001


class CommitCount(Struct, frozen=True, kw_only=True):
    committed: int
    synced: int  # last fact that the disk itself has; 0: none
    effect: int  # last fact committed with, or after, the start of an effect on the world; 0: none
    is_same_boot: bool


class CountFile:
    def __init__(self, directory: Path) -> None:
        self._descriptor = os.open(directory / COUNT, os.O_WRONLY | os.O_CREAT, 0o600)

    def note(self, seq: int, *, has_effect: bool = False) -> None:
        """Note a commit. Call it after the commit."""
        # On a full disk the note may be too small, which rule 1 allows; the next commit fails.
        with contextlib.suppress(OSError):
            if has_effect:  # first: a process that dies in between must not leave only the commit's note
                self._write(_EFFECT, seq)
            self._write(_COMMITTED, seq)

    def note_synced(self, seq: int) -> None:
        """Note that the disk has all facts up to this position. Call it after the synchronisation."""
        with contextlib.suppress(OSError):
            self._write(_SYNCED, seq)

    def reset(self, seq: int) -> None:
        for slot in (_SYNCED, _EFFECT, _COMMITTED):
            self._write(slot, seq if slot == _COMMITTED else 0)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, slot: int, seq: int) -> None:
        text = b"%-12d %-36s " % (seq, _boot())
        os.pwrite(self._descriptor, b"%s%08x\n" % (text.ljust(_NOTE_BYTES - 9), crc32(text)), slot * _NOTE_BYTES)


def read_count(directory: Path) -> CommitCount | None:
    committed = synced = effect = None
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_S)
        try:
            content = (directory / COUNT).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        committed, synced, effect = notes = [_read(content, slot) for slot in range(3)]
        written = (content[slot * _NOTE_BYTES : (slot + 1) * _NOTE_BYTES].strip(b"\0") for slot in range(3))
        if not any(note is None and text for note, text in zip(notes, written, strict=True)):
            break
    if committed is None:
        return None
    seq, boot = committed
    return CommitCount(
        committed=seq,
        synced=synced[0] if synced else 0,
        effect=effect[0] if effect else 0,
        is_same_boot=boot == _boot(),
    )


def _read(content: bytes, slot: int) -> tuple[int, bytes] | None:
    note = content[slot * _NOTE_BYTES : (slot + 1) * _NOTE_BYTES]
    if len(note) < _NOTE_BYTES or note[-1:] != b"\n":
        return None
    text = note[:50]
    try:
        if int(note[-9:], 16) != crc32(text):
            return None
        return int(text[:12]), text[13:].rstrip()
    except ValueError:
        return None


@cache
def _boot() -> bytes:
    """Return the id of the machine's current boot; empty if the system has none."""
    try:
        return _BOOT.read_bytes().strip()[:36]
    except OSError:
        return b""


_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_MAGIC = 0x377F0682  # First word of a log with little-endian checksums. If the lowest bit is set, they are big-endian.
_MASK = 0xFFFFFFFF
_SMALLEST_PAGE_BYTES, _LARGEST_PAGE_BYTES = 512, 65_536


class LogScan(Struct, frozen=True, kw_only=True):
    commits: int
    broken_at: int | None = None  # first byte that is in no complete frame of this round; None: the log ends cleanly
    commits_behind: int = 0  # commits with correct frames behind that position

    @property
    def is_damaged(self) -> bool:
        return self.commits_behind > 1


def scan_log(path: Path) -> LogScan:
    content = path.read_bytes()
    if len(content) < _HEADER_BYTES:
        return LogScan(commits=0, broken_at=0 if content else None)
    page_bytes = int.from_bytes(content[8:12], "big")
    if content[:3] != _MAGIC.to_bytes(4, "big")[:3] or not _SMALLEST_PAGE_BYTES <= page_bytes <= _LARGEST_PAGE_BYTES:
        return LogScan(commits=0, broken_at=0)
    is_big = bool(content[3] & 1)
    salts = content[16:24]
    sums = _checksum(content[:24], (0, 0), is_big=is_big)
    if sums == _read_checksum(content, 24):
        return _scan_frames(content, page_bytes, salts, sums, is_big=is_big)
    # SQLite ignores the whole log. Checksums between its frames still show whether it contained commits.
    salts = content[_HEADER_BYTES + 8 : _HEADER_BYTES + 16]
    return _scan_frames(content, page_bytes, salts, None, is_big=is_big)


def _scan_frames(
    content: bytes, page_bytes: int, salts: bytes, sums: tuple[int, int] | None, *, is_big: bool
) -> LogScan:
    """Check all frames in order. `sums` is the checksum of the log so far, or None if unknown."""
    commits = behind = 0
    broken_at: int | None = None if sums is not None else 0
    frame_bytes = _FRAME_HEADER_BYTES + page_bytes
    at = _HEADER_BYTES
    while at + frame_bytes <= len(content):
        is_of_round = content[at + 8 : at + 16] == salts
        stored = _read_checksum(content, at + 16)
        if sums is not None and is_of_round:
            found = _checksum(content[at : at + 8], sums, is_big=is_big)
            found = _checksum(content[at + _FRAME_HEADER_BYTES : at + frame_bytes], found, is_big=is_big)
            is_right = found == stored
        else:
            is_right = False
        if broken_at is None and not is_right:
            broken_at = at
        if is_right and any(content[at + 4 : at + 8]):
            commits, behind = (commits + 1, behind) if broken_at is None else (commits, behind + 1)
        sums = stored
        at += frame_bytes
    if broken_at is None and at < len(content):
        broken_at = at
    return LogScan(commits=commits, broken_at=broken_at, commits_behind=behind)


def _read_checksum(content: bytes, at: int) -> tuple[int, int]:
    return int.from_bytes(content[at : at + 4], "big"), int.from_bytes(content[at + 4 : at + 8], "big")


def _checksum(part: bytes, sums: tuple[int, int], *, is_big: bool) -> tuple[int, int]:
    words = array("I", part)
    if (sys.byteorder == "big") is not is_big:
        words.byteswap()
    first, second = sums
    pairs = iter(words)
    for word, other in zip(pairs, pairs, strict=True):
        first = (first + word + second) & _MASK
        second = (second + other + first) & _MASK
    return first, second


RECORD = "record.sqlite"  # The file in a run's directory.
#: Logs without damage: path -> inode, size and time. A record without notes is checked for every page.
_in_order: dict[str, tuple[int, int, int]] = {}
_REMEMBERED = 1000


class Loss(Struct, frozen=True, kw_only=True):
    path: Path
    last: int
    expected: int | None  # last fact that was committed; None: unknown
    gap: int = 0
    texts: int = 0
    log: LogScan | None = None
    has_effect: bool = True  # whether the lost facts may include the start of an effect on the world

    def accept(self, kept: str | None) -> LossAccepted:
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
        where = f"; {self._describe_log()}" if self.expected is None or self.expected > self.last else ""
        return f"{self._missing()} in {self.path}{where}"

    def error(self) -> RecordError:
        run = self.path.parent.name
        advice = (
            f"Restore its files, or continue without the lost facts: {resume_advice(run, None, field='allow_loss=True')}. "
            "That repeats the lost work, and flags calls that may have been made in it"
            if self.last
            else f"Nothing of it is left. Restore its files, or remove it (ensemble-ray delete {run}) and run again"
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
    return path.with_name(f"{path.name}-wal")


def make_deleted_error(path: Path) -> RecordError:
    return RecordError(
        f"The run's record was removed: {path} is missing or another file. Its facts are lost. "
        "Restore it, or run again under another run id",
        str(path),
    )


def is_short(connection: sqlite3.Connection, count: CommitCount | None, path: Path) -> bool:
    """Whether an open record may have lost its end. Cheap enough to call for every read."""
    if count is None:
        return _is_log_damaged(log_of(path))
    (last,) = connection.execute("SELECT max(seq) FROM facts").fetchone()
    # Only synchronised facts must exist after a possible power loss.
    promised = count.committed if count.is_same_boot else min(count.synced, count.committed)
    return int(last or 0) < promised


def find_loss(
    connection: sqlite3.Connection, count: CommitCount | None, path: Path, *, has_texts: bool = False
) -> Loss | None:
    """Return the loss of an open record. `has_texts` checks the long texts, which reads everything."""
    number, last = connection.execute("SELECT count(*), coalesce(max(seq), 0) FROM facts").fetchone()
    gap = int(last) - int(number)
    is_cut = is_short(connection, count, path)
    accepted: list[tuple[int, LossAccepted]] = []
    if gap or is_cut or has_texts:
        query = "SELECT seq, data FROM facts WHERE instance = ? ORDER BY seq"
        rows = connection.execute(query, (LossAccepted.FENCE,))
        accepted = [(int(seq), accepted_loss(text)) for seq, text in rows]
    texts = _missing_texts(connection) if has_texts and not accepted else 0
    gap -= sum(loss.gap for _, loss in accepted)
    committed = count.committed if count is not None else None
    if is_cut and accepted and accepted[-1][0] == last and accepted[-1][1].expected == committed:
        is_cut = False  # the process that accepted it ended before it could reset the notes
    if gap <= 0 and not is_cut and not texts:
        return None
    is_effect_cut = is_cut and (count is None or count.effect > int(last))
    return Loss(
        path=path,
        last=int(last),
        expected=committed if is_cut else int(last),
        gap=max(0, gap),
        texts=texts,
        log=_scan(log_of(path)),
        has_effect=gap > 0 or is_effect_cut or any(loss.has_effect for _, loss in accepted),
    )


def _missing_texts(connection: sqlite3.Connection) -> int:
    wanted: set[str] = set()
    for (text,) in connection.execute("SELECT data FROM facts WHERE instr(data, ?)", (BODY_MARK,)):
        wanted.update(REFERENCE.findall(str(text)))
    for digest, body in connection.execute("SELECT sha256, body FROM bodies"):
        if digest in wanted and body_digest(stored_text(body)) == digest:
            wanted.discard(digest)
    return len(wanted)


def keep_log(path: Path) -> Path | None:
    """Copy the rest of a record's log, because resuming replaces it. Return the copy's path, if there is a log."""
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
    """Whether the log of a record without notes has commits behind its end. A writer may be active."""
    key = str(log)
    found = _identity(log)
    if found is None or _in_order.get(key) == found:
        return False
    # A log that restarts during the read looks damaged, but never twice in the same way.
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
    try:
        return read_count(directory)
    except OSError as error:
        raise RecordError(f"Cannot read the record {directory}: {error}", str(directory)) from error


_PART_BYTES = 32_768
_lock = new_lock()
_open: dict[str, int] = {}  # This process's writing connections, by path of the record.


def index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-shm")


def remember(path: Path) -> None:
    with _lock:
        _open[str(path)] = _open.get(str(path), 0) + 1


def drop_position(path: Path) -> None:
    with _lock:
        left = _open.get(str(path), 0) - 1
        if left > 0:
            _open[str(path)] = left
        else:
            _open.pop(str(path), None)


def is_sound(path: Path) -> bool:
    """Whether the index of an open record is complete and writable; a removed index keeps its memory."""
    index = str(index_of(path))
    try:
        found = os.stat(index)  # noqa: PTH116  called often, and faster than `Path.stat`
    except FileNotFoundError:
        return True
    return found.st_size >= _PART_BYTES and found.st_size % _PART_BYTES == 0 and os.access(index, os.W_OK)


def is_dangerous(path: Path) -> bool:
    """Whether this process has the record open and must not touch its index."""
    return str(path) in _open and not is_sound(path)
