"""Callers of an endpoint and their rights. The driver's process loads no web framework, so neither does this."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Protocol

from msgspec import Struct

from ensemble_ray import errors
from ensemble_ray.access.admission import Admission, ApiKey, Credentials, Denied, KeyPolicy, Right
from ensemble_ray.access.key_store import KeyStamp, KeyStore
from ensemble_ray.access.quotas import NO_QUOTAS, Account, Quotas, Standing
from ensemble_ray.errors import EnsembleError
from ensemble_ray.facts.runs import OWN_ERRORS
from ensemble_ray.ports import Clock
from ensemble_ray.process.concurrency import SystemClock, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve.schemas import Failure, FinishedTask, NewRun, Refusal

_log = bounded_logger(__name__)
_NONE_MADE = (
    "This endpoint has no keys yet, and without one it answers on loopback alone. What to do: the operator makes one with "
    "ensemble-ray keys add NAME"
)
_MISSING = "A key is needed. What to do: send it as 'Authorization: Bearer KEY'"
_UNKNOWN = "This key is unknown here, or was revoked"
_REALM = 'Bearer realm="ensemble-ray"'


class Caller(Struct, frozen=True, kw_only=True):
    #: empty if the endpoint does not identify callers
    name: str = ""
    rights: frozenset[Right] = frozenset(Right)
    #: None: all
    ensembles: frozenset[str] | None = None
    #: for reviews; None: the endpoint does not identify callers, so it checks no roles
    roles: frozenset[str] | None = frozenset()
    quotas: Quotas = NO_QUOTAS
    #: when the request arrived; None: unknown, or without quotas
    standing: Standing | None = None

    @property
    def account(self) -> Account | None:
        """The account of its runs; None: runs are not counted."""
        return Account(name=self.name, quotas=self.quotas) if self.name else None

    def check(self, right: Right) -> None:
        if right not in self.rights:
            raise Refusal(HTTPStatus.FORBIDDEN, "FORBIDDEN", f"This key lacks the right '{right}'")

    def sign(self, asked: NewRun) -> NewRun:
        """Return the request with its user: this caller, or the one that an admin names (S-CTX-71)."""
        if asked.user is None:
            return asked.model_copy(update={"user": self.name}) if self.name else asked
        if asked.user != self.name and Right.ADMIN not in self.rights:
            raise Refusal(HTTPStatus.FORBIDDEN, "FORBIDDEN", "Only a key with the right 'admin' may set 'user'")
        return asked

    def own_key(self, key: str | None) -> str | None:
        """Return an idempotency key that differs between callers."""
        return None if key is None else f"{self.name}:{key}"

    def sees(self, ensemble: str) -> bool:
        return self.ensembles is None or ensemble in self.ensembles


ANYBODY = Caller(roles=None)
#: Returns what a key's runs have used, or None while that is unknown.
FindStanding = Callable[[Account], "Standing | None"]


class Callers(Protocol):
    """Identifies callers. `RemoteRuns` asks the driver, which counts the requests of all replicas."""

    async def admit(self, credentials: Credentials) -> Caller:
        """Return the sender of a request, or raise a `Refusal`."""
        ...

    async def standings(self, caller: Caller) -> Sequence[Standing]:
        """Return the quotas and the usage of today of the keys that a caller may see: its own, with `admin` those of its teams."""
        ...


class CallerCache:
    """Identifies callers by the stored keys."""

    def __init__(
        self,
        keys: KeyStore,
        policy: KeyPolicy = KeyPolicy.AUTO,
        *,
        clock: Clock | None = None,
        find_standing: FindStanding = lambda _account: None,
    ) -> None:
        self._keys = keys
        self._find_standing = find_standing
        self._known: Sequence[ApiKey] = ()
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
        if key is None:
            return ANYBODY
        standing = None if key.quotas == NO_QUOTAS else self._find_standing(_account_of(key))
        return Caller(
            name=key.name,
            rights=key.rights,
            ensembles=key.teams,
            roles=key.roles,
            quotas=key.quotas,
            standing=standing,
        )

    async def standings(self, caller: Caller) -> Sequence[Standing]:
        found = [self._find_standing(_account_of(each)) for each in self._known if _is_shown(each, caller)]
        if None in found:
            text = "The endpoint is starting. Accepted runs are stored"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NOT_READY", text, retry_after_s=5)
        return sorted((each for each in found if each is not None), key=lambda each: each.key)

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
                    found = await threads.run(self._keys.read)
                    self._known = found or ()
                    self._admission.use(found)
                    self._stamp = stamp
            except (EnsembleError, OSError) as error:
                self._failures, self._failure = self._failures + 1, error
                raise
            self._failure = None


def _account_of(key: ApiKey) -> Account:
    return Account(name=key.name, quotas=key.quotas)


def _is_shown(key: ApiKey, caller: Caller) -> bool:
    """Whether a caller may see the usage of a key: its own, or with `admin` that of a key for none but its teams."""
    if not caller.name or key.name == caller.name:
        return True
    is_of_teams = caller.ensembles is None or (key.teams is not None and key.teams <= caller.ensembles)
    return Right.ADMIN in caller.rights and is_of_teams


def _refusal(denied: Denied) -> Refusal:
    if denied.retry_after_s is not None:
        _log.warning("Key '%s' has used up its requests", denied.name)
        text = f"Key '{denied.name}' has used up its requests: ask again in {denied.retry_after_s} s"
        return Refusal(HTTPStatus.TOO_MANY_REQUESTS, "RATE_LIMITED", text, retry_after_s=denied.retry_after_s)
    text = _UNKNOWN if denied.has_key else _MISSING if denied.is_openable else _NONE_MADE
    challenge = f'{_REALM}, error="invalid_token"' if denied.has_key else _REALM
    return Refusal(HTTPStatus.UNAUTHORIZED, "UNAUTHENTICATED", text, headers=(("www-authenticate", challenge),))


_CODES = {
    "PromptTemplateError": "INPUTS_MISSING",
    "RunExistsError": "RUN_EXISTS",
    "ReviewDecidedError": "REVIEW_DECIDED",
    "ReviewRoleError": "ROLE_REQUIRED",
    "ValidationError": "INVALID_RUN",
    "InternalError": "INTERNAL_ERROR",
}
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
#: The first match in the chain of causes applies.
_STATUS: tuple[tuple[type[BaseException], HTTPStatus], ...] = (
    (errors.RunExistsError, HTTPStatus.CONFLICT),
    (errors.PromptTemplateError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.RecordError, HTTPStatus.INTERNAL_SERVER_ERROR),
    (errors.IllegalStateError, HTTPStatus.INTERNAL_SERVER_ERROR),
    (errors.GuardrailViolationError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.RateLimitTimeoutError, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.RateLimitInterruptedError, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.CircuitOpenError, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.UnknownOutcomeError, HTTPStatus.INTERNAL_SERVER_ERROR),
    (errors.OutputParsingError, HTTPStatus.BAD_GATEWAY),
    (errors.MaxIterationsExceededError, HTTPStatus.BAD_GATEWAY),
    (errors.ConstraintViolationError, HTTPStatus.BAD_GATEWAY),
    (errors.MaxLoopIterationsExceededError, HTTPStatus.BAD_GATEWAY),
    (errors.MaxGraphStepsExceededError, HTTPStatus.BAD_GATEWAY),
    (errors.GraphNoEdgeMatchedError, HTTPStatus.BAD_GATEWAY),
    (errors.AllModelsFailedError, HTTPStatus.BAD_GATEWAY),
    (errors.BatchError, HTTPStatus.BAD_GATEWAY),
    (errors.ReviewTimeoutError, HTTPStatus.GATEWAY_TIMEOUT),
    (errors.ReviewDecidedError, HTTPStatus.CONFLICT),
    (errors.ReviewRoleError, HTTPStatus.FORBIDDEN),
    (errors.AgentExecutionError, HTTPStatus.BAD_GATEWAY),
    (errors.TaskExecutionError, HTTPStatus.BAD_GATEWAY),
    (errors.ParallelExecutionError, HTTPStatus.BAD_GATEWAY),
)


def status_of(error: BaseException) -> HTTPStatus:
    if isinstance(error, errors.ValidationError):
        # Without a trace the run has not started, so the request is wrong. With a trace the team is wrong.
        has_begun = error.trace is not None
        return HTTPStatus.INTERNAL_SERVER_ERROR if has_begun else HTTPStatus.BAD_REQUEST
    chain = tuple(_chain(error))
    found = (status for error_type, status in _STATUS if any(isinstance(link, error_type) for link in chain))
    return next(found, HTTPStatus.INTERNAL_SERVER_ERROR)


def status_of_name(name: str) -> HTTPStatus:
    found = (status for kind, status in _STATUS if kind.__name__ == name)
    return next(found, HTTPStatus.INTERNAL_SERVER_ERROR)


def is_refusal(error: BaseException) -> bool:
    """Whether the request is wrong and the run did not start."""
    is_of_request = isinstance(error, errors.ValidationError | errors.PromptTemplateError | errors.RunExistsError)
    return is_of_request and getattr(error, "trace", None) is None


def failure_of(error: BaseException, run_id: str | None = None) -> Failure:
    causes = list(_chain(error))[1:]
    if isinstance(error, errors.ParallelExecutionError):
        causes += error.failed_task_causes.values()
    shown = [cause for cause in causes if isinstance(cause, OWN_ERRORS)]
    return Failure(
        error=type(error).__name__,
        code=code_of(type(error).__name__),
        status=status_of(error),
        message=str(error) or type(error).__name__,
        run_id=getattr(error, "run_id", None) or run_id,
        missing=list(error.missing_variables) if isinstance(error, errors.PromptTemplateError) else [],
        causes=[f"{type(cause).__name__}: {cause}" for cause in shown],
        tasks=[FinishedTask.of(output) for output in getattr(error, "completed_task_outputs", ())],
    )


def code_of(name: str) -> str:
    """Return the stable code of an error class, such as `TASK_EXECUTION_ERROR` (S-SRV-4)."""
    return _CODES.get(name) or _WORD.sub("_", name).upper()


def describe_refusal(refusal: Refusal) -> Failure:
    return Failure(
        error=refusal.error,
        code=refusal.code,
        status=refusal.status,
        message=refusal.message,
        run_id=refusal.run_id,
        missing=list(refusal.missing),
        retry_after_ms=None if refusal.retry_after_s is None else refusal.retry_after_s * 1000,
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__
