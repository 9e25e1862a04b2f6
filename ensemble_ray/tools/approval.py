"""Ask the run's review handler from within a tool (S-REV-50 to S-REV-69)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from datetime import timedelta
from typing import Protocol, cast, runtime_checkable

from ensemble_ray.errors import IllegalStateError, ToolConfigurationError
from ensemble_ray.process.concurrency import call_user
from ensemble_ray.process.context import ScopedVariable
from ensemble_ray.tools.user_code import run_to_end
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

_PREVIEW = 200


@runtime_checkable
class ThreadReviewing(Protocol):
    def review_from_thread(self, request: ReviewRequest) -> ReviewDecision: ...


_reviews: ContextVar[object] = ContextVar("ensemble_ray_task_reviews", default=None)


def current_reviews() -> object:
    return _reviews.get()


def use_reviews(handler: object) -> AbstractContextManager[None]:
    return ScopedVariable(_reviews, handler)


def approval_request(
    description: str,
    *,
    timeout: timedelta | float | None = Review.DEFAULT_TIMEOUT,
    on_timeout: OnTimeoutAction | str = OnTimeoutAction.EXIT_EARLY,
    ends_run: bool = False,
) -> ReviewRequest:
    return ReviewRequest(
        task_description=description,
        timing=ReviewTiming.DURING_EXECUTION,
        timeout=timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout,
        on_timeout=OnTimeoutAction(on_timeout),
        ends_run=ends_run,
    )


async def ask(handler: object, request: ReviewRequest) -> ReviewDecision:
    """Return the handler's decision, or `Continue` without one (S-TOOL-64)."""
    return Continue() if handler is None else _check(handler, await call_user(_review_of(handler), request))


def ask_from_thread(handler: object, request: ReviewRequest) -> ReviewDecision:
    """`ask` for synchronous code; raise `IllegalStateError` on the thread of an event loop."""
    if handler is None:
        return Continue()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise IllegalStateError(
            "request_approval waits in its thread: in async code `await self.arequest_approval(...)`"
        )
    if isinstance(handler, ThreadReviewing):
        return handler.review_from_thread(request)
    decision = _review_of(handler)(request)
    return _check(handler, run_to_end(decision) if inspect.isawaitable(decision) else decision)


async def approve(handler: object, tool_name: str, description: str, text: str) -> str | None:
    """Return the approved or edited input; None if rejected (S-REV-64, S-REV-65)."""
    return _approved(await ask(_require(handler, tool_name), approval_request(description)), text)


def approve_from_thread(handler: object, tool_name: str, description: str, text: str) -> str | None:
    return _approved(ask_from_thread(_require(handler, tool_name), approval_request(description)), text)


def preview(text: str) -> str:
    return text if len(text) <= _PREVIEW else f"{text[:_PREVIEW]}..."


def _require(handler: object, tool_name: str) -> object:
    if handler is None:
        raise ToolConfigurationError(
            f"Tool '{tool_name}' requires approval but no ReviewHandler is configured. Set the ensemble's "
            "review_handler, or leave out require_approval (of a @tool, approval)"
        )
    return handler


def _approved(decision: ReviewDecision, text: str) -> str | None:
    match decision:
        case Edit(revised_output=edited):
            return edited
        case ExitEarly():
            return None
        case _:
            return text


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
