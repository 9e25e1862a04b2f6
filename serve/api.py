"""The HTTP interface of an endpoint, as a web application without Ray."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ensemble_ray.access.admission import is_allowed_origin
from ensemble_ray.access.keys import Right
from ensemble_ray.process.concurrency import threads
from ensemble_ray.process.config import package_version
from ensemble_ray.serve.answers import add_failure_handlers, refusal_answer
from ensemble_ray.serve.callers import Callers
from ensemble_ray.serve.middleware import OPEN_PATHS, HostCheck, KeyCheck, OriginCheck, body_too_long, caller_of
from ensemble_ray.serve.openai_api import chat_router, model_router, refusal_error, response_router
from ensemble_ray.serve.routes import (
    a2a_router,
    capabilities_router,
    control_router,
    ensembles_router,
    events_router,
    health_router,
    metrics_router,
    reviews_router,
    runs_router,
)
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.serve.schemas import Refusal
from ensemble_ray.studio.http_server import DEFAULT_MAX_BODY_BYTES, BodyLimit, ResponseHeaders

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

_STUDIO, MCP_PATH = "/studio", "/mcp"
ROUTERS: tuple[APIRouter, ...] = (
    ensembles_router,
    runs_router,
    control_router,
    reviews_router,
    capabilities_router,
    events_router,
    health_router,
    metrics_router,
    model_router,
    chat_router,
    response_router,
    a2a_router,
)
#: Headers that pages of other origins may send, and headers of an answer that they may read.
_CORS_REQUEST_HEADERS = (
    *("authorization", "content-type", "idempotency-key", "last-event-id", "prefer"),
    *("mcp-method", "mcp-name", "mcp-protocol-version"),
)
_CORS_RESPONSE_HEADERS = (
    *("location", "preference-applied", "retry-after"),
    *("www-authenticate", "x-request-id", "x-run-id"),
)


def build_api(
    service: AbstractAsyncContextManager[RunService],
    *,
    callers: Callers | None = None,
    routers: Sequence[APIRouter] = ROUTERS,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    allowed_hosts: Sequence[str] = (),
    cancel_on_disconnect: bool = True,
    allowed_origins: Sequence[str] = (),
    has_studio: bool = False,
    public_url: str | None = None,
) -> FastAPI:
    """Return the web application of an endpoint.

    Args:
        service: The runs; entered and left with the application.
        callers: Identifies callers; None admits every request, for tests and for servers with their own check.
        routers: Routes to serve.
        max_body_bytes: Longer bodies are rejected before they are read completely.
        allowed_hosts: Values of `Host` to accept besides loopback names.
        cancel_on_disconnect: Whether a run that was started through the OpenAI API ends with its connection.
        allowed_origins: Origins, such as `https://team.example.org`, whose pages may send requests.
        has_studio: Whether to serve Studio at `/studio`.
        public_url: Base URL in A2A cards; None: the URL of the request for the card.
    """

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncGenerator[None, None]:
        async with service as entered:
            api.state.service = entered
            try:
                yield
            finally:
                await mcp.close()

    api = FastAPI(title="ensemble-ray", version=package_version(), lifespan=lifespan, docs_url=None, redoc_url=None)
    api.state.cancel_on_disconnect = cancel_on_disconnect
    api.state.public_url = public_url
    api.state.asks_for_keys = callers is not None
    # The middleware that is added last runs first.
    api.add_middleware(BodyLimit, max_bytes=max_body_bytes, refusal=body_too_long)
    if callers is not None:
        api.add_middleware(
            KeyCheck,
            callers=callers,
            forms={"/v1/": refusal_error},
            is_open=is_page if has_studio else OPEN_PATHS.__contains__,
        )
    api.add_middleware(OriginCheck, allowed_origins=allowed_origins)
    if allowed_origins:
        api.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=_CORS_REQUEST_HEADERS,
            expose_headers=_CORS_RESPONSE_HEADERS,
        )
    api.add_middleware(HostCheck, allowed_hosts=allowed_hosts)
    api.add_middleware(ResponseHeaders)
    add_failure_handlers(api)
    for router in routers:
        # `include_router` would build each route a second time at the first request (40 ms), without any other effect.
        api.router.routes.extend(router.routes)
    mcp = _LazyMcp(max_body_bytes=max_body_bytes, allowed_origins=allowed_origins)
    api.router.routes.append(Route(MCP_PATH, endpoint=cast("ASGIApp", mcp), include_in_schema=False))
    if has_studio:
        api.mount(_STUDIO, _LazyStudio(lambda: cast("RunService", api.state.service)))
    return api


def is_page(path: str) -> bool:
    """Whether a path is a static file of Studio, which contains no data and needs no key."""
    return path == _STUDIO or (path.startswith(f"{_STUDIO}/") and not path.startswith(f"{_STUDIO}/api/"))


class _LazyStudio:
    """Builds Studio on the first request."""

    def __init__(self, service: Callable[[], RunService]) -> None:
        self._service = service
        self._app: ASGIApp | None = None
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._lock:
            if self._app is None:
                self._app = await threads.run(self._build)
        await self._app(scope, receive, send)

    def _build(self) -> ASGIApp:
        from ensemble_ray.serve.studio import endpoint_studio

        return endpoint_studio(self._service)


class _LazyMcp:
    """Checks requests and passes them to the SDK's server, which the first request loads and starts."""

    def __init__(self, *, max_body_bytes: int, allowed_origins: Sequence[str]) -> None:
        self._max_body_bytes = max_body_bytes
        self._allowed_origins = frozenset(allowed_origins)
        self._opening: asyncio.Task[StreamableHTTPSessionManager] | None = None
        self._holding: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(Request(scope), scope)
        except Refusal as refusal:
            await refusal_answer(refusal)(scope, receive, send)
            return
        if self._opening is None:
            # An empty context, because the server must outlive the first request.
            self._opening = asyncio.create_task(self._open(), context=contextvars.Context())
        manager = await asyncio.shield(self._opening)
        await manager.handle_request(scope, receive, send)

    async def close(self) -> None:
        self._closed.set()
        if self._holding is not None:
            await asyncio.wait({self._holding})

    def _check(self, request: Request, scope: Scope) -> None:
        """Raise a `Refusal` if the method, the origin, the caller's rights or the installation do not allow the request."""
        caller_of(request).check(Right.RUN)
        if not is_allowed_origin(scope, self._allowed_origins):  # the protocol requires it also for requests with a key
            text = (
                "Pages of this origin may not send requests. What to do: ask the operator to add it to allowed_origins"
            )
            raise Refusal(HTTPStatus.FORBIDDEN, "FORBIDDEN", text)
        if request.method != "POST":  # without sessions there are no other methods
            text = f"{request.method} {MCP_PATH}: only POST is served, since the server keeps no sessions"
            allow = (("allow", "POST"),)
            raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", text, headers=allow)
        if find_spec("mcp") is None:
            text = "MCP needs the package mcp, which is not installed: pip install 'ensemble-ray[mcp]'"
            raise Refusal(HTTPStatus.NOT_IMPLEMENTED, "NOT_INSTALLED", text)

    async def _open(self) -> StreamableHTTPSessionManager:
        server = await asyncio.to_thread(importlib.import_module, "ensemble_ray.serve.mcp_api")
        manager: StreamableHTTPSessionManager = server.build_session_manager(max_body_bytes=self._max_body_bytes)
        is_open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold(manager, is_open))
        await is_open
        return manager

    async def _hold(self, manager: StreamableHTTPSessionManager, is_open: asyncio.Future[None]) -> None:
        """Keep the manager open. Its cancel scopes must be entered and left by the same task."""
        async with manager.run():
            is_open.set_result(None)
            await self._closed.wait()
