"""Access to runs and teams of one caller. Those of other teams do not exist for it (S-SRV-5)."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends, Request

from ensemble_ray.serve.run_service import RunService
from ensemble_ray.serve.schemas import Refusal

if TYPE_CHECKING:
    from ensemble_ray.serve.callers import Caller
    from ensemble_ray.serve.schemas import RunDetail


async def visible_run(service: RunService, caller: Caller, run_id: str) -> RunDetail:
    """Return a run of the caller's teams.

    Raises:
        Refusal: the caller's teams have no such run.
    """
    found = await service.get(run_id)
    if not caller.sees(found.ensemble):
        raise Refusal(HTTPStatus.NOT_FOUND, "RUN_NOT_FOUND", f"There is no run '{run_id[:200]}'", run_id=run_id[:200])
    return found


async def chosen_ensemble(service: RunService, caller: Caller, name: str | None) -> str | None:
    """Return the team that a request means; None: the service decides.

    Raises:
        Refusal: the team is not the caller's, or the caller has several and the request names none.
    """
    if caller.ensembles is None:
        return name
    known = [each.name for each in await service.ensembles() if caller.sees(each.name)]
    if name is None and len(known) == 1:
        return known[0]
    shown = ", ".join(known)
    if name is None:
        text = f"Say which team with 'ensemble'. There are: [{shown}]"
        raise Refusal(HTTPStatus.BAD_REQUEST, "ENSEMBLE_REQUIRED", text)
    if name not in known:
        raise Refusal(HTTPStatus.NOT_FOUND, "ENSEMBLE_NOT_FOUND", f"There is no team '{name}'. There are: [{shown}]")
    return name


def service_of(request: Request) -> RunService:
    """Return the service of the application.

    Raises:
        Refusal: the application is starting.
    """
    found: object = getattr(request.app.state, "service", None)
    if found is None:
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NOT_READY", "The endpoint is starting", retry_after_s=1)
    return cast("RunService", found)


ServiceDependency = Annotated[RunService, Depends(service_of)]
