"""The handler that the tools of one call find in their context: their questions are gates of the task.

Fulfils `Reviewing`, and `ThreadReviewing` for tools that run in threads. While somebody is asked the call's time limits
stand still (S-REV-88). The questions of a call are numbered: one that is made again,
after a crash or after its server was lost, finds its answers.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

from ensemble_ray.execute.review.gates import ReviewOpenError, decide_at_gate
from ensemble_ray.facts.effects import ToolIntended
from ensemble_ray.facts.runs import ReviewDecided, ReviewRequested
from ensemble_ray.values.reviews import OpenReview, ReviewDecision, ReviewRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.tools.waiting import TimeLimit


def _gate_name(call: str, number: int) -> str:
    return f"{call}-review-{number}"


def tool_reviews(scope: TaskScope, call: str, limits: Sequence[TimeLimit]) -> ToolReviews | None:
    """Return the handler for a call; None: there is nobody to ask, and nobody was.

    Args:
        scope: The task.
        call: Name of the call's effect.
        limits: Those of the call.
    """
    if scope.context.review_policy is None:
        was_asked = scope.recorded_facts and scope.find_recorded(_gate_name(call, 0), ReviewDecided) is not None
        if not was_asked:
            return None
    return ToolReviews(scope, call, limits)


def stands_at_gate(scope: TaskScope, call: str, *, asks_first: bool) -> bool:
    """Return whether a call was begun, came to a gate, and did nothing behind it: then it is made again (S-REV-89, S-REV-117).

    Args:
        scope: The task.
        call: Name of the call's effect.
        asks_first: Whether the tool does nothing before its first gate, so that a process that died there did nothing.
    """
    if not scope.recorded_facts:  # as a rule
        return False
    newest, asked = 0, scope.find_recorded(_gate_name(call, 0), ReviewRequested)
    if asked is None:
        return False
    while (later := scope.find_recorded(_gate_name(call, newest + 1), ReviewRequested)) is not None:
        newest, asked = newest + 1, later
    if not asked.data.detached and not (asks_first and newest == 0):
        return False
    decided = scope.find_recorded(_gate_name(call, newest), ReviewDecided)
    if decided is None:
        return True
    # Somebody else decided, and nobody has made the call again since.
    intent = scope.find_recorded(call, ToolIntended)
    return decided.data.outside and (intent is None or intent.seq < decided.seq)


class ToolReviews:
    """Asks for one call of a tool."""

    def __init__(self, scope: TaskScope, call: str, limits: Sequence[TimeLimit]) -> None:
        self._scope = scope
        self._call = call
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._asked = 0
        #: by name, what was decided in this execution, which `scope.recorded` does not have
        self._given: dict[str, ReviewDecision] = {}
        #: questions that threads of the call wait for; None: the call is over
        self._open: set[Future[ReviewDecision]] | None = set()
        #: held where it is looked at: a question may be asked, and its call stopped, before its thread goes on
        self._lock = threading.Lock()
        #: the gates at which the call was put down
        self._waits_for: list[OpenReview] = []

    def begin_again(self) -> None:
        """Count the questions from the first again: the call is made again, and asks the same ones."""
        self._asked = 0

    async def review(self, request: ReviewRequest) -> ReviewDecision:
        """Ask at a gate of its own."""
        name = _gate_name(self._call, self._asked)
        self._asked += 1
        if (given := self._given.get(name)) is not None:
            return given
        standing = tuple(self._limits)
        for limit in standing:
            limit.pause()
        try:
            decision = await decide_at_gate(self._scope, name, request)
        except ReviewOpenError as put_down:
            self._waits_for += put_down.reviews
            raise
        finally:
            for limit in standing:
                limit.go_on()
        self._given[name] = decision
        return decision

    def review_from_thread(self, request: ReviewRequest) -> ReviewDecision:
        """Do the same, while the calling thread waits.

        Raises:
            CancelledError: the call is over.
        """
        with self._lock:
            if self._open is None:
                raise CancelledError
            asking = asyncio.run_coroutine_threadsafe(self.review(request), self._loop)
            self._open.add(asking)
        try:
            return asking.result()
        finally:
            with self._lock:
                if self._open is not None:
                    self._open.discard(asking)

    def close(self) -> None:
        """Give up what is still asked, and ask nothing more: the call is over."""
        with self._lock:
            left, self._open = self._open or (), None
        for asking in left:
            asking.cancel()

    def check_decided(self) -> None:
        """Let nothing count that a tool made of an open gate, such as a text for the model.

        Raises:
            ReviewOpenError: the call came to a gate that is open.
        """
        if self._waits_for:
            raise ReviewOpenError(self._waits_for)
