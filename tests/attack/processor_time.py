"""A limit of processor time around a block of a test: what would take minutes fails within seconds."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Generator


class ProcessorTimeError(BaseException):
    """The block used more processor time than it may; no `except Exception` on the way swallows it."""


@contextlib.contextmanager
def processor_limit(limit_s: float) -> Generator[None]:
    """Raise in the main thread when the process has used that much processor time inside the block.

    Regular expressions look for signals while they run, and so does everything that is written in Python.

    Raises:
        ProcessorTimeError: it has.
    """

    def stop(*_: object) -> None:
        msg = f"more than {limit_s:g} s of processor time"
        raise ProcessorTimeError(msg)

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
