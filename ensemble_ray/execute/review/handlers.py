"""Handlers of review gates that are ready made (S-REV-40 to S-REV-42).

A handler is any callable of a `ReviewRequest`, sync or async, or an object with `review`; nothing has to derive from
`ReviewHandler`.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TextIO, cast

from ensemble_ray.errors import ExitEarlyError, ValidationError
from ensemble_ray.process.forks import call_user
from ensemble_ray.values.reviews import (
    Continue,
    Edit,
    ExitEarly,
    ReviewAnswer,
    ReviewDecision,
    ReviewFunction,
    Reviewing,
    ReviewRequest,
)


class ReviewHandler(ABC):
    """Decides at review gates; its class methods make those that most teams need."""

    @abstractmethod
    def review(self, request: ReviewRequest, /) -> ReviewDecision | Awaitable[ReviewDecision]:
        """Decide; may be `async`. What it raises fails the task."""

    @staticmethod
    def auto_approve() -> Reviewing:
        """Return a handler that approves at once."""
        return AutoApproval(timedelta())

    @staticmethod
    def auto_approve_with_delay(delay: timedelta | float) -> Reviewing:
        """Return a handler that approves after a time, a `timedelta` or seconds.

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
            input: Where answers come from; None: the standard input, as it is when somebody is asked.
            output: Where questions go; None: the standard output.
        """
        from ensemble_ray.execute.review.console import ConsoleReviewHandler  # most handlers need no terminal

        return ConsoleReviewHandler(lambda: input or sys.stdin, lambda: output or sys.stdout)

    @staticmethod
    def notifying(handler: Reviewing | ReviewFunction, *notifiers: Callable[[ReviewRequest], object]) -> Reviewing:
        """Return a handler that tells notifiers of each request, and then asks that handler."""
        from ensemble_ray.execute.review.notifiers import NotifyingHandler  # which needs an HTTP client

        return NotifyingHandler(handler, notifiers)


class AutoApproval(ReviewHandler):
    """Approves whatever it is asked."""

    def __init__(self, delay: timedelta) -> None:
        self._delay_s = delay.total_seconds()

    async def review(self, request: ReviewRequest, /) -> ReviewDecision:
        """Approve."""
        del request
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        return Continue()


#: Who decided where nobody was asked, since the run was ending.
_RUN_ENDING = "(run ending)"


class LocalReviewer:
    """Asks the handler of one run. Fulfils `Reviewer`."""

    def __init__(self, handler: object) -> None:
        self._handler = handler
        self._turn = asyncio.Lock()
        #: set when a decision has ended the run
        self._ending = asyncio.Event()

    async def ask(self, request: ReviewRequest) -> ReviewAnswer:
        """Ask, when it is the request's turn; see `Reviewer`.

        Raises:
            ValidationError: the handler returned no decision.
            BaseException: what the handler raised.
        """
        if not request.ends_run:
            return await self._answer(request)
        if getattr(self._handler, "is_concurrent", False):
            return await self._ask_beside_others(request)
        async with self._turn:
            if self._ending.is_set():
                return ReviewAnswer(decision=Continue(), by=_RUN_ENDING)
            answer = await self._answer(request)
            if isinstance(answer.decision, ExitEarly):
                self._ending.set()
            return answer

    async def _ask_beside_others(self, request: ReviewRequest) -> ReviewAnswer:
        """Ask while other gates are open; the first decision that ends the run answers them all."""
        if self._ending.is_set():
            return ReviewAnswer(decision=Continue(), by=_RUN_ENDING)
        loop = asyncio.get_running_loop()
        asking, ending = loop.create_task(self._answer(request)), loop.create_task(self._ending.wait())
        try:
            await asyncio.wait([asking, ending], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return ReviewAnswer(decision=Continue(), by=_RUN_ENDING)
            answer = asking.result()
            if isinstance(answer.decision, ExitEarly):
                self._ending.set()
            return answer
        finally:
            asking.cancel()
            ending.cancel()

    async def _answer(self, request: ReviewRequest) -> ReviewAnswer:
        try:
            decision = await self._ask(request)
        except ExitEarlyError as exit_early:
            decision = ExitEarly(timed_out=exit_early.timed_out)
        return ReviewAnswer(decision=decision, by=_name_of(self._handler))

    async def _ask(self, request: ReviewRequest) -> ReviewDecision:
        ask = cast("Callable[[ReviewRequest], object]", getattr(self._handler, "review", self._handler))
        decision = await call_user(ask, request)
        if isinstance(decision, Continue | Edit | ExitEarly):
            return decision
        returned = "None" if decision is None else type(decision).__name__
        raise ValidationError(
            f"Review handler '{_name_of(self._handler)}' returned {returned}, expected a ReviewDecision. Return "
            "ReviewDecision.continue_execution(), .edit(text) or .exit_early()"
        )


def _name_of(handler: object) -> str:
    """Return what records and messages call a handler."""
    return str(getattr(handler, "__name__", type(handler).__name__))
