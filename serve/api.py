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

from ensemble_ray.access.admission import Right, is_allowed_origin
from ensemble_ray.access.quotas import HEADERS as QUOTA_HEADERS
from ensemble_ray.process.concurrency import threads
from ensemble_ray.process.config import package_version
from ensemble_ray.serve import openai_api, routes
from ensemble_ray.serve.callers import Callers
from ensemble_ray.serve.middleware import (
    OPEN_PATHS,
    HostCheck,
    KeyCheck,
    OriginCheck,
    add_failure_handlers,
    body_too_long,
    caller_of,
    refusal_answer,
)
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.serve.schemas import Refusal
from ensemble_ray.studio.http_server import DEFAULT_MAX_BODY_BYTES, BodyLimit, ResponseHeaders

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

_STUDIO, MCP_PATH = "/studio", "/mcp"
ROUTERS: tuple[APIRouter, ...] = (
    *(routes.ensembles_router, routes.runs_router, routes.control_router, routes.reviews_router),
    *(routes.schedules_router, routes.capabilities_router, routes.events_router, routes.health_router),
    routes.metrics_router,
    routes.quota_router,
    routes.operations_router,
    *(openai_api.model_router, openai_api.chat_router, openai_api.response_router, routes.a2a_router),
)
#: Headers that pages of other origins may send, and headers that they may read.
_CORS_REQUEST_HEADERS = (
    *("authorization", "content-type", "idempotency-key", "last-event-id", "prefer"),
    *("mcp-method", "mcp-name", "mcp-protocol-version"),
)
_CORS_RESPONSE_HEADERS = (
    *("location", "preference-applied", "retry-after"),
    *("www-authenticate", "x-request-id", "x-run-id"),
    *QUOTA_HEADERS,
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
    """Return the web application of an endpoint, which enters `service`.

    Without `callers` every request is admitted. `allowed_hosts` are accepted besides loopback names; pages of `allowed_origins`
    may send requests. `public_url` is the base URL in A2A cards, by default the request's URL.
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
    api.state.callers = callers
    api.state.asks_for_keys = callers is not None
    api.add_middleware(BodyLimit, max_bytes=max_body_bytes, refusal=body_too_long)
    if callers is not None:
        api.add_middleware(
            KeyCheck,
            callers=callers,
            forms={"/v1/": openai_api.refusal_error},
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
        # `include_router` would build each route again at the first request (40 ms).
        api.router.routes.extend(router.routes)
    mcp = _LazyMcp(max_body_bytes=max_body_bytes, allowed_origins=allowed_origins)
    api.router.routes.append(Route(MCP_PATH, endpoint=cast("ASGIApp", mcp), include_in_schema=False))
    if has_studio:
        api.mount(_STUDIO, _lazy_studio(lambda: cast("RunService", api.state.service)))
    return api


def is_page(path: str) -> bool:
    """Whether a path is a static file of Studio, which needs no key."""
    return path == _STUDIO or (path.startswith(f"{_STUDIO}/") and not path.startswith(f"{_STUDIO}/api/"))


def _lazy_studio(service: Callable[[], RunService]) -> ASGIApp:
    """Return an application that builds Studio on the first request."""
    app: ASGIApp | None = None
    lock = asyncio.Lock()

    def build() -> ASGIApp:
        from ensemble_ray.serve.studio import endpoint_studio

        return endpoint_studio(service)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal app
        async with lock:
            if app is None:
                app = await threads.run(build)
            built = app
        await built(scope, receive, send)

    return answer


class _LazyMcp:
    """Checks requests and passes them to the SDK's server, which the first request loads and starts."""

    def __init__(self, *, max_body_bytes: int, allowed_origins: Sequence[str]) -> None:
        self._max_body_bytes = max_body_bytes
        self._allowed_origins = allowed_origins
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
            # In an empty context, because the server outlives the first request.
            self._opening = asyncio.create_task(self._open(), context=contextvars.Context())
        manager = await asyncio.shield(self._opening)
        await manager.handle_request(scope, receive, send)

    async def close(self) -> None:
        self._closed.set()
        if self._holding is not None:
            await asyncio.wait({self._holding})

    def _check(self, request: Request, scope: Scope) -> None:
        caller_of(request).check(Right.RUN)
        if not is_allowed_origin(scope, self._allowed_origins):  # also for requests with a key
            text = (
                "Pages of this origin may not send requests. What to do: ask the operator to add it to allowed_origins"
            )
            raise Refusal(HTTPStatus.FORBIDDEN, "FORBIDDEN", text)
        if request.method != "POST":
            text = f"{request.method} {MCP_PATH}: only POST is served, since the server keeps no sessions"
            raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", text, headers=(("allow", "POST"),))
        if find_spec("mcp") is None:
            text = "MCP needs the package mcp, which is not installed: pip install 'ensemble-ray[mcp]'"
            raise Refusal(HTTPStatus.NOT_IMPLEMENTED, "NOT_INSTALLED", text)

    async def _open(self) -> StreamableHTTPSessionManager:
        server = await asyncio.to_thread(importlib.import_module, "ensemble_ray.serve.mcp_api")
        manager: StreamableHTTPSessionManager = server.build_session_manager(max_body_bytes=self._max_body_bytes)
        is_open: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def hold() -> None:  # one task must enter and leave the manager's cancel scopes
            async with manager.run():
                is_open.set_result(None)
                await self._closed.wait()

        self._holding = asyncio.create_task(hold())
        await is_open
        return manager
