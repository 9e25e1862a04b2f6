"""`/runs/{run_id}/inject` and `/model`: what people tell a run that goes on (S-SRV-200, S-SRV-201, S-SRV-209)."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from ensemble_ray.access.keys import Right
from ensemble_ray.serve.answers import FAILURES, answer
from ensemble_ray.serve.control_schemas import NewDirective, NewModel
from ensemble_ray.serve.rights import CallerDependency
from ensemble_ray.serve.routes.service import ServiceDependency
from ensemble_ray.serve.routes.visible_runs import visible_run
from ensemble_ray.serve.run_schemas import RunDetail

control_router: APIRouter = APIRouter(tags=["runs"], responses=FAILURES)


@control_router.post("/runs/{run_id}/inject", response_model=RunDetail)
async def post_directive(
    run_id: str, directive: NewDirective, service: ServiceDependency, caller: CallerDependency
) -> JSONResponse:
    """Tell the tasks of a run that start from now on; it is on record when this is answered."""
    caller.check(Right.RUN)
    await visible_run(service, caller, run_id)
    return answer(await service.inject(run_id, directive, by=caller.name), HTTPStatus.OK)


@control_router.post("/runs/{run_id}/model", response_model=RunDetail)
async def post_model(
    run_id: str, model: NewModel, service: ServiceDependency, caller: CallerDependency
) -> JSONResponse:
    """Let the tasks of a run that start from now on ask another model; it is on record when this is answered."""
    caller.check(Right.RUN)
    await visible_run(service, caller, run_id)
    return answer(await service.switch_model(run_id, model, by=caller.name), HTTPStatus.OK)
