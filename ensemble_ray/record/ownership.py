"""Who owns a run: a lock that the operating system lets go when its holder dies. Room: record.

Never: a lock that outlives its process, as a file with a process id in it would.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # a system without file locks: nobody is kept out there, and no run counts as running
    fcntl = None  # type: ignore[assignment]

__all__ = ["Ownership"]

#: Somebody who looks whether a run has an owner holds the lock for a moment; so try again before giving up.
_TRIES = 5
_PAUSE_S = 0.01


class Ownership:
    """A lock on one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Become the owner; False when somebody else is.

        Raises:
            OSError: the file cannot be made.
        """
        if self._descriptor is not None:
            return True
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE_S)
            if _lock(descriptor):
                self._descriptor = descriptor
                return True
        os.close(descriptor)
        return False

    def is_taken(self) -> bool:
        """Whether anybody owns it, this object included."""
        if self._descriptor is not None:
            return True
        try:
            descriptor = os.open(self._path, os.O_RDWR)
        except OSError:
            return False
        try:
            return not _lock(descriptor)
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Own it no more."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _lock(descriptor: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
