"""The door of `/mcp`: what a request passes before the SDK reads it, and how long what answers lives.

In: requests that `KeyCheck`, `HostCheck` and `BodyLimit` let pass. Out: answers of the SDK. Rules: the package `mcp` is loaded with the
first request, on a thread; every request stands alone, so that any replica answers it; pages of other origins are refused.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
from collections.abc import Sequence
from http import HTTPStatus
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from fastapi import FastAPI
from starlette.requests import Request
from starlette.routing import Route

from ensemble_ray.access.admission import is_allowed_origin
from ensemble_ray.access.keys import Right
from ensemble_ray.serve.answers import refusal_answer
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.rights import caller_of

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from starlette.types import ASGIApp, Receive, Scope, Send

#: Where the server is.
PATH = "/mcp"
_SERVER = "ensemble_ray.serve.mcp_api.server"


def add_mcp(api: FastAPI, *, max_body_bytes: int, allowed_origins: Sequence[str]) -> McpEndpoint:
    """Serve teams as tools at `/mcp`.

    Args:
        api: The endpoint.
        max_body_bytes: The longest body.
        allowed_origins: Origins whose pages may ask.
    """
    endpoint = McpEndpoint(max_body_bytes=max_body_bytes, allowed_origins=allowed_origins)
    api.router.routes.append(Route(PATH, endpoint=cast("ASGIApp", endpoint), include_in_schema=False))
    return endpoint


class McpEndpoint:
    """Lets requests pass to the SDK, which it starts with the first one."""

    def __init__(self, *, max_body_bytes: int, allowed_origins: Sequence[str]) -> None:
        self._max_body_bytes = max_body_bytes
        self._allowed_origins = frozenset(allowed_origins)
        self._opening: asyncio.Task[StreamableHTTPSessionManager] | None = None
        self._holding: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            self._check(Request(scope), scope)
        except Refusal as refusal:
            await refusal_answer(refusal)(scope, receive, send)
            return
        manager = await self._manager()
        await manager.handle_request(scope, receive, send)

    async def close(self) -> None:
        """End what still answers."""
        self._closed.set()
        if self._holding is not None:
            await asyncio.wait({self._holding})

    def _check(self, request: Request, scope: Scope) -> None:
        """Refuse what is not for the SDK.

        Raises:
            Refusal: another method than POST, a page of another origin, a caller without the right `run`, or no package `mcp`.
        """
        caller_of(request).check(Right.RUN)
        if not is_allowed_origin(scope, self._allowed_origins):  # also with a key, as the protocol wants it
            text = "Pages of this origin may not ask here. What to do: the operator names it with allowed_origins"
            raise Refusal(HTTPStatus.FORBIDDEN, "FORBIDDEN", text)
        if request.method != "POST":  # there are no sessions to end, and no messages outside of answers
            text = f"{request.method} {PATH}: only POST is served, since the server keeps no sessions"
            allow = (("allow", "POST"),)
            raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", text, headers=allow)
        if find_spec("mcp") is None:
            text = "MCP needs the package mcp, which is not installed: pip install 'ensemble-ray[mcp]'"
            raise Refusal(HTTPStatus.NOT_IMPLEMENTED, "NOT_INSTALLED", text)

    async def _manager(self) -> StreamableHTTPSessionManager:
        if self._opening is None:
            # In a context of its own: what belongs to the request that comes first must not end with it.
            self._opening = asyncio.create_task(self._open(), context=contextvars.Context())
        return await asyncio.shield(self._opening)

    async def _open(self) -> StreamableHTTPSessionManager:
        server = await asyncio.to_thread(importlib.import_module, _SERVER)
        manager = cast(
            "StreamableHTTPSessionManager", server.build_session_manager(max_body_bytes=self._max_body_bytes)
        )
        is_open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold(manager, is_open))
        await is_open
        return manager

    async def _hold(self, manager: StreamableHTTPSessionManager, is_open: asyncio.Future[None]) -> None:
        """Keep it open in one task, as its cancel scopes need it."""
        async with manager.run():
            is_open.set_result(None)
            await self._closed.wait()
