"""`/v1/models`: each team is a model (S-SRV-100)."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from ensemble_ray.access.keys import Right
from ensemble_ray.serve.answers import answer
from ensemble_ray.serve.openai_api.asking import find_models, model_of
from ensemble_ray.serve.openai_api.completions import Model, ModelList
from ensemble_ray.serve.openai_api.errors import API_ERRORS, ApiRoute
from ensemble_ray.serve.rights import CallerDependency
from ensemble_ray.serve.routes.service import ServiceDependency

model_router: APIRouter = APIRouter(prefix="/v1", tags=["openai"], responses=API_ERRORS, route_class=ApiRoute)


@model_router.get("/models", response_model=ModelList)
async def get_models(service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """List the teams as models."""
    caller.check(Right.READ)
    return answer(ModelList(data=[Model(id=each.name) for each in await find_models(service, caller)]))


@model_router.get("/models/{model}", response_model=Model)
async def get_model(model: str, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """Return a team as a model."""
    caller.check(Right.READ)
    return answer(Model(id=(await model_of(service, caller, model)).name))
