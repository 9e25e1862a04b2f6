"""The thread that writes records, one per process for all runs.

In: whoever has something to write. Out: its `write_out`, called in groups. Never: work on an event loop, a wait of
whoever has something to write.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from typing import Protocol

from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import after_fork

#: Longest time that something waits to be written, s.
GROUP_S = 0.2
#: How long the end of the process waits for what is not written yet, s.
_LAST_CALL_S = 5.0
_log = bounded_logger(__name__)


class Writable(Protocol):
    """Somebody with something to write."""

    def write_out(self) -> None:
        """Write everything there is; called in the writer's thread, must not raise."""
        ...


class GroupWriter:
    """Calls `write_out` of everybody who asked, in groups."""

    def __init__(self, group_s: float = GROUP_S) -> None:
        self._group_s = group_s
        self._asked: deque[Writable] = deque()
        self._work = threading.Event()
        self._hurry = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def ask(self, somebody: Writable) -> None:
        """Let somebody's `write_out` be called within the group time."""
        self._asked.append(somebody)
        self._work.set()
        if self._thread is None:
            self._begin()

    def hurry(self) -> None:
        """Write now what was asked for so far."""
        self._hurry.set()

    def finish(self, timeout_s: float = _LAST_CALL_S) -> None:
        """Write everything that is asked for, and wait for it; for the end of the process."""
        if self._thread is None:
            return
        last = _Mark()
        self.ask(last)
        self.hurry()
        last.reached.wait(timeout_s)

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                # A daemon: a disk that hangs must not hold the process's exit.
                self._thread = threading.Thread(target=self._run, name="ensemble-ray-record", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._hurry.wait(self._group_s)
            self._hurry.clear()
            self._work.clear()
            while self._asked:
                somebody = self._asked.popleft()
                try:
                    somebody.write_out()
                except Exception:  # noqa: BLE001  the thread serves everybody else too
                    _log.exception("A run's record could not be written")


class _Mark:
    """Tells when everything before it was written."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def write_out(self) -> None:
        """Reached."""
        self.reached.set()


_writer = GroupWriter()


def group_writer() -> GroupWriter:
    """Return the process's writer."""
    return _writer


@after_fork
def _begin_anew() -> None:
    global _writer  # noqa: PLW0603  a forked child has no threads and must not write its parent's facts again
    _writer = GroupWriter()


@atexit.register
def _finish() -> None:
    _writer.finish()
