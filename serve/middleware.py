"""What a request has to pass before the interface sees it: its host, its origin, and the length of its body.

All are plain ASGI and know neither teams nor runs. Refusals have the form of all failures. Never: a request for another host's
name, by which a page of another site reaches a server that listens on loopback alone (DNS rebinding).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from typing import Annotated

from anyio import CancelScope
from fastapi import Depends, Request, Security
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ensemble_ray import ValidationError
from ensemble_ray.access.admission import (
    Knock,
    headers_of,
    host_name,
    is_allowed_origin,
    is_loopback,
    is_served_host,
    own_address,
)
from ensemble_ray.access.keys import digest_of, is_key
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve.answers import refusal_answer
from ensemble_ray.serve.callers import ANYBODY, Caller, Callers
from ensemble_ray.serve.schemas import Failure, Refusal
from ensemble_ray.studio.http_server import DEFAULT_MAX_BODY_BYTES, BodyLimit, body_length, too_long
from ensemble_ray.values.trace import parse_traceparent

#: Environment variable with the longest body, for replicas and for Serve's proxy.
BODY_VARIABLE = "ENSEMBLE_RAY_MAX_BODY_BYTES"
#: Code of a WebSocket that is closed because of what its client may not do.
_POLICY_VIOLATION = 1008
_log = bounded_logger(__name__)


def body_limit(configured: int | None = None) -> int:
    """Return the longest body: the one given, else the environment's, else the default.

    Raises:
        ValidationError: what the environment says is no number above 0.
    """
    if configured is not None:
        return configured
    said = os.environ.get(BODY_VARIABLE, "").strip()
    if not said:
        return DEFAULT_MAX_BODY_BYTES
    if body_length(said) <= 0:
        raise ValidationError(f"{BODY_VARIABLE} must be a whole number above 0, got: {said!r}")
    return body_length(said)


def for_proxy() -> list[Middleware]:
    """Return the middleware of Serve's own proxy, where `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names this function.

    The proxy reads a body as fast as it comes, and keeps what the replica has not taken yet.
    """
    return [Middleware(BodyLimit, max_bytes=body_limit(), refusal=body_too_long)]


def body_too_long(limit: int) -> JSONResponse:
    """Return the refusal of a body that is longer than the limit."""
    status, code, text = too_long(limit)
    return _refusal(status, code, f"{text}, or let the operator raise max_body_bytes")


class HostCheck:
    """Lets requests pass that name a host which is served.

    Args:
        app: What comes behind it.
        allowed_hosts: Names besides those of loopback and the address that a request came in by; `*.example.org` stands
            for all names below it, `*` for any.
    """

    def __init__(self, app: ASGIApp, *, allowed_hosts: Collection[str] = ()) -> None:
        self._app = app
        self._allowed = tuple(name.lower() for name in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it with 421."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hosts = headers_of(scope, b"host")
        host = host_name(hosts[0]) if len(hosts) == 1 else None
        if host is not None and is_served_host(host, self._allowed, own_address(scope)):
            await self._app(scope, receive, send)
            return
        shown = ", ".join(hosts) or "none"
        _log.warning("Refused a request for the host '%.200s'", shown)
        text = (
            f"The host '{shown[:200]}' is not served here: served are the names of this machine's loopback. What to do: the "
            "operator names others with allowed_hosts=NAME, as an argument of the application"
        )
        await _refusal(HTTPStatus.MISDIRECTED_REQUEST, "HOST_NOT_SERVED", text)(scope, receive, send)


class OriginCheck:
    """Refuses what pages of other sites ask through the browser of a person at this machine.

    Without keys, whoever reaches the endpoint may do everything, and a browser on this machine reaches it for any page that
    is open in it. A request with a key passes: a browser sends none by itself.

    Args:
        app: What comes behind it.
        allowed_origins: Origins whose pages may ask.
    """

    def __init__(self, app: ASGIApp, *, allowed_origins: Collection[str] = ()) -> None:
        self._app = app
        self._allowed = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it with 403."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
        elif not headers_of(scope, b"authorization") and not is_allowed_origin(scope, self._allowed):
            origins = ", ".join(headers_of(scope, b"origin"))
            _log.warning("Refused a request from the page '%.200s'", origins)
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": "Origin not allowed"})
                return
            text = (
                f"Pages of the origin '{origins[:200]}' may not ask here. What to do: the operator names it with allowed_origins, "
                "or the request sends a key"
            )
            await _refusal(HTTPStatus.FORBIDDEN, "ORIGIN_NOT_ALLOWED", text)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _refusal(status: HTTPStatus, code: str, message: str) -> JSONResponse:
    failure = Failure(error="InvalidRequest", code=code, status=status, message=message)
    return JSONResponse(failure.model_dump(mode="json"), status_code=status, headers={"connection": "close"})


RefusalForm = Callable[[Refusal], JSONResponse]
#: What probes ask, which have no key; nothing of teams or runs is in the answers.
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
#: An answer that goes on is looked at again so often, s: its key may have been revoked meanwhile.
_LOOK_S = 10.0
#: What a proxy adds to a request of somebody else; this machine's own programs send none of them.
_FORWARDED = (b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip")

#: Stands in the place of what has another form than a key, which therefore none has.
_NO_KEY = "-"
_PLAIN: Mapping[str, RefusalForm] = {}


class KeyCheck:
    """Lets requests pass of callers that are known.

    Args:
        app: What comes behind it.
        callers: Who is known.
        forms: How refusals are answered, by how a path begins, for parts of the interface that have a form of their own; the
            longest beginning decides.
        is_open: Says which paths besides those of probes need no key: nothing of teams or runs is in the answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        callers: Callers,
        forms: Mapping[str, RefusalForm] = _PLAIN,
        is_open: Callable[[str], bool] = OPEN_PATHS.__contains__,
    ) -> None:
        self._app = app
        self._is_open = is_open
        self._callers = callers
        self._forms = forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "websocket":  # none are served
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in OPEN_PATHS or self._is_open(path):
            await self._app(scope, receive, send)
            return
        knock = Knock(digest=bearer_of(scope), is_local=is_local(scope))
        try:
            caller = await self._callers.admit(knock)
        except Refusal as refusal:
            _log.warning("Refused %.10s %.200s: %s", scope["method"], scope["path"], refusal.code)
            begun = max((each for each in self._forms if path.startswith(each)), key=len, default="")
            answer = self._forms.get(begun, refusal_answer)(refusal)
            if refusal.status is not HTTPStatus.TOO_MANY_REQUESTS:
                answer.headers["connection"] = "close"  # its body is not read
            await answer(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"authorization"]
        passed = {**scope, "headers": headers, "state": {**scope.get("state", {}), "caller": caller}}
        with CancelScope() as answering:
            watched = _WatchedAnswer(self._callers, knock, send, answering)
            await self._app(passed, receive, watched)


class _WatchedAnswer:
    """Ends an answer that goes on for long when its caller is known no more."""

    def __init__(self, callers: Callers, knock: Knock, send: Send, answering: CancelScope) -> None:
        self._callers = callers
        self._knock = Knock(digest=knock.digest, is_local=knock.is_local, is_counted=False)
        self._send = send
        self._answering = answering
        self._looked_at = time.monotonic()

    async def __call__(self, message: Message) -> None:
        if message.get("more_body") and time.monotonic() - self._looked_at >= _LOOK_S:
            try:
                await self._callers.admit(self._knock)
            except Refusal as refusal:
                if refusal.status is HTTPStatus.UNAUTHORIZED:
                    _log.warning("Ended an answer: its key was revoked")
                    await self._send({"type": "http.response.body", "body": b"", "more_body": False})
                    self._answering.cancel()
                    return
            self._looked_at = time.monotonic()
        await self._send(message)


def bearer_of(scope: Scope) -> str | None:
    """Return the digest of the key that a request brings; None where it brings none.

    What has not the form of a key, or comes twice, is a key that nobody has.
    """
    sent = headers_of(scope, b"authorization")
    if not sent:
        return None
    scheme, _, text = sent[0].strip().partition(" ")
    if len(sent) > 1 or scheme.lower() != "bearer" or not is_key(text.strip()):
        return _NO_KEY
    return digest_of(text.strip())


def is_local(scope: Scope) -> bool:
    """Return whether a request came by loopback, from this machine itself, as far as can be seen.

    It arrived at an address of loopback, is for a name of loopback, and no proxy says that it passes it on.
    """
    hosts = headers_of(scope, b"host")
    names = [own_address(scope), (host_name(hosts[0]) or "") if len(hosts) == 1 else ""]
    is_forwarded = any(name.lower() in _FORWARDED for name, _ in scope["headers"])
    return not is_forwarded and all(map(is_loopback, names))


#: Says in the OpenAPI document that a key is sent; `KeyCheck` has looked at it, and taken it out, long before.
_BEARER = HTTPBearer(auto_error=False, scheme_name="key", description="A key of `ensemble-ray keys add`")


def caller_of(
    request: Request, _sent: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)] = None
) -> Caller:
    """Return who sent a request."""
    found: object = getattr(request.state, "caller", ANYBODY)
    return found if isinstance(found, Caller) else ANYBODY


CallerDependency = Annotated[Caller, Depends(caller_of)]


def traceparent_of(request: Request, said: object = None) -> str | None:
    """Return the span that asks for a run; None where there is none.

    Args:
        request: Its header `traceparent` names the span.
        said: What the request's body names; counts before the header, unless it is wrong: that is no reason to refuse a run.
    """
    texts = (said if isinstance(said, str) else "", request.headers.get("traceparent", ""))
    found = next((span for span in map(parse_traceparent, texts) if span is not None), None)
    return None if found is None else str(found)
