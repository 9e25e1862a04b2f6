"""The index of a SQLite file's log, which all processes that have the file open share as memory.

A process that touches memory of a file which was cut short, or which has become read-only (another mount, an immutable
file), is ended by the system (SIGBUS), without a word. So whoever has a record open looks before SQLite does.
Never: a connection that is closed over such an index, since closing looks into it too.
"""

from __future__ import annotations

import os
from pathlib import Path

from ensemble_ray.process.forks import new_lock

#: Bytes of one part of an index.
_PART_BYTES = 32_768
_lock = new_lock()
#: How often this process has each record open to write, by its path.
_open: dict[str, int] = {}


def index_of(path: Path) -> Path:
    """Return the place of the index of a record's log."""
    return path.with_name(f"{path.name}-shm")


def remember(path: Path) -> None:
    """Note that this process has a record open to write."""
    with _lock:
        _open[str(path)] = _open.get(str(path), 0) + 1


def forget(path: Path) -> None:
    """Note that it has it open once less."""
    with _lock:
        left = _open.get(str(path), 0) - 1
        if left > 0:
            _open[str(path)] = left
        else:
            _open.pop(str(path), None)


def is_sound(path: Path) -> bool:
    """Whether the index of a record that is open has its size and can be written; a removed one keeps its memory."""
    index = str(index_of(path))
    try:
        found = os.stat(index)  # noqa: PTH116  asked often, and faster than `Path.stat`
    except FileNotFoundError:
        return True
    return found.st_size >= _PART_BYTES and found.st_size % _PART_BYTES == 0 and os.access(index, os.W_OK)


def is_dangerous(path: Path) -> bool:
    """Whether this process has a record open whose index must not be touched."""
    return str(path) in _open and not is_sound(path)
