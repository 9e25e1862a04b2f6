"""WebReviewHandler: asks at review gates on the pages of a dashboard.

In: requests of runs, each on its own loop; decisions of pages, on the loop of the server. Out: messages, and the decisions. Rules:

1. Gates are open several at a time, and are decided in any order (S-WEB-58).
2. The first decision counts; whatever else comes is ignored (S-WEB-54). A timeout is a decision like others.
3. Pages that come and go decide nothing: a gate stays open until a decision or its own timeout (S-WEB-56, S-WEB-57).
4. A gate that its run waits for no more is taken from the pages, too (S-WEB-61).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ensemble_ray.events import messages
from ensemble_ray.execute.review.handlers import ReviewHandler
from ensemble_ray.process.forks import SystemClock, new_lock
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.reviews import Review, ReviewAnswer, ReviewDecision, decision_at_timeout

if TYPE_CHECKING:
    from datetime import timedelta

    from ensemble_ray.events.messages import Message
    from ensemble_ray.studio.dashboard.hub import MessageHub
    from ensemble_ray.values.reviews import OnTimeoutAction, ReviewRequest

_RUN_ENDING = "(run ending)"
_APPROVALS = frozenset({"approve", "continue"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A gate that nobody has decided."""

    request: ReviewRequest
    created_at: float
    #: set on its loop
    decided: asyncio.Future[ReviewDecision]
    loop: asyncio.AbstractEventLoop

    def decide(self, decision: ReviewDecision) -> None:
        """Let the task go on; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._set, decision)

    def _set(self, decision: ReviewDecision) -> None:
        if not self.decided.done():
            self.decided.set_result(decision)


class WebReviewHandler(ReviewHandler):
    """Asks the people at a dashboard's pages; `WebDashboard.review_handler` gives it."""

    #: asked about several gates at a time (S-WEB-58)
    is_concurrent: ClassVar[bool] = True

    def __init__(self, hub: MessageHub, *, timeout: timedelta, on_timeout: OnTimeoutAction) -> None:
        """Make one that asks by a hub's messages.

        Args:
            hub: Has the pages.
            timeout: Of gates that a task does not describe itself.
            on_timeout: What follows for these.
        """
        self._hub = hub
        self._clock = SystemClock()
        self._lock = new_lock()
        self._open: dict[str, _Open] = {}
        #: the gate that a review policy puts behind a task
        self.default_review = Review(timeout=timeout, on_timeout=on_timeout)

    async def review(self, request: ReviewRequest, /) -> ReviewDecision:
        """Ask, and return what somebody decides, or what follows where nobody does in time.

        Raises:
            ReviewTimeoutError: nobody did, and that fails the task.
        """
        review_id = request.review_id or new_object_id()
        loop = asyncio.get_running_loop()
        gate = _Open(request=request, created_at=self._clock.now(), decided=loop.create_future(), loop=loop)
        with self._lock:  # a decision in this moment is told behind the request
            self._open[review_id] = gate
            self._hub.publish(request.run_id, _make_request(review_id, request))
        try:
            await asyncio.wait([gate.decided], timeout=request.timeout_s)
            if self._take(review_id) is None:  # decided, perhaps in this moment: then the decision is on its way
                return await gate.decided
        except asyncio.CancelledError:
            if self._take(review_id) is not None:
                self._hub.publish(request.run_id, messages.review_decided(review_id, "exit", _RUN_ENDING))
            raise
        self._hub.publish(request.run_id, messages.review_timed_out(review_id, request.on_timeout.value))
        return decision_at_timeout(request, request.timeout_s or 0.0)

    def decide(self, review_id: str, decision: str, revised_output: str | None = None) -> bool:
        """Decide at a gate, and return whether it was open; from any thread.

        Args:
            review_id: Of the gate.
            decision: `approve` or `continue`, `edit`; everything else ends the run. Case makes no difference.
            revised_output: Of an edit: the new text; None: an empty one.
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
        """Return the gates that wait, oldest first, as data."""
        with self._lock:
            waiting = list(self._open.items())
        return [_to_json(review_id, gate) for review_id, gate in waiting]

    def is_open(self, review_id: str) -> bool:
        """Return whether a gate waits here for a decision."""
        return review_id in self._open

    def _take(self, review_id: str) -> _Open | None:
        """Close a gate, and return it; None: it is closed already."""
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
