"""What goes wrong, as an error of the OpenAI API (S-SRV-110 to S-SRV-113).

In: what routes raise, and failures of runs. Out: `{error: {message, type, param, code}}` under the status that it has elsewhere, too.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from ensemble_ray.serve.answers import answer, problems_of
from ensemble_ray.serve.failures import describe_refusal
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.schemas import Failure, Text, Wire

#: Header of every answer about a run: its id.
RUN_HEADER = "x-run-id"
#: Tells clients of this API not to send the request again: a run that failed would be paid for again.
_NO_RETRY = {"x-should-retry": "false"}
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
#: Codes for which clients of this API have a name.
_CODES = {"ENSEMBLE_NOT_FOUND": "model_not_found"}
_UNREADABLE = "The body cannot be read: it is no text, is nested too deeply, or has a number of thousands of digits"


class ApiError(Wire):
    """What went wrong.

    Attributes:
        type: Kind of the error, after its status.
        param: Field of the request that is wrong.
        code: Stable name of the reason, in small letters.
    """

    message: Text
    type: str
    param: str | None = None
    code: str | None = None


class ApiErrorBody(Wire):
    """Every answer that is no success."""

    error: ApiError


#: What the OpenAPI document says of answers that are no success.
API_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ApiErrorBody}, "5XX": {"model": ApiErrorBody}}


def wrong_parameter(param: str, message: str, code: str = "UNSUPPORTED_PARAMETER") -> Refusal:
    """Return the refusal of a field that is wrong, or asks for what no team can do."""
    return Refusal(HTTPStatus.BAD_REQUEST, code, message, param=param)


def api_error(failure: Failure, param: str | None = None) -> ApiErrorBody:
    """Return a failure as this API says it."""
    status = HTTPStatus(failure.status)
    kind = _TYPES.get(status, "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error")
    causes = f" Causes: {'; '.join(failure.causes)}" if failure.causes else ""
    code = _CODES.get(failure.code, failure.code.lower())
    return ApiErrorBody(error=ApiError(message=f"{failure.message}{causes}", type=kind, param=param, code=code))


def run_error(failure: Failure, run_id: str) -> JSONResponse:
    """Return the answer about a run that gave none."""
    headers = {RUN_HEADER: run_id, **_NO_RETRY}
    return answer(api_error(failure), HTTPStatus(failure.status), headers)


def refusal_error(refusal: Refusal) -> JSONResponse:
    """Return a refusal as the answer with its status and its headers."""
    headers = dict(refusal.headers)
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    return answer(api_error(describe_refusal(refusal), refusal.param), HTTPStatus(refusal.status), headers)


class ApiRoute(APIRoute):
    """A route whose refusals have the form of this API."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers requests."""
        handle = super().get_route_handler()

        async def handle_in_form(request: Request) -> Response:
            try:
                return await handle(request)
            except Refusal as refusal:
                return refusal_error(refusal)
            except RequestValidationError as error:
                return _invalid("; ".join(problems_of(error)), _place(error))
            except HTTPException as error:
                if error.status_code != HTTPStatus.BAD_REQUEST:
                    raise
                return _invalid(_UNREADABLE)

        return handle_in_form


def _invalid(message: str, param: str | None = None) -> JSONResponse:
    error = ApiError(message=message, type="invalid_request_error", param=param, code="invalid_request")
    return answer(ApiErrorBody(error=error), HTTPStatus.BAD_REQUEST)


def _place(error: RequestValidationError) -> str | None:
    """Return the first field that is wrong."""
    places = [".".join(str(part) for part in each["loc"][1:]) for each in error.errors()]
    return (places[0][:200] or None) if places else None
