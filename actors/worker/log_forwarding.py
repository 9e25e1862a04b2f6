"""Forwards warnings and printed lines from an agent's process to its driver (S-SET-57). A run never fails because of a line."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import ray.exceptions
from msgspec import structs

from ensemble_ray.actors.link.reach import BatchSender
from ensemble_ray.actors.link.wire import LineBudget, LogLine
from ensemble_ray.errors.texts import user_traceback
from ensemble_ray.process.context import TEXT_FILTER, current_log_context
from ensemble_ray.text.foreign_text import one_line

#: Of an incomplete line, characters.
_MOST_HELD = 4000
#: Characters per line, and lines of a traceback.
_TRACE_LINE, _TRACE_LINES = 300, 40
_LEFT_OUT_S = 1.0


class LineForwarder:
    """It forwards no line before `open`."""

    def __init__(self, service: Any, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        #: set by `open`
        self._loop: Any = None
        #: in order of arrival
        self._runs: dict[str, None] = {}
        self._budget = LineBudget()
        self._lock = threading.Lock()
        self._sender = BatchSender(self._send)
        self._is_installed = False
        self._counting = False

    def open(self, run_id: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._runs[run_id] = None
        if not self._is_installed:
            self._is_installed = True
            own_log = sys.stderr
            logging.getLogger().addHandler(_ForwardingHandler(self, own_log))
            sys.stdout = _ObservedStream(sys.stdout, self.forward_text)
            sys.stderr = _ObservedStream(sys.stderr, self.forward_text)

    def close(self, run_id: str) -> None:
        self._runs.pop(run_id, None)

    async def flush(self) -> None:
        await asyncio.sleep(0)  # lines of other threads are added in the loop's next turn
        if self._counting:
            self._report_left_out()
        await self._sender.flush()

    def forward_text(self, text: str) -> None:
        if text.strip():
            self._forward(lambda role: LogLine(text=str(one_line(text)), agent_role=role))

    def forward_record(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        trace = "" if error is None else user_traceback(error)
        lines = [str(one_line(line, _TRACE_LINE)) for line in trace.splitlines()[:_TRACE_LINES]]
        self._forward(
            lambda role: LogLine(
                text=str(one_line(record.getMessage())),
                agent_role=role,
                logger=record.name,
                level=record.levelno,
                template=str(record.msg),
                traceback="\n".join(lines),
            )
        )

    def _forward(self, line_of: Callable[[str], LogLine]) -> None:
        fields = current_log_context()
        named, role = fields.get("ensemble.id"), fields.get("agent.role", "")
        clean = TEXT_FILTER.get()
        # A line that belongs to no run, such as one from a tool's thread, goes to the program once.
        run_id = next(iter(self._runs), None) if named is None else named
        if run_id is None or run_id not in self._runs:
            return
        with self._lock:
            is_admitted = self._budget.admit(self._clock())
        if is_admitted:
            line = line_of(str(one_line(role, 100)))
            if clean is not None:
                line = structs.replace(
                    line, text=clean(line.text), template=clean(line.template), traceback=clean(line.traceback)
                )
            self._loop.call_soon_threadsafe(self._sender.add, (run_id, line))
        else:
            self._loop.call_soon_threadsafe(self._count)

    def _count(self) -> None:
        if not self._counting:
            self._counting = True
            self._loop.call_later(_LEFT_OUT_S, self._report_left_out)

    def _report_left_out(self) -> None:
        self._counting = False
        with self._lock:
            count = self._budget.reset_left_out()
        if not count:
            return  # already reported
        text = f"{count} more lines were left out; the logs of Ray have all"
        for run_id in list(self._runs)[:1]:
            self._sender.add((run_id, LogLine(text=text, agent_role="")))

    async def _send(self, batch: Sequence[tuple[str, LogLine]]) -> None:
        for run_id in dict.fromkeys(run for run, _ in batch):
            # A restarting scheduler loses lines, which does not affect the run.
            with contextlib.suppress(ray.exceptions.RayError):
                await self._service.put_lines.remote(run_id, [line for run, line in batch if run == run_id])


def _clean(text: str) -> str:
    """Clean what a tool of a run with a redactor prints and logs (S-RED-25)."""
    clean = TEXT_FILTER.get()
    return text if clean is None else clean(text)


class _ForwardingHandler(logging.Handler):
    """Forwards warnings, and writes them to the process's own log as Python does without a handler."""

    def __init__(self, forwarder: LineForwarder, own_log: TextIO) -> None:
        super().__init__(logging.WARNING)
        self._forwarder = forwarder
        self._own_log = own_log

    def emit(self, record: logging.LogRecord) -> None:
        self._own_log.write(f"{_clean(self.format(record))}\n")
        if record.name != "ray" and not record.name.startswith("ray."):
            try:
                self._forwarder.forward_record(record)
            except Exception:  # noqa: BLE001  a record that cannot be formatted must not fail its caller
                self.handleError(record)


class _ObservedStream(io.TextIOBase):
    """A standard stream that forwards its lines too, except bytes written to `buffer`."""

    def __init__(self, stream: TextIO, on_line: Callable[[str], None]) -> None:
        self._stream = stream
        self._on_line = on_line
        self._held: dict[int, str] = {}

    def write(self, text: str) -> int:
        self._stream.write(_clean(text))
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
        self._stream.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def buffer(self) -> Any:
        return self._stream.buffer
