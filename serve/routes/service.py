"""The service behind the routes of an application."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, cast

from fastapi import Depends, Request

from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.run_service import RunService


def service_of(request: Request) -> RunService:
    """Return the service of the application that a request came to.

    Raises:
        Refusal: it is not there yet.
    """
    found: object = getattr(request.app.state, "service", None)
    if found is None:
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NOT_READY", "The endpoint is starting", retry_after_s=1)
    return cast("RunService", found)


ServiceDependency = Annotated[RunService, Depends(service_of)]
