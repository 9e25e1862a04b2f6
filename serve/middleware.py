"""What a request has to pass before the interface sees it: its host, its origin, and the length of its body.

All are plain ASGI and know neither teams nor runs. Refusals have the form of all failures. Never: a request for another host's
name, by which a page of another site reaches a server that listens on loopback alone (DNS rebinding).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from http import HTTPStatus

from fastapi.responses import JSONResponse
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ensemble_ray import ValidationError
from ensemble_ray.access.admission import headers_of, host_name, is_allowed_origin, is_served_host, own_address
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve.schemas import Failure
from ensemble_ray.studio.body_limit import DEFAULT_MAX_BODY_BYTES, BodyLimit, body_length, too_long

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
