"""Where the write-ahead log of a SQLite file is damaged. Pure but for reading the one file.

SQLite takes the first frame whose checksum is wrong for the end of the log, and what follows is gone without a word. Here
the log is read past that frame. Rules, after SQLite's description of the format:

1. The log is a header of 32 bytes and frames: 24 bytes, then a page. Each frame carries the two salts of the header. When
   the log begins anew the salts change, so that frames of an earlier round do not belong to it.
2. The checksum of a frame covers everything before it, and is computed from the checksum that the frame before it stores.
   So frames behind a damaged one can be checked by themselves.
3. A process that is killed in the middle of a commit leaves frames behind the end of the log that carry the current salts,
   and at most one of them ends a commit: a second commit is only written behind a first one that was complete. So two
   commits behind the end are damage, and fewer may be nothing.
Never: a write, a file opened that SQLite holds locks on (closing it would give them up: the log itself is not such a file).
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from pathlib import Path

_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
#: First word of a log whose checksums are of little-endian words; with the lowest bit set of big-endian ones.
_MAGIC = 0x377F0682
_MASK = 0xFFFFFFFF
_SMALLEST_PAGE_BYTES, _LARGEST_PAGE_BYTES = 512, 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class LogScan:
    """What a log holds."""

    #: commits up to the end that SQLite sees
    commits: int
    #: position of the first byte that is not part of a whole frame of this round; None: the log ends cleanly
    broken_at: int | None = None
    #: commits behind that position whose own frames are right
    commits_behind: int = 0

    @property
    def is_damaged(self) -> bool:
        """Whether commits are lost for certain (rule 3)."""
        return self.commits_behind > 1


def scan_log(path: Path) -> LogScan:
    """Read a log.

    Raises:
        OSError: it cannot be read.
    """
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
    # Nothing of the log counts then. What its frames say among themselves still tells whether there was something.
    salts = content[_HEADER_BYTES + 8 : _HEADER_BYTES + 16]
    return _scan_frames(content, page_bytes, salts, None, is_big=is_big)


def _scan_frames(
    content: bytes, page_bytes: int, salts: bytes, sums: tuple[int, int] | None, *, is_big: bool
) -> LogScan:
    """Check frame after frame; `sums` is the checksum so far, None where it is not known."""
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
