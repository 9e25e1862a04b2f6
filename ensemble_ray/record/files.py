"""Append-only files of one writer. Room: record.

In: whole lines. Out: where each lies. Never: a line that is changed or taken back, a file that others may read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ensemble_ray.errors import RecordError

__all__ = ["LineFile", "Place", "cannot_write", "read_line", "whole_lines"]


class Place(NamedTuple):
    """Where a line lies."""

    path: str
    offset_bytes: int
    length_bytes: int


def cannot_write(path: Path, error: OSError) -> RecordError:
    """What went wrong with the record, where, and what to do about it."""
    where = error.filename if isinstance(error.filename, str) else str(path)
    found = RecordError(
        f"Cannot write the run's record to {where}: {error.strerror or error}. "
        "Free space or correct the rights there, or set ENSEMBLE_RAY_HOME to a directory that can be written.",
        where,
    )
    found.__cause__ = error
    return found


def read_line(place: Place) -> bytes:
    """The line at that place."""
    with Path(place.path).open("rb") as file:
        file.seek(place.offset_bytes)
        return file.read(place.length_bytes)


def whole_lines(path: Path) -> list[tuple[Place, bytes]]:
    """The lines of a file that end in a line feed; what a writer that died left half-written is passed over."""
    found: list[tuple[Place, bytes]] = []
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                found.append((Place(str(path), offset, len(line)), line))
            offset += len(line)
    return found


class LineFile:
    """A file to which one writer appends."""

    def __init__(self, path: Path) -> None:
        """Make it; it must not be there yet.

        Raises:
            FileExistsError: another writer has it.
            OSError: it cannot be made.
        """
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._size_bytes = 0

    def append(self, lines: list[bytes]) -> list[Place]:
        """Write whole lines at once; gives the place of each.

        Raises:
            OSError: they are not written, or in part; the file must not be written to again.
        """
        places: list[Place] = []
        at = self._size_bytes
        for line in lines:
            places.append(Place(str(self.path), at, len(line)))
            at += len(line)
        rest = memoryview(b"".join(lines))
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._size_bytes = at
        return places

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
