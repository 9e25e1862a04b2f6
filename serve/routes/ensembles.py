"""`/ensembles`: the teams that are served (S-SRV-2). Package: serve."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from ensemble_ray.serve.answers import FAILURES, answer
from ensemble_ray.serve.rights import CallerDependency, Right
from ensemble_ray.serve.routes.service import ServiceDependency
from ensemble_ray.serve.run_schemas import EnsembleList

__all__ = ["router"]

router: APIRouter = APIRouter(tags=["ensembles"], responses=FAILURES)


@router.get("/ensembles", response_model=EnsembleList)
async def get_ensembles(service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """List the teams, with the inputs that their runs have to give."""
    caller.check(Right.READ)
    seen = [each for each in await service.ensembles() if caller.sees(each.name)]
    return answer(EnsembleList(ensembles=seen))
