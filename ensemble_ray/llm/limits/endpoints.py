"""Whether and when an endpoint is asked: the breakers and adaptive limits of one process.

In: calls that want to go, and what came of them; updates on the same from other processes. Out: permission, at once or
after waiting; updates for other processes. It carries out what `Breaker` and `AdaptiveLimit` say and decides nothing.

While an endpoint makes no trouble, a call costs a look-up and a few set operations: no lock, no wait. Callers may be on
several event loops and threads. Must never happen: a call that waits on although it may go, or a place that is kept by
a call that left.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ensemble_ray.errors import CircuitOpenError
from ensemble_ray.llm.limits.breaker import AdaptiveLimit, Breaker, CallAdmission
from ensemble_ray.llm.limits.limiter import MonotonicClock, Wakeup
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import new_lock, track
from ensemble_ray.values.descriptions import MOST_ENDPOINTS, EndpointDescription

if TYPE_CHECKING:
    from ensemble_ray.ports import Clock


_log = bounded_logger(__name__)

#: How much longer than the process that sent the update others wait before they probe, s: at least, at most.
_EXTRA_S = (0.1, 1.0)
#: Characters of a failure that a description has.
_MOST_FAILURE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointUpdate:
    """What one process sends to the others about an endpoint; data only, no key."""

    endpoint: str
    #: a call failed, a probe failed, an answer came after failures, it asked for fewer calls, a probe is on its way
    category: Literal["failed", "probe_failed", "answered", "refused", "probing"]
    #: the failure in words
    text: str = ""


@dataclass(slots=True, eq=False)
class _Waiter:
    """One call that waits, on its own loop."""

    visit: Visit
    wakeup: Wakeup = field(default_factory=Wakeup)
    may_go: bool = False


class _Endpoint:
    """One endpoint, and the calls that want something of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.breaker = Breaker()
        self.limit = AdaptiveLimit()
        #: calls that want an answer, between two attempts too; sets, since one step of theirs needs no lock
        self.wanted: set[Visit] = set()
        #: calls on their way
        self.sent: set[Visit] = set()
        self.waiters: deque[_Waiter] = deque()
        #: whether calls need not ask the service; written under its lock
        self.is_calm = True
        #: what the waiters were last woken for: whether the breaker is open, and until when
        self.announced: tuple[bool, float | None] = (False, None)
        #: answers not yet counted by the breaker, since all was well, and when the last of them came
        self.quiet_answers = 0
        self.answered_at = float("-inf")

    def count_quiet_answers(self) -> None:
        """Count the answers that came while all was well; under the service's lock."""
        if self.quiet_answers:
            self.breaker.record_answer(self.answered_at, self.quiet_answers)
            self.quiet_answers = 0


class Visit:
    """One wanted answer of an endpoint, over all its attempts; made by `EndpointService.visit`.

    Each attempt begins with `try_go` or `wait` and ends with `record_answer`, `record_failure`, `record_refusal` or `leave`.
    """

    __slots__ = ("_endpoint", "_generation", "_is_probe", "_service")

    def __init__(self, service: EndpointService, endpoint: _Endpoint) -> None:
        self._service = service
        self._endpoint = endpoint
        self._generation = 0
        self._is_probe = False
        endpoint.wanted.add(self)

    def try_go(self) -> bool:
        """Begin an attempt if nothing hinders it; else `wait` has to be awaited."""
        endpoint = self._endpoint
        if not endpoint.is_calm:
            return self._service.admit(self, endpoint)
        self._generation = endpoint.limit.generation
        endpoint.sent.add(self)
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
        return await self._service.wait(self, self._endpoint, patience_s)

    def record_answer(self) -> None:
        """Report that the attempt has its answer, or a refusal that shows that the endpoint is there."""
        endpoint = self._endpoint
        endpoint.sent.discard(self)
        if endpoint.is_calm:
            # Several threads may lose a count here; the breaker wants a share, not a sum.
            endpoint.quiet_answers += 1
            endpoint.answered_at = self._service.now()
        else:
            self._service.record_answer(endpoint)
        self._is_probe = False

    def record_failure(self, what: str, *, ago_s: float = 0.0) -> None:
        """Report that the attempt failed by the endpoint's fault.

        Args:
            what: The failure in words.
            ago_s: How long ago the failure arrived, s: making an error of it may take a while.
        """
        self._service.record_failure(self._endpoint, self, what, is_probe=self._is_probe, ago_s=ago_s)
        self._is_probe = False

    def record_refusal(self) -> None:
        """Report that the endpoint asked for fewer calls (429)."""
        self._service.record_refusal(self._endpoint, self, self._generation, is_probe=self._is_probe)
        self._is_probe = False

    def leave(self) -> None:
        """Report that the attempt ended, and nothing is known of the endpoint."""
        endpoint = self._endpoint
        endpoint.sent.discard(self)
        if not endpoint.is_calm:
            self._service.leave(endpoint, is_probe=self._is_probe)
        self._is_probe = False

    def end(self) -> None:
        """End the visit: no answer is wanted any more."""
        self._endpoint.wanted.discard(self)

    def announce_probe(self) -> None:
        """Let other processes know if this attempt is a probe."""
        if self._is_probe:
            self._service.publish(EndpointUpdate(endpoint=self._endpoint.name, category="probing"))

    def begin_attempt(self, endpoint: _Endpoint, entry: CallAdmission) -> None:
        """Begin the attempt; called by the service alone, under its lock."""
        self._is_probe = entry is CallAdmission.PROBE
        self._generation = endpoint.limit.generation
        endpoint.sent.add(self)


class EndpointService:
    """All endpoints, as one process knows them.

    Args:
        clock: Where time comes from; a steady clock by default. Only differences count.
        share: Takes updates for other processes; it must neither wait nor raise. May be set later.
    """

    def __init__(self, *, clock: Clock | None = None, share: Callable[[EndpointUpdate], None] | None = None) -> None:
        self._clock: Clock = clock or MonotonicClock()
        self.share = share
        self._endpoints: dict[str, _Endpoint] = {}
        self._lock = new_lock()
        track(self)

    def after_fork(self) -> None:
        """Begin without calls and callers that wait; those of the parent are its own."""
        self._endpoints = {}
        self.share = None

    def now(self) -> float:
        """Return the instant, s; only differences count."""
        return self._clock.now()

    def visit(self, name: str) -> Visit:
        """Say that an answer of that endpoint is wanted."""
        endpoint = self._endpoints.get(name)
        return Visit(self, self._endpoints.setdefault(name, _Endpoint(name)) if endpoint is None else endpoint)

    def describe(self, most: int = MOST_ENDPOINTS) -> list[EndpointDescription]:
        """Return how the endpoints stand, those that make trouble first."""
        with self._lock:
            at = self._clock.now()
            chosen = sorted(self._endpoints.copy().values(), key=lambda each: (each.is_calm, -len(each.sent)))[:most]
            return [_describe(each, at) for each in chosen]

    def on_update(self, update: EndpointUpdate) -> None:
        """Take over what another process found out; a process gets no update of its own."""
        endpoint = self._endpoints.setdefault(update.endpoint, _Endpoint(update.endpoint))
        with self._lock:
            at = self._clock.now()
            endpoint.count_quiet_answers()
            match update.category:
                case "failed" | "probe_failed":
                    extra_s = random.uniform(*_EXTRA_S)  # noqa: S311  spreads probes, keeps no secret
                    endpoint.breaker.record_failure(
                        at, update.text, is_probe=update.category == "probe_failed", extra_s=extra_s
                    )
                case "answered":
                    endpoint.breaker.record_answer(at)
                case "refused":
                    endpoint.limit.refused_elsewhere(len(endpoint.sent))
                case "probing":
                    endpoint.breaker.probed_elsewhere(at)
            self._admit_waiters(endpoint, at)

    # What visits say; each of these is called only where the endpoint makes trouble.

    def admit(self, visit: Visit, endpoint: _Endpoint) -> bool:
        """Let a call in that found trouble, if nobody came before it."""
        with self._lock:
            if endpoint.waiters:
                return False
            entry = self._entry(endpoint, self._clock.now())
            if entry is CallAdmission.WAIT:
                return False
            visit.begin_attempt(endpoint, entry)
        visit.announce_probe()
        return True

    def record_answer(self, endpoint: _Endpoint) -> None:
        """Count an answered call."""
        with self._lock:
            is_change, was_open = not endpoint.breaker.is_calm, endpoint.breaker.is_open
            endpoint.breaker.record_answer(self._clock.now())
            # The call that was answered is still among those that want one.
            endpoint.limit.record_answer(len(endpoint.wanted) - 1)
            self._admit_waiters(endpoint, self._clock.now())
        if was_open:
            _log.info("Endpoint %s answers again", endpoint.name)
        if is_change:
            self.publish(EndpointUpdate(endpoint=endpoint.name, category="answered"))

    def record_failure(self, endpoint: _Endpoint, visit: Visit, what: str, *, is_probe: bool, ago_s: float) -> None:
        """Count a call that failed by the endpoint's fault."""
        with self._lock:
            endpoint.sent.discard(visit)
            endpoint.count_quiet_answers()
            was_open = endpoint.breaker.is_open
            endpoint.breaker.record_failure(self._clock.now() - ago_s, what, is_probe=is_probe)
            opens = endpoint.breaker.is_open and (is_probe or not was_open)
            self._admit_waiters(endpoint, self._clock.now())
        if opens:
            _log.warning("Endpoint %s fails for everybody; calls to it wait. Last failure: %s", endpoint.name, what)
        # Failures of calls that were sent before it opened change nothing elsewhere either.
        if is_probe or not was_open:
            category: Literal["probe_failed", "failed"] = "probe_failed" if is_probe else "failed"
            self.publish(EndpointUpdate(endpoint=endpoint.name, category=category, text=what))

    def record_refusal(self, endpoint: _Endpoint, visit: Visit, generation: int, *, is_probe: bool) -> None:
        """Lower the limit: the endpoint asked for fewer calls; it is there, but that is no success either."""
        with self._lock:
            is_change = endpoint.limit.record_refusal(len(endpoint.sent), generation)
            endpoint.sent.discard(visit)
            if is_probe:
                endpoint.breaker.record_answer(self._clock.now())
            self._admit_waiters(endpoint, self._clock.now())
        if is_probe:
            self.publish(EndpointUpdate(endpoint=endpoint.name, category="answered"))
        if is_change:
            self.publish(EndpointUpdate(endpoint=endpoint.name, category="refused"))

    def leave(self, endpoint: _Endpoint, *, is_probe: bool) -> None:
        """Let go of a call that ended, and of which nothing is known."""
        with self._lock:
            if is_probe:
                endpoint.breaker.probe_left()
            self._admit_waiters(endpoint, self._clock.now())

    # Waiting.

    async def wait(self, visit: Visit, endpoint: _Endpoint, patience_s: float) -> float:
        """Wait until the call may go; `Visit.wait`."""
        waiter = _Waiter(visit)
        with self._lock:
            endpoint.waiters.append(waiter)
            endpoint.is_calm = False
        try:
            waited_s = await self._wait_in_queue(waiter, endpoint, patience_s)
        except BaseException:
            self._abandon(endpoint, waiter)
            raise
        visit.announce_probe()
        return waited_s

    async def _wait_in_queue(self, waiter: _Waiter, endpoint: _Endpoint, patience_s: float) -> float:
        waited_s = 0.0
        while True:
            waiter.wakeup.clear()
            with self._lock:
                at = self._clock.now()
                self._admit_waiters(endpoint, at)
                is_open, wakes_at = endpoint.breaker.is_open, endpoint.breaker.wakes_at()
            if waiter.may_go:
                return waited_s
            if not is_open:
                await waiter.wakeup.wait()
                continue
            if waited_s >= patience_s:
                raise _open_error(endpoint, waited_s)
            rest_s = patience_s - waited_s
            # A probe that is due already waits for a place under the limit, and is woken when there is one.
            if wakes_at is not None and wakes_at > at:
                rest_s = min(rest_s, wakes_at - at)
            await waiter.wakeup.wait_until(at + rest_s, self._clock)
            waited_s += self._clock.now() - at

    def _abandon(self, endpoint: _Endpoint, waiter: _Waiter) -> None:
        """Take a waiter that gives up out of the queue, or end the attempt that it was admitted to."""
        if waiter.may_go:
            waiter.visit.leave()
            return
        with self._lock:
            endpoint.waiters.remove(waiter)
            self._admit_waiters(endpoint, self._clock.now())

    # Under the lock.

    @staticmethod
    def _entry(endpoint: _Endpoint, at: float) -> CallAdmission:
        # The limit first: asking the breaker may make the call its probe.
        return endpoint.breaker.enter(at) if endpoint.limit.lets_in(len(endpoint.sent)) else CallAdmission.WAIT

    def _admit_waiters(self, endpoint: _Endpoint, at: float) -> None:
        """Admit the waiters that may go now, and wake those for whom waiting changed."""
        while endpoint.waiters:
            entry = self._entry(endpoint, at)
            if entry is CallAdmission.WAIT:
                break
            waiter = endpoint.waiters.popleft()
            waiter.may_go = True
            waiter.visit.begin_attempt(endpoint, entry)
            if not waiter.wakeup.wake():  # nobody is there any more
                endpoint.sent.discard(waiter.visit)
                endpoint.wanted.discard(waiter.visit)
                if entry is CallAdmission.PROBE:
                    endpoint.breaker.probe_left()
        opening = (endpoint.breaker.is_open, endpoint.breaker.wakes_at())
        if opening != endpoint.announced:
            endpoint.announced = opening
            for waiter in endpoint.waiters:
                waiter.wakeup.wake()
        endpoint.is_calm = endpoint.breaker.is_calm and endpoint.limit.is_calm and not endpoint.waiters

    # Other processes.

    def publish(self, update: EndpointUpdate) -> None:
        """Send an update to the other processes."""
        if self.share is not None:
            self.share(update)


def _describe(endpoint: _Endpoint, at: float) -> EndpointDescription:
    state, wakes_at = endpoint.breaker.state(at), endpoint.breaker.wakes_at()
    return EndpointDescription(
        name=endpoint.name,
        state=state,
        probe_in_s=wakes_at - at if state == "open" and wakes_at is not None else None,
        last_failure="" if state == "closed" else endpoint.breaker.last_failure[:_MOST_FAILURE],
        limit=endpoint.limit.limit,
        sent=len(endpoint.sent),
        waiting=len(endpoint.waiters),
    )


def _open_error(endpoint: _Endpoint, waited_s: float) -> CircuitOpenError:
    text = (
        f"Endpoint {endpoint.name} fails for everybody and is not asked for now; waited {waited_s:.3g} s for it. "
        f"Last failure: {endpoint.breaker.last_failure}"
    )
    return CircuitOpenError(text, endpoint.name)


_process_endpoints = EndpointService()


def process_endpoints() -> EndpointService:
    """Return the service of this process: all its runs share it."""
    return _process_endpoints
