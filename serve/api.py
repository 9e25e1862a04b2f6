"""The HTTP interface of one team, as a web application that knows no Ray. Package: serve.

`POST /runs` runs the team and answers with its output; `GET /healthz` says that it is loaded. Every refusal and every
failure is a `Failure` as JSON. Pages that load scripts from elsewhere are not served.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ensemble_ray import EnsembleError, IllegalStateError
from ensemble_ray.serve.failures import failure_of, status_of
from ensemble_ray.serve.middleware import DEFAULT_MAX_BODY_BYTES, BodyLimit, HostCheck
from ensemble_ray.serve.run_schemas import NewRun
from ensemble_ray.serve.runs import Runs
from ensemble_ray.serve.schemas import Failure, FinishedRun, Health
from ensemble_ray.text.foreign_text import whole_data

if TYPE_CHECKING:
    from ensemble_ray import Ensemble, Runtime

__all__ = ["build_api"]

_REFUSED = "InvalidRequest"
_EXPECTED = 'Expected application/json such as {"inputs": {"topic": "Ray"}, "run_id": "first"}'
#: Mistakes that one answer names, and how much of a client's own words.
_SHOWN, _SHOWN_CHARACTERS = 10, 200


def build_api(
    ensemble: Ensemble,
    runtime: AbstractAsyncContextManager[Runtime],
    *,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    allowed_hosts: Sequence[str] = (),
) -> FastAPI:
    """Return the web application of a team.

    Args:
        ensemble: The team.
        runtime: Where its runs live; entered with the application and left with it, warm in between.
        max_body_bytes: Longer bodies are refused before they are in memory.
        allowed_hosts: Names that requests may be for besides those of loopback.
    """
    team = ensemble.origin or ""
    serving: list[Runs] = []

    @asynccontextmanager
    async def lifespan(_api: FastAPI) -> AsyncGenerator[None, None]:
        async with runtime as entered:
            serving.append(Runs(ensemble, entered))
            yield

    api = FastAPI(title="ensemble-ray", lifespan=lifespan, docs_url=None, redoc_url=None)
    # The one that is added last comes first.
    api.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    api.add_middleware(HostCheck, allowed_hosts=allowed_hosts)
    api.add_exception_handler(RequestValidationError, _refused)
    api.add_exception_handler(HTTPException, _not_served)
    api.add_exception_handler(Exception, _broken)

    @api.post("/runs", response_model=FinishedRun, responses={"4XX": {"model": Failure}, "5XX": {"model": Failure}})
    async def post_run(asked: NewRun) -> JSONResponse:
        """Run the team and answer with its output."""
        try:
            return _WholeResponse((await serving[0].run(asked)).model_dump(mode="json"))
        except (EnsembleError, IllegalStateError) as error:
            return _answer(status_of(error), failure_of(error, asked.run_id))

    @api.get("/healthz")
    async def get_health() -> Health:
        """Whether the team is loaded and takes requests."""
        return Health(status="ok", team=team)

    # Routes are registered by being defined.
    _ = post_run, get_health
    return api


class _WholeResponse(JSONResponse):
    """JSON in UTF-8 whatever stands in its texts: an answer that cannot be encoded would be a paid run lost."""

    def render(self, content: object) -> bytes:
        """Return the body."""
        return super().render(whole_data(content))


def _answer(status: int, failure: Failure) -> JSONResponse:
    return _WholeResponse(failure.model_dump(mode="json"), status_code=status)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _refused(_request: Request, error: Exception) -> JSONResponse:
    """Answer a body that is no run: not JSON, or not of that form."""
    found = error.errors() if isinstance(error, RequestValidationError) else []
    problems = [f"{_cut('.'.join(str(part) for part in each['loc']))}: {each['msg']}" for each in found[:_SHOWN]]
    if len(found) > _SHOWN:
        problems.append(f"and {len(found) - _SHOWN} more")
    return _answer(
        HTTPStatus.UNPROCESSABLE_ENTITY, Failure(error=_REFUSED, message=f"{'; '.join(problems)}. {_EXPECTED}")
    )


def _not_served(request: Request, error: Exception) -> JSONResponse:
    """Answer a wrong path or method, or a body that no JSON reader takes."""
    status = error.status_code if isinstance(error, HTTPException) else HTTPStatus.NOT_FOUND
    if status == HTTPStatus.BAD_REQUEST:
        why = "The body cannot be read: it is no text, is nested too deeply, or has a number of thousands of digits"
        return _answer(status, Failure(error=_REFUSED, message=f"{why}. {_EXPECTED}"))
    routes = "Served are POST /runs and GET /healthz"
    text = f"{request.method} {_cut(request.url.path)}: {HTTPStatus(status).phrase}. {routes}"
    return _answer(status, Failure(error=_REFUSED, message=text))


def _broken(_request: Request, error: Exception) -> JSONResponse:
    """Answer a defect of ours; its text is of use to the operator alone, and stands in the replica's log."""
    text = f"{type(error).__name__} in the endpoint. Its log says more"
    return _answer(HTTPStatus.INTERNAL_SERVER_ERROR, Failure(error="InternalError", message=text))
