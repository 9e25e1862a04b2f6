"""How many calls to an endpoint may be on their way at once, as a machine. Package: limits. Pure.

In: what came of calls. Out: whether one more may go. It counts no calls itself: whoever asks says how many there are.
Must never happen: a limit below 1, or one that stays when it hinders nobody.

Rules (S-DUR-65):
1. There is no limit until an endpoint asks for fewer calls (429). Then it is half of those on their way, at least 1.
2. Calls that were sent before the limit was lowered do not lower it again: the endpoint spoke of the same crowd.
3. When another process was asked for fewer calls, the limit here is halved too, unless nothing was answered since it
   was last lowered; a process without calls has nothing to halve.
4. After as many answers as the limit is high, it rises by 1.
5. When it rises above the calls that are wanted, it is lifted.
"""

from __future__ import annotations

__all__ = ["AdaptiveLimit"]


class AdaptiveLimit:
    """Additive increase, multiplicative decrease of one endpoint's calls on their way."""

    def __init__(self) -> None:
        self._answers = 0
        self._is_fresh = False
        #: calls that may be on their way; None: any number
        self.limit: int | None = None
        #: how often the limit was lowered; a call keeps the number under which it was sent
        self.generation = 0

    @property
    def is_calm(self) -> bool:
        """Whether there is no limit."""
        return self.limit is None

    def lets_in(self, sent: int) -> bool:
        """Whether one more call may go when so many are on their way."""
        return self.limit is None or sent < self.limit

    def record_refusal(self, sent: int, generation: int) -> bool:
        """Lower the limit, since the endpoint asked for fewer calls, and return whether it was lowered.

        Args:
            sent: Calls on their way, the refused one included.
            generation: The number under which the refused one was sent.
        """
        if generation != self.generation:
            return False
        self._lower(sent)
        return True

    def refused_elsewhere(self, sent: int) -> None:
        """Lower the limit, since another process was asked for fewer calls."""
        if sent and not self._is_fresh:
            self._lower(sent)

    def record_answer(self, wanted: int) -> None:
        """Count an answered call.

        Args:
            wanted: Calls on their way, waiting, or about to be tried again.
        """
        if self.limit is None:
            return
        self._is_fresh = False
        self._answers += 1
        if self._answers < self.limit:
            return
        self._answers = 0
        self.limit += 1
        if self.limit > wanted:
            self.limit = None

    def _lower(self, sent: int) -> None:
        at_most = sent if self.limit is None else min(sent, self.limit)
        self.limit = max(1, at_most // 2)
        self.generation += 1
        self._answers = 0
        self._is_fresh = True
