"""Circuit breakers and adaptive limits of all endpoints that one process calls.

`EndpointService` carries out the decisions of `Breaker` and `AdaptiveLimit`. Callers may be on several event loops and
threads. While an endpoint works, a call costs a look-up and a few set operations, without a lock.
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

#: How much longer a process waits before its probe if it learned of the failure from an update, s: minimum, maximum.
_EXTRA_S = (0.1, 1.0)
#: Characters of a failure in a description.
_MOST_FAILURE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointUpdate:
    """A report about an endpoint to other processes; it contains no key."""

    endpoint: str
    #: a call failed, a probe failed, an answer arrived after failures, the endpoint asked for fewer calls, a probe was sent
    category: Literal["failed", "probe_failed", "answered", "refused", "probing"]
    #: the failure in words
    text: str = ""


class Visit:
    """One answer that a caller wants, over all attempts; made by `EndpointService.visit`.

    Each attempt begins with `try_go` or `wait`. It ends with `record_answer`, `record_failure`, `record_refusal` or
    `leave`.
    """

    __slots__ = ("_endpoint", "_generation", "_is_probe", "_service")

    def __init__(self, service: EndpointService, endpoint: _Endpoint) -> None:
        self._service = service
        self._endpoint = endpoint
        self._generation = 0
        self._is_probe = False
        endpoint.wanted.add(self)

    def try_go(self) -> bool:
        """Begin an attempt if the endpoint allows it now; otherwise await `wait`."""
        endpoint = self._endpoint
        if not endpoint.is_calm:
            return self._service.admit(self, endpoint)
        self._generation = endpoint.limit.generation
        endpoint.sent.add(self)
        return True

    async def wait(self, patience_s: float) -> float:
        """Begin an attempt when breaker and limit allow it, in order of arrival.

        Args:
            patience_s: Longest wait while the breaker is open. Time in the queue under the limit does not count,
                because then other calls receive answers.

        Returns:
            The time that it waited for the breaker, s.

        Raises:
            CircuitOpenError: the breaker did not close in time.
        """
        return await self._service.wait(self, self._endpoint, patience_s)

    def record_answer(self) -> None:
        """End the attempt with an answer, or with a refusal that shows that the endpoint works."""
        endpoint = self._endpoint
        endpoint.sent.discard(self)
        if endpoint.is_calm:
            # Threads may overwrite each other's count here. The breaker needs a share, not an exact sum.
            endpoint.quiet_answers += 1
            endpoint.answered_at = self._service.now()
        else:
            self._service.record_answer(endpoint)
        self._is_probe = False

    def record_failure(self, what: str, *, ago_s: float = 0.0) -> None:
        """End the attempt with a failure of the endpoint.

        Args:
            what: The failure in words.
            ago_s: Age of the failure, s: building its error may have taken a while.
        """
        self._service.record_failure(self._endpoint, self, what, is_probe=self._is_probe, ago_s=ago_s)
        self._is_probe = False

    def record_refusal(self) -> None:
        """End the attempt because the endpoint asked for fewer calls (429)."""
        self._service.record_refusal(self._endpoint, self, self._generation, is_probe=self._is_probe)
        self._is_probe = False

    def leave(self) -> None:
        """End the attempt without information about the endpoint."""
        endpoint = self._endpoint
        endpoint.sent.discard(self)
        if not endpoint.is_calm:
            self._service.leave(endpoint, is_probe=self._is_probe)
        self._is_probe = False

    def end(self) -> None:
        """Report that the caller wants no answer any more."""
        self._endpoint.wanted.discard(self)

    def announce_probe(self) -> None:
        """Notify other processes if this attempt is a probe."""
        if self._is_probe:
            self._service.publish(EndpointUpdate(endpoint=self._endpoint.name, category="probing"))

    def begin_attempt(self, endpoint: _Endpoint, entry: CallAdmission) -> None:
        """Begin the attempt; for the service, under its lock."""
        self._is_probe = entry is CallAdmission.PROBE
        self._generation = endpoint.limit.generation
        endpoint.sent.add(self)


class EndpointService:
    """All endpoints of one process.

    Args:
        clock: Source of instants; a monotonic clock by default.
        share: Sends updates to other processes; it must neither wait nor raise. May be set later.
    """

    def __init__(self, *, clock: Clock | None = None, share: Callable[[EndpointUpdate], None] | None = None) -> None:
        self._clock: Clock = clock or MonotonicClock()
        self.share = share
        self._endpoints: dict[str, _Endpoint] = {}
        self._lock = new_lock()
        track(self)

    def after_fork(self) -> None:
        self._endpoints = {}
        self.share = None

    def now(self) -> float:
        return self._clock.now()

    def visit(self, name: str) -> Visit:
        """Return a new visit of that endpoint."""
        endpoint = self._endpoints.get(name)
        return Visit(self, self._endpoints.setdefault(name, _Endpoint(name)) if endpoint is None else endpoint)

    def describe(self, most: int = MOST_ENDPOINTS) -> list[EndpointDescription]:
        """Return descriptions of the endpoints; those with problems and calls in flight first."""
        with self._lock:
            at = self._clock.now()
            chosen = sorted(self._endpoints.copy().values(), key=lambda each: (each.is_calm, -len(each.sent)))[:most]
            return [_describe(each, at) for each in chosen]

    def on_update(self, update: EndpointUpdate) -> None:
        """Apply an update of another process."""
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
                    endpoint.limit.record_remote_refusal(len(endpoint.sent))
                case "probing":
                    endpoint.breaker.record_remote_probe(at)
            self._admit_waiters(endpoint, at)

    # For visits. They call these methods only if the endpoint is not calm.

    def admit(self, visit: Visit, endpoint: _Endpoint) -> bool:
        """Begin an attempt if breaker and limit allow it and no other call waits."""
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
        with self._lock:
            is_change, was_open = not endpoint.breaker.is_calm, endpoint.breaker.is_open
            endpoint.breaker.record_answer(self._clock.now())
            # The answered call is still among the wanted ones.
            endpoint.limit.record_answer(len(endpoint.wanted) - 1)
            self._admit_waiters(endpoint, self._clock.now())
        if was_open:
            _log.info("Endpoint %s answers again", endpoint.name)
        if is_change:
            self.publish(EndpointUpdate(endpoint=endpoint.name, category="answered"))

    def record_failure(self, endpoint: _Endpoint, visit: Visit, what: str, *, is_probe: bool, ago_s: float) -> None:
        with self._lock:
            endpoint.sent.discard(visit)
            endpoint.count_quiet_answers()
            was_open = endpoint.breaker.is_open
            endpoint.breaker.record_failure(self._clock.now() - ago_s, what, is_probe=is_probe)
            opens = endpoint.breaker.is_open and (is_probe or not was_open)
            self._admit_waiters(endpoint, self._clock.now())
        if opens:
            _log.warning("Endpoint %s fails for everybody; calls to it wait. Last failure: %s", endpoint.name, what)
        # Failures of calls that were sent before the opening have no effect in other processes either.
        if is_probe or not was_open:
            category: Literal["probe_failed", "failed"] = "probe_failed" if is_probe else "failed"
            self.publish(EndpointUpdate(endpoint=endpoint.name, category=category, text=what))

    def record_refusal(self, endpoint: _Endpoint, visit: Visit, generation: int, *, is_probe: bool) -> None:
        """Lower the limit. The endpoint works, which ends a probe, but a refusal does not reset the count of failures."""
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
        with self._lock:
            if is_probe:
                endpoint.breaker.cancel_probe()
            self._admit_waiters(endpoint, self._clock.now())

    async def wait(self, visit: Visit, endpoint: _Endpoint, patience_s: float) -> float:
        waiter = _Waiter(visit)
        with self._lock:
            endpoint.waiters.append(waiter)
            endpoint.is_calm = False
        try:
            waited_s = await self._wait_in_queue(waiter, endpoint, patience_s)
        except BaseException:
            if waiter.may_go:
                visit.leave()
            else:
                with self._lock:
                    endpoint.waiters.remove(waiter)
                    self._admit_waiters(endpoint, self._clock.now())
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
                raise CircuitOpenError(
                    f"Endpoint {endpoint.name} fails for everybody and is not asked for now; waited {waited_s:.3g} s "
                    f"for it. Last failure: {endpoint.breaker.last_failure}",
                    endpoint.name,
                )
            rest_s = patience_s - waited_s
            # If the probe is due, this call waits for a place under the limit, and is woken when there is one.
            if wakes_at is not None and wakes_at > at:
                rest_s = min(rest_s, wakes_at - at)
            await waiter.wakeup.wait_until(at + rest_s, self._clock)
            waited_s += self._clock.now() - at

    def publish(self, update: EndpointUpdate) -> None:
        if self.share is not None:
            self.share(update)

    # Under the lock.

    @staticmethod
    def _entry(endpoint: _Endpoint, at: float) -> CallAdmission:
        # The limit first, because the breaker may make this call its probe.
        return endpoint.breaker.enter(at) if endpoint.limit.allows(len(endpoint.sent)) else CallAdmission.WAIT

    def _admit_waiters(self, endpoint: _Endpoint, at: float) -> None:
        """Admit the waiters that may proceed now, and wake the others if the state of the breaker changed."""
        while endpoint.waiters:
            entry = self._entry(endpoint, at)
            if entry is CallAdmission.WAIT:
                break
            waiter = endpoint.waiters.popleft()
            waiter.may_go = True
            waiter.visit.begin_attempt(endpoint, entry)
            if not waiter.wakeup.wake():  # its event loop is closed
                endpoint.sent.discard(waiter.visit)
                endpoint.wanted.discard(waiter.visit)
                if entry is CallAdmission.PROBE:
                    endpoint.breaker.cancel_probe()
        opening = (endpoint.breaker.is_open, endpoint.breaker.wakes_at())
        if opening != endpoint.announced:
            endpoint.announced = opening
            for waiter in endpoint.waiters:
                waiter.wakeup.wake()
        endpoint.is_calm = endpoint.breaker.is_calm and endpoint.limit.limit is None and not endpoint.waiters


_process_endpoints = EndpointService()


def process_endpoints() -> EndpointService:
    """Return the service of this process, which all its runs share."""
    return _process_endpoints


@dataclass(slots=True, eq=False)
class _Waiter:
    visit: Visit
    wakeup: Wakeup = field(default_factory=Wakeup)
    may_go: bool = False


class _Endpoint:
    def __init__(self, name: str) -> None:
        self.name = name
        self.breaker = Breaker()
        self.limit = AdaptiveLimit()
        #: calls that want an answer, also between two attempts; sets, because one operation on them needs no lock
        self.wanted: set[Visit] = set()
        #: calls in flight
        self.sent: set[Visit] = set()
        self.waiters: deque[_Waiter] = deque()
        #: whether calls may skip the service; written under its lock
        self.is_calm = True
        #: the state that the waiters were last woken for: whether the breaker is open, and until when
        self.announced: tuple[bool, float | None] = (False, None)
        #: number of the answers that the breaker has not counted, and the instant of the last one
        self.quiet_answers = 0
        self.answered_at = float("-inf")

    def count_quiet_answers(self) -> None:
        """Count the answers that arrived while the endpoint was calm; under the service's lock."""
        if self.quiet_answers:
            self.breaker.record_answer(self.answered_at, self.quiet_answers)
            self.quiet_answers = 0


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
