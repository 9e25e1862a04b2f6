"""From an agent's process to its driver: warnings of the library and of user code, and what user code prints (S-SET-57).

A handler of the root logger, and standard streams that are listened to; the driver's `log_listener` logs each line again. The
process's own log files have everything, as before. Must never happen: a run that fails with what it says.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import ray.exceptions

from ensemble_ray.actors.link.wire import LineBudget, LogLine
from ensemble_ray.errors.texts import user_traceback
from ensemble_ray.process.context import current_log_context
from ensemble_ray.text.foreign_text import one_line

#: Longest part of a line that is held back until its end comes, characters.
_MOST_HELD = 4000
#: Longest line of a traceback, characters; and how many lines of it.
_TRACE_LINE, _TRACE_LINES = 300, 40
#: How often a process says how many lines it left out, s.
_LEFT_OUT_S = 1.0


class LineForwarder:
    """What this process says, on its way to the drivers of the runs that it hosts."""

    def __init__(self, service: Any, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make it; `service` is the scheduler's handle. Nothing is listened to before `open`."""
        self._service = service
        self._clock = clock
        #: the process's, from `open` on
        self._loop: Any = None
        #: in the order in which they came; all are of one program
        self._runs: dict[str, None] = {}
        self._budget = LineBudget()
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, LogLine]] = []
        self._sending: asyncio.Task[None] | None = None
        self._is_installed = False
        self._counting = False

    def open(self, run_id: str) -> None:
        """Forward what this process says in that run; called on the process's loop."""
        self._loop = asyncio.get_running_loop()
        self._runs[run_id] = None
        if not self._is_installed:
            self._is_installed = True
            own_log = sys.stderr
            logging.getLogger().addHandler(_ForwardingHandler(self, own_log))
            sys.stdout = _ObservedStream(sys.stdout, self.forward_text)
            sys.stderr = _ObservedStream(sys.stderr, self.forward_text)

    def close(self, run_id: str) -> None:
        """Forward nothing more of that run."""
        self._runs.pop(run_id, None)

    async def flush(self) -> None:
        """Return when the scheduler has everything that was said so far."""
        await asyncio.sleep(0)  # what other threads said is added in the loop's next turn
        if self._counting:
            self._say_left_out()
        if self._sending is not None:
            await asyncio.wait([self._sending])

    def forward_text(self, text: str) -> None:
        """Take a line that was printed, in any thread."""
        if text.strip():
            self._say(lambda role: LogLine(text=str(one_line(text)), agent_role=role))

    def forward_record(self, record: logging.LogRecord) -> None:
        """Take a log record, in any thread."""
        error = record.exc_info[1] if record.exc_info else None
        trace = "" if error is None else user_traceback(error)
        lines = [str(one_line(line, _TRACE_LINE)) for line in trace.splitlines()[:_TRACE_LINES]]
        self._say(
            lambda role: LogLine(
                text=str(one_line(record.getMessage())),
                agent_role=role,
                logger=record.name,
                level=record.levelno,
                template=str(record.msg),
                traceback="\n".join(lines),
            )
        )

    def _say(self, line_of: Callable[[str], LogLine]) -> None:
        fields = current_log_context()
        named, role = fields.get("ensemble.id"), fields.get("agent.role", "")
        # What no run says in particular, such as a thread of a tool, is the program's, which is told once.
        run_id = next(iter(self._runs), None) if named is None else named
        if run_id is None or run_id not in self._runs:
            return
        with self._lock:
            is_admitted = self._budget.admit(self._clock())
        if is_admitted:
            line = line_of(str(one_line(role, 100)))
            self._loop.call_soon_threadsafe(self._add, run_id, line)
        else:
            self._loop.call_soon_threadsafe(self._count)

    def _count(self) -> None:
        if not self._counting:
            self._counting = True
            self._loop.call_later(_LEFT_OUT_S, self._say_left_out)

    def _say_left_out(self) -> None:
        self._counting = False
        with self._lock:
            count = self._budget.reset_left_out()
        if not count:
            return  # it was said already
        text = f"{count} more lines were left out; the logs of Ray have all"
        for run_id in list(self._runs)[:1]:
            self._add(run_id, LogLine(text=text, agent_role=""))

    def _add(self, run_id: str, line: LogLine) -> None:
        self._waiting.append((run_id, line))
        if self._sending is None:
            self._sending = self._loop.create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                for run_id in dict.fromkeys(run for run, _ in waiting):
                    # A scheduler that is being started again loses lines; the run is not concerned.
                    with contextlib.suppress(ray.exceptions.RayError):
                        await self._service.put_lines.remote(run_id, [line for run, line in waiting if run == run_id])
        finally:
            self._sending = None


class _ForwardingHandler(logging.Handler):
    """Hands warnings to the forwarder, and writes them to the process's own log as Python does without a handler."""

    def __init__(self, forwarder: LineForwarder, own_log: TextIO) -> None:
        super().__init__(logging.WARNING)
        self._forwarder = forwarder
        self._own_log = own_log

    def emit(self, record: logging.LogRecord) -> None:
        """Take one; the records of Ray are the business of Ray."""
        self._own_log.write(f"{self.format(record)}\n")
        if record.name != "ray" and not record.name.startswith("ray."):
            try:
                self._forwarder.forward_record(record)
            except Exception:  # noqa: BLE001  a message that cannot be made must not fail what logs it
                self.handleError(record)


class _ObservedStream(io.TextIOBase):
    """A stream of the process whose lines are forwarded too."""

    def __init__(self, stream: TextIO, on_line: Callable[[str], None]) -> None:
        self._stream = stream
        self._on_line = on_line
        #: what each thread has written of a line that has not ended
        self._held: dict[int, str] = {}

    def write(self, text: str) -> int:
        """Write it, and hand on each line that ended."""
        self._stream.write(text)
        thread = threading.get_ident()
        *lines, rest = (self._held.pop(thread, "") + text).split("\n")
        if len(rest) > _MOST_HELD:
            lines, rest = [*lines, rest], ""
        if rest:
            self._held[thread] = rest
        for line in lines:
            self._on_line(line)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Ask the stream."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Ask the stream."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Ask the stream."""
        return self._stream.encoding

    @property
    def buffer(self) -> Any:
        """The bytes below the stream; what is written there is not forwarded."""
        return self._stream.buffer
