"""The lock that processes take turns at while they commit to one run's file.

SQLite's own way of waiting sleeps in steps of up to 100 ms, so that a busy run starves some of its writers. Here a
process waits in steps of a tenth of a millisecond to one millisecond, and knows whom it waits for.
Never: a lock that outlives its process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from ensemble_ray.errors import RecordError
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import track

try:
    import fcntl
except ImportError:  # a system without file locks: SQLite's own locks are left
    fcntl = None  # type: ignore[assignment]

_log = bounded_logger(__name__)
#: How long a commit waits for its turn before the run is told, s.
PATIENCE_S = 30.0
#: How long somebody who takes a run by force waits before looking whether the holder is stopped, s.
_FROZEN_S = 1.0
_FIRST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.001


class CommitLock:
    """A lock on one file; whoever holds it writes its process id into it."""

    def __init__(self, path: Path) -> None:
        """Name the file; it is made when the lock is first taken."""
        self.path = path
        self._descriptor = -1
        self._name = b""
        track(self)

    def acquire(self, patience_s: float = PATIENCE_S) -> bool:
        """Wait for the lock; False when somebody else still holds it after that time.

        Raises:
            OSError: the file cannot be made.
        """
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            self._name = b"%-10d\n" % os.getpid()
        if not self._try():
            until = time.monotonic() + patience_s
            pause_s = _FIRST_PAUSE_S
            while True:
                time.sleep(pause_s)
                if self._try():
                    break
                if time.monotonic() > until:
                    return False
                pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        with contextlib.suppress(OSError):  # it is for messages only; on a full disk the commit itself tells
            os.pwrite(self._descriptor, self._name, 0)
        return True

    def acquire_or_raise(self, patience_s: float = PATIENCE_S) -> None:
        """As `acquire`, for those who can go no further without it.

        Raises:
            RecordError: somebody else holds it for longer; names the process.
            OSError: the file cannot be made.
        """
        if not self.acquire(patience_s):
            raise self.is_held(patience_s)

    def seize(self, patience_s: float = PATIENCE_S) -> None:
        """As `acquire_or_raise`; a holder that is stopped (SIGSTOP) on this machine is ended, since it would hold it for ever.

        SQLite's own locks and what is half written are the holder's too, and end with it as after any kill.

        Raises:
            RecordError: somebody else holds it for longer; names the process.
            OSError: the file cannot be made.
        """
        until = time.monotonic() + patience_s
        while not self.acquire(min(_FROZEN_S, patience_s)):
            if time.monotonic() > until:
                raise self.is_held(patience_s)
            self._end_frozen_holder()

    def is_held(self, patience_s: float) -> RecordError:
        """Return the error that says who has held it for that long."""
        msg = (
            f"Cannot write the run's record in {self.path.parent}: {self._holder()} has held its lock "
            f"for {patience_s:.0f} s. Is it stopped? Let it go on, or end it"
        )
        return RecordError(msg, str(self.path))

    def release(self) -> None:
        """Let the next one in."""
        if fcntl is not None and self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the file, and of the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def after_fork(self) -> None:
        """Let go of the parent's file: its lock would be held as long as the child lives."""
        self.close()

    def _holder(self) -> str:
        pid = self._holder_pid()
        return f"process {pid}" if pid else "another process"

    def _holder_pid(self) -> int:
        """Who holds it, as it says itself; 0: not known."""
        try:
            return int(self.path.read_text())
        except (OSError, ValueError):
            return 0

    def _end_frozen_holder(self) -> None:
        """End the holder if it is a process of this machine that has the file open and is stopped."""
        pid = self._holder_pid()
        if not pid or pid == os.getpid() or not hasattr(os, "pidfd_open"):
            return
        try:
            process = os.pidfd_open(
                pid
            )  # first: what is found out from here on is about that process, and no later one
        except OSError:
            return
        try:
            if self._is_open_in(pid) and _is_stopped(pid) and self._holder_pid() == pid:
                _log.warning(
                    "%s is held by process %d, which is stopped in the middle of a commit: it is ended", self.path, pid
                )
                signal.pidfd_send_signal(process, signal.SIGKILL)
        except OSError as error:
            _log.warning("Process %d, which is stopped in the middle of a commit, cannot be ended: %s", pid, error)
        finally:
            os.close(process)

    def _is_open_in(self, pid: int) -> bool:
        own = os.fstat(self._descriptor)
        for opened in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if os.path.samestat(opened.stat(), own):
                    return True
        return False

    def _try(self) -> bool:
        if fcntl is None:
            return True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal; a traced one, or one that only waits, is not."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
