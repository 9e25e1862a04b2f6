"""A circuit breaker as a machine. Pure: it is given the time, and touches no clock, loop, lock or log.

In: what came of calls, here and in other processes, each with its instant `at` (s, any origin). Out: whether a call
may go now, or when to ask again. Must never happen: a call that goes while the breaker is open, or two probes at the
same time within one process.

Rules (S-DUR-64):
1. Closed: calls go. Failures in a row are counted; any answer sets the count back. The order is that of arrival: a
   failure that is reported late, and arrived before the last answer, is none of the row.
2. At the fifth it opens if at least half of the last 20 calls failed: calls wait, for 5 s the first time. A few failures
   among many answers, in whatever order they come, are left to retries.
3. Then one call goes as a probe. Its answer closes the breaker; its failure opens it again, twice as long, up to 60 s.
   A probe that ended as neither, by being cancelled say, leaves its place to the next call.
4. What calls tell that were sent before it opened: an answer closes it, a failure changes nothing.
5. While a probe of another process is on its way no other goes, but for no longer than 60 s: that process may be dead.
   Processes that got an update of the opening wait a little longer than the one that sent it, so that they do not probe at once.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Literal

FAILURES_TO_OPEN = 5
#: Share of failures among the last calls that opens it, at least.
SHARE_TO_OPEN = 0.5
#: How many calls are the last ones.
WINDOW = 20
FIRST_OPEN_S = 5.0
LONGEST_OPEN_S = 60.0


class CallAdmission(Enum):
    """What a call may do."""

    GO = auto()
    #: go, and everybody waits for what comes of it
    PROBE = auto()
    WAIT = auto()


class Breaker:
    """Whether one endpoint is asked at all."""

    def __init__(self) -> None:
        self._failures = 0
        #: whether each of the last calls failed
        self._window: deque[bool] = deque(maxlen=WINDOW)
        #: instant of the last answer
        self._answered_at = float("-inf")
        #: None while closed; else how long it was opened for the last time
        self._open_s: float | None = None
        #: while open: the instant from which a probe may go
        self._probe_at = 0.0
        self._is_probing = False
        self.last_failure = ""

    @property
    def is_open(self) -> bool:
        """Whether calls wait."""
        return self._open_s is not None

    @property
    def is_calm(self) -> bool:
        """Whether nothing has happened that a breaker would remember."""
        return self._open_s is None and not self._failures

    def state(self, at: float) -> Literal["closed", "open", "half_open"]:
        """Return whether calls go, wait, or wait for a probe that is on its way or may go."""
        if self._open_s is None:
            return "closed"
        return "half_open" if self._is_probing or at >= self._probe_at else "open"

    def enter(self, at: float) -> CallAdmission:
        """Whether a call may go; the call that gets `PROBE` is the probe."""
        if self._open_s is None:
            return CallAdmission.GO
        if self._is_probing or at < self._probe_at:
            return CallAdmission.WAIT
        self._is_probing = True
        return CallAdmission.PROBE

    def wakes_at(self) -> float | None:
        """Return when a waiting call should ask again; None: when the probe of this process has ended."""
        return None if self._is_probing else self._probe_at

    def record_failure(self, at: float, what: str, *, is_probe: bool = False, extra_s: float = 0.0) -> None:
        """Count a call that failed by the endpoint's fault.

        Args:
            at: When it arrived.
            what: The failure in words.
            is_probe: Whether that call was a probe.
            extra_s: How much longer to wait, in a process that has it from an update.
        """
        self.last_failure = what
        if self._open_s is not None:
            if is_probe:
                self._open(at, min(LONGEST_OPEN_S, self._open_s * 2), extra_s)
            return
        self._window.append(True)
        if at < self._answered_at:
            return
        self._failures += 1
        if self._failures >= FAILURES_TO_OPEN and sum(self._window) >= SHARE_TO_OPEN * len(self._window):
            self._open(at, FIRST_OPEN_S, extra_s)

    def record_answer(self, at: float = float("-inf"), count: int = 1) -> None:
        """Close again: the endpoint answered.

        Args:
            at: When the last answer arrived; by default it counts as older than any failure.
            count: How many calls were answered.
        """
        self._window.extend([False] * min(count, WINDOW))
        self._answered_at = max(self._answered_at, at)
        self._failures = 0
        self._open_s = None
        self._is_probing = False

    def probe_left(self) -> None:
        """End the probe of this process, from which nothing is known."""
        self._is_probing = False

    def probed_elsewhere(self, at: float) -> None:
        """Note that another process has sent a probe."""
        if self._open_s is not None:
            self._probe_at = max(self._probe_at, at + LONGEST_OPEN_S)

    def _open(self, at: float, open_s: float, extra_s: float) -> None:
        self._open_s = open_s
        self._probe_at = at + open_s + extra_s
        self._is_probing = False


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
