"""ASGI middleware of an endpoint (checks of host, origin, key and body length), and its answers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any

from anyio import CancelScope
from fastapi import Depends, FastAPI, Request, Security
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ensemble_ray import ValidationError
from ensemble_ray.access import admission
from ensemble_ray.access.admission import Credentials, digest_of, headers_of, host_name, is_key, own_address
from ensemble_ray.access.quotas import Standing
from ensemble_ray.process.concurrency import SystemClock
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve.callers import ANYBODY, Caller, Callers, describe_refusal
from ensemble_ray.serve.schemas import Failure, Refusal
from ensemble_ray.studio.http_server import DEFAULT_MAX_BODY_BYTES, HEADERS, BodyLimit, body_length, too_long
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.trace import parse_traceparent

#: Error answers in the OpenAPI document.
FAILURES: dict[int | str, dict[str, Any]] = {"4XX": {"model": Failure}, "5XX": {"model": Failure}}
_REFUSED = "InvalidRequest"
_EXPECTED = 'Expected application/json such as {"inputs": {"topic": "Ray"}, "run_id": "first"}'
#: Limits of reported mistakes, and of characters of a client's text.
_SHOWN, _SHOWN_CHARACTERS = 10, 200
_CODES = {HTTPStatus.NOT_FOUND: "NOT_FOUND", HTTPStatus.METHOD_NOT_ALLOWED: "METHOD_NOT_ALLOWED"}


class _WholeResponse(JSONResponse):
    """JSON without lone surrogates, which could not be encoded. A paid run would be lost."""

    def render(self, content: object) -> bytes:
        return super().render(whole_data(content))


def json_text(data: object) -> str:
    return json.dumps(whole_data(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def answer(
    value: BaseModel, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return _WholeResponse(value.model_dump(mode="json"), status_code=status, headers=dict(headers or {}))


def failure_answer(failure: Failure, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return answer(failure, HTTPStatus(failure.status), headers)


def add_failure_handlers(api: FastAPI) -> None:
    def refuse(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Refusal)  # noqa: S101  it is registered for this class
        return refusal_answer(error)

    def refuse_invalid(request: Request, error: Exception) -> JSONResponse:
        problems = problems_of(error) if isinstance(error, RequestValidationError) else []
        expected = f". {_EXPECTED}" if request.url.path == "/runs" and request.method == "POST" else ""
        return _plain(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", f"{'; '.join(problems)}{expected}")

    api.add_exception_handler(Refusal, refuse)
    api.add_exception_handler(RequestValidationError, refuse_invalid)
    api.add_exception_handler(HTTPException, _not_served)
    api.add_exception_handler(Exception, _broken)


def refusal_answer(refusal: Refusal) -> JSONResponse:
    return failure_answer(describe_refusal(refusal), refusal.all_headers)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def problems_of(error: RequestValidationError) -> list[str]:
    found = error.errors()
    problems = [f"{_cut('.'.join(str(part) for part in each['loc']))}: {each['msg']}" for each in found[:_SHOWN]]
    return [*problems, f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else problems


def _not_served(request: Request, error: Exception) -> JSONResponse:
    """Answer a wrong path or method, or a body that is not JSON."""
    status = HTTPStatus(error.status_code) if isinstance(error, HTTPException) else HTTPStatus.NOT_FOUND
    if status is HTTPStatus.BAD_REQUEST:
        why = "The body cannot be read: it is no text, is nested too deeply, or has a number of thousands of digits"
        return _plain(status, "INVALID_REQUEST", f"{why}. {_EXPECTED}")
    text = f"{request.method} {_cut(request.url.path)}: {status.phrase}. GET /openapi.json says what is served"
    response = _plain(status, _CODES.get(status, "INVALID_REQUEST"), text)
    response.headers.update(getattr(error, "headers", None) or {})
    return response


def _broken(_request: Request, error: Exception) -> JSONResponse:
    failure = Failure(
        error="InternalError",
        code="INTERNAL_ERROR",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        message=f"{type(error).__name__} in the endpoint. Its log says more",
    )
    return failure_answer(failure, HEADERS)  # it bypasses the middleware that adds these headers


def _plain(status: HTTPStatus, code: str, message: str) -> JSONResponse:
    return failure_answer(Failure(error=_REFUSED, code=code, status=status, message=message))


class OwnRoute(APIRoute):
    """A route that refuses unknown query parameters, because a misspelt one would be a request for something else.

    Routes of other protocols ignore them, as these protocols require.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = sorted(_query_names(self.dependant))
        text = f"unknown parameter. Known: [{', '.join(known)}]"

        async def checked(request: Request) -> Response:
            unknown = [name for name in request.query_params if name not in known]
            if unknown:
                problems = [{"type": "extra_forbidden", "loc": ("query", name), "msg": text} for name in unknown]
                raise RequestValidationError(problems)
            return await handle(request)

        return checked


def _query_names(dependant: Dependant) -> Iterator[str]:
    yield from (each.alias for each in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _query_names(inner)


BODY_VARIABLE = "ENSEMBLE_RAY_MAX_BODY_BYTES"
_POLICY_VIOLATION = 1008
_log = bounded_logger(__name__)
RefusalForm = Callable[[Refusal], JSONResponse]
#: Health probes have no key, and get no data.
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
#: Interval for checking the key of a streaming answer, s.
_LOOK_S = 10.0
#: Headers that only proxies add.
_FORWARDED = (b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip")
_NO_KEY = "-"
_PLAIN: Mapping[str, RefusalForm] = {}
#: For the OpenAPI document. `KeyCheck` has checked and removed the key.
_BEARER = HTTPBearer(auto_error=False, scheme_name="key", description="A key of `ensemble-ray keys add`")


def body_limit(configured: int | None = None) -> int:
    if configured is not None:
        return configured
    value = os.environ.get(BODY_VARIABLE, "").strip()
    if not value:
        return DEFAULT_MAX_BODY_BYTES
    if body_length(value) <= 0:
        raise ValidationError(f"{BODY_VARIABLE} must be a whole number above 0, got: {value!r}")
    return body_length(value)


def for_proxy() -> list[Middleware]:
    """Return the middleware of Serve's proxy, for `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`.

    The proxy buffers the part of a body that the replica has not read yet.
    """
    return [Middleware(BodyLimit, max_bytes=body_limit(), refusal=body_too_long)]


def body_too_long(limit: int) -> JSONResponse:
    status, code, text = too_long(limit)
    return _refusal(status, code, f"{text}, or let the operator raise max_body_bytes")


class HostCheck:
    """Accepts requests for a served host only, against DNS rebinding.

    `allowed_hosts` are names besides loopback and the address of the connection: `*.example.org` for all below it, `*` for any.
    """

    def __init__(self, app: ASGIApp, *, allowed_hosts: Collection[str] = ()) -> None:
        self._app = app
        self._allowed = tuple(name.lower() for name in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hosts = headers_of(scope, b"host")
        host = host_name(hosts[0]) if len(hosts) == 1 else None
        if host is not None and admission.is_served_host(host, self._allowed, own_address(scope)):
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
    """Rejects requests that a browser on this machine sends for a page of another site.

    Without keys the endpoint trusts every local client. Browsers never add a key, so requests with one pass.
    """

    def __init__(self, app: ASGIApp, *, allowed_origins: Collection[str] = ()) -> None:
        self._app = app
        self._allowed = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
        elif not headers_of(scope, b"authorization") and not admission.is_allowed_origin(scope, self._allowed):
            origins = ", ".join(headers_of(scope, b"origin"))
            _log.warning("Refused a request from the page '%.200s'", origins)
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": "Origin not allowed"})
                return
            text = (
                f"Pages of the origin '{origins[:200]}' may not send requests. What to do: ask the operator to add it to allowed_origins, "
                "or send a key"
            )
            await _refusal(HTTPStatus.FORBIDDEN, "ORIGIN_NOT_ALLOWED", text)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _refusal(status: HTTPStatus, code: str, message: str) -> JSONResponse:
    failure = Failure(error="InvalidRequest", code=code, status=status, message=message)
    return JSONResponse(failure.model_dump(mode="json"), status_code=status, headers={"connection": "close"})


class KeyCheck:
    """Accepts requests of known callers only.

    Args:
        forms: Answers to refusals by path prefix, for APIs with their own error format. The longest prefix applies.
        is_open: Whether a path needs no key.
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
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in OPEN_PATHS or self._is_open(path):
            await self._app(scope, receive, send)
            return
        credentials = Credentials(digest=bearer_of(scope), is_local=is_local(scope))
        try:
            caller = await self._callers.admit(credentials)
        except Refusal as refusal:
            _log.warning("Refused %.10s %.200s: %s", scope["method"], scope["path"], refusal.code)
            prefix = max((each for each in self._forms if path.startswith(each)), key=len, default="")
            answer = self._forms.get(prefix, refusal_answer)(refusal)
            if refusal.status is not HTTPStatus.TOO_MANY_REQUESTS:
                answer.headers["connection"] = "close"
            await answer(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"authorization"]
        passed = {**scope, "headers": headers, "state": {**scope.get("state", {}), "caller": caller}}
        with CancelScope() as answering:
            watched = _WatchedAnswer(self._callers, credentials, _with_quotas(send, caller.standing), answering)
            await self._app(passed, receive, watched)


def _with_quotas(send: Send, standing: Standing | None) -> Send:
    """Return a `send` that adds the headers of a key's quotas (S-QUO-30)."""
    if standing is None:
        return send
    headers = [
        (name.encode(), value.encode())
        for name, value in standing.headers(datetime.fromtimestamp(SystemClock().now(), UTC))
    ]

    async def send_with_quotas(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    return send_with_quotas


class _WatchedAnswer:
    """Ends a streaming answer when the key of its caller is revoked."""

    def __init__(self, callers: Callers, credentials: Credentials, send: Send, answering: CancelScope) -> None:
        self._callers = callers
        self._credentials = Credentials(digest=credentials.digest, is_local=credentials.is_local, is_counted=False)
        self._send = send
        self._answering = answering
        self._looked_at = time.monotonic()

    async def __call__(self, message: Message) -> None:
        if message.get("more_body") and time.monotonic() - self._looked_at >= _LOOK_S:
            try:
                await self._callers.admit(self._credentials)
            except Refusal as refusal:
                if refusal.status is HTTPStatus.UNAUTHORIZED:
                    _log.warning("Ended an answer, because its key was revoked")
                    await self._send({"type": "http.response.body", "body": b"", "more_body": False})
                    self._answering.cancel()
                    return
            self._looked_at = time.monotonic()
        await self._send(message)


def bearer_of(scope: Scope) -> str | None:
    """Return the digest of a request's key; None without credentials. Malformed credentials match no key."""
    sent = headers_of(scope, b"authorization")
    if not sent:
        return None
    scheme, _, text = sent[0].strip().partition(" ")
    if len(sent) > 1 or scheme.lower() != "bearer" or not is_key(text.strip()):
        return _NO_KEY
    return digest_of(text.strip())


def is_local(scope: Scope) -> bool:
    """Return whether this machine sent the request: by loopback, to a loopback host, without a proxy's header."""
    hosts = headers_of(scope, b"host")
    names = [own_address(scope), (host_name(hosts[0]) or "") if len(hosts) == 1 else ""]
    is_forwarded = any(name.lower() in _FORWARDED for name, _ in scope["headers"])
    return not is_forwarded and all(map(admission.is_loopback, names))


def caller_of(
    request: Request, _sent: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)] = None
) -> Caller:
    found: object = getattr(request.state, "caller", ANYBODY)
    return found if isinstance(found, Caller) else ANYBODY


CallerDependency = Annotated[Caller, Depends(caller_of)]


def traceparent_of(request: Request, in_body: object = None) -> str | None:
    """Return the client's span, from the body or the header. Invalid values are ignored."""
    texts = (in_body if isinstance(in_body, str) else "", request.headers.get("traceparent", ""))
    found = next((span for span in map(parse_traceparent, texts) if span is not None), None)
    return None if found is None else str(found)
