"""Values as answers, and what goes wrong as a failure (S-STU-40)."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError
from starlette.exceptions import HTTPException

from ensemble_ray.errors import EnsembleError, IllegalStateError, message_of
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.studio.refusals import StudioRefusal, code_of, status_of
from ensemble_ray.studio.schemas.wire import FailureSchema
from ensemble_ray.studio.service import Studio
from ensemble_ray.text.foreign_text import whole_data

_JSON = "application/json"
_log = bounded_logger(__name__)


def _studio_of(request: Request) -> Studio:
    studio: Studio = request.app.state.studio
    return studio


StudioDependency = Annotated[Studio, Depends(_studio_of)]


def json_text(value: BaseModel) -> str:
    """Return a value as JSON in one line, whatever stands in its texts."""
    try:
        return value.model_dump_json(by_alias=True)
    except (PydanticSerializationError, UnicodeEncodeError):  # half of a surrogate pair, in an id
        import json

        return json.dumps(whole_data(value.model_dump(mode="python", by_alias=True)), ensure_ascii=False)


def answer(value: BaseModel, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Return a value as an answer."""
    return Response(json_text(value), status_code=status, media_type=_JSON)


def add_failure_handlers(app: FastAPI) -> None:
    """Let an application answer everything that goes wrong in one form."""
    app.add_exception_handler(StudioRefusal, _refusal)
    app.add_exception_handler(EnsembleError, _ours)
    app.add_exception_handler(IllegalStateError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _not_served)
    app.add_exception_handler(Exception, _broken)


def _plain(status: HTTPStatus, code: str, message: str, error: str = "InvalidRequest") -> JSONResponse:
    failure = FailureSchema(error=error, code=code, message=message)
    return JSONResponse(failure.model_dump(mode="json"), status_code=status)


def _refusal(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StudioRefusal)  # noqa: S101  it is registered for these
    return _plain(error.status, error.code, error.message)


def _ours(_request: Request, error: Exception) -> JSONResponse:
    return _plain(status_of(error), code_of(error), message_of(error), type(error).__name__)


def _invalid(_request: Request, error: Exception) -> JSONResponse:
    found = error.errors() if isinstance(error, RequestValidationError) else []
    problems = "; ".join(f"{'.'.join(map(str, each['loc']))[:100]}: {each['msg']}" for each in found[:5])
    return _plain(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", problems)


def _not_served(request: Request, error: Exception) -> JSONResponse:
    status = HTTPStatus(error.status_code) if isinstance(error, HTTPException) else HTTPStatus.NOT_FOUND
    return _plain(status, status.name, f"{request.method} {request.url.path[:200]}: {status.phrase}")


def _broken(request: Request, error: Exception) -> JSONResponse:
    _log.error("%s of studio failed", request.url.path[:200], exc_info=error)
    text = f"{type(error).__name__} in studio. The log of its process says more"
    return _plain(HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL_ERROR", text, "InternalError")
