"""`/ensembles`: the teams that are served (S-SRV-2)."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from ensemble_ray.access.keys import Right
from ensemble_ray.serve.answers import FAILURES, answer
from ensemble_ray.serve.rights import CallerDependency
from ensemble_ray.serve.routes.service import ServiceDependency
from ensemble_ray.serve.run_schemas import EnsembleList

ensembles_router: APIRouter = APIRouter(tags=["ensembles"], responses=FAILURES)


@ensembles_router.get("/ensembles", response_model=EnsembleList)
async def get_ensembles(service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """List the teams, with the inputs that their runs have to give."""
    caller.check(Right.READ)
    seen = [each for each in await service.ensembles() if caller.sees(each.name)]
    return answer(EnsembleList(ensembles=seen))
