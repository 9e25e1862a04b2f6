"""`/runs`: begin, see and cancel runs (S-SRV-10 to S-SRV-25)."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse

from ensemble_ray.access.keys import Right
from ensemble_ray.serve.answers import FAILURES, answer, failure_answer
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.rights import CallerDependency
from ensemble_ray.serve.routes.service import ServiceDependency
from ensemble_ray.serve.routes.visible_runs import chosen_ensemble, visible_run
from ensemble_ray.serve.routes.waiting import LONGEST_WAIT_S, preferred_wait
from ensemble_ray.serve.run_schemas import AcceptedRun, Instant, NewRun, RunDetail, RunFilter, RunPage, RunStatus
from ensemble_ray.serve.run_service import DEFAULT_PAGE, LARGEST_PAGE
from ensemble_ray.serve.trace_context import traceparent_of

runs_router: APIRouter = APIRouter(tags=["runs"], responses=FAILURES)
_LOCATION = {"Location": {"description": "Where the run is", "schema": {"type": "string"}}}


@runs_router.post(
    "/runs",
    status_code=HTTPStatus.ACCEPTED,
    response_model=AcceptedRun,
    responses={
        200: {"model": RunDetail, "description": "It ended while the client waited", "headers": _LOCATION},
        202: {"description": "It was accepted", "headers": _LOCATION},
    },
)
async def post_run(
    asked: NewRun,
    service: ServiceDependency,
    caller: CallerDependency,
    request: Request,
    *,
    wait: Annotated[float | None, Query(ge=0, le=LONGEST_WAIT_S)] = None,
    prefer: Annotated[str | None, Header()] = None,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> JSONResponse:
    """Begin a run. With `wait`, answer with its result if it ends in so many seconds."""
    caller.check(Right.RUN)
    if asked.task_overrides is not None or asked.tasks is not None:
        caller.check(Right.ADMIN)  # they say what agents do, and with which tools
    ensemble = await chosen_ensemble(service, caller, asked.ensemble)
    # Keys of several callers must not meet.
    key = None if idempotency_key is None else f"{caller.name}:{idempotency_key}"
    span = traceparent_of(request, asked.traceparent)
    named = asked.model_copy(update={"ensemble": ensemble, "traceparent": span})
    taken = await service.start(named, idempotency_key=key)
    headers = {"location": f"{request.scope.get('root_path', '')}/runs/{taken.run_id}"}
    preferred = preferred_wait(prefer)
    seconds = preferred if wait is None else wait
    if seconds is None:
        return answer(taken, HTTPStatus.ACCEPTED, headers)
    if wait is None:
        headers["preference-applied"] = f"wait={seconds:.0f}"
    found = await service.wait(taken.run_id, seconds)
    if not found.status.is_final:
        return answer(taken.model_copy(update={"status": found.status}), HTTPStatus.ACCEPTED, headers)
    if found.error is not None:
        return failure_answer(found.error, headers)
    return answer(found, HTTPStatus.OK, headers)


@runs_router.get("/runs", response_model=RunPage)
async def get_runs(
    service: ServiceDependency,
    caller: CallerDependency,
    *,
    status: RunStatus | None = None,
    tag: Annotated[list[str], Query(max_length=16, description="NAME:VALUE; all of them must be the run's")] = [],  # noqa: B006  FastAPI copies it
    ensemble: Annotated[list[str], Query(max_length=64)] = [],  # noqa: B006  as above
    since: Instant | None = None,
    cursor: str | None = None,
    limit: Annotated[int, Query(ge=1, le=LARGEST_PAGE)] = DEFAULT_PAGE,
) -> JSONResponse:
    """List runs, newest first."""
    caller.check(Right.READ)
    ensembles = frozenset(ensemble) if ensemble else None
    if caller.ensembles is not None:
        ensembles = caller.ensembles if ensembles is None else ensembles & caller.ensembles
    wanted = RunFilter(status=status, ensembles=ensembles, tags=dict(map(_tag, tag)), since=since)
    return answer(await service.list(wanted, cursor=cursor, size=limit))


@runs_router.get("/runs/{run_id}", response_model=RunDetail)
async def get_run(run_id: str, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """Return a run with its result or its error."""
    caller.check(Right.READ)
    return answer(await visible_run(service, caller, run_id))


@runs_router.post("/runs/{run_id}/cancel", status_code=HTTPStatus.ACCEPTED, response_model=RunDetail)
async def post_cancel(run_id: str, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """Ask a run to end: nothing starts any more, and running tasks are stopped."""
    caller.check(Right.RUN)
    await visible_run(service, caller, run_id)
    return answer(await service.cancel(run_id), HTTPStatus.ACCEPTED)


def _tag(text: str) -> tuple[str, str]:
    """Return name and value of `NAME:VALUE`."""
    name, colon, value = text.partition(":")
    if not colon or not name:
        raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", "query.tag: say NAME:VALUE")
    return name, value
