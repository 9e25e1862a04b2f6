"""`/healthz` and `/readyz` (S-SRV-60)."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from fastapi import APIRouter

from ensemble_ray.serve.answers import FAILURES
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.routes.service import ServiceDependency
from ensemble_ray.serve.schemas import Health

health_router: APIRouter = APIRouter(tags=["health"], responses=FAILURES)
#: How long what drives runs may take to answer, s.
_PATIENCE_S = 5.0


@health_router.get("/healthz")
async def get_health() -> Health:
    """Return whether this process answers."""
    return Health(status="ok")


@health_router.get("/readyz")
async def get_readiness(service: ServiceDependency) -> Health:
    """Return whether runs can be begun: what drives them answers, and has loaded its teams."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await service.ensembles()
    except TimeoutError:
        raise Refusal(
            HTTPStatus.SERVICE_UNAVAILABLE, "NOT_READY", "What drives runs does not answer", retry_after_s=5
        ) from None
    return Health(status="ok")
