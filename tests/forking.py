"""Forked children of the process that runs the tests.

In: a function. Out: what it returned in a child. Never: a child that outlives its test, or goes on with the tests.
"""

from __future__ import annotations

import multiprocessing.util
import os
import pickle
import select
import signal
import traceback
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")

#: Longest wait for a child, s; one that needs it hangs.
PATIENCE_S = 60.0


class Child:
    """A forked child that calls a function; `result` waits for it."""

    def __init__(self, function: Callable[[], object]) -> None:
        reading, writing = os.pipe()
        self._result, self._pid = reading, os.fork()
        if self._pid:
            os.close(writing)
            return
        try:
            reply = (function(), "")
        except BaseException:  # noqa: BLE001  told to the parent
            reply = (None, traceback.format_exc())
        try:
            multiprocessing.util._exit_function()  # type: ignore[attr-defined]
            data = pickle.dumps(reply)
            data = len(data).to_bytes(8, "big") + data
            while data:
                data = data[os.write(writing, data) :]
        finally:
            os._exit(0)

    def result(self) -> object:
        """What the function returned.

        Raises:
            AssertionError: it raised, or the child hangs.
        """
        data = b""
        try:
            # A child of the child has the pipe open too, so that its end does not tell.
            while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "big"):
                assert select.select([self._result], [], [], PATIENCE_S)[0], (
                    f"the forked child hangs ({PATIENCE_S:g} s)"
                )
                piece = os.read(self._result, 65_536)
                assert piece, "the forked child died"
                data += piece
        finally:
            os.close(self._result)
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        value, error = pickle.loads(data[8:])  # noqa: S301  of our own child
        assert not error, error
        return value


def call_in_child(function: Callable[[], T]) -> T:
    """Return what the function returns in a forked child."""
    return cast("T", Child(function).result())
