"""One fixed program as a tool. Package: built-in tools. In: text, told to the program as JSON; out: what it answers.

The command is the developer's own list of arguments: no shell, and nothing of it comes from a model. The program gets a
small environment, so that the keys in that of this process do not reach it unless the developer says so. How it is run
and ended is up to `process/run.py`.
"""

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
from ensemble_ray.process.forks import abandon, new_lock, threads, track
from ensemble_ray.tools.approval import approve, preview
from ensemble_ray.tools.builtin import supervisor
from ensemble_ray.tools.tool import AbstractAgentTool, ToolResult
from ensemble_ray.tools.waiting import render_value

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


_DEFAULT_MAX_BYTES = 1_048_576
#: the guard around every tool comes after the tool's own limit, whose text says more
_GRACE_S = 10.0
#: how long a killed program's streams may take to end; a descendant that left the group may hold them open
_AFTER_KILL_S = 1.0
#: Variables that every program gets (S-BIT-67): where programs, files and libraries are, who the user is, and language.
_ALWAYS_INHERITED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "WINDIR", "COMSPEC", "PATHEXT", "USERPROFILE"),
        *("APPDATA", "LOCALAPPDATA", "PROGRAMDATA"),
    }
)
_LANGUAGE_PREFIX = "LC_"


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
        environment: Variables that the program gets besides `PATH`, `HOME` and the like, and in place of them.
        inherit: Names of further variables that it gets from this process; True: all of them, keys of models too.
        require_approval: Whether the run's review handler is asked before the program is started.

    Raises:
        ValueError: a name is blank, the description is missing, the command is empty, a limit is not positive, or a
            variable has no name or no text.
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
        self._inherit = inherit if isinstance(inherit, bool) else _checked_names(inherit)

    async def do_execute(self, text: str, /) -> ToolResult:
        """Run the program; a cancelled call kills it."""
        if self.require_approval:
            command = " ".join(self._command)
            described = f"Run command: {command}\nInput: {preview(text or '')}"
            approved = await approve(self.context.review_handler, self.name, described, text or "")
            if approved is None:
                return ToolResult.failure(f"Command execution rejected by reviewer: {command}")
            text = approved
        run = ProgramRun(self._command, environment=self._environment(), max_bytes=self._max_bytes)
        try:
            return await threads.run(self._supervise, run, text or "")
        finally:
            run.kill()

    def _environment(self) -> dict[str, str]:
        """Return what the program gets of this process's environment, and its own variables."""
        inherit = self._inherit
        kept = {
            name: value
            for name, value in os.environ.items()
            if inherit is True
            or name in _ALWAYS_INHERITED
            or name.startswith(_LANGUAGE_PREFIX)
            or (inherit is not False and name in inherit)
        }
        return {**kept, **self._own_variables}

    def _supervise(self, run: ProgramRun, text: str) -> ToolResult:
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
            raise ValueError(
                f"ProcessAgentTool environment must map names to texts, got {type(value).__name__} for {name!r}"
            )
    return dict(environment)


def _checked_names(inherit: Sequence[str]) -> frozenset[str]:
    if isinstance(inherit, str) or not all(isinstance(name, str) for name in inherit):
        raise ValueError(f"ProcessAgentTool inherit must be True, False or a list of names, got: {inherit!r}")
    return frozenset(inherit)


def _interpret(stdout: str) -> ToolResult:
    """Return the output of a program that ended well (S-BIT-62)."""
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
    return ToolResult.success(stdout if output is None else render_value(output), said.get("structured"))
