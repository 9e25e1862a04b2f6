"""The HTTP client of a session, which tells what became of each request. Package: tools. Imported with the SDK, which needs the same package."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import httpx2

from ensemble_ray.tools.mcp.address import ServerAddress
from ensemble_ray.tools.mcp.delivery import McpDelivery, current_delivery

__all__ = ["http_client"]


_SESSION_ID = "mcp-session-id"


class _WatchedClient(httpx2.AsyncClient):
    """Tells the work that a request is part of whether it may have arrived, and with which status it was answered."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request; one for which there was no connection was not sent."""
        delivery = current_delivery.get() or McpDelivery()
        delivery.sent += 1
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


def http_client(address: ServerAddress) -> httpx2.AsyncClient:
    """Return the client of a session; how long an answer may take is the matter of each call."""
    timeout = httpx2.Timeout(address.connect_timeout_s, read=None)
    return _WatchedClient(headers=dict(address.headers), timeout=timeout)
