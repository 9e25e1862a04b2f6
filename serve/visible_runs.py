"""Runs and teams of one caller. Others do not exist for it (S-SRV-5)."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, cast

from fastapi import Depends, Request

from ensemble_ray.access.admission import Right
from ensemble_ray.errors import EnsembleError, message_of
from ensemble_ray.process.concurrency import bridge
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.recovery.revealing import RevealRefusedError, ValueReader, reveal_to
from ensemble_ray.serve.callers import Caller
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.serve.schemas import EnsembleInfo, Refusal, RunDetail
from ensemble_ray.text.redaction import map_texts


async def visible_run(service: RunService, caller: Caller, run_id: str) -> RunDetail:
    found = await service.get(run_id)
    if not caller.sees(found.ensemble):
        raise Refusal(HTTPStatus.NOT_FOUND, "RUN_NOT_FOUND", f"There is no run '{run_id[:200]}'", run_id=run_id[:200])
    return found


async def revealed_run(found: RunDetail, caller: Caller) -> RunDetail:
    """Return the run with the values of its redactor, if the caller may see them (S-RED-64)."""
    reader = ValueReader(name=caller.name or None, is_admin=Right.ADMIN in caller.rights, roles=caller.roles)
    try:
        redaction = await bridge(reveal_to(reader, store_at(StoreAddress.of()), found.run_id))
    except RevealRefusedError as error:
        raise Refusal(HTTPStatus.FORBIDDEN, "FORBIDDEN", str(error), run_id=found.run_id) from None
    except EnsembleError as error:
        raise Refusal(HTTPStatus.CONFLICT, "NOT_REVEALABLE", message_of(error), run_id=found.run_id) from None
    return cast("RunDetail", map_texts(found, redaction.restore))


async def visible_teams(service: RunService, caller: Caller) -> list[EnsembleInfo]:
    return [each for each in await service.ensembles() if caller.sees(each.name)]


async def visible_team(service: RunService, caller: Caller, name: str, *, kind: str = "team") -> EnsembleInfo:
    known = await visible_teams(service, caller)
    for each in known:
        if each.name == name:
            return each
    shown = ", ".join(each.name for each in known)
    text = f"There is no {kind} '{name[:200]}'. There are: [{shown}]"
    raise Refusal(HTTPStatus.NOT_FOUND, "ENSEMBLE_NOT_FOUND", text)


async def chosen_ensemble(service: RunService, caller: Caller, name: str | None) -> str | None:
    """Return the team that a request means; None: the service decides."""
    if caller.ensembles is None:
        return name
    known = [each.name for each in await visible_teams(service, caller)]
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
    found: object = getattr(request.app.state, "service", None)
    if found is None:
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NOT_READY", "The endpoint is starting", retry_after_s=1)
    return cast("RunService", found)


ServiceDependency = Annotated[RunService, Depends(service_of)]
