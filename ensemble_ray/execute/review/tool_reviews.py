"""The handler that the tools of one call find in their context: their questions are gates of the task. Package: execute.

Fulfils `Reviewing`, and `ThreadReviewing` for tools that run in threads. While somebody is asked the call's time limits
stand still (S-REV-88). The questions of a call are numbered: one that is made again, after a crash, finds its answers.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ensemble_ray.execute.review.asking import decide_at_gate
from ensemble_ray.facts.reviews import ReviewDecided, ReviewRequested
from ensemble_ray.values.reviews import ReviewDecision, ReviewRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.tools.time_limit import TimeLimit

__all__ = ["ToolReviews", "is_waiting_for_approval", "tool_reviews"]


def _gate_name(call: str, number: int) -> str:
    return f"{call}-review-{number}"


def tool_reviews(scope: TaskScope, call: str, limits: Sequence[TimeLimit]) -> ToolReviews | None:
    """Return the handler for a call; None: there is nobody to ask, and nobody was.

    Args:
        scope: The task.
        call: Name of the call's effect.
        limits: Those of the call.
    """
    was_asked = scope.recorded(_gate_name(call, 0), ReviewDecided) is not None
    return ToolReviews(scope, call, limits) if was_asked or scope.context.review_policy is not None else None


def is_waiting_for_approval(scope: TaskScope, call: str) -> bool:
    """Return whether a call was begun, and had asked for its approval when its process died: nothing else was done (S-REV-89)."""
    name = _gate_name(call, 0)
    return scope.recorded(name, ReviewRequested) is not None and scope.recorded(name, ReviewDecided) is None


class ToolReviews:
    """Asks for one call of a tool."""

    def __init__(self, scope: TaskScope, call: str, limits: Sequence[TimeLimit]) -> None:
        self._scope = scope
        self._call = call
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._asked = 0
        #: questions that threads of the call wait for
        self._open: set[Future[ReviewDecision]] = set()

    async def review(self, request: ReviewRequest) -> ReviewDecision:
        """Ask at a gate of its own."""
        name = _gate_name(self._call, self._asked)
        self._asked += 1
        standing = tuple(self._limits)
        for limit in standing:
            limit.pause()
        try:
            return await decide_at_gate(self._scope, name, request)
        finally:
            for limit in standing:
                limit.go_on()

    def review_from_thread(self, request: ReviewRequest) -> ReviewDecision:
        """Do the same, while the calling thread waits."""
        asking = asyncio.run_coroutine_threadsafe(self.review(request), self._loop)
        self._open.add(asking)
        try:
            return asking.result()
        finally:
            self._open.discard(asking)

    def close(self) -> None:
        """Give up what is still asked: the call is over."""
        for asking in tuple(self._open):
            asking.cancel()
