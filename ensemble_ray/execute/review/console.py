"""Ask at a terminal, one question after the other (S-REV-44 to S-REV-48). Ended questions consume no answer."""

from __future__ import annotations

import asyncio
import math
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TextIO
from weakref import WeakKeyDictionary

from ensemble_ray.errors import ReviewTimeoutError, message_of
from ensemble_ray.process.concurrency import after_fork, is_terminal, terminal_lock, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.text.foreign_text import escape_controls, escape_unencodable
from ensemble_ray.values.reviews import (
    Continue,
    Edit,
    ExitEarly,
    OnTimeoutAction,
    ReviewDecision,
    ReviewRequest,
    ReviewTiming,
    decision_at_timeout,
)

_log = bounded_logger(__name__)
_RULE = "== Review Required " + "=" * 41
_MOST_DESCRIPTION = 200
_MOST_OUTPUT = 500
_TICK_S = 0.2  # interval of checks for a cancelled question, s
_CHOICES = "[c] Continue  [e] Edit  [x] Exit early"
_CONTINUE = frozenset({"c", "y", "yes", "continue", "approve"})  # other words have no effect (S-REV-46)
_EDIT = frozenset({"e", "edit"})
_EXIT = frozenset({"x", "n", "no", "q", "exit"})
_HELP = (
    f"Type one of these words: {', '.join(sorted(_CONTINUE))}; {', '.join(sorted(_EDIT))}; {', '.join(sorted(_EXIT))}."
)
_COMING = {"continue": "auto-c", "exit_early": "auto-x", "fail": "auto-fail"}


class ConsoleReviewHandler:
    """Asks at a terminal. Implements `Reviewing`."""

    def __init__(
        self,
        input: Callable[[], TextIO],  # noqa: A002  the public name of the argument (S-REV-42)
        output: Callable[[], TextIO],
        *,
        lines: Callable[[TextIO], LineSource] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a handler. The streams are called for each request; `now` is monotonic time, s."""
        self._input = input
        self._output = output
        self._lines = lines or _Lines.of
        self._now = now

    def warn_without_terminal(self) -> None:
        stream = self._input()
        if stream is sys.stdin and not is_terminal(stream):
            _log.warning(
                "Reviews are asked at the console, and standard input is no terminal. When it ends, open reviews exit the run early. "
                "Use another review_handler, or review_wait='detach' to decide later"
            )

    async def review(self, request: ReviewRequest, /) -> ReviewDecision:
        """Ask in a thread; cancelling the caller ends the question."""
        is_cancelled = threading.Event()
        try:
            return await threads.run(self._ask, request, is_cancelled)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    def _ask(self, request: ReviewRequest, is_cancelled: threading.Event) -> ReviewDecision:
        while not terminal_lock.acquire(timeout=_TICK_S):
            if is_cancelled.is_set():
                return Continue()
        try:
            return _Question(request, self._input(), self._output(), self._lines, self._now, is_cancelled).ask()
        except (OSError, ValueError) as error:
            return _unanswered(request, f"the console cannot be read: {message_of(error)}")
        finally:
            terminal_lock.release()


@dataclass(slots=True)
class _Question:
    request: ReviewRequest
    input: TextIO
    output: TextIO
    lines_of: Callable[[TextIO], LineSource]
    now: Callable[[], float]
    is_cancelled: threading.Event

    def ask(self) -> ReviewDecision:
        self._show(_header(self.request))
        limit_s = self.request.timeout_s
        ends_at = None if limit_s is None else self.now() + limit_s
        while (line := self._read_choice(ends_at)) is not None:
            word = line.strip().lower()
            if not line:
                return _unanswered(self.request, "the input of the console has ended")
            if word in _CONTINUE:
                return Continue()
            if word in _EDIT:
                return self._edit()
            if word in _EXIT:
                return ExitEarly()
            self._show(f"{_HELP}\n")
        self._show("\n")
        if self.is_cancelled.is_set():
            return Continue()
        return decision_at_timeout(self.request, limit_s or 0.0)

    def _edit(self) -> ReviewDecision:
        self._show("New text: ")
        text = None
        while text is None and not self.is_cancelled.is_set():
            text = self._read(_TICK_S)
        if not text and not self.is_cancelled.is_set():
            return _unanswered(self.request, "the input of the console has ended before the new text")
        return Edit((text or "").rstrip("\r\n"))

    def _read_choice(self, ends_at: float | None) -> str | None:
        """Return a line during the countdown; None: no line in time."""
        shown = ""
        while not self.is_cancelled.is_set():
            left_s = None if ends_at is None else ends_at - self.now()
            if left_s is not None and left_s <= 0:
                return None
            prompt = f"{_CHOICES} > "
            if left_s is not None:
                minutes, seconds = divmod(math.ceil(left_s), 60)
                prompt = f"{_CHOICES} ({_COMING[self.request.on_timeout]} in {minutes}:{seconds:02d}) > "
            if prompt != shown:
                self._show(f"\r{prompt}" if shown else prompt)
                shown = prompt
            line = self._read(_TICK_S if left_s is None else min(_TICK_S, left_s))
            if line is not None:
                return line
        return None

    def _read(self, timeout_s: float) -> str | None:
        lines = self.lines_of(self.input)
        line = lines.read(self.input, timeout_s)
        if line is not None and self.is_cancelled.is_set():  # the line answers the next question
            lines.put_back(line)
            return None
        return line

    def _show(self, text: str) -> None:
        self.output.write(escape_unencodable(text, getattr(self.output, "encoding", None)))
        self.output.flush()


def _header(request: ReviewRequest) -> str:
    lines = ["", _RULE, f"Task:   {_cut(request.task_description, _MOST_DESCRIPTION)}"]
    if request.task_output.strip():
        lines.append(f"Output: {_cut(request.task_output, _MOST_OUTPUT)}")
    elif request.timing is ReviewTiming.DURING_EXECUTION:
        lines.append(f"Question: {request.task_description}")
    if request.prompt is not None:
        lines.append(f"Prompt: {request.prompt}")
    return escape_controls("\n".join([*lines, "---", ""]))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def _unanswered(request: ReviewRequest, reason: str) -> ReviewDecision:
    """Return a decision that ends the run (S-REV-46), or raise `ReviewTimeoutError` for the task or asking tool."""
    is_question = request.timing is ReviewTiming.DURING_EXECUTION and request.ends_run
    if request.on_timeout is OnTimeoutAction.FAIL or (is_question and request.on_timeout is OnTimeoutAction.CONTINUE):
        raise ReviewTimeoutError(f"Review gate has no answer: {reason} (on_timeout={request.on_timeout})")
    _log.warning("A review exits early: %s", reason)
    return ExitEarly(timed_out=True)


class LineSource(Protocol):
    def read(self, stream: TextIO, timeout_s: float) -> str | None:
        """Return the next line with its end, `""` at the end of input, None at the timeout; or raise `OSError`."""
        ...

    def put_back(self, line: str) -> None: ...


class _Lines:
    """A terminal is read when it has a line; a thread reads other streams on request."""

    def __init__(self, *, can_select: bool) -> None:
        self._can_select = can_select
        self._kept: list[str] = []
        self._read_lines: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
        self._is_reading = False

    @classmethod
    def of(cls, stream: TextIO) -> LineSource:
        source = _sources.get(stream)
        if source is None:
            source = _sources[stream] = cls(can_select=os.name != "nt" and is_terminal(stream))
        return source

    def put_back(self, line: str) -> None:
        self._kept.append(line)

    def read(self, stream: TextIO, timeout_s: float) -> str | None:
        if self._kept:
            return self._kept.pop(0)
        if self._can_select:
            ready, _, _ = select.select([stream], [], [], timeout_s)
            return stream.readline() if ready else None

        def read_one() -> None:
            try:
                self._read_lines.put(stream.readline())
            except (OSError, ValueError) as error:
                self._read_lines.put(error)

        if not self._is_reading:
            self._is_reading = True
            threading.Thread(target=read_one, name="ensemble-ray-console", daemon=True).start()
        try:
            line = self._read_lines.get(timeout=timeout_s)
        except queue.Empty:  # the thread keeps reading, for the next question
            return None
        self._is_reading = False
        if isinstance(line, BaseException):
            raise line
        return line


_sources: WeakKeyDictionary[TextIO, LineSource] = WeakKeyDictionary()
after_fork(_sources.clear)
