"""The HTTP interface of an endpoint, as a web application that knows no Ray.

Routers, one a topic, over one `RunService`. Every refusal and every failure is a `Failure` as JSON. Pages that load scripts from
elsewhere are not served.
"""

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


#: Where the page is.
_BASE = "/studio"


def is_page(path: str) -> bool:
    """Whether a path is that of a file of the page, which holds no data and needs no key."""
    return path == _BASE or (path.startswith(f"{_BASE}/") and not path.startswith(f"{_BASE}/api/"))


def add_studio(api: FastAPI, service: Callable[[], RunService]) -> None:
    """Add the page, and what it asks for, to an endpoint.

    Args:
        api: The endpoint.
        service: Gives its runs, once it has started.
    """
    api.mount(_BASE, _LazyStudio(service))


class _LazyStudio:
    """Studio, made when somebody asks."""

    def __init__(self, service: Callable[[], RunService]) -> None:
        self._service = service
        self._made: ASGIApp | None = None
        self._making = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._making:
            if self._made is None:
                self._made = await threads.run(self._make)
        await self._made(scope, receive, send)

    def _make(self) -> ASGIApp:
        from ensemble_ray.serve.studio import endpoint_studio

        return endpoint_studio(self._service)


#: What an endpoint serves, a router a topic.
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
#: What pages of other origins may send, and what they may read of an answer besides its body.
_SENT = (
    *("authorization", "content-type", "idempotency-key", "last-event-id", "prefer"),
    *("mcp-method", "mcp-name", "mcp-protocol-version"),
)
_READ = ("location", "preference-applied", "retry-after", "www-authenticate", "x-request-id", "x-run-id")


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
        service: The runs behind it; entered with the application and left with it.
        callers: Who may ask; None: everybody, for tests and what has a check of its own.
        routers: What it serves.
        max_body_bytes: Longer bodies are refused before they are in memory.
        allowed_hosts: Names that requests may be for besides those of loopback.
        cancel_on_disconnect: Whether a run that was asked for through the OpenAI API ends with its connection.
        allowed_origins: Origins, such as `https://team.example.org`, whose pages may ask.
        has_studio: Whether it serves the page over its runs, at `/studio`.
        public_url: Where clients reach it, for the cards of its teams; None: where their requests for a card came to.
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
    # The one that is added last comes first.
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
            allow_headers=_SENT,
            expose_headers=_READ,
        )
    api.add_middleware(HostCheck, allowed_hosts=allowed_hosts)
    api.add_middleware(ResponseHeaders)
    add_failure_handlers(api)
    for router in routers:
        # `include_router` would build each route a second time at the first request (40 ms), and change nothing about it.
        api.router.routes.extend(router.routes)
    mcp = add_mcp(api, max_body_bytes=max_body_bytes, allowed_origins=allowed_origins)
    if has_studio:
        add_studio(api, lambda: cast("RunService", api.state.service))
    return api
