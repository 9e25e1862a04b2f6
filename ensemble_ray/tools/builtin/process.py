"""A built-in tool that runs one fixed program."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, cast

from ensemble_ray.errors import message_of
from ensemble_ray.process.concurrency import abandon, new_lock, threads, track
from ensemble_ray.tools.approval import approve, preview
from ensemble_ray.tools.builtin import supervisor
from ensemble_ray.tools.tool import AbstractAgentTool, ToolResult
from ensemble_ray.tools.user_code import render_value

_DEFAULT_MAX_BYTES = 1_048_576
_GRACE_S = 10.0  # after the tool's own limit, which reports more
_AFTER_KILL_S = 1.0  # a descendant that left the group may keep the streams open
#: every program receives them (S-BIT-67)
_ALWAYS_INHERITED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "WINDIR", "COMSPEC", "PATHEXT", "USERPROFILE"),
        *("APPDATA", "LOCALAPPDATA", "PROGRAMDATA"),
    }
)
_LANGUAGE_PREFIX = "LC_"


class ProcessAgentTool(AbstractAgentTool):
    """Runs one program per call and returns its output.

    The program reads one JSON object, `{"input": "<text>"}`, from its standard input. It writes either plain text or
    one JSON object: `{"output": ..., "structured": ...}`, or `{"success": false, "error": ...}`.

    Args:
        name: Name for the model.
        description: Explains to the model when to use the tool and what input it expects.
        command: The program and its arguments. They run without a shell, and a model cannot change them.
        timeout: Time limit of one run, in seconds or as a `timedelta`. After it, the program and its children are killed.
        max_output_bytes: Limit of each output stream; the rest is dropped.
        environment: Variables for the program, in addition to `PATH`, `HOME` and the like, or instead of them.
        inherit: Names of further variables of this process for the program; True: all of them, including API keys.
        require_approval: Whether the tool asks the run's review handler before it starts the program.

    Raises:
        ValueError: a name is blank, the description is missing, the command is empty, a limit is not positive, or a
            variable has an invalid name or value.
    """

    def __init__(
        self,
        name: str | None = None,
        description: str | None = None,
        command: Sequence[str] | None = None,
        *,
        timeout: float | timedelta = 30.0,
        max_output_bytes: int = _DEFAULT_MAX_BYTES,
        environment: Mapping[str, str] | None = None,
        inherit: bool | Sequence[str] = False,
        require_approval: bool = False,
    ) -> None:
        if name is None or not name.strip():
            raise ValueError("ProcessAgentTool name must not be blank")
        if description is None:
            raise ValueError("ProcessAgentTool description must not be None")
        if isinstance(command, str):
            raise ValueError(f"ProcessAgentTool command must be a list of arguments, got one string: {command!r}")  # noqa: TRY004  the specification's class for bad arguments
        if not command or not command[0].strip():
            raise ValueError("ProcessAgentTool command must not be empty")
        self._limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        if not self._limit_s > 0:
            raise ValueError(f"ProcessAgentTool timeout must be > 0, got: {timeout}")
        if max_output_bytes <= 0:
            raise ValueError(f"ProcessAgentTool max_output_bytes must be > 0, got: {max_output_bytes}")
        self.name = name
        self.description = description
        self.timeout = self._limit_s + _GRACE_S
        self._command = tuple(command)
        self._max_bytes = max_output_bytes
        self._own_variables = _checked_variables(environment or {})
        self.require_approval = require_approval
        if isinstance(inherit, str) or not (
            isinstance(inherit, bool) or all(isinstance(each, str) for each in inherit)
        ):
            raise ValueError(f"ProcessAgentTool inherit must be True, False or a list of names, got: {inherit!r}")
        self._inherit = inherit if isinstance(inherit, bool) else frozenset(inherit)

    async def do_execute(self, text: str, /) -> ToolResult:
        if self.require_approval:
            command = " ".join(self._command)
            described = f"Run command: {command}\nInput: {preview(text or '')}"
            approved = await approve(self.context.review_handler, self.name, described, text or "")
            if approved is None:
                return ToolResult.failure(f"Command execution rejected by reviewer: {command}")
            text = approved
        run = ProgramRun(self._command, environment=self._environment(), max_bytes=self._max_bytes)
        try:
            return await threads.run(self._run_to_end, run, text or "")
        finally:
            run.kill()

    def _environment(self) -> dict[str, str]:
        inherit = self._inherit
        inherited = {
            name: value
            for name, value in os.environ.items()
            if inherit is True
            or name in _ALWAYS_INHERITED
            or name.startswith(_LANGUAGE_PREFIX)
            or (inherit is not False and name in inherit)
        }
        return {**inherited, **self._own_variables}

    def _run_to_end(self, run: ProgramRun, text: str) -> ToolResult:
        try:
            run.start(json.dumps({"input": text}).encode())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return ToolResult.failure(f"Failed to start process: {message_of(error)}")
        if not run.ends_within(self._limit_s):
            run.kill()
            run.ends_within(_AFTER_KILL_S)
            return ToolResult.failure(f"Process timed out after {self._limit_s:g} seconds: {self._command[0]}")
        if run.start_error is not None:
            return ToolResult.failure(f"Failed to start process: {message_of(run.start_error)}")
        if run.exit_code != 0:
            return ToolResult.failure(run.stderr.strip() or f"Process exited with code {run.exit_code}")
        return _interpret(run.stdout.strip())


def _checked_variables(environment: Mapping[str, str]) -> dict[str, str]:
    for name, value in environment.items():
        if not isinstance(name, str) or not name or {"=", "\0"} & set(name):
            raise ValueError(f"ProcessAgentTool environment has a name that is none: {name!r}")
        if not isinstance(value, str) or "\0" in value:
            got = f"got {type(value).__name__} for {name!r}"
            raise ValueError(f"ProcessAgentTool environment must map names to texts, {got}")
    return dict(environment)


def _interpret(stdout: str) -> ToolResult:
    try:
        parsed: object = json.loads(stdout) if stdout.startswith("{") else None
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        return ToolResult.success(stdout)
    answer = cast("Mapping[str, object]", parsed)
    if answer.get("success") is False:
        reason = answer.get("error")
        return ToolResult.failure("Process returned success=false" if reason is None else render_value(reason))
    output = answer.get("output")
    return ToolResult.success(stdout if output is None else render_value(output), answer.get("structured"))


_READ_BYTES = 65_536
_FIRST_POLL_S, _LAST_POLL_S = 0.001, 0.05
_STATUS_BYTES = 64
_OVER = b"."
_ERRNO = "errno"
#: without the user's packages and variables, which would slow its start
_SUPERVISOR = (sys.executable, "-I", "-S", str(Path(supervisor.__file__)))


class ProgramRun:
    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], max_bytes: int) -> None:
        self._command = command
        self._environment = environment
        self._max_bytes = max_bytes
        self._lock = new_lock()
        track(self)
        self._is_over = False
        self._process: subprocess.Popen[bytes] | None = None
        #: writing end of the pipe that the supervisor watches; -1: there is none
        self._lifeline = -1
        self._is_supervised = hasattr(os, "killpg") and bool(sys.executable) and not getattr(sys, "frozen", False)
        self._status = bytearray()
        self._stdout = bytearray()
        self._stderr = bytearray()
        self._readers: list[threading.Thread] = []

    def start(self, stdin: bytes) -> None:
        with self._lock:
            if self._is_over:
                raise InterruptedError("cancelled")
            process = self._start_supervised() if self._is_supervised else self._start_process(self._command)
            self._process = process
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise AssertionError  # `_start_process` opens all three
        stream = process.stdin

        def feed() -> None:
            with contextlib.suppress(OSError), stream:  # a program need not read its input (S-BIT-61)
                stream.write(stdin)

        _in_thread(feed)
        self._readers += [
            _in_thread(self._drain, process.stdout, self._stdout, self._max_bytes),
            _in_thread(self._drain, process.stderr, self._stderr, self._max_bytes),
        ]

    def after_fork(self) -> None:
        """Replace the parent's pipes: open copies would hide the parent's end from the program."""
        process, self._process = self._process, None
        abandon(process)
        streams = () if process is None else (process.stdin, process.stdout, process.stderr)
        descriptors = [each.fileno() for each in streams if each is not None and not each.closed]
        with open(os.devnull, "rb") as null:  # noqa: PTH123  replaced, not closed: their owners close the numbers
            for descriptor in (*descriptors, *([self._lifeline] if self._lifeline >= 0 else [])):
                os.dup2(null.fileno(), descriptor, inheritable=False)

    def _start_supervised(self) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as theirs:
            watched, lifeline = os.pipe()
            theirs.callback(os.close, watched)
            status, report = os.pipe()
            theirs.callback(os.close, report)
            arguments = (str(watched), str(report), str(int("LC_CTYPE" in self._environment)))
            try:
                process = self._start_process([*_SUPERVISOR, *arguments, *self._command], watched, report)
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
        """Wait for the program and its streams; return False after the limit."""
        until = time.monotonic() + limit_s
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))
        if any(reader.is_alive() for reader in self._readers):
            return False
        self._end_supervisor()
        pause_s = _FIRST_POLL_S
        while True:
            with self._lock:  # `kill` must not use the id of a group that was just freed
                if self._process is None or self._process.poll() is not None:
                    return True
            if time.monotonic() >= until:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)

    def kill(self) -> None:
        """Kill the program and its children without waiting."""
        with self._lock:
            self._is_over = True
            process = self._process
            # the group keeps its id until the process is collected
            if process is None or process.returncode is not None:
                return
            if hasattr(os, "killpg"):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            self._end_supervisor()

    def _end_supervisor(self) -> None:
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            with contextlib.suppress(OSError):
                os.write(lifeline, _OVER)
            os.close(lifeline)

    @property
    def exit_code(self) -> int | None:
        status = self._status.decode()
        if status and not status.startswith(_ERRNO):
            return int(status)
        return None if self._process is None else self._process.returncode

    @property
    def start_error(self) -> OSError | None:
        status = self._status.decode()
        if not status.startswith(_ERRNO):
            return None
        number = int(status.split()[1])
        return OSError(number, os.strerror(number), self._command[0])

    @property
    def stdout(self) -> str:
        return self._decode(self._stdout)

    @property
    def stderr(self) -> str:
        return self._decode(self._stderr)

    def _decode(self, data: bytearray) -> str:
        if len(data) <= self._max_bytes:
            return data.decode("utf-8", "replace")
        # drops a character that the limit cuts in two
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(data[: self._max_bytes]))
        return f"{text}\n[output truncated at {self._max_bytes} bytes]"

    @staticmethod
    def _drain(stream: IO[bytes], into: bytearray, max_bytes: int) -> None:
        with stream, contextlib.suppress(ValueError):  # closed after a kill
            while chunk := os.read(stream.fileno(), _READ_BYTES):
                into += chunk[: max_bytes + 1 - len(into)]


def _in_thread(function: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, name="ensemble-ray-process", daemon=True)
    thread.start()
    return thread
