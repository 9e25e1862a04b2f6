"""Asks a person at a terminal (S-REV-44 to S-REV-48).

In: a request. Out: the decision. One person has one terminal: questions of several tasks, tools and runs of this process come
one after the other. A question that timed out, or whose run was cancelled, leaves nothing that reads the next answer.
"""

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
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import after_fork, is_terminal, terminal_lock, threads
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
#: How soon a reader finds that nobody wants its line any more, s.
_TICK_S = 0.2
_CHOICES = "[c] Continue  [e] Edit  [x] Exit early"
#: Words of each choice (S-REV-46). Whatever else is typed decides nothing.
_CONTINUE = frozenset({"c", "y", "yes", "continue", "approve"})
_EDIT = frozenset({"e", "edit"})
_EXIT = frozenset({"x", "n", "no", "q", "exit"})
_HELP = (
    f"Type one of these words: {', '.join(sorted(_CONTINUE))}; {', '.join(sorted(_EDIT))}; {', '.join(sorted(_EXIT))}."
)
#: What the countdown calls the action that is coming.
_COMING = {"continue": "auto-c", "exit_early": "auto-x", "fail": "auto-fail"}


class LineSource(Protocol):
    """Reads lines of a person or a program, one at a time."""

    def read(self, stream: TextIO, timeout_s: float) -> str | None:
        """Return the next line with its end, `""` at the end of input, None where none came in time.

        Raises:
            OSError, ValueError: it cannot be read.
        """
        ...

    def put_back(self, line: str) -> None:
        """Keep a line that nobody wanted for whoever reads next."""
        ...


class _KeptLines:
    """Lines that were read for a question that is not asked any more."""

    def __init__(self) -> None:
        self._kept: list[str] = []

    def put_back(self, line: str) -> None:
        """Keep a line for whoever reads next."""
        self._kept.append(line)


class _TerminalLines(_KeptLines):
    """Lines of a terminal, which is asked whether it has one before it is read: no thread is left waiting in it."""

    def read(self, stream: TextIO, timeout_s: float) -> str | None:
        """Return the next line; see `LineSource`."""
        if self._kept:
            return self._kept.pop(0)
        ready, _, _ = select.select([stream], [], [], timeout_s)
        return stream.readline() if ready else None


class _ThreadedLines(_KeptLines):
    """Lines of a stream that cannot be asked whether it has one: a thread reads a line when somebody wants one.

    A line that comes after its question timed out is the answer to the next one, and is lost to nobody.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
        self._is_reading = False

    def read(self, stream: TextIO, timeout_s: float) -> str | None:
        """Return the next line; see `LineSource`."""
        if self._kept:
            return self._kept.pop(0)
        if not self._is_reading:
            self._is_reading = True
            threading.Thread(target=self._read_one, args=(stream,), name="ensemble-ray-console", daemon=True).start()
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._is_reading = False
        if isinstance(line, BaseException):
            raise line
        return line

    def _read_one(self, stream: TextIO) -> None:
        try:
            self._lines.put(stream.readline())
        except (OSError, ValueError) as error:
            self._lines.put(error)


_sources: WeakKeyDictionary[TextIO, LineSource] = WeakKeyDictionary()
after_fork(_sources.clear)


def line_source(stream: TextIO) -> LineSource:
    """Return the one reader that a stream has in this process."""
    source = _sources.get(stream)
    if source is None:
        can_ask = os.name != "nt" and is_terminal(stream)
        source = _sources[stream] = _TerminalLines() if can_ask else _ThreadedLines()
    return source


def render_header(request: ReviewRequest) -> str:
    """Return what a person is shown of a request (S-REV-44)."""
    lines = ["", _RULE, f"Task:   {_cut(request.task_description, _MOST_DESCRIPTION)}"]
    if request.task_output.strip():
        lines.append(f"Output: {_cut(request.task_output, _MOST_OUTPUT)}")
    elif request.timing is ReviewTiming.DURING_EXECUTION:
        lines.append(f"Question: {request.task_description}")
    if request.prompt is not None:
        lines.append(f"Prompt: {request.prompt}")
    return escape_controls("\n".join([*lines, "---", ""]))


class ConsoleReviewHandler:
    """Asks at a terminal. Fulfils `Reviewing`."""

    def __init__(
        self,
        input: Callable[[], TextIO],  # noqa: A002  the public name of the argument (S-REV-42)
        output: Callable[[], TextIO],
        *,
        lines: Callable[[TextIO], LineSource] = line_source,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make one.

        Args:
            input: Returns the stream of the answers; asked anew for each request.
            output: Returns the stream of the questions.
            lines: Returns what reads the answers.
            now: Time that only goes forward, s.
        """
        self._input = input
        self._output = output
        self._lines = lines
        self._now = now

    def warn_without_terminal(self) -> None:
        """Warn that no person can answer: standard input is the console, and no terminal."""
        stream = self._input()
        if stream is sys.stdin and not is_terminal(stream):
            _log.warning(
                "Reviews are asked at the console, and standard input is no terminal. When it ends, open reviews exit the run early. "
                "Use another review_handler, or review_wait='detach' to decide later"
            )

    async def review(self, request: ReviewRequest, /) -> ReviewDecision:
        """Ask in a thread; a cancelled caller ends the question."""
        given_up = threading.Event()
        try:
            return await threads.run(self._ask, request, given_up)
        except asyncio.CancelledError:
            given_up.set()
            raise

    def _ask(self, request: ReviewRequest, given_up: threading.Event) -> ReviewDecision:
        while not terminal_lock.acquire(timeout=_TICK_S):
            if given_up.is_set():
                return Continue()
        try:
            return self._ask_question(request, given_up)
        except (OSError, ValueError) as error:
            return _unanswered(request, f"the console cannot be read: {message_of(error)}")
        finally:
            terminal_lock.release()

    def _ask_question(self, request: ReviewRequest, given_up: threading.Event) -> ReviewDecision:
        question = _Question(request, self._input(), self._output(), self._lines, self._now, given_up)
        return question.ask()


@dataclass(slots=True)
class _Question:
    """One request, from its header to its decision."""

    request: ReviewRequest
    input: TextIO
    output: TextIO
    lines_of: Callable[[TextIO], LineSource]
    now: Callable[[], float]
    #: set when nobody wants the answer any more
    given_up: threading.Event

    def ask(self) -> ReviewDecision:
        """Show it, and return what is typed, or what follows when nothing is."""
        self._show(render_header(self.request))
        limit_s = self.request.timeout_s
        ends_at = None if limit_s is None else self.now() + limit_s
        while (line := self._choice(ends_at)) is not None:
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
        if self.given_up.is_set():
            return Continue()
        return decision_at_timeout(self.request, limit_s or 0.0)

    def _edit(self) -> ReviewDecision:
        """Read the new text; who is writing it is not hurried."""
        self._show("New text: ")
        text = None
        while text is None and not self.given_up.is_set():
            text = self._read(_TICK_S)
        if not text and not self.given_up.is_set():
            return _unanswered(self.request, "the input of the console has ended before the new text")
        return Edit((text or "").rstrip("\r\n"))

    def _choice(self, ends_at: float | None) -> str | None:
        """Return a line, showing the time that is left before it; None: there was none in time."""
        shown = ""
        while not self.given_up.is_set():
            left_s = None if ends_at is None else ends_at - self.now()
            if left_s is not None and left_s <= 0:
                return None
            waiting = "" if left_s is None else f" {_countdown(left_s, self.request.on_timeout)}"
            prompt = f"{_CHOICES}{waiting} > "
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
        if line is not None and self.given_up.is_set():  # it is the answer to the next question
            lines.put_back(line)
            return None
        return line

    def _show(self, text: str) -> None:
        # A character that a terminal lacks is no reason to lose the question (S-LLM-34).
        self.output.write(escape_unencodable(text, getattr(self.output, "encoding", None)))
        self.output.flush()


def _unanswered(request: ReviewRequest, reason: str) -> ReviewDecision:
    """Return what follows when no answer can come: never that the run continues (S-REV-46).

    Raises:
        ReviewTimeoutError: the gate fails its task, or it is a question of a tool, which passes the error to its model.
    """
    is_question = request.timing is ReviewTiming.DURING_EXECUTION and request.ends_run
    if request.on_timeout is OnTimeoutAction.FAIL or (is_question and request.on_timeout is OnTimeoutAction.CONTINUE):
        raise ReviewTimeoutError(f"Review gate has no answer: {reason} (on_timeout={request.on_timeout})")
    _log.warning("A review exits early: %s", reason)
    return ExitEarly(timed_out=True)


def _countdown(left_s: float, action: OnTimeoutAction) -> str:
    """Return the time that is left in whole seconds, the one that has begun included."""
    minutes, seconds = divmod(math.ceil(left_s), 60)
    return f"({_COMING[action]} in {minutes}:{seconds:02d})"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."
