"""`/reviews`: gates at which runs wait for people, and decisions there (S-SRV-202 to S-SRV-204)."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from ensemble_ray.access.keys import Right
from ensemble_ray.serve.answers import FAILURES, answer
from ensemble_ray.serve.control_schemas import DecidedReview, NewDecision, ReviewConflict, ReviewList
from ensemble_ray.serve.rights import CallerDependency
from ensemble_ray.serve.routes.service import ServiceDependency
from ensemble_ray.serve.routes.visible_runs import visible_run

reviews_router: APIRouter = APIRouter(tags=["reviews"], responses=FAILURES)


@reviews_router.get("/reviews", response_model=ReviewList)
async def get_reviews(service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """List the gates that are open, oldest first."""
    if Right.REVIEW not in caller.rights:  # who decides has to see what about
        caller.check(Right.READ)
    return answer(ReviewList(reviews=list(await service.reviews(caller.ensembles))))


@reviews_router.post(
    "/reviews/{run_id}/{gate_id}",
    response_model=DecidedReview,
    responses={409: {"model": ReviewConflict, "description": "It was decided before; `first` is that decision"}},
)
async def post_decision(
    run_id: str, gate_id: str, decision: NewDecision, service: ServiceDependency, caller: CallerDependency
) -> JSONResponse:
    """Decide at a gate. The run goes on by itself."""
    caller.check(Right.REVIEW)
    await visible_run(service, caller, run_id)
    decided = await service.decide(run_id, gate_id, decision, by=caller.name)
    return answer(decided, HTTPStatus.CONFLICT if isinstance(decided, ReviewConflict) else HTTPStatus.OK)
