"""Asking a person from within a tool (S-REV-50 to S-REV-69).

In: what is asked, in the context of a call. Out: the decision; without a handler everything is approved. A handler that
stands in a run's context is the run's own, whose decisions are recorded; outside a run it is whatever the context was given.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Protocol, cast, runtime_checkable

from ensemble_ray.errors import IllegalStateError, ToolConfigurationError
from ensemble_ray.process.forks import call_user
from ensemble_ray.tools.waiting import run_to_end
from ensemble_ray.values.reviews import (
    Continue,
    Edit,
    ExitEarly,
    OnTimeoutAction,
    Review,
    ReviewDecision,
    ReviewRequest,
    ReviewTiming,
)

#: Characters of an input that an approval shows.
_PREVIEW = 200


@runtime_checkable
class ThreadReviewing(Protocol):
    """A handler that code of another thread can wait for as well."""

    def review_from_thread(self, request: ReviewRequest) -> ReviewDecision:
        """Decide, while the calling thread waits."""
        ...


_reviews: ContextVar[object] = ContextVar("ensemble_ray_task_reviews", default=None)


def current_reviews() -> object:
    """Return the handler of the task that runs here; None: nobody is to be asked."""
    return _reviews.get()


@contextmanager
def use_reviews(handler: object) -> Generator[None]:
    """Let tools that do the task in the block, as its handler, ask that one."""
    token = _reviews.set(handler)
    try:
        yield
    finally:
        _reviews.reset(token)


def approval_request(
    description: str,
    *,
    timeout: timedelta | float | None = Review.DEFAULT_TIMEOUT,
    on_timeout: OnTimeoutAction | str = OnTimeoutAction.EXIT_EARLY,
    ends_run: bool = False,
) -> ReviewRequest:
    """Return the request of a tool (S-REV-51, S-REV-62)."""
    length = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    return ReviewRequest(
        task_description=description,
        timing=ReviewTiming.DURING_EXECUTION,
        timeout=length,
        on_timeout=OnTimeoutAction(on_timeout),
        ends_run=ends_run,
    )


async def ask(handler: object, request: ReviewRequest) -> ReviewDecision:
    """Return what a handler decides; None decides to go on.

    Raises:
        ToolConfigurationError: it is no handler (S-TOOL-64).
    """
    return Continue() if handler is None else _check(handler, await call_user(_review_of(handler), request))


def ask_from_thread(handler: object, request: ReviewRequest) -> ReviewDecision:
    """Do the same from synchronous code.

    Raises:
        ToolConfigurationError: it is no handler (S-TOOL-64).
        IllegalStateError: an event loop runs here, which would stand still; async code awaits `arequest_approval`.
    """
    if handler is None:
        return Continue()
    if _has_loop():
        raise IllegalStateError(
            "request_approval waits in its thread: in async code `await self.arequest_approval(...)`"
        )
    if isinstance(handler, ThreadReviewing):
        return handler.review_from_thread(request)
    decision = _review_of(handler)(request)
    return _check(handler, run_to_end(decision) if inspect.isawaitable(decision) else decision)


async def approve(handler: object, tool_name: str, description: str, text: str) -> str | None:
    """Return the input that a tool with `require_approval` may work with; None: it was refused (S-REV-64, S-REV-65).

    Args:
        handler: Decides.
        tool_name: Of the tool.
        description: What it is about to do.
        text: Its input, which an edit replaces.

    Raises:
        ToolConfigurationError: there is nobody to ask.
    """
    _require(handler, tool_name)
    return _approve(await ask(handler, approval_request(description)), text)


def approve_from_thread(handler: object, tool_name: str, description: str, text: str) -> str | None:
    """Do the same from synchronous code."""
    _require(handler, tool_name)
    return _approve(ask_from_thread(handler, approval_request(description)), text)


def preview(text: str) -> str:
    """Return the beginning of an input, as an approval shows it."""
    return text if len(text) <= _PREVIEW else f"{text[:_PREVIEW]}..."


def _require(handler: object, tool_name: str) -> None:
    if handler is None:
        raise ToolConfigurationError(
            f"Tool '{tool_name}' requires approval but no ReviewHandler is configured. Give the ensemble a "
            "review_handler, or leave out require_approval (of a @tool, approval)"
        )


def _approve(decision: ReviewDecision, text: str) -> str | None:
    match decision:
        case Edit(revised_output=edited):
            return edited
        case ExitEarly():
            return None
        case _:
            return text


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _review_of(handler: object) -> Callable[[ReviewRequest], object]:
    review = getattr(handler, "review", handler)
    if not callable(review):
        raise ToolConfigurationError(
            f"The review handler of a tool must be callable or have a method 'review', got: {type(handler).__name__}"
        )
    return cast("Callable[[ReviewRequest], object]", review)


def _check(handler: object, decision: object) -> ReviewDecision:
    if isinstance(decision, Continue | Edit | ExitEarly):
        return decision
    raise ToolConfigurationError(
        f"The review handler '{type(handler).__name__}' returned {type(decision).__name__}, expected a ReviewDecision"
    )
