"""The HTTP interface of an endpoint, as a web application that knows no Ray. Package: serve.

Routers, one a topic, over one `RunService`. Every refusal and every failure is a `Failure` as JSON. Pages that load scripts from
elsewhere are not served.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import APIRouter, FastAPI

from ensemble_ray.process.config import package_version
from ensemble_ray.serve.answers import add_failure_handlers
from ensemble_ray.serve.middleware import DEFAULT_MAX_BODY_BYTES, BodyLimit, HostCheck
from ensemble_ray.serve.routes import capabilities, control, ensembles, events, health, reviews, runs
from ensemble_ray.serve.run_service import RunService

__all__ = ["ROUTERS", "build_api"]

#: What an endpoint serves, a router a topic.
ROUTERS: tuple[APIRouter, ...] = (
    ensembles.router,
    runs.router,
    control.router,
    reviews.router,
    capabilities.router,
    events.router,
    health.router,
)


def build_api(
    service: AbstractAsyncContextManager[RunService],
    *,
    routers: Sequence[APIRouter] = ROUTERS,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    allowed_hosts: Sequence[str] = (),
) -> FastAPI:
    """Return the web application of an endpoint.

    Args:
        service: The runs behind it; entered with the application and left with it.
        routers: What it serves.
        max_body_bytes: Longer bodies are refused before they are in memory.
        allowed_hosts: Names that requests may be for besides those of loopback.
    """

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncGenerator[None, None]:
        async with service as entered:
            api.state.service = entered
            yield

    api = FastAPI(title="ensemble-ray", version=package_version(), lifespan=lifespan, docs_url=None, redoc_url=None)
    # The one that is added last comes first.
    api.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    api.add_middleware(HostCheck, allowed_hosts=allowed_hosts)
    add_failure_handlers(api)
    for router in routers:
        api.include_router(router)
    return api
