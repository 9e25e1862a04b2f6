"""Answers of the protocol server as they are sent."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web


async def reply_with(
    http: web.BaseRequest,
    body: bytes,
    *,
    status: int = 200,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """Send a whole answer."""
    response = web.Response(body=body, status=status, content_type=content_type, headers=headers)
    await response.prepare(http)
    await response.write_eof()
    return response


def drop(http: web.BaseRequest, response: web.StreamResponse | None = None) -> web.StreamResponse:
    """Cut the connection without another byte."""
    if http.transport is not None:
        http.transport.abort()
    return response or web.StreamResponse()  # the library wants one, and cannot send it any more
