"""One fixed program as a tool. Package: built-in tools. In: text, told to the program as JSON; out: what it answers.

The command is the developer's own list of arguments: no shell, and nothing of it comes from a model. The program gets a
small environment, so that the keys in that of this process do not reach it unless the developer says so. How it is run
and ended is up to `process/run.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import cast

from ensemble_ray.errors import message_of
from ensemble_ray.process.threads import threads
from ensemble_ray.tools.approval import approve, preview
from ensemble_ray.tools.process.run import ProgramRun
from ensemble_ray.tools.rendering import render_value
from ensemble_ray.tools.tool import AbstractAgentTool, ToolResult

__all__ = ["ProcessAgentTool"]

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
