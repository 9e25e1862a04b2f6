"""A thread that sends what waits when a run has ended, so that nobody waits for a receiver. Package: telemetry."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Flusher"]


class Flusher:
    """Calls a function on a thread of its own when asked to; asked while it works, it calls it once more."""

    def __init__(self, flush: Callable[[], object]) -> None:
        """Make one; its thread begins with the first wish."""
        self._flush = flush
        self._changed = threading.Condition()
        self._asked = 0
        self._done = 0
        self._has_thread = False

    def ask(self) -> int:
        """Ask for what waits now to be sent, and return at once; gives the number of the wish."""
        with self._changed:
            self._asked += 1
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._work, name="ensemble-ray-telemetry", daemon=True).start()
            self._changed.notify_all()
            return self._asked

    def wait(self, number: int, timeout_s: float) -> bool:
        """Wait until that wish is fulfilled; return whether it was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= number, timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done)
                number = self._asked
            try:
                self._flush()
            finally:
                with self._changed:
                    self._done = number
                    self._changed.notify_all()
