"""From a request of the OpenAI API to a run of the team that it calls a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Header, Request
from pydantic import JsonValue

from ensemble_ray.access.keys import Right
from ensemble_ray.serve.asked_run import AskedRun
from ensemble_ray.serve.callers import Caller
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.rights import CallerDependency
from ensemble_ray.serve.routes.service import ServiceDependency
from ensemble_ray.serve.run_schemas import EnsembleInfo, NewRun
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.serve.trace_context import traceparent_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """One request, with what it is carried out by."""

    request: Request
    service: RunService
    caller: Caller
    idempotency_key: str | None

    async def begin(self, info: EnsembleInfo, inputs: Mapping[str, JsonValue], tags: Mapping[str, str]) -> AskedRun:
        """Begin a run of a team.

        Raises:
            Refusal: as `RunService.start`.
        """
        # Keys of several callers must not meet.
        key = None if self.idempotency_key is None else f"{self.caller.name}:{self.idempotency_key}"
        return await AskedRun.begin(
            self.service,
            NewRun(
                ensemble=info.name,
                inputs=dict(inputs),
                tags=dict(tags),
                traceparent=traceparent_of(self.request),
            ),
            idempotency_key=key,
            ends_with_client=bool(self.request.app.state.cancel_on_disconnect),
        )


def _asking(
    request: Request,
    service: ServiceDependency,
    caller: CallerDependency,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Asking:
    """Return a request of somebody who may begin runs.

    Raises:
        Refusal: the caller may not.
    """
    caller.check(Right.RUN)
    return Asking(request=request, service=service, caller=caller, idempotency_key=idempotency_key)


AskingDependency = Annotated[Asking, Depends(_asking)]


async def find_models(service: RunService, caller: Caller) -> list[EnsembleInfo]:
    """Return the teams that a caller may use."""
    return [each for each in await service.ensembles() if caller.sees(each.name)]


async def model_of(service: RunService, caller: Caller, name: str) -> EnsembleInfo:
    """Return the team that a request calls its model.

    Raises:
        Refusal: the caller has none of that name.
    """
    found = await find_models(service, caller)
    for each in found:
        if each.name == name:
            return each
    known = ", ".join(each.name for each in found)
    text = f"There is no model '{name[:200]}'. There are: [{known}]"
    raise Refusal(HTTPStatus.NOT_FOUND, "ENSEMBLE_NOT_FOUND", text)
