"""Who owns a run: a lock that the operating system lets go when its holder dies.

The lock is the truth; what is written into the file is for messages.
Never: a lock that outlives its process, as a file with a process id in it would.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import weakref
from pathlib import Path

from ensemble_ray.process.forks import after_fork, no_fork

try:
    import fcntl
except ImportError:  # a system without file locks: nobody is kept out there, and no run counts as running
    fcntl = None  # type: ignore[assignment]

#: Somebody who looks whether a run has an owner holds the lock for a moment, which is long where the machine is busy; so
#: try again before giving up. A new owner has then said who it is, too.
_TRIES = 20
_PAUSE_S = 0.01


class Ownership:
    """A lock on one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Become the owner; False when somebody else is.

        Raises:
            OSError: the file cannot be made.
        """
        if self._descriptor is not None:
            return True
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE_S)
            with no_fork():  # a child would hold a lock that it does not know of
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
                # A file that was replaced meanwhile is nobody's lock any more.
                if _lock(descriptor) and _is_same(descriptor, self._path):
                    self._hold(descriptor)
                    return True
                os.close(descriptor)
        return False

    def acquire_by_force(self) -> None:
        """Become the owner in place of one that holds the lock: another file takes the place of its file.

        Raises:
            OSError: the file cannot be made.
        """
        half = self._path.with_suffix(f".{os.getpid()}.tmp")
        with no_fork():
            descriptor = os.open(half, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                _lock(descriptor)
                half.replace(self._path)
            except OSError:
                os.close(descriptor)
                raise
            self.release()
            self._hold(descriptor)

    def is_mine(self) -> bool:
        """Whether this object owns it, and nobody took it by force."""
        return self._descriptor is not None and _is_same(self._descriptor, self._path)

    def is_there(self) -> bool:
        """Whether the file is there: it stays as long as the run does."""
        return self._path.exists()

    def is_held(self) -> bool:
        """Whether anybody owns it, this object included."""
        if self._descriptor is not None:
            return True
        with no_fork():
            try:
                descriptor = os.open(self._path, os.O_RDONLY)
            except OSError:
                return False
            try:
                return not _lock(descriptor, is_shared=True)
            finally:
                os.close(descriptor)

    def owner(self) -> str:
        """Who owns it, or was the last to, for people: `process 4711 on HOST`; empty when it is not known."""
        with contextlib.suppress(OSError, ValueError):
            match json.loads(self._path.read_bytes()):
                case {"pid": int(pid), "host": str(host)}:
                    return f"process {pid} on {host}"
                case _:
                    pass
        return ""

    def release(self) -> None:
        """Own it no more."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)

    def _hold(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _held.add(self)
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n"
        os.ftruncate(descriptor, os.pwrite(descriptor, text, 0))


def _lock(descriptor: int, *, is_shared: bool = False) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


_held: weakref.WeakSet[Ownership] = weakref.WeakSet()


@after_fork
def _release_all() -> None:
    for ownership in list(_held):  # a child that outlives its parent must not keep what the parent owned
        ownership.release()
