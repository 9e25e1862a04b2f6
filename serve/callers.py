"""Callers of an endpoint and their rights. The driver's process loads no web framework, so neither does this."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from ensemble_ray.access.admission import Admission, Credentials, Denied, KeyPolicy
from ensemble_ray.access.key_store import KeyStamp, KeyStore
from ensemble_ray.access.keys import Right
from ensemble_ray.errors import EnsembleError
from ensemble_ray.ports import Clock
from ensemble_ray.process.concurrency import SystemClock, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve.schemas import Refusal

_log = bounded_logger(__name__)
_NONE_MADE = (
    "This endpoint has no keys yet, and without one it answers on loopback alone. What to do: the operator makes one with "
    "ensemble-ray keys add NAME"
)
_MISSING = "A key is needed. What to do: send it as 'Authorization: Bearer KEY'"
_UNKNOWN = "This key is unknown here, or was revoked"
_REALM = 'Bearer realm="ensemble-ray"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    #: empty if the endpoint does not identify callers
    name: str = ""
    rights: frozenset[Right] = frozenset(Right)
    #: None: all
    ensembles: frozenset[str] | None = None

    def check(self, right: Right) -> None:
        if right not in self.rights:
            raise Refusal(HTTPStatus.FORBIDDEN, "FORBIDDEN", f"This key lacks the right '{right}'")

    def own_key(self, key: str | None) -> str | None:
        """Return an idempotency key that differs between callers."""
        return None if key is None else f"{self.name}:{key}"

    def sees(self, ensemble: str) -> bool:
        return self.ensembles is None or ensemble in self.ensembles


ANYBODY = Caller()


class Callers(Protocol):
    """Identifies callers. `RemoteRuns` asks the driver, which counts the requests of all replicas."""

    async def admit(self, credentials: Credentials) -> Caller:
        """Return the sender of a request, or raise a `Refusal`."""
        ...


class CallerCache:
    """Identifies callers by the stored keys."""

    def __init__(self, keys: KeyStore, policy: KeyPolicy = KeyPolicy.AUTO, *, clock: Clock | None = None) -> None:
        self._keys = keys
        self._admission = Admission(policy)
        self._clock = clock or SystemClock()
        #: False: no keys were read
        self._stamp: KeyStamp | bool | None = False
        self._reading = asyncio.Lock()
        self._failures = 0
        self._failure: EnsembleError | OSError | None = None

    async def admit(self, credentials: Credentials) -> Caller:
        try:
            await self._refresh()
        except (EnsembleError, OSError) as error:
            _log.error("All requests are refused, because the keys cannot be read: %s", error)
            text = "The endpoint cannot read its keys. See its log"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NOT_READY", text, retry_after_s=30) from None
        decision = self._admission.decide(credentials, at=self._clock.now())
        if isinstance(decision, Denied):
            raise _refusal(decision)
        key = decision.key
        return ANYBODY if key is None else Caller(name=key.name, rights=key.rights, ensembles=key.teams)

    async def _refresh(self) -> None:
        """Read the keys if they have changed. Calls that wait for a failing read fail with it."""
        before = self._failures
        async with self._reading:
            if self._failure is not None and self._failures > before:
                raise self._failure.with_traceback(None)
            try:
                stamp = await threads.run(self._keys.stamp)
                if self._stamp is False or stamp != self._stamp:
                    self._stamp = False
                    self._admission.use(await threads.run(self._keys.read))
                    self._stamp = stamp
            except (EnsembleError, OSError) as error:
                self._failures, self._failure = self._failures + 1, error
                raise
            self._failure = None


def _refusal(denied: Denied) -> Refusal:
    if denied.retry_after_s is not None:
        _log.warning("Key '%s' has used up its requests", denied.name)
        text = f"Key '{denied.name}' has used up its requests: ask again in {denied.retry_after_s} s"
        return Refusal(HTTPStatus.TOO_MANY_REQUESTS, "RATE_LIMITED", text, retry_after_s=denied.retry_after_s)
    text = _UNKNOWN if denied.has_key else _MISSING if denied.is_openable else _NONE_MADE
    challenge = f'{_REALM}, error="invalid_token"' if denied.has_key else _REALM
    return Refusal(HTTPStatus.UNAUTHORIZED, "UNAUTHENTICATED", text, headers=(("www-authenticate", challenge),))
