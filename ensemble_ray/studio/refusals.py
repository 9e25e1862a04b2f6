"""Refusals of requests of the page, as exceptions that its routes answer. Pure."""

from __future__ import annotations

import re
from http import HTTPStatus

from ensemble_ray.errors import (
    EnsembleError,
    IllegalStateError,
    RecordError,
    ReviewDecidedError,
    RunExistsError,
    ValidationError,
)

_WORD = re.compile(r"(?<!^)(?<![A-Z])(?=[A-Z])")
_STATUS: tuple[tuple[type[BaseException], HTTPStatus], ...] = (
    (ReviewDecidedError, HTTPStatus.CONFLICT),
    (RunExistsError, HTTPStatus.CONFLICT),
    (IllegalStateError, HTTPStatus.CONFLICT),
    (RecordError, HTTPStatus.INTERNAL_SERVER_ERROR),
    (ValidationError, HTTPStatus.BAD_REQUEST),
    (EnsembleError, HTTPStatus.BAD_GATEWAY),
)


class StudioRefusal(Exception):  # noqa: N818  no defect: an answer
    """A request that is answered with a failure (S-STU-40).

    Attributes:
        status: HTTP status.
        code: Name of the reason for programs.
        message: What happened, where, and what to do.
    """

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(status, code, message)
        self.status, self.code, self.message = status, code, message


def not_found(what: str, name: str) -> StudioRefusal:
    """Return the refusal of a request for something that there is not."""
    return StudioRefusal(HTTPStatus.NOT_FOUND, f"{what.upper()}_NOT_FOUND", f"There is no {what} '{name[:200]}' here")


def status_of(error: BaseException) -> HTTPStatus:
    """Return the status that an error of ours is answered with."""
    found = (status for kind, status in _STATUS if isinstance(error, kind))
    return next(found, HTTPStatus.INTERNAL_SERVER_ERROR)


def code_of(error: BaseException) -> str:
    """Return the stable code of an error: `REVIEW_DECIDED_ERROR`."""
    return _WORD.sub("_", type(error).__name__).upper()
