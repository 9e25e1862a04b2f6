"""The HTTP client of a session, which tells what became of each request. Package: tools. Imported with the SDK, which needs the same package."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, cast

import httpx2

from ensemble_ray.text.unpacking import ACCEPTED_CODINGS, bound_response
from ensemble_ray.tools.mcp.address import ServerAddress
from ensemble_ray.tools.mcp.delivery import MESSAGE_BYTES, McpDelivery, current_delivery

__all__ = ["http_client", "sse_http_client"]


_SESSION_ID = "mcp-session-id"
#: What is read of the body of a failure.
_FAILURE_BYTES = 64 * 2**10


class _WatchedClient(httpx2.AsyncClient):
    """Tells the work that a request is part of whether it may have arrived, and with which status it was answered."""

    def __init__(self, address: ServerAddress) -> None:
        headers = httpx2.Headers({"Accept-Encoding": ACCEPTED_CODINGS})
        headers.update(dict(address.headers))
        timeout = httpx2.Timeout(address.connect_timeout_s, read=None)
        super().__init__(headers=headers, timeout=timeout, event_hooks={"response": [_bound]})

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request; one for which there was no connection was not sent."""
        delivery = current_delivery.get() or McpDelivery()
        delivery.sent += 1
        if request.method == "DELETE":  # of a session that has ended: a server that hangs is not waited for
            request.extensions["timeout"] = httpx2.Timeout(self.timeout.connect).as_dict()
        try:
            response = await super().send(request, **options)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout):
            delivery.sent -= 1
            raise
        delivery.status = response.status_code
        # So the protocol says of a session that has ended; the SDK's own server has a text of its own for it.
        delivery.is_forgotten = response.status_code == HTTPStatus.NOT_FOUND and _SESSION_ID in request.headers
        if delivery.is_forgotten:
            delivery.sent -= 1
        return response


class _SseClient(_WatchedClient):
    """Closes the connection for the SDK when the server refuses a message: no answer to that will come, and the session is over."""

    def __init__(self, address: ServerAddress) -> None:
        super().__init__(address)
        self._answers: _Answers | None = None

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request; a message that was refused was not worked on. The SDK logs what is raised here, with the URL."""
        try:
            response = await super().send(request, **options)
            if request.method != "GET":
                async with contextlib.aclosing(response):
                    await response.aread()  # here: the SDK, which needs none of it, hangs where it cannot be read
        except (httpx2.TransportError, httpx2.StreamError):
            if self._answers is None:
                raise
            await self._answers.aclose()
            return httpx2.Response(HTTPStatus.ACCEPTED, request=request)
        if request.method == "GET":
            if response.is_success:
                response.stream = self._answers = _Answers(response.stream)
        elif response.status_code >= HTTPStatus.BAD_REQUEST and self._answers is not None:
            if response.is_client_error and (delivery := current_delivery.get()) is not None:
                delivery.sent -= 1
            await self._answers.aclose()
            return httpx2.Response(HTTPStatus.ACCEPTED, request=request)
        return response


class _Answers(httpx2.AsyncByteStream):
    """The stream of a server's answers, which ends where it breaks off."""

    def __init__(self, inner: httpx2.AsyncByteStream | httpx2.SyncByteStream) -> None:
        self._inner = cast("httpx2.AsyncByteStream", inner)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with contextlib.suppress(httpx2.TransportError, httpx2.StreamError):
            async for part in self._inner:
                yield part

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Unreadable(httpx2.AsyncByteStream):
    """A body that is not read."""

    def __init__(self, inner: httpx2.AsyncByteStream | httpx2.SyncByteStream, error: httpx2.StreamError) -> None:
        self._inner = cast("httpx2.AsyncByteStream", inner)
        self._error = error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        raise self._error
        yield b""

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _bound(response: httpx2.Response) -> None:
    """Bound an answer; a stream may be long, and the SDK bounds each of its events."""
    is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
    try:
        bound_response(
            response,
            httpx2.StreamError,
            max_bytes=sys.maxsize if is_stream else MESSAGE_BYTES,
            cut_bytes=_FAILURE_BYTES if response.is_error else None,
        )
    except httpx2.StreamError as error:
        if response.request.method == "GET":  # the client closes it
            raise
        response.stream = _Unreadable(response.stream, error)  # else the SDK ends the whole session


def http_client(address: ServerAddress) -> httpx2.AsyncClient:
    """Return the client of a session; how long an answer may take is the matter of each call."""
    return _WatchedClient(address)


def sse_http_client(
    address: ServerAddress,
    headers: dict[str, str] | None = None,  # noqa: ARG001  the SDK's idea of the client is passed over
    timeout: httpx2.Timeout | None = None,  # noqa: ARG001  as above
    auth: httpx2.Auth | None = None,  # noqa: ARG001  as above
) -> httpx2.AsyncClient:
    """Return the client of a session over the older SSE transport."""
    return _SseClient(address)
