"""The HTTP interface of an endpoint, as a web application without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, cast

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from ensemble_ray.process.config import package_version
from ensemble_ray.process.forks import threads
from ensemble_ray.serve.answers import add_failure_handlers
from ensemble_ray.serve.callers import Callers
from ensemble_ray.serve.mcp_api import add_mcp
from ensemble_ray.serve.middleware import OPEN_PATHS, HostCheck, KeyCheck, OriginCheck, body_too_long
from ensemble_ray.serve.openai_api.asking import refusal_error
from ensemble_ray.serve.openai_api.chat import chat_router, model_router
from ensemble_ray.serve.openai_api.responses import response_router
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
from ensemble_ray.studio.http_server import DEFAULT_MAX_BODY_BYTES, BodyLimit, ResponseHeaders

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send


_STUDIO = "/studio"
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
    mcp = add_mcp(api, max_body_bytes=max_body_bytes, allowed_origins=allowed_origins)
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
