"""Programs that a demonstration starts, in sessions of their own, and how all of one is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

_WATCH_S = 0.02
#: How long killed processes may take to be gone, s.
_GONE_S = 10.0


def our_program() -> Sequence[str]:
    """Return how this program is started."""
    return (sys.executable, "-m", "ensemble_ray.cli")


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the session that a process began, and wait until all of it is gone, so that nobody writes any more."""
    # Ray's processes have groups of their own. They are stopped first: whoever saw the others die would go on for a while.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in _session_of(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    process.wait()
    deadline = time.monotonic() + _GONE_S
    while _session_of(process) and time.monotonic() < deadline:
        time.sleep(_WATCH_S)


def _session_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the ids of the processes of its session that are alive."""
    listed = subprocess.run(["ps", "-axo", "pid=,stat="], capture_output=True, text=True, check=True)  # noqa: S607  where it is differs
    found: list[int] = []
    for line in listed.stdout.splitlines():
        pid, _, state = line.strip().partition(" ")
        with contextlib.suppress(OSError):  # it is gone already
            if "Z" not in state and os.getsid(int(pid)) == process.pid:
                found.append(int(pid))
    return found
