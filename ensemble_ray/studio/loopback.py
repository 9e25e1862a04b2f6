"""LoopbackCheck: keeps pages of other sites from a server that listens on loopback. Plain ASGI.

Whoever is at this machine may ask such a server everything, so a page of another site must not ask it through their browser: under
another name that leads here (S-WEB-73), or with a request that changes something (S-WEB-74). Refusals have the form of all failures.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray.access.admission import headers_of, host_name, is_allowed_origin, is_loopback
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.studio.response_headers import refuse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_log = bounded_logger(__name__)


class LoopbackCheck:
    """Lets requests pass that are for a name of loopback, and from no page of another site.

    Browsers send the origin of a page with its requests; programs send none.
    WebSockets check their `Origin` themselves, since they say why on the connection (S-WEB-71).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it with 403."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        hosts = headers_of(scope, b"host")
        host = host_name(hosts[0]) if len(hosts) == 1 else None
        if host is None or not is_loopback(host):
            shown = ", ".join(hosts) or "none"
            _log.warning("Refused a request for the host '%.200s'", shown)
            text = f"The host '{shown[:200]}' is not served here: use localhost or 127.0.0.1"
            await _refuse("HOST_NOT_SERVED", text, scope, receive, send)
        elif scope["type"] == "http" and not is_allowed_origin(scope):
            text = "Origin not allowed: only pages of this machine may ask here"
            _log.warning("Refused a request from the page '%.200s'", ", ".join(headers_of(scope, b"origin")))
            await _refuse("ORIGIN_NOT_ALLOWED", text, scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def _refuse(code: str, message: str, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": message[:100]})  # which is answered with 403
        return
    await refuse(HTTPStatus.FORBIDDEN, code, message)(scope, receive, send)
