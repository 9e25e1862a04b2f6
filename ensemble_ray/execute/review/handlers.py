"""Review handlers of the library (S-REV-40 to S-REV-42), and the caller of a run's handler."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import TextIO, cast

from ensemble_ray.errors import ExitEarlyError, ValidationError, message_of
from ensemble_ray.process.concurrency import call_user
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.reviews import (
    Continue,
    Edit,
    ExitEarly,
    Review,
    ReviewAnswer,
    ReviewDecision,
    ReviewFunction,
    Reviewing,
    ReviewRequest,
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
        from ensemble_ray.execute.review.console import ConsoleReviewHandler  # only for terminals

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
