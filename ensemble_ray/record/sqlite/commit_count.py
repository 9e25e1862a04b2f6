"""How far a run's record came, kept beside its file. Blocks: it is for threads.

Each commit is followed by a note of its last fact in a file of its own. So what is missing from the record later is
noticed, whatever became of its log. Rules:

1. A note is written after its commit, by the process that holds the commit lock: a process that dies between the two
   leaves a note that is too small, and never one that is too large.
2. A note is not synchronised to the disk. It carries the machine's boot: what is missing since another boot may be what a
   loss of power took, of which only synchronised facts are promised to be there.
3. Each note is written in one piece, with a checksum. One that cannot be read says nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zlib import crc32

#: The file in a run's directory.
COUNT = "record.count"
#: Bytes of one note.
_NOTE_BYTES = 64
#: Places of the notes: of the last commit, of the last synchronised one, of the last one with an effect.
_COMMITTED, _SYNCED, _EFFECT = range(3)
_BOOT = Path("/proc/sys/kernel/random/boot_id")
#: A note is read again where it was being written just then.
_TRIES = 5
_PAUSE_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCount:
    """What the notes of a record say."""

    #: position of the last committed fact
    committed: int
    #: position of the last fact that the disk itself has; 0: none
    synced: int
    #: position of the last fact before which, or with which, an effect on the world was begun; 0: none
    effect: int
    #: whether the machine has not been started anew since the last commit
    is_same_boot: bool

    @property
    def promised(self) -> int:
        """Position of the last fact that must be there, also after a loss of power where there may have been one."""
        return self.committed if self.is_same_boot else min(self.synced, self.committed)


class CountFile:
    """The notes of one run, as a writer has them open."""

    def __init__(self, directory: Path) -> None:
        """Open the file; it is made when it is missing.

        Raises:
            OSError: it cannot be opened.
        """
        self._descriptor = os.open(directory / COUNT, os.O_WRONLY | os.O_CREAT, 0o600)

    def note(self, seq: int, *, has_effect: bool = False) -> None:
        """Note a commit, after it."""
        # On a full disk a note may not be written. It then is too small, which rule 1 allows; the next commit tells.
        with contextlib.suppress(OSError):
            if has_effect:  # first: a process that dies here must not leave a note of the commit alone
                self._write(_EFFECT, seq)
            self._write(_COMMITTED, seq)

    def note_synced(self, seq: int) -> None:
        """Note that the disk has everything up to there, after it has."""
        with contextlib.suppress(OSError):  # as above
            self._write(_SYNCED, seq)

    def reset(self, seq: int) -> None:
        """Note that the record ends there, whatever was noted before.

        Raises:
            OSError: it cannot be written.
        """
        for slot in (_SYNCED, _EFFECT, _COMMITTED):
            self._write(slot, seq if slot == _COMMITTED else 0)

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, slot: int, seq: int) -> None:
        text = b"%-12d %-36s " % (seq, _boot())
        os.pwrite(self._descriptor, b"%s%08x\n" % (text.ljust(_NOTE_BYTES - 9), crc32(text)), slot * _NOTE_BYTES)


def read_count(directory: Path) -> CommitCount | None:
    """Return the notes of a run; None where there are none, as of a record of an earlier version.

    Raises:
        OSError: the file is there and cannot be read.
    """
    committed = synced = effect = None
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_S)
        try:
            content = (directory / COUNT).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        committed, synced, effect = notes = [_read(content, slot) for slot in range(3)]
        if not any(note is None and _is_written(content, slot) for slot, note in enumerate(notes)):
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


def _is_written(content: bytes, slot: int) -> bool:
    return bool(content[slot * _NOTE_BYTES : (slot + 1) * _NOTE_BYTES].strip(b"\0"))


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
    """Return what names the time since the machine was started; empty where the system does not say it."""
    try:
        return _BOOT.read_bytes().strip()[:36]
    except OSError:
        return b""
