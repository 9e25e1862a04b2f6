"""Processes that the harness starts: they answer in lines, have a deadline, and never outlive it.

In: a command and its environment. Out: the lines it prints. What must never happen here: a child, or a child of a
child, that is still there when the harness has ended.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from benchmarks.process_tree import kill_tree

__all__ = ["DEADLINE_S", "ROOT", "Child", "ChildFailedError", "clean_environment", "start_child"]

ROOT = Path(__file__).resolve().parent.parent
#: A round that takes longer than this has failed, s.
DEADLINE_S = 180.0
#: How long a child may take to end once its input is closed, s.
_LEAVE_S = 30.0
#: Settings of the caller that would change what is measured.
_REMOVED = (
    "RAY_ADDRESS",
    "ENSEMBLE_RAY_RUNTIME",
    "ENSEMBLE_RAY_CAPTURE_MODE",
    "ENSEMBLE_RAY_STORE",
    "ENSEMBLE_RAY_RETENTION",
    "OPENAI_BASE_URL",
    "OPENAI_API_KEY",
    # An installed package has bytecode; without it every start would compile everything, on the team's side only.
    "PYTHONDONTWRITEBYTECODE",
)


class ChildFailedError(RuntimeError):
    """A child ended, or did not answer in time; the text shows the end of what it wrote to stderr."""


def clean_environment(home: Path, *, ray_address: str | None = None) -> dict[str, str]:
    """Return the environment of every child: this checkout's code, records under `home`, none of our settings."""
    environment = {name: value for name, value in os.environ.items() if name not in _REMOVED}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "ENSEMBLE_RAY_HOME": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
        "NO_PROXY": "127.0.0.1,localhost",
    }
    if ray_address:
        # A local instance takes tokens; whoever joins it by address has to say that he brings one.
        environment |= {"RAY_ADDRESS": ray_address, "RAY_AUTH_MODE": "token"}
    return environment


class Child:
    """A running process that answers line by line."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], *, command: Sequence[str] = (sys.executable,)
    ) -> None:
        self._name = " ".join(arguments[:3])
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  lives as long as the process
        self._process = subprocess.Popen(  # noqa: S603  our own interpreter and files
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=dict(environment),
            cwd=ROOT,
        )
        self.pid = self._process.pid

    def ask(self, line: str = "", *, deadline_s: float = DEADLINE_S) -> str:
        """Send a line, and return the next one that it prints."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer will say what happened
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        return self.line(deadline_s=deadline_s)

    def line(self, *, deadline_s: float = DEADLINE_S) -> str:
        """Return the next line that it prints.

        Args:
            deadline_s: How long it may take, where that is no round of usual size.

        Raises:
            ChildFailedError: it ended, or took longer than the deadline.
        """
        assert self._process.stdout is not None
        deadline = threading.Timer(deadline_s, kill_tree, [self.pid])
        deadline.start()
        try:
            answer = self._process.stdout.readline()
        finally:
            deadline.cancel()
        if not answer:
            self._errors.seek(0)
            told = self._errors.read()[-3000:]
            raise ChildFailedError(f"'{self._name}' gave no answer (ended, or {deadline_s:g} s were over):\n{told}")
        return answer.strip()

    def detach(self) -> None:
        """Close its input and wait for its end; what does not end is killed, with everything it started."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            kill_tree(self.pid)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()


@contextlib.contextmanager
def start_child(arguments: Sequence[str], environment: Mapping[str, str]) -> Generator[Child]:
    """Start a child that ends with the block."""
    child = Child(arguments, environment)
    try:
        yield child
    finally:
        child.detach()
