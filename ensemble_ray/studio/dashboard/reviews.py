"""A review handler that asks on the pages of a dashboard. Runs open gates on their loops; the server decides them on its loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from ensemble_ray.events import messages
from ensemble_ray.events.messages import Message
from ensemble_ray.execute.review.handlers import ReviewHandler
from ensemble_ray.process.concurrency import SystemClock, new_lock
from ensemble_ray.studio.dashboard.hub import MessageHub
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.reviews import (
    OnTimeoutAction,
    Review,
    ReviewAnswer,
    ReviewDecision,
    ReviewRequest,
    decision_at_timeout,
)

_RUN_ENDING = "(run ending)"
_APPROVALS = frozenset({"approve", "continue"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    request: ReviewRequest
    created_at: float
    decided: asyncio.Future[ReviewDecision]
    loop: asyncio.AbstractEventLoop

    def decide(self, decision: ReviewDecision) -> None:
        """Thread-safe."""

        def set_result() -> None:
            if not self.decided.done():
                self.decided.set_result(decision)

        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
            self.loop.call_soon_threadsafe(set_result)


class WebReviewHandler(ReviewHandler):
    """Asks the users of the pages of a dashboard, as `WebDashboard.review_handler`.

    The first decision or timeout of a gate counts. A gate stays open when pages disconnect. When a run stops waiting, the pages
    close its gate.
    """

    is_concurrent: ClassVar[bool] = True  # gates are decided in any order (S-WEB-58)

    def __init__(self, hub: MessageHub, *, timeout: timedelta, on_timeout: OnTimeoutAction) -> None:
        """`timeout` and `on_timeout` are those of the gates of a review policy."""
        self._hub = hub
        self._clock = SystemClock()
        self._lock = new_lock()
        self._open: dict[str, _Open] = {}
        self.default_review = Review(timeout=timeout, on_timeout=on_timeout)  # of a review policy

    async def review(self, request: ReviewRequest, /) -> ReviewDecision:
        """Ask, and return the decision of a user or of the timeout.

        Raises:
            ReviewTimeoutError: the gate timed out, and its timeout fails the task.
        """
        review_id = request.review_id or new_object_id()
        loop = asyncio.get_running_loop()
        gate = _Open(request=request, created_at=self._clock.now(), decided=loop.create_future(), loop=loop)
        with self._lock:  # a concurrent decision is published after the request
            self._open[review_id] = gate
            self._hub.publish(request.run_id, _make_request(review_id, request))
        try:
            await asyncio.wait([gate.decided], timeout=request.timeout_s)
            if self._take(review_id) is None:  # decided; the decision may still be on its way to this loop
                return await gate.decided
        except asyncio.CancelledError:
            if self._take(review_id) is not None:
                self._hub.publish(request.run_id, messages.review_decided(review_id, "exit", _RUN_ENDING))
            raise
        self._hub.publish(request.run_id, messages.review_timed_out(review_id, request.on_timeout.value))
        return decision_at_timeout(request, request.timeout_s or 0.0)

    def decide(self, review_id: str, decision: str, revised_output: str | None = None) -> bool:
        """Decide a gate, and return whether it was open. Thread-safe.

        Args:
            review_id: Id of the gate.
            decision: `approve`, `continue` or `edit`, in any case. Any other word ends the run.
            revised_output: The new text of an edit.
        """
        word = decision.strip().lower()
        if word in _APPROVALS:
            taken = ReviewDecision.continue_execution()
        elif word == "edit":
            taken = ReviewDecision.edit(revised_output or "")
        else:
            taken = ReviewDecision.exit_early()
        gate = self._take(review_id)
        if gate is None:
            return False
        verdict = str(ReviewAnswer(decision=taken).to_data()["verdict"])
        self._hub.publish(gate.request.run_id, messages.review_decided(review_id, verdict, type(self).__name__))
        gate.decide(taken)
        return True

    def open_reviews(self) -> list[Mapping[str, object]]:
        """Return the open gates as data, oldest first."""
        with self._lock:
            waiting = list(self._open.items())
        return [_to_json(review_id, gate) for review_id, gate in waiting]

    def is_open(self, review_id: str) -> bool:
        """Return whether this handler waits for a decision."""
        return review_id in self._open

    def _take(self, review_id: str) -> _Open | None:
        """Close and return an open gate."""
        with self._lock:
            return self._open.pop(review_id, None)


def _make_request(review_id: str, request: ReviewRequest) -> Message:
    return messages.review_requested(
        review_id=review_id,
        task_description=request.task_description,
        task_output=request.task_output,
        timing=request.timing.value,
        prompt=request.prompt,
        timeout_s=request.timeout_s,
        on_timeout=request.on_timeout.value,
        required_role=request.required_role,
    )


def _to_json(review_id: str, gate: _Open) -> Mapping[str, object]:
    request, timeout_s = gate.request, gate.request.timeout_s
    return {
        "review_id": review_id,
        "run_id": request.run_id,
        "task_description": request.task_description,
        "task_output": request.task_output,
        "timing": request.timing.value,
        "prompt": request.prompt,
        "timeout_ms": None if timeout_s is None else messages.milliseconds(timeout_s),
        "created_at": messages.instant(gate.created_at),
        "expires_at": None if timeout_s is None else messages.instant(gate.created_at + timeout_s),
    }
