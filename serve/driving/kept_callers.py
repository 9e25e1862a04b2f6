"""KeptCallers: the `Callers` of one endpoint, in the process that drives its runs.

One process for all replicas on all nodes, so that a key's rate is one rate, and a key that is revoked is refused by the next request:
the keys are looked at for each of them, and read when they changed. Never: a request let in because they cannot be read.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray.access.admission import Admission, Denied, KeyPolicy, Knock
from ensemble_ray.errors import EnsembleError
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import SystemClock, threads
from ensemble_ray.serve.callers import ANYBODY, Caller
from ensemble_ray.serve.refusals import Refusal

if TYPE_CHECKING:
    from ensemble_ray.access.key_store import KeyStamp, KeyStore
    from ensemble_ray.ports import Clock

_log = bounded_logger(__name__)
_NONE_MADE = (
    "This endpoint has no keys yet, and without one it answers on loopback alone. What to do: the operator makes one with "
    "ensemble-ray keys add NAME"
)
_MISSING = "A key is needed. What to do: send it as 'Authorization: Bearer KEY'"
_UNKNOWN = "This key is unknown here, or was revoked"
_REALM = 'Bearer realm="ensemble-ray"'


class KeptCallers:
    """Who may ask, as the keys have it that are kept.

    Args:
        keys: Where they are kept.
        policy: Which requests need one.
        clock: Where time comes from.
    """

    def __init__(self, keys: KeyStore, policy: KeyPolicy = KeyPolicy.AUTO, *, clock: Clock | None = None) -> None:
        self._keys = keys
        self._admission = Admission(policy)
        self._clock = clock or SystemClock()
        #: of the keys as they were read; False: they were not
        self._stamp: KeyStamp | bool | None = False
        self._reading = asyncio.Lock()
        #: how often they could not be read, and why the last time
        self._failures = 0
        self._failure: EnsembleError | OSError | None = None

    async def admit(self, knock: Knock) -> Caller:
        """Return who sends a request; see `Callers.admit`."""
        try:
            await self._refresh()
        except (EnsembleError, OSError) as error:
            _log.error("No request is let in: %s", error)
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "NOT_READY",
                "The endpoint cannot read its keys. Its log says more",
                retry_after_s=30,
            ) from None
        decision = self._admission.decide(knock, at=self._clock.now())
        if isinstance(decision, Denied):
            raise _refusal(decision)
        key = decision.key
        return ANYBODY if key is None else Caller(name=key.name, rights=key.rights, ensembles=key.teams)

    async def _refresh(self) -> None:
        """Take the keys as they are now.

        A database that is away is waited for: who comes meanwhile is refused with the one that waits, and not one after the other.

        Raises:
            EnsembleError, OSError: they cannot be read.
        """
        before = self._failures
        async with self._reading:
            if self._failure is not None and self._failures > before:
                raise self._failure.with_traceback(None)
            try:
                await self._look()
            except (EnsembleError, OSError) as error:
                self._failures, self._failure = self._failures + 1, error
                raise
            self._failure = None

    async def _look(self) -> None:
        stamp = await threads.run(self._keys.stamp)
        if self._stamp is not False and stamp == self._stamp:
            return
        self._stamp = False
        self._admission.use(await threads.run(self._keys.read))
        self._stamp = stamp


def _refusal(denied: Denied) -> Refusal:
    if denied.retry_after_s is not None:
        _log.warning("Key '%s' has used up its requests", denied.name)
        text = f"Key '{denied.name}' has used up its requests: ask again in {denied.retry_after_s} s"
        return Refusal(HTTPStatus.TOO_MANY_REQUESTS, "RATE_LIMITED", text, retry_after_s=denied.retry_after_s)
    text = _UNKNOWN if denied.has_key else _MISSING if denied.is_openable else _NONE_MADE
    challenge = f'{_REALM}, error="invalid_token"' if denied.has_key else _REALM
    return Refusal(HTTPStatus.UNAUTHORIZED, "UNAUTHENTICATED", text, headers=(("www-authenticate", challenge),))
