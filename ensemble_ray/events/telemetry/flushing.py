"""A thread that flushes span processors and meter providers when a run has ended, so that no run waits for a receiver.

Their errors are logged and neither end the thread nor reach a run. The thread holds no reference to the listener.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from ensemble_ray.errors import message_of
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import track

_log = bounded_logger(__name__)


class Flushable(Protocol):
    """A sender: a span processor or a meter provider."""

    def force_flush(self) -> object:
        """Send pending data."""
        ...

    def shutdown(self) -> object:
        """Stop permanently."""
        ...


class Flusher:
    """Flushes senders on its own thread on request; a request during a flush starts another flush.

    The thread starts with `begin` or the first request. It ends with `close`, or when the flusher is garbage-collected.
    It must exist before the process exits, because from Python 3.12 on no thread can start then.
    """

    def __init__(self, senders: Sequence[Flushable]) -> None:
        """Create a flusher of these senders."""
        self._work = _Work(senders)
        weakref.finalize(self, self._work.end).atexit = False

    def begin(self) -> None:
        """Start the thread: there is data to send."""
        self._work.begin()

    def ask(self) -> int:
        """Request a flush of the pending data and return the number of the request immediately."""
        return self._work.ask()

    def wait(self, number: int, timeout_s: float) -> bool:
        """Wait for a request; return whether its data was sent in time. A timeout is logged once."""
        return self._work.wait(number, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush and shut down the senders; return whether the data was sent and the thread ended in time."""
        return self._work.close(timeout_s)


def flush_all(flushers: Sequence[Flusher], timeout_s: float) -> None:
    """Flush all of them in parallel and wait; a timeout is logged once."""
    ends_at = time.monotonic() + timeout_s
    wishes = [(each, each.ask()) for each in flushers]
    for flusher, number in wishes:
        left_s = max(0.0, ends_at - time.monotonic())
        if not flusher.wait(number, left_s) and time.monotonic() >= ends_at:
            return


class _Work:
    """The requests of a flusher, and the thread that serves them."""

    def __init__(self, senders: Sequence[Flushable]) -> None:
        self._senders = senders
        self._changed = threading.Condition()  # with a reentrant lock
        self._asked = 0
        self._done = 0
        #: number of the last request that failed
        self._failed = 0
        self._thread: threading.Thread | None = None
        #: whether the thread ends when no request is left
        self._is_ending = False
        #: number of the final request, after which the senders are shut down
        self._last: int | None = None
        self._has_told = False
        track(self)

    def after_fork(self) -> None:
        """Reset the thread and the requests; the SDK restarts its own threads."""
        self._changed = threading.Condition()
        self._done, self._thread = self._asked, None

    def ask(self) -> int:
        with self._changed:
            self._asked += 1
            self._begin()
            self._changed.notify_all()
            return self._asked

    def wait(self, number: int, timeout_s: float) -> bool:
        with self._changed:
            if self._changed.wait_for(lambda: self._done >= number, timeout_s):
                return number > self._failed
            is_told, self._has_told = self._has_told, True
        if not is_told:
            _log.warning(
                "Spans or metrics have not been sent in time: their receiver does not answer. Pending data is sent in the background, "
                "and lost when the program ends. What to do: check the receiver and OTEL_EXPORTER_OTLP_ENDPOINT"
            )
        return False

    def end(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        ends_at = time.monotonic() + timeout_s
        with self._changed:
            if self._last is None:
                self._is_ending, self._last = True, self._asked + 1
                self.ask()
            number, thread = self._last, self._thread
        is_sent = self.wait(number, timeout_s)
        if thread is None:
            return is_sent
        thread.join(max(0.0, ends_at - time.monotonic()))
        return is_sent and not thread.is_alive()

    def begin(self) -> None:
        with self._changed:
            self._begin()

    def _begin(self) -> None:
        """Start the thread; at process exit, when no thread can start, serve the requests on this one."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="ensemble-ray-telemetry", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._fulfil(self._asked)
            if self._last is not None:
                self._try([each.shutdown for each in self._senders])
            return
        self._thread = thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done or self._is_ending)
                number = self._asked
                if number == self._done:
                    break
            self._fulfil(number)
        if self._last is not None:
            self._try([each.shutdown for each in self._senders])

    def _fulfil(self, number: int) -> None:
        is_sent = self._try([each.force_flush for each in self._senders])
        with self._changed:
            self._done = number
            self._failed = self._failed if is_sent else number
            self._changed.notify_all()

    def _try(self, calls: Sequence[Callable[[], object]]) -> bool:
        """Call all of them; return whether none failed. Failures are logged once until a success (S-INT-34)."""
        failure: Exception | None = None
        for each in calls:
            try:
                each()
            except Exception as error:  # noqa: BLE001  senders of the user or the SDK may raise any error
                failure = failure or error
        if failure is not None and not self._has_told:
            _log.warning("Spans or metrics cannot be sent: %s: %s", type(failure).__name__, message_of(failure))
        self._has_told = failure is not None
        return failure is None
