"""One run of a program for `ProcessAgentTool`: started in a thread, killed from any, ended with the process that asked.

Package: built-in tools. In: a command, its environment and its input. Out: what it wrote and how it ended. The program runs
under `supervisor.py`, in a session and a process group of its own: an end by time-out or by cancelling takes its children
along, and so does the death of this process, by whatever signal. Both streams are read to the end whatever their length,
and only so much is kept: a program that talks too much is never blocked, and never fills this process's memory.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from ensemble_ray.process.forks import abandon, new_lock, track
from ensemble_ray.tools.process import supervisor

__all__ = ["ProgramRun"]

_CHUNK_BYTES = 65_536
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.05
#: What a supervisor writes of one program at most.
_STATUS_BYTES = 64
_OVER = b"."
_ERRNO = "errno"
#: Without the user's packages and variables: it starts in some milliseconds, and nothing of theirs runs in it.
_SUPERVISOR = (sys.executable, "-I", "-S", str(Path(supervisor.__file__)))


class ProgramRun:
    """One run of a program."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], max_bytes: int) -> None:
        self._command = command
        self._environment = environment
        self._max_bytes = max_bytes
        self._lock = new_lock()
        track(self)
        self._is_over = False
        self._process: subprocess.Popen[bytes] | None = None
        #: the only writing end of the pipe that the supervisor watches; -1: there is none
        self._lifeline = -1
        self._is_supervised = _can_supervise()
        self._status = bytearray()
        self._stdout = bytearray()
        self._stderr = bytearray()
        self._readers: list[threading.Thread] = []

    def start(self, stdin: bytes) -> None:
        """Start the program, feed it and drain it.

        Raises:
            OSError: it cannot be started.
        """
        with self._lock:
            if self._is_over:
                raise InterruptedError("cancelled")
            process = self._start_supervised() if self._is_supervised else self._start_process(self._command)
            self._process = process
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise AssertionError  # all three were asked for
        _in_thread(_feed, process.stdin, stdin)
        self._readers += [
            _in_thread(self._drain, process.stdout, self._stdout, self._max_bytes),
            _in_thread(self._drain, process.stderr, self._stderr, self._max_bytes),
        ]

    def after_fork(self) -> None:
        """Let go of the parent's pipes: the program reads and ends by them."""
        process, self._process = self._process, None
        abandon(process)
        streams = () if process is None else (process.stdin, process.stdout, process.stderr)
        descriptors = [each.fileno() for each in streams if each is not None and not each.closed]
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123  in their place: their owners close the numbers
            for descriptor in (*descriptors, *([self._lifeline] if self._lifeline >= 0 else [])):
                os.dup2(nothing.fileno(), descriptor, inheritable=False)

    def _start_supervised(self) -> subprocess.Popen[bytes]:
        """Start the supervisor, which starts the program; keep the pipe that it watches."""
        with contextlib.ExitStack() as theirs:
            watched, lifeline = os.pipe()
            theirs.callback(os.close, watched)
            status, telling = os.pipe()
            theirs.callback(os.close, telling)
            ours = (str(watched), str(telling), str(int("LC_CTYPE" in self._environment)))
            try:
                process = self._start_process([*_SUPERVISOR, *ours, *self._command], watched, telling)
            except BaseException:
                os.close(lifeline)
                os.close(status)
                raise
        self._lifeline = lifeline
        self._readers.append(_in_thread(self._drain, os.fdopen(status, "rb", 0), self._status, _STATUS_BYTES))
        return process

    def _start_process(self, command: Sequence[str], *inherited: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  no shell; the command is the developer's own
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
            pass_fds=inherited,
        )

    def ends_within(self, limit_s: float) -> bool:
        """Wait until the program has ended and both streams with it; False when that takes longer."""
        until = time.monotonic() + limit_s
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))
        if any(reader.is_alive() for reader in self._readers):
            return False
        self._release()
        # a program nearly always ends as its streams do, so the first looks are close together
        pause_s = _FIRST_LOOK_S
        while not self._is_collected():
            if time.monotonic() >= until:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        return True

    def kill(self) -> None:
        """Kill the program and its children if they are there; a program that was not started never will be.

        Returns at once; `ends_within` collects what is left.
        """
        with self._lock:
            self._is_over = True
            process = self._process
            # until it is collected the group's id is its own, also when it has ended and only children are left
            if process is None or process.returncode is not None:
                return
            if hasattr(os, "killpg"):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            self._release()

    def _release(self) -> None:
        """Tell the supervisor that the call is over."""
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            with contextlib.suppress(OSError):  # it is gone
                os.write(lifeline, _OVER)
            os.close(lifeline)

    def _is_collected(self) -> bool:
        # under the lock, so that no group is killed whose id has just become free
        with self._lock:
            return self._process is None or self._process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """What the program ended with; negative: killed by that signal."""
        status = self._status.decode()
        if status and not status.startswith(_ERRNO):
            return int(status)
        return None if self._process is None else self._process.returncode

    @property
    def start_error(self) -> OSError | None:
        """Why the program could not be started; None where it could."""
        status = self._status.decode()
        if not status.startswith(_ERRNO):
            return None
        number = int(status.split()[1])
        return OSError(number, os.strerror(number), self._command[0])

    @property
    def stdout(self) -> str:
        """What it wrote, as much as is kept."""
        return self._decode_kept(self._stdout)

    @property
    def stderr(self) -> str:
        """What it wrote as errors, as much as is kept."""
        return self._decode_kept(self._stderr)

    def _decode_kept(self, data: bytearray) -> str:
        if len(data) <= self._max_bytes:
            return data.decode("utf-8", "replace")
        # a character cut in two by the limit is dropped, not shown as damage
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(data[: self._max_bytes]))
        return f"{text}\n[output truncated at {self._max_bytes} bytes]"

    @staticmethod
    def _drain(stream: IO[bytes], into: bytearray, max_bytes: int) -> None:
        with stream, contextlib.suppress(ValueError):  # closed under us after a kill
            while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
                # one byte more than is kept tells that something was dropped
                into += chunk[: max_bytes + 1 - len(into)]


def _can_supervise() -> bool:
    """Whether this interpreter can be started as a supervisor."""
    return hasattr(os, "killpg") and bool(sys.executable) and not getattr(sys, "frozen", False)


def _feed(stream: IO[bytes], data: bytes) -> None:
    """Write and close; a program that reads nothing is fine (S-BIT-61)."""
    with contextlib.suppress(OSError), stream:
        stream.write(data)


def _in_thread(function: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, name="ensemble-ray-process", daemon=True)
    thread.start()
    return thread
