"""ResponseHeaders: what every answer says to browsers and caches, the page's and the endpoint's. Plain ASGI."""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: A route that says something else of its own, such as a page with its scripts, is left as it is.
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class ResponseHeaders:
    """Adds headers to all answers of an application, those of refusals and of its own failures included.

    Args:
        app: What comes behind it.
        policy: What its pages may load and do, as `Content-Security-Policy`.
    """

    def __init__(self, app: ASGIApp, *, policy: str = HEADERS["content-security-policy"]) -> None:
        self._app = app
        self._headers = {**HEADERS, "content-security-policy": policy}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and the answer back with its headers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def refuse(status: HTTPStatus, code: str, message: str) -> JSONResponse:
    """Return a refusal from in front of an application, in the form of studio's failures."""
    failure = {"error": "InvalidRequest", "code": code, "message": message}
    return JSONResponse(failure, status_code=status, headers={**HEADERS, "connection": "close"})
