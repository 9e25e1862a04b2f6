"""HTTP statuses and bodies for our errors, without stack traces and texts of foreign errors.

4xx: another request can succeed. 502: a model or a task failed. 503: a retry may succeed. 500: only the operator can fix it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from http import HTTPStatus

from ensemble_ray import errors
from ensemble_ray.facts.runs import OWN_ERRORS
from ensemble_ray.serve.schemas import Failure, FinishedTask, Refusal

_CODES = {
    "PromptTemplateError": "INPUTS_MISSING",
    "RunExistsError": "RUN_EXISTS",
    "ReviewDecidedError": "REVIEW_DECIDED",
    "ValidationError": "INVALID_RUN",
    "InternalError": "INTERNAL_ERROR",
}
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
#: The first match in the chain of causes applies.
_STATUS: tuple[tuple[type[BaseException], HTTPStatus], ...] = (
    (errors.RunExistsError, HTTPStatus.CONFLICT),
    (errors.PromptTemplateError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.RecordError, HTTPStatus.INTERNAL_SERVER_ERROR),
    (errors.IllegalStateError, HTTPStatus.INTERNAL_SERVER_ERROR),
    (errors.GuardrailViolationError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.RateLimitTimeoutError, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.RateLimitInterruptedError, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.CircuitOpenError, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.UnknownOutcomeError, HTTPStatus.INTERNAL_SERVER_ERROR),
    (errors.OutputParsingError, HTTPStatus.BAD_GATEWAY),
    (errors.MaxIterationsExceededError, HTTPStatus.BAD_GATEWAY),
    (errors.ConstraintViolationError, HTTPStatus.BAD_GATEWAY),
    (errors.MaxLoopIterationsExceededError, HTTPStatus.BAD_GATEWAY),
    (errors.MaxGraphStepsExceededError, HTTPStatus.BAD_GATEWAY),
    (errors.GraphNoEdgeMatchedError, HTTPStatus.BAD_GATEWAY),
    (errors.ReviewTimeoutError, HTTPStatus.GATEWAY_TIMEOUT),
    (errors.ReviewDecidedError, HTTPStatus.CONFLICT),
    (errors.AgentExecutionError, HTTPStatus.BAD_GATEWAY),
    (errors.TaskExecutionError, HTTPStatus.BAD_GATEWAY),
    (errors.ParallelExecutionError, HTTPStatus.BAD_GATEWAY),
)


def status_of(error: BaseException) -> HTTPStatus:
    if isinstance(error, errors.ValidationError):
        # Without a trace the run has not started, so the request is wrong. With a trace the team is wrong.
        has_begun = error.trace is not None
        return HTTPStatus.INTERNAL_SERVER_ERROR if has_begun else HTTPStatus.BAD_REQUEST
    chain = tuple(_chain(error))
    found = (status for error_type, status in _STATUS if any(isinstance(link, error_type) for link in chain))
    return next(found, HTTPStatus.INTERNAL_SERVER_ERROR)


def status_of_name(name: str) -> HTTPStatus:
    found = (status for kind, status in _STATUS if kind.__name__ == name)
    return next(found, HTTPStatus.INTERNAL_SERVER_ERROR)


def is_refusal(error: BaseException) -> bool:
    """Whether the request is wrong and the run did not start."""
    is_of_request = isinstance(error, errors.ValidationError | errors.PromptTemplateError | errors.RunExistsError)
    return is_of_request and getattr(error, "trace", None) is None


def failure_of(error: BaseException, run_id: str | None = None) -> Failure:
    causes = list(_chain(error))[1:]
    if isinstance(error, errors.ParallelExecutionError):
        causes += error.failed_task_causes.values()
    shown = [cause for cause in causes if isinstance(cause, OWN_ERRORS)]
    return Failure(
        error=type(error).__name__,
        code=code_of(type(error).__name__),
        status=status_of(error),
        message=str(error) or type(error).__name__,
        run_id=getattr(error, "run_id", None) or run_id,
        missing=list(error.missing_variables) if isinstance(error, errors.PromptTemplateError) else [],
        causes=[f"{type(cause).__name__}: {cause}" for cause in shown],
        tasks=[FinishedTask.of(output) for output in getattr(error, "completed_task_outputs", ())],
    )


def code_of(name: str) -> str:
    """Return the stable code of an error class, such as `TASK_EXECUTION_ERROR` (S-SRV-4)."""
    return _CODES.get(name) or _WORD.sub("_", name).upper()


def describe_refusal(refusal: Refusal) -> Failure:
    return Failure(
        error=refusal.error,
        code=refusal.code,
        status=refusal.status,
        message=refusal.message,
        run_id=refusal.run_id,
        missing=list(refusal.missing),
        retry_after_ms=None if refusal.retry_after_s is None else refusal.retry_after_s * 1000,
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__
