"""One fixed program as a tool. Room: built-in tools. In: text, told to the program as JSON; out: what it answers.

The command is the developer's own list of arguments: no shell, and nothing of it comes from a model. The program runs
in a process group of its own, so that an end by time-out or by cancelling takes its children along. Both of its
streams are read to the end whatever their length, and only so much is kept: a program that talks too much is never
blocked, and never fills this process's memory.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import IO, cast

from ensemble_ray.errors import message_of
from ensemble_ray.threads import threads
from ensemble_ray.tools.rendering import render_value
from ensemble_ray.tools.tool import AbstractAgentTool, ToolResult

__all__ = ["ProcessAgentTool"]

_DEFAULT_MAX_BYTES = 1_048_576
_CHUNK_BYTES = 65_536
#: the guard around every tool comes after the tool's own limit, whose text says more
_GRACE_S = 10.0
#: how long a killed program's streams may take to end; a descendant that left the group may hold them open
_AFTER_KILL_S = 1.0
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.05


class ProcessAgentTool(AbstractAgentTool):
    """Runs one program per call and gives what it wrote.

    The program reads one JSON object, `{"input": "<text>"}`, from its standard input and writes either plain text or
    one JSON object: `{"output": ..., "structured": ...}`, or `{"success": false, "error": ...}`.

    Args:
        name: What the model calls it.
        description: Tells the model when to use it and what to write as input.
        command: The program and its arguments.
        timeout: For one run, in seconds or as a `timedelta`; after it the program and its children are killed.
        max_output_bytes: That much of each stream is kept.

    Raises:
        ValueError: a name is blank, the description is missing, the command is empty, or a limit is not positive.
    """

    def __init__(
        self,
        name: str | None = None,
        description: str | None = None,
        command: Sequence[str] | None = None,
        *,
        timeout: float | timedelta = 30.0,
        max_output_bytes: int = _DEFAULT_MAX_BYTES,
    ) -> None:
        if name is None or not name.strip():
            msg = "ProcessAgentTool name must not be blank"
            raise ValueError(msg)
        if description is None:
            msg = "ProcessAgentTool description must not be None"
            raise ValueError(msg)
        if isinstance(command, str):
            msg = f"ProcessAgentTool command must be a list of arguments, got one string: {command!r}"
            raise ValueError(msg)  # noqa: TRY004  the specification's class for bad arguments
        if not command or not command[0].strip():
            msg = "ProcessAgentTool command must not be empty"
            raise ValueError(msg)
        self._limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        if not self._limit_s > 0:
            msg = f"ProcessAgentTool timeout must be > 0, got: {timeout}"
            raise ValueError(msg)
        if max_output_bytes <= 0:
            msg = f"ProcessAgentTool max_output_bytes must be > 0, got: {max_output_bytes}"
            raise ValueError(msg)
        self.name = name
        self.description = description
        self.timeout = self._limit_s + _GRACE_S
        self._command = tuple(command)
        self._max_bytes = max_output_bytes

    async def do_execute(self, text: str, /) -> ToolResult:
        """Run the program; a cancelled call kills it."""
        run = _Run(self._command, max_bytes=self._max_bytes)
        try:
            return await threads.run(self._supervise, run, text or "")
        finally:
            run.kill()

    def _supervise(self, run: _Run, text: str) -> ToolResult:
        try:
            run.start(json.dumps({"input": text}).encode())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return ToolResult.failure(f"Failed to start process: {message_of(error)}")
        if not run.ends_within(self._limit_s):
            run.kill()
            run.ends_within(_AFTER_KILL_S)
            return ToolResult.failure(f"Process timed out after {self._limit_s:g} seconds: {self._command[0]}")
        if run.exit_code != 0:
            return ToolResult.failure(run.stderr.strip() or f"Process exited with code {run.exit_code}")
        return _interpret(run.stdout.strip())


def _interpret(stdout: str) -> ToolResult:
    """What a program that ended well has said (S-BIT-62)."""
    try:
        answer: object = json.loads(stdout) if stdout.startswith("{") else None
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        return ToolResult.success(stdout)
    said = cast("Mapping[str, object]", answer)
    if said.get("success") is False:
        error = said.get("error")
        return ToolResult.failure("Process returned success=false" if error is None else render_value(error))
    output = said.get("output")
    return ToolResult.success(stdout if output is None else output, said.get("structured"))


class _Run:
    """One run of a program: started in a thread, killed from any."""

    def __init__(self, command: Sequence[str], *, max_bytes: int) -> None:
        self._command = command
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._is_over = False
        self._process: subprocess.Popen[bytes] | None = None
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
                msg = "cancelled"
                raise InterruptedError(msg)
            process = subprocess.Popen(  # noqa: S603  no shell; the command is the developer's own
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._process = process
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise AssertionError  # all three were asked for
        _in_thread(_feed, process.stdin, stdin)
        self._readers = [
            _in_thread(self._drain, process.stdout, self._stdout),
            _in_thread(self._drain, process.stderr, self._stderr),
        ]

    def ends_within(self, limit_s: float) -> bool:
        """Wait until the program has ended and both streams with it; False when that takes longer."""
        until = time.monotonic() + limit_s
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))
        if any(reader.is_alive() for reader in self._readers):
            return False
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

    def _is_collected(self) -> bool:
        # under the lock, so that nobody kills a group whose id has just become free
        with self._lock:
            return self._process is None or self._process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """What the program ended with; negative: killed by that signal."""
        return None if self._process is None else self._process.returncode

    @property
    def stdout(self) -> str:
        """What it wrote, as much as is kept."""
        return self._kept(self._stdout)

    @property
    def stderr(self) -> str:
        """What it wrote as errors, as much as is kept."""
        return self._kept(self._stderr)

    def _kept(self, data: bytearray) -> str:
        if len(data) <= self._max_bytes:
            return data.decode("utf-8", "replace")
        # a character cut in two by the limit is dropped, not shown as damage
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(data[: self._max_bytes]))
        return f"{text}\n[output truncated at {self._max_bytes} bytes]"

    def _drain(self, stream: IO[bytes], into: bytearray) -> None:
        with stream, contextlib.suppress(ValueError):  # closed under us after a kill
            while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
                # one byte more than is kept tells that something was dropped
                into += chunk[: self._max_bytes + 1 - len(into)]


def _feed(stream: IO[bytes], data: bytes) -> None:
    """Write and close; a program that reads nothing is fine (S-BIT-61)."""
    with contextlib.suppress(OSError), stream:
        stream.write(data)


def _in_thread(function: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, name="ensemble-ray-process", daemon=True)
    thread.start()
    return thread
