"""Review handler for the tools of one call. Its questions are numbered, so a repeated call finds the answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future

from ensemble_ray.execute.review.gates import ReviewOpenError, decide_at_gate
from ensemble_ray.execute.scope import TaskScope
from ensemble_ray.facts.effects import ToolIntended
from ensemble_ray.facts.runs import ReviewDecided, ReviewRequested
from ensemble_ray.tools.user_code import TimeLimit
from ensemble_ray.values.reviews import OpenReview, ReviewDecision, ReviewRequest


def _gate_name(call: str, number: int) -> str:
    return f"{call}-review-{number}"


def tool_reviews(scope: TaskScope, call: str, limits: Sequence[TimeLimit]) -> ToolReviews | None:
    """Return a call's handler, which pauses its time limits (S-REV-88); None: no reviewer, no decision."""
    if scope.context.review_policy is None:
        was_asked = scope.recorded_facts and scope.find_recorded(_gate_name(call, 0), ReviewDecided) is not None
        if not was_asked:
            return None
    return ToolReviews(scope, call, limits)


def can_repeat_at_gate(scope: TaskScope, call: str, *, asks_first: bool) -> bool:
    """Whether to repeat a call that stopped at a gate without other effects (S-REV-89, S-REV-117)."""
    if not scope.recorded_facts:
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
    intent = scope.find_recorded(call, ToolIntended)
    return decided.data.outside and (intent is None or intent.seq < decided.seq)


class ToolReviews:
    """Asks for one call. Implements `Reviewing`, and `ThreadReviewing` for tools in threads."""

    def __init__(self, scope: TaskScope, call: str, limits: Sequence[TimeLimit]) -> None:
        self._scope = scope
        self._call = call
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._asked = 0
        self._decisions: dict[str, ReviewDecision] = {}  # of this process, by gate
        self._open: set[Future[ReviewDecision]] | None = set()  # of waiting threads; None: the call has ended
        self._lock = threading.Lock()  # guards `_open`: the call may end while a thread starts a question
        self._open_gates: list[OpenReview] = []  # gates that suspended the call

    def restart(self) -> None:
        """Restart the numbering for a repeated call."""
        self._asked = 0

    async def review(self, request: ReviewRequest) -> ReviewDecision:
        name = _gate_name(self._call, self._asked)
        self._asked += 1
        if (decision := self._decisions.get(name)) is not None:
            return decision
        paused = tuple(self._limits)
        for limit in paused:
            limit.pause()
        try:
            decision = await decide_at_gate(self._scope, name, request)
        except ReviewOpenError as suspended:
            self._open_gates += suspended.reviews
            raise
        finally:
            for limit in paused:
                limit.resume()
        self._decisions[name] = decision
        return decision

    def review_from_thread(self, request: ReviewRequest) -> ReviewDecision:
        """Block a thread until the decision; the end of the call raises `CancelledError`."""
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
        """End the call: cancel open questions, and refuse further ones."""
        with self._lock:
            left, self._open = self._open or (), None
        for asking in left:
            asking.cancel()

    def check_decided(self) -> None:
        """Raise `ReviewOpenError` again if the call was suspended, even if the tool caught it."""
        if self._open_gates:
            raise ReviewOpenError(self._open_gates)
