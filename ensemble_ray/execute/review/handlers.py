"""Handlers of review gates that are ready made (S-REV-40 to S-REV-42). Package: execute.

A handler is any callable of a `ReviewRequest`, sync or async, or an object with `review`; nothing has to derive from
`ReviewHandler`.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TextIO

from ensemble_ray.errors import ValidationError
from ensemble_ray.values.reviews import Continue, ReviewDecision, ReviewFunction, Reviewing, ReviewRequest

__all__ = ["AutoApproval", "ReviewHandler"]


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
