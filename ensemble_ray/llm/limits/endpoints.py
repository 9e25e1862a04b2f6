"""Circuit breakers and adaptive limits of all endpoints that one process calls.

Callers may be on several event loops and threads. While an endpoint works, a call takes no lock.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from ensemble_ray.errors import CircuitOpenError
from ensemble_ray.llm.limits.breaker import AdaptiveLimit, Breaker, CallAdmission
from ensemble_ray.llm.limits.limiter import MonotonicClock, Wakeup
from ensemble_ray.ports import Clock
from ensemble_ray.process.concurrency import new_lock, track
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.metrics import MOST_ENDPOINTS, EndpointDescription

_log = bounded_logger(__name__)

_EXTRA_S = (0.1, 1.0)  # additional waiting time after an update, s: minimum, maximum
_MOST_FAILURE = 500


_Category = Literal["failed", "probe_failed", "answered", "refused", "probing"]


class EndpointUpdate(Struct, frozen=True, kw_only=True):
    """A report to other processes; it contains no key."""

    endpoint: str
    category: _Category
    text: str = ""


class EndpointService:
    """`share` sends updates to other processes; it must neither wait nor raise."""

    def __init__(self, *, clock: Clock | None = None, share: Callable[[EndpointUpdate], None] | None = None) -> None:
        self.clock: Clock = clock or MonotonicClock()
        self.share = share
        self._endpoints: dict[str, _Endpoint] = {}
        self.lock = new_lock()
        track(self)

    def after_fork(self) -> None:
        self._endpoints = {}
        self.share = None

    def open_call(self, name: str) -> EndpointCall:
        endpoint = self._endpoints.get(name)
        return EndpointCall(self, self._endpoints.setdefault(name, _Endpoint(name)) if endpoint is None else endpoint)

    def describe(self, most: int = MOST_ENDPOINTS) -> list[EndpointDescription]:
        with self.lock:
            at = self.clock.now()
            chosen = sorted(self._endpoints.copy().values(), key=lambda each: (each.is_calm, -len(each.sent)))[:most]
            return [each.describe(at) for each in chosen]

    def on_update(self, update: EndpointUpdate) -> None:
        endpoint = self._endpoints.setdefault(update.endpoint, _Endpoint(update.endpoint))
        with self.lock:
            at = self.clock.now()
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
            endpoint.admit_waiters(at)

    def publish(self, endpoint: _Endpoint, category: _Category, text: str = "") -> None:
        if self.share is not None:
            self.share(EndpointUpdate(endpoint=endpoint.name, category=category, text=text))


_process_endpoints = EndpointService()


def process_endpoints() -> EndpointService:
    return _process_endpoints


class EndpointCall:
    """One answer that a caller wants, over all attempts. `try_begin` or `wait` begin an attempt; a record ends it."""

    __slots__ = ("_endpoint", "_generation", "_is_probe", "_service")

    def __init__(self, service: EndpointService, endpoint: _Endpoint) -> None:
        self._service = service
        self._endpoint = endpoint
        self._generation = 0
        self._is_probe = False
        endpoint.wanted.add(self)

    @property
    def last_failure(self) -> str:
        """The last failure of the endpoint that its breaker counted."""
        return self._endpoint.breaker.last_failure

    def try_begin(self) -> bool:
        """Return False if the caller must await `wait`."""
        endpoint = self._endpoint
        if endpoint.is_calm:
            self._generation = endpoint.limit.generation
            endpoint.sent.add(self)
            return True
        with self._service.lock:
            entry = CallAdmission.WAIT if endpoint.waiters else endpoint.enter(self._service.clock.now())
            if entry is CallAdmission.WAIT:
                return False
            self.begin_attempt(entry)
        self._announce_probe()
        return True

    async def wait(self, patience_s: float) -> float:
        """Begin an attempt in order of arrival; return the wait for the breaker, s.

        Raises:
            CircuitOpenError: the breaker was open for `patience_s`, without the wait for the limit.
        """
        endpoint, waiter = self._endpoint, _Waiter(self)
        with self._service.lock:
            endpoint.waiters.append(waiter)
            endpoint.is_calm = False
        try:
            waited_s = await self._wait_in_queue(waiter, patience_s)
        except BaseException:
            if waiter.may_go:
                self.abandon()
            else:
                with self._service.lock:
                    endpoint.waiters.remove(waiter)
                    endpoint.admit_waiters(self._service.clock.now())
            raise
        self._announce_probe()
        return waited_s

    async def _wait_in_queue(self, waiter: _Waiter, patience_s: float) -> float:
        endpoint, clock = self._endpoint, self._service.clock
        waited_s = 0.0
        while True:
            waiter.wakeup.clear()
            with self._service.lock:
                at = clock.now()
                endpoint.admit_waiters(at)
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
            await waiter.wakeup.wait_until(at + rest_s, clock)
            waited_s += clock.now() - at

    def begin_attempt(self, entry: CallAdmission) -> None:
        self._is_probe = entry is CallAdmission.PROBE
        self._generation = self._endpoint.limit.generation
        self._endpoint.sent.add(self)

    def record_answer(self) -> None:
        endpoint, service = self._endpoint, self._service
        endpoint.sent.discard(self)
        self._is_probe = False
        if endpoint.is_calm:
            # Threads may overwrite each other's count here. The breaker needs a share, not an exact sum.
            endpoint.quiet_answers += 1
            endpoint.answered_at = service.clock.now()
            return
        with service.lock:
            is_change, was_open = not endpoint.breaker.is_calm, endpoint.breaker.is_open
            endpoint.breaker.record_answer(service.clock.now())
            # The answered call is still wanted.
            endpoint.limit.record_answer(len(endpoint.wanted) - 1)
            endpoint.admit_waiters(service.clock.now())
        if was_open:
            _log.info("Endpoint %s answers again", endpoint.name)
        if is_change:
            service.publish(endpoint, "answered")

    def record_failure(self, what: str, *, ago_s: float = 0.0) -> None:
        endpoint, service, is_probe = self._endpoint, self._service, self._is_probe
        self._is_probe = False
        with service.lock:
            endpoint.sent.discard(self)
            endpoint.count_quiet_answers()
            was_open = endpoint.breaker.is_open
            endpoint.breaker.record_failure(service.clock.now() - ago_s, what, is_probe=is_probe)
            opens = endpoint.breaker.is_open and (is_probe or not was_open)
            endpoint.admit_waiters(service.clock.now())
        if opens:
            _log.warning("Endpoint %s fails for everybody; calls to it wait. Last failure: %s", endpoint.name, what)
        # Failures of calls from before the opening have no effect elsewhere either.
        if is_probe or not was_open:
            service.publish(endpoint, "probe_failed" if is_probe else "failed", what)

    def record_refusal(self) -> None:
        """The endpoint asked for fewer calls (429); the count of failures stays."""
        endpoint, service, is_probe = self._endpoint, self._service, self._is_probe
        self._is_probe = False
        with service.lock:
            is_change = endpoint.limit.record_refusal(len(endpoint.sent), self._generation)
            endpoint.sent.discard(self)
            if is_probe:
                endpoint.breaker.record_answer(service.clock.now())
            endpoint.admit_waiters(service.clock.now())
        if is_probe:
            service.publish(endpoint, "answered")
        if is_change:
            service.publish(endpoint, "refused")

    def abandon(self) -> None:
        endpoint, is_probe = self._endpoint, self._is_probe
        self._is_probe = False
        endpoint.sent.discard(self)
        if not endpoint.is_calm:
            with self._service.lock:
                if is_probe:
                    endpoint.breaker.cancel_probe()
                endpoint.admit_waiters(self._service.clock.now())

    def end(self) -> None:
        self._endpoint.wanted.discard(self)

    def _announce_probe(self) -> None:
        if self._is_probe:
            self._service.publish(self._endpoint, "probing")


class _Waiter(Struct, eq=False):
    call: EndpointCall
    wakeup: Wakeup = msgspec.field(default_factory=Wakeup)
    may_go: bool = False


class _Endpoint:
    """Methods are called under the service's lock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.breaker = Breaker()
        self.limit = AdaptiveLimit()
        #: calls between their attempts, too; one operation on a set needs no lock
        self.wanted: set[EndpointCall] = set()
        self.sent: set[EndpointCall] = set()
        self.waiters: deque[_Waiter] = deque()
        self.is_calm = True  # calls may skip the lock
        #: state that the waiters were last woken for: whether the breaker is open, and until when
        self._announced: tuple[bool, float | None] = (False, None)
        self.quiet_answers = 0  # answers that the breaker has not counted, and the instant of the last one
        self.answered_at = float("-inf")

    def count_quiet_answers(self) -> None:
        if self.quiet_answers:
            self.breaker.record_answer(self.answered_at, self.quiet_answers)
            self.quiet_answers = 0

    def enter(self, at: float) -> CallAdmission:
        # The limit first, because the breaker may make this call its probe.
        return self.breaker.enter(at) if self.limit.allows(len(self.sent)) else CallAdmission.WAIT

    def admit_waiters(self, at: float) -> None:
        while self.waiters:
            entry = self.enter(at)
            if entry is CallAdmission.WAIT:
                break
            waiter = self.waiters.popleft()
            waiter.may_go = True
            waiter.call.begin_attempt(entry)
            if not waiter.wakeup.wake():  # its event loop is closed
                self.sent.discard(waiter.call)
                self.wanted.discard(waiter.call)
                if entry is CallAdmission.PROBE:
                    self.breaker.cancel_probe()
        opening = (self.breaker.is_open, self.breaker.wakes_at())
        if opening != self._announced:
            self._announced = opening
            for waiter in self.waiters:
                waiter.wakeup.wake()
        self.is_calm = self.breaker.is_calm and self.limit.limit is None and not self.waiters

    def describe(self, at: float) -> EndpointDescription:
        state, wakes_at = self.breaker.state(at), self.breaker.wakes_at()
        return EndpointDescription(
            name=self.name,
            state=state,
            probe_in_s=wakes_at - at if state == "open" and wakes_at is not None else None,
            last_failure="" if state == "closed" else self.breaker.last_failure[:_MOST_FAILURE],
            limit=self.limit.limit,
            sent=len(self.sent),
            waiting=len(self.waiters),
        )
