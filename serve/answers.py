"""JSON answers, including those for errors (S-SRV-4)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from ensemble_ray.serve.failures import describe_refusal
from ensemble_ray.serve.schemas import Failure, Refusal
from ensemble_ray.studio.http_server import HEADERS
from ensemble_ray.text.foreign_text import whole_data

#: Error answers in the OpenAPI document.
FAILURES: dict[int | str, dict[str, Any]] = {"4XX": {"model": Failure}, "5XX": {"model": Failure}}
_REFUSED = "InvalidRequest"
_EXPECTED = 'Expected application/json such as {"inputs": {"topic": "Ray"}, "run_id": "first"}'
#: Limits of reported mistakes, and of characters of a client's text.
_SHOWN, _SHOWN_CHARACTERS = 10, 200
_CODES = {HTTPStatus.NOT_FOUND: "NOT_FOUND", HTTPStatus.METHOD_NOT_ALLOWED: "METHOD_NOT_ALLOWED"}


class _WholeResponse(JSONResponse):
    """JSON without lone surrogates, which could not be encoded. A paid run would be lost."""

    def render(self, content: object) -> bytes:
        return super().render(whole_data(content))


def json_text(data: object) -> str:
    return json.dumps(whole_data(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def answer(
    value: BaseModel, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return _WholeResponse(value.model_dump(mode="json"), status_code=status, headers=dict(headers or {}))


def failure_answer(failure: Failure, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return answer(failure, HTTPStatus(failure.status), headers)


def add_failure_handlers(api: FastAPI) -> None:
    def refuse(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Refusal)  # noqa: S101  it is registered for this class
        return refusal_answer(error)

    def refuse_invalid(request: Request, error: Exception) -> JSONResponse:
        problems = problems_of(error) if isinstance(error, RequestValidationError) else []
        expected = f". {_EXPECTED}" if request.url.path == "/runs" and request.method == "POST" else ""
        return _plain(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", f"{'; '.join(problems)}{expected}")

    api.add_exception_handler(Refusal, refuse)
    api.add_exception_handler(RequestValidationError, refuse_invalid)
    api.add_exception_handler(HTTPException, _not_served)
    api.add_exception_handler(Exception, _broken)


def refusal_answer(refusal: Refusal) -> JSONResponse:
    return failure_answer(describe_refusal(refusal), refusal.all_headers)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def problems_of(error: RequestValidationError) -> list[str]:
    found = error.errors()
    problems = [f"{_cut('.'.join(str(part) for part in each['loc']))}: {each['msg']}" for each in found[:_SHOWN]]
    return [*problems, f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else problems


def _not_served(request: Request, error: Exception) -> JSONResponse:
    """Answer a wrong path or method, or a body that is not JSON."""
    status = HTTPStatus(error.status_code) if isinstance(error, HTTPException) else HTTPStatus.NOT_FOUND
    if status is HTTPStatus.BAD_REQUEST:
        why = "The body cannot be read: it is no text, is nested too deeply, or has a number of thousands of digits"
        return _plain(status, "INVALID_REQUEST", f"{why}. {_EXPECTED}")
    text = f"{request.method} {_cut(request.url.path)}: {status.phrase}. GET /openapi.json says what is served"
    response = _plain(status, _CODES.get(status, "INVALID_REQUEST"), text)
    response.headers.update(getattr(error, "headers", None) or {})
    return response


def _broken(_request: Request, error: Exception) -> JSONResponse:
    failure = Failure(
        error="InternalError",
        code="INTERNAL_ERROR",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        message=f"{type(error).__name__} in the endpoint. Its log says more",
    )
    return failure_answer(failure, HEADERS)  # it bypasses the middleware that adds these headers


def _plain(status: HTTPStatus, code: str, message: str) -> JSONResponse:
    return failure_answer(Failure(error=_REFUSED, code=code, status=status, message=message))
