"""Whether and when an endpoint is asked: the breakers and adaptive limits of one process. Room: limits.

In: calls that want to go, and what came of them; news of the same from other processes. Out: permission, at once or
after waiting; news for other processes. It carries out what `Breaker` and `AdaptiveLimit` say and decides nothing.

While an endpoint makes no trouble, a call costs a look-up and a few set operations: no lock, no wait. Callers may be on
several event loops and threads. Must never happen: a call that waits on although it may go, or a place that is kept by
a call that left.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ensemble_ray.errors import CircuitOpenError
from ensemble_ray.limits.adaptive import AdaptiveLimit
from ensemble_ray.limits.breaker import Breaker, Entry
from ensemble_ray.limits.desk import MonotonicClock
from ensemble_ray.process.bounded_log import bounded_logger

if TYPE_CHECKING:
    from ensemble_ray.ports import Clock

__all__ = ["EndpointDesk", "EndpointNews", "Visit", "process_endpoints"]

_log = bounded_logger(__name__)

#: How much longer than the process that told of it others wait before they probe, s: at least, at most.
_EXTRA_S = (0.1, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointNews:
    """What one process tells the others of an endpoint; data only, no key."""

    endpoint: str
    #: a call failed, a probe failed, an answer came after failures, it asked for fewer calls, a probe is on its way
    kind: Literal["failed", "probe_failed", "answered", "refused", "probing"]
    #: the failure in words
    text: str = ""


class _Waiter:
    """One call that waits, on its own loop."""

    def __init__(self, visit: Visit) -> None:
        self.visit = visit
        self.bell = asyncio.Event()
        self.may_go = False
        self._loop = asyncio.get_running_loop()

    def ring(self) -> bool:
        """Wake it; False when its loop is closed and nobody can hear."""
        try:
            self._loop.call_soon_threadsafe(self.bell.set)
        except RuntimeError:
            return False
        return True


class _Line:
    """One endpoint, and the calls that want something of it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.breaker = Breaker()
        self.limit = AdaptiveLimit()
        #: calls that want an answer, between two attempts too; sets, since one step of theirs needs no lock
        self.wanted: set[Visit] = set()
        #: calls on their way
        self.sent: set[Visit] = set()
        self.waiters: deque[_Waiter] = deque()
        #: whether calls need not ask anybody; written under the desk's lock
        self.is_calm = True
        #: what those who wait were last woken for
        self.told: tuple[bool, float | None] = (False, None)
        #: answers that the breaker was not told of while all was well, and when the last of them came
        self.quiet_answers = 0
        self.answered_at = float("-inf")

    def tell_quiet_answers(self) -> None:
        """Tell the breaker of the answers that came while all was well; under the desk's lock."""
        if self.quiet_answers:
            self.breaker.answered(self.answered_at, self.quiet_answers)
            self.quiet_answers = 0


class Visit:
    """One wanted answer of an endpoint, over all its attempts; made by `EndpointDesk.visit`.

    Each attempt begins with `try_go` or `wait` and ends with `answered`, `failed`, `refused` or `left`.
    """

    __slots__ = ("_desk", "_generation", "_is_probe", "_line")

    def __init__(self, desk: EndpointDesk, line: _Line) -> None:
        self._desk = desk
        self._line = line
        self._generation = 0
        self._is_probe = False
        line.wanted.add(self)

    def try_go(self) -> bool:
        """Begin an attempt if nothing hinders it; else `wait` has to be awaited."""
        line = self._line
        if not line.is_calm:
            return self._desk.admit(self, line)
        self._generation = line.limit.generation
        line.sent.add(self)
        return True

    async def wait(self, patience_s: float) -> float:
        """Begin an attempt when the endpoint's breaker and limit allow it, first come first served.

        Args:
            patience_s: How long to wait while the breaker is open. Waiting for a place under the limit is not
                counted: others get their answers then.

        Returns:
            How long it waited for the breaker, s.

        Raises:
            CircuitOpenError: the breaker did not close in time.
        """
        return await self._desk.wait(self, self._line, patience_s)

    def answered(self) -> None:
        """The attempt has its answer, or a refusal that tells that the endpoint is there."""
        line = self._line
        line.sent.discard(self)
        if line.is_calm:
            # Several threads may lose a count here; the breaker wants a share, not a sum.
            line.quiet_answers += 1
            line.answered_at = self._desk.now()
        else:
            self._desk.answered(line)
        self._is_probe = False

    def failed(self, what: str, *, ago_s: float = 0.0) -> None:
        """The attempt failed by the endpoint's fault.

        Args:
            what: The failure in words.
            ago_s: How long ago the failure arrived, s: making an error of it may take a while.
        """
        self._desk.failed(self._line, self, what, is_probe=self._is_probe, ago_s=ago_s)
        self._is_probe = False

    def refused(self) -> None:
        """The endpoint asked for fewer calls (429)."""
        self._desk.refused(self._line, self, self._generation, is_probe=self._is_probe)
        self._is_probe = False

    def left(self) -> None:
        """The attempt ended, and nothing is known of the endpoint."""
        line = self._line
        line.sent.discard(self)
        if not line.is_calm:
            self._desk.left(line, is_probe=self._is_probe)
        self._is_probe = False

    def end(self) -> None:
        """No answer is wanted any more."""
        self._line.wanted.discard(self)

    def tell_probe(self) -> None:
        """Let other processes know if this attempt is a probe."""
        if self._is_probe:
            self._desk.tell(EndpointNews(endpoint=self._line.endpoint, kind="probing"))

    def begun(self, line: _Line, entry: Entry) -> None:
        """The desk let it in; only the desk says so, under its lock."""
        self._is_probe = entry is Entry.PROBE
        self._generation = line.limit.generation
        line.sent.add(self)


class EndpointDesk:
    """All endpoints, as one process knows them.

    Args:
        clock: Where time comes from; a steady clock by default. Only differences count.
        share: Told what other processes should know; it must neither wait nor raise. May be set later.
    """

    def __init__(self, *, clock: Clock | None = None, share: Callable[[EndpointNews], None] | None = None) -> None:
        self._clock: Clock = clock or MonotonicClock()
        self.share = share
        self._lines: dict[str, _Line] = {}
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the instant, s; only differences count."""
        return self._clock.now()

    def visit(self, endpoint: str) -> Visit:
        """Say that an answer of that endpoint is wanted."""
        line = self._lines.get(endpoint)
        return Visit(self, self._lines.setdefault(endpoint, _Line(endpoint)) if line is None else line)

    def hear(self, news: EndpointNews) -> None:
        """Take what another process tells; a process that tells hears nothing of itself."""
        line = self._lines.setdefault(news.endpoint, _Line(news.endpoint))
        with self._lock:
            at = self._clock.now()
            line.tell_quiet_answers()
            match news.kind:
                case "failed" | "probe_failed":
                    extra_s = random.uniform(*_EXTRA_S)  # noqa: S311  spreads probes, keeps no secret
                    line.breaker.failed(at, news.text, is_probe=news.kind == "probe_failed", extra_s=extra_s)
                case "answered":
                    line.breaker.answered(at)
                case "refused":
                    line.limit.refused_elsewhere(len(line.sent))
                case "probing":
                    line.breaker.probed_elsewhere(at)
            self._settle(line, at)

    # What visits say; each of these is called only where the endpoint makes trouble.

    def admit(self, visit: Visit, line: _Line) -> bool:
        """Let a call in that found trouble, if nobody came before it."""
        with self._lock:
            if line.waiters:
                return False
            entry = self._entry(line, self._clock.now())
            if entry is Entry.WAIT:
                return False
            visit.begun(line, entry)
        visit.tell_probe()
        return True

    def answered(self, line: _Line) -> None:
        """A call was answered."""
        with self._lock:
            is_news, was_open = not line.breaker.is_calm, line.breaker.is_open
            line.breaker.answered(self._clock.now())
            # The call that was answered is still among those that want one.
            line.limit.answered(len(line.wanted) - 1)
            self._settle(line, self._clock.now())
        if was_open:
            _log.info("Endpoint %s answers again", line.endpoint)
        if is_news:
            self.tell(EndpointNews(endpoint=line.endpoint, kind="answered"))

    def failed(self, line: _Line, visit: Visit, what: str, *, is_probe: bool, ago_s: float = 0.0) -> None:
        """A call failed by the endpoint's fault."""
        with self._lock:
            line.sent.discard(visit)
            line.tell_quiet_answers()
            was_open = line.breaker.is_open
            line.breaker.failed(self._clock.now() - ago_s, what, is_probe=is_probe)
            opens = line.breaker.is_open and (is_probe or not was_open)
            self._settle(line, self._clock.now())
        if opens:
            _log.warning("Endpoint %s fails for everybody; calls to it wait. Last failure: %s", line.endpoint, what)
        # Failures of calls that were sent before it opened change nothing elsewhere either.
        if is_probe or not was_open:
            kind: Literal["probe_failed", "failed"] = "probe_failed" if is_probe else "failed"
            self.tell(EndpointNews(endpoint=line.endpoint, kind=kind, text=what))

    def refused(self, line: _Line, visit: Visit, generation: int, *, is_probe: bool) -> None:
        """The endpoint asked for fewer calls; it is there, but that is no success either."""
        with self._lock:
            is_news = line.limit.refused(len(line.sent), generation)
            line.sent.discard(visit)
            if is_probe:
                line.breaker.answered(self._clock.now())
            self._settle(line, self._clock.now())
        if is_probe:
            self.tell(EndpointNews(endpoint=line.endpoint, kind="answered"))
        if is_news:
            self.tell(EndpointNews(endpoint=line.endpoint, kind="refused"))

    def left(self, line: _Line, *, is_probe: bool) -> None:
        """A call ended, and nothing is known of the endpoint."""
        with self._lock:
            if is_probe:
                line.breaker.probe_left()
            self._settle(line, self._clock.now())

    # Waiting.

    async def wait(self, visit: Visit, line: _Line, patience_s: float) -> float:
        """`Visit.wait`."""
        waiter = _Waiter(visit)
        with self._lock:
            line.waiters.append(waiter)
            line.is_calm = False
        try:
            waited_s = await self._wait_in_line(waiter, line, patience_s)
        except BaseException:
            self._abandon(line, waiter)
            raise
        visit.tell_probe()
        return waited_s

    async def _wait_in_line(self, waiter: _Waiter, line: _Line, patience_s: float) -> float:
        waited_s = 0.0
        while True:
            # First cleared, then looked at: what changes after the look rings again.
            waiter.bell.clear()
            with self._lock:
                at = self._clock.now()
                self._settle(line, at)
                is_open, wakes_at = line.breaker.is_open, line.breaker.wakes_at()
            if waiter.may_go:
                return waited_s
            if not is_open:
                await waiter.bell.wait()
                continue
            if waited_s >= patience_s:
                raise _open_error(line, waited_s)
            rest_s = patience_s - waited_s
            # A probe that is due already waits for a place under the limit, and is woken when there is one.
            if wakes_at is not None and wakes_at > at:
                rest_s = min(rest_s, wakes_at - at)
            await self._rest(waiter, rest_s)
            waited_s += self._clock.now() - at

    async def _rest(self, waiter: _Waiter, at_most_s: float) -> None:
        called = asyncio.ensure_future(waiter.bell.wait())
        timer = asyncio.ensure_future(self._clock.sleep(at_most_s))
        try:
            await asyncio.wait((called, timer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            called.cancel()
            timer.cancel()

    def _abandon(self, line: _Line, waiter: _Waiter) -> None:
        """A waiter gives up: it leaves the queue, or the place that it was given and had not heard of."""
        if waiter.may_go:
            waiter.visit.left()
            return
        with self._lock:
            line.waiters.remove(waiter)
            self._settle(line, self._clock.now())

    # Under the lock.

    @staticmethod
    def _entry(line: _Line, at: float) -> Entry:
        # The limit first: asking the breaker may make the call its probe.
        return line.breaker.enter(at) if line.limit.lets_in(len(line.sent)) else Entry.WAIT

    def _settle(self, line: _Line, at: float) -> None:
        """Let in whoever may go now, and wake those for whom waiting changed."""
        while line.waiters:
            entry = self._entry(line, at)
            if entry is Entry.WAIT:
                break
            waiter = line.waiters.popleft()
            waiter.may_go = True
            waiter.visit.begun(line, entry)
            if not waiter.ring():  # nobody is there any more
                line.sent.discard(waiter.visit)
                line.wanted.discard(waiter.visit)
                if entry is Entry.PROBE:
                    line.breaker.probe_left()
        state = (line.breaker.is_open, line.breaker.wakes_at())
        if state != line.told:
            line.told = state
            for waiter in line.waiters:
                waiter.ring()
        line.is_calm = line.breaker.is_calm and line.limit.is_calm and not line.waiters

    # Other processes.

    def tell(self, news: EndpointNews) -> None:
        """Hand news to whoever carries them."""
        if self.share is not None:
            self.share(news)


def _open_error(line: _Line, waited_s: float) -> CircuitOpenError:
    text = (
        f"Endpoint {line.endpoint} fails for everybody and is not asked for now; waited {waited_s:.3g} s for it. "
        f"Last failure: {line.breaker.last_failure}"
    )
    return CircuitOpenError(text, line.endpoint)


_process_endpoints = EndpointDesk()


def process_endpoints() -> EndpointDesk:
    """The desk of this process: all its runs ask there."""
    return _process_endpoints
