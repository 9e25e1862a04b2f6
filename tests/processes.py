"""Programs that tests start: in an environment and a session of their own, ended with everything they started.

Never: a process that outlives its test, a Ray cluster of somebody else that is joined or stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.template import RAY_SETTINGS, ForkedProgram

T = TypeVar("T")

#: Environment variables that would lead a program to somebody else's cluster, records or models.
_FOREIGN = ("RAY_", "ENSEMBLE_RAY_", "OPENAI_", "SERVE_")
#: How long a program may take to end when asked, s.
_GRACE_S = 20.0


def ports_of(worker: str) -> range:
    """The ports from 20000 to 32767 that belong to a worker of pytest-xdist (`gw0` to `gw14`), or to `master`.

    The system assigns ports from 32768 on, and Ray assigns those from 10002 to 19999 to its workers. A port of these
    could be taken before it is used, also by the program that it is meant for.
    """
    share = 0 if worker == "master" else 1 + int(worker.removeprefix("gw"))
    assert share < 16, f"{worker} has no ports: 16 processes share them"
    return range(20_000 + 798 * share, 20_000 + 798 * (share + 1))


_own_ports = ports_of(os.environ.get("PYTEST_XDIST_WORKER", "master"))
#: In random order, so that two sessions of pytest seldom try the same. No port comes again before all others have come.
_next_ports = itertools.cycle(random.sample(_own_ports, len(_own_ports)))


def free_ports(count: int) -> list[int]:
    """Return different ports on loopback that no process listens on, and that no other call in any worker returns."""
    found: list[int] = []
    while len(found) < count:
        port = next(_next_ports)
        with contextlib.suppress(OSError), socket.socket() as trial:  # another program uses it
            trial.bind(("127.0.0.1", port))
            found.append(port)
    return found


@contextlib.contextmanager
def own_directory() -> Generator[Path, None, None]:
    """A directory with a short path, since Ray puts sockets there whose paths may have 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="er-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def own_environment(directory: Path, **variables: str) -> dict[str, str]:
    """This environment without anything that leads elsewhere; home, records and Ray's files are in the directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {
        **kept,
        "HOME": str(directory),
        # Ray starts the entry points of jobs with the `python` that it finds here.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}",
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        **RAY_SETTINGS,
        "ENSEMBLE_RAY_HOME": str(directory / "records"),
        **variables,
        **_counted(variables),
    }


def _counted(variables: Mapping[str, str]) -> dict[str, str]:
    """Keep what notes starts (`tests.accounting`) on an import path that is given anew."""
    if "TEST_ACCOUNTS" not in os.environ or "PYTHONPATH" not in variables:
        return {}
    counting = str(Path(__file__).parent / "counting")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (variables["PYTHONPATH"], counting)))}


@dataclass(frozen=True)
class Program:
    """A program that runs."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def until(self, is_so: Callable[[], T], what: str, *, timeout_s: float = 180.0) -> T:
        """Wait until that gives something; for states that the program does not announce.

        Raises:
            AssertionError: it did not, or the program ended; with what it printed.
        """
        deadline = time.monotonic() + timeout_s
        while not (found := is_so()):
            assert self.process.poll() is None, f"ended while waiting for {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}:\n{self.text}"
            time.sleep(0.1)
        return found

    def members(self, *, named: str = "") -> list[int]:
        """Ids of the processes of its session, itself included."""
        listed = subprocess.run(["ps", "-eo", "pid=,comm="], capture_output=True, text=True, check=True)  # noqa: S607  where it is differs
        found: list[int] = []
        for line in listed.stdout.splitlines():
            pid, _, name = line.strip().partition(" ")
            with contextlib.suppress(OSError):
                if os.getsid(int(pid)) == self.process.pid and named in name:
                    found.append(int(pid))
        return found


@contextlib.contextmanager
def program(
    command: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path | None = None, is_forked: bool = True
) -> Generator[Program, None, None]:
    """Run a program, forked where that can be; at the end it and all that it started are gone.

    `is_forked=False`: for tests of a start, of a signal or of the memory that it takes.
    """
    start = ForkedProgram[bytes] if is_forked else subprocess.Popen[bytes]
    with log.open("wb") as out:
        process = start(command, env=env, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    running = Program(process, log)
    try:
        yield running
    finally:
        _end(running)


def _end(running: Program) -> None:
    """Ask, wait, and then insist, for the whole session; its id is the first process's."""
    if running.process.poll() is None:
        running.process.terminate()
    deadline = time.monotonic() + _GRACE_S
    while (left := running.members()) and time.monotonic() < deadline:
        running.process.poll()  # takes note of its end, so that it does not stay in the list
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    running.process.wait(timeout=_GRACE_S)
