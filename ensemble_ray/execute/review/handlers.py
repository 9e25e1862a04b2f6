"""Review handlers of the library (S-REV-40 to S-REV-48), at the console too, and the caller of a run's handler."""

from __future__ import annotations

import asyncio
import math
import os
import queue
import select
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Protocol, TextIO, cast
from weakref import WeakKeyDictionary

from msgspec import Struct

from ensemble_ray.errors import ExitEarlyError, ReviewTimeoutError, ValidationError, message_of
from ensemble_ray.process.concurrency import after_fork, call_user, is_terminal, terminal_lock, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.text.foreign_text import escape_controls, escape_unencodable
from ensemble_ray.values.reviews import (
    Continue,
    Edit,
    ExitEarly,
    OnTimeoutAction,
    Review,
    ReviewAnswer,
    ReviewDecision,
    ReviewFunction,
    Reviewing,
    ReviewRequest,
    ReviewTiming,
    decision_at_timeout,
)

_log = bounded_logger(__name__)
_NOT_ASKED = ReviewAnswer(decision=Continue(), by="(run ending)")  # if a gate was not asked since the run was ending


class ReviewHandler(ABC):
    """Decides at review gates. The static methods return common handlers.

    A handler need not derive from this class: any callable of a `ReviewRequest`, or object with `review`, is one.
    """

    @abstractmethod
    def review(self, request: ReviewRequest, /) -> ReviewDecision | Awaitable[ReviewDecision]:
        """Decide; may be `async`. An error fails the task."""

    @staticmethod
    def auto_approve() -> Reviewing:
        """Return a handler that approves immediately."""
        return AutoApproval(timedelta())

    @staticmethod
    def auto_approve_with_delay(delay: timedelta | float) -> Reviewing:
        """Return a handler that approves after a delay, a `timedelta` or seconds.

        Raises:
            ValidationError: the delay is None or negative.
        """
        if delay is None:
            raise ValidationError("delay must not be None")
        length = delay if isinstance(delay, timedelta) else timedelta(seconds=delay)
        if length < timedelta():
            raise ValidationError("delay must not be negative")
        return AutoApproval(length)

    @staticmethod
    def console(input: TextIO | None = None, output: TextIO | None = None) -> Reviewing:  # noqa: A002  S-REV-42
        """Return a handler that asks a person at a terminal.

        Args:
            input: Stream of the answers; None: the current `sys.stdin` of every question.
            output: Stream of the questions; None: the current `sys.stdout` of every question.
        """

        return ConsoleReviewHandler(lambda: input or sys.stdin, lambda: output or sys.stdout)

    @staticmethod
    def notifying(handler: Reviewing | ReviewFunction, *notifiers: Callable[[ReviewRequest], object]) -> Reviewing:
        """Return a handler that calls notifiers for each request, and then the given handler."""
        return NotifyingHandler(handler, notifiers)


class AutoApproval(ReviewHandler):
    def __init__(self, delay: timedelta) -> None:
        self._delay_s = delay.total_seconds()

    async def review(self, request: ReviewRequest, /) -> ReviewDecision:
        del request
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        return Continue()


class NotifyingHandler:
    """Calls notifiers one after the other, then a handler. Implements `Reviewing`."""

    def __init__(self, handler: object, notifiers: tuple[object, ...]) -> None:
        self._handler = handler
        self._notifiers = notifiers
        self.is_concurrent = bool(getattr(handler, "is_concurrent", False))  # copied (S-WEB-58, S-WEB-51)
        self.default_review: Review | None = getattr(handler, "default_review", None)

    async def review(self, request: ReviewRequest, /) -> ReviewDecision:
        for notify in self._notifiers:
            try:
                await call_user(cast("Callable[[ReviewRequest], object]", notify), request)
            except Exception as error:  # noqa: BLE001  user code that only watches must not end the run
                _log.warning("A review notifier failed: %s", message_of(error))
        return cast("ReviewDecision", await _call_handler(self._handler, request))


def _call_handler(handler: object, request: ReviewRequest) -> Awaitable[object]:
    return call_user(cast("Callable[[ReviewRequest], object]", getattr(handler, "review", handler)), request)


class LocalReviewer:
    def __init__(self, handler: object) -> None:
        self._handler = handler
        self._turn = asyncio.Lock()
        self._ending = asyncio.Event()  # set when a decision has ended the run

    async def ask(self, request: ReviewRequest) -> ReviewAnswer:
        """Call the handler for one request at a time if it is not concurrent; others than `ends_run` do not wait."""
        if not request.ends_run:
            return await self._answer(request)
        is_concurrent = getattr(self._handler, "is_concurrent", False)
        async with nullcontext() if is_concurrent else self._turn:
            if self._ending.is_set():
                return _NOT_ASKED
            answer = await (self._answer_unless_ending(request) if is_concurrent else self._answer(request))
            if isinstance(answer.decision, ExitEarly):
                self._ending.set()
            return answer

    async def _answer_unless_ending(self, request: ReviewRequest) -> ReviewAnswer:
        """Ask; the first decision that ends the run answers all open gates."""
        loop = asyncio.get_running_loop()
        asking, ending = loop.create_task(self._answer(request)), loop.create_task(self._ending.wait())
        try:
            await asyncio.wait([asking, ending], return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else _NOT_ASKED
        finally:
            asking.cancel()
            ending.cancel()

    async def _answer(self, request: ReviewRequest) -> ReviewAnswer:
        name = str(getattr(self._handler, "__name__", type(self._handler).__name__))
        try:
            decision = await _call_handler(self._handler, request)
        except ExitEarlyError as exit_early:
            decision = ExitEarly(timed_out=exit_early.timed_out)
        if isinstance(decision, Continue | Edit | ExitEarly):
            return ReviewAnswer(decision=decision, by=name)
        returned = "None" if decision is None else type(decision).__name__
        raise ValidationError(
            f"Review handler '{name}' returned {returned}, expected a ReviewDecision. Return "
            "ReviewDecision.continue_execution(), .edit(text) or .exit_early()"
        )


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


class _Question(Struct):
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
    if request.required_role is not None:
        lines.append(f"Role:   {request.required_role}")
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
