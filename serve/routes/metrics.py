"""`/metrics`: what runs of an endpoint did and cost, for Prometheus (S-SRV-170)."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response

from ensemble_ray.access.keys import Right
from ensemble_ray.serve.answers import FAILURES
from ensemble_ray.serve.metrics import render_samples
from ensemble_ray.serve.rights import CallerDependency
from ensemble_ray.serve.routes.service import ServiceDependency

metrics_router: APIRouter = APIRouter(tags=["health"], responses=FAILURES)
_TEXT = {"text/plain": {"schema": {"type": "string"}}}


@metrics_router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "The text format of Prometheus", "content": _TEXT}},
)
async def get_metrics(service: ServiceDependency, caller: CallerDependency) -> PlainTextResponse:
    """Return counts of runs, tokens, cost and refusals, of the caller's teams; those of the whole endpoint if it has all."""
    caller.check(Right.READ)
    seen = [
        each
        for each in await service.metrics()
        if caller.ensembles is None or (each.team is not None and caller.sees(each.team))
    ]
    return PlainTextResponse(render_samples(seen))
