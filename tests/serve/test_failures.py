"""The table of errors and statuses."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest

import ensemble_ray
from ensemble_ray import (
    AgentExecutionError,
    AllModelsFailedError,
    BatchError,
    CircuitOpenError,
    ConstraintViolationError,
    EnsembleError,
    ExecutionTrace,
    GraphNoEdgeMatchedError,
    GuardrailViolationError,
    IllegalStateError,
    ManagerStalledError,
    MaxGraphStepsExceededError,
    MaxIterationsExceededError,
    MaxLoopIterationsExceededError,
    OutputParsingError,
    ParallelExecutionError,
    PromptTemplateError,
    RateLimit,
    RateLimitInterruptedError,
    RateLimitTimeoutError,
    RecordError,
    ReviewDecidedError,
    ReviewRoleError,
    ReviewTimeoutError,
    RunExistsError,
    StaleEpochError,
    TaskExecutionError,
    ToolConfigurationError,
    ToolExecutionError,
    UnknownOutcomeError,
    UnreadableAttachmentError,
    ValidationError,
)
from ensemble_ray.serve.callers import failure_of, status_of

LIMIT = RateLimitTimeoutError(RateLimit.per_minute(60), timedelta(seconds=1))

STATUSES: list[tuple[BaseException, int]] = [
    (ValidationError("bad id"), 400),
    (UnreadableAttachmentError("no pictures"), 400),
    (RunExistsError("running"), 409),
    (PromptTemplateError("missing", ["a", "b"], "{a} {b}"), 422),
    (GuardrailViolationError("input", "no", "write", "Writer"), 422),
    (RateLimitInterruptedError("interrupted"), 503),
    (LIMIT, 503),
    (CircuitOpenError("the endpoint fails"), 503),
    (TaskExecutionError("failed"), 502),
    (AllModelsFailedError({"openai:a": "HTTP 503"}), 502),
    (BatchError("HTTP 404", "4f2a"), 502),
    (OutputParsingError("no JSON"), 502),
    (ParallelExecutionError("1 of 2 tasks failed"), 502),
    (AgentExecutionError("model"), 502),
    (MaxIterationsExceededError("Writer", "write", 3, 6), 502),
    (ConstraintViolationError(["none asked"]), 502),
    (ManagerStalledError(5), 502),
    (MaxLoopIterationsExceededError("refine", 5), 502),
    (MaxGraphStepsExceededError("triage", 50, "critique"), 502),
    (GraphNoEdgeMatchedError("triage", "critique", "neither"), 502),
    (ReviewTimeoutError("Review gate timed out after 5s (on_timeout=fail)"), 504),
    (ReviewDecidedError("by Ann"), 409),
    (ReviewRoleError("it requires the role 'lead'"), 403),
    (RecordError("disk full"), 500),
    (StaleEpochError("run", "task", 1, 2), 500),
    (UnknownOutcomeError("was it sent?"), 500),
    (ToolExecutionError("tool"), 500),
    (IllegalStateError("no"), 500),
    (ToolConfigurationError("no"), 500),
    (EnsembleError("the cluster failed"), 500),
]


@pytest.mark.parametrize(("error", "status"), STATUSES, ids=lambda value: type(value).__name__)
def test_each_error_has_its_status(error: BaseException, status: int) -> None:
    """And a body that names it."""
    assert status_of(error) == status
    body = failure_of(error, "given")
    assert (body.error, body.message, body.run_id) == (type(error).__name__, str(error), "given")


def test_the_table_covers_every_error_of_the_face() -> None:
    """A new error class must be given a status here."""
    faces = {getattr(ensemble_ray, name) for name in ensemble_ray.__all__ if name.endswith("Error")}
    assert faces - {type(error) for error, _ in STATUSES} == {ensemble_ray.ExitEarlyError}  # it never leaves a run


def chained(*links: BaseException) -> BaseException:
    """The first error, caused by the second, and so on."""
    for error, cause in itertools.pairwise(links):
        error.__cause__ = cause
    return links[0]


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (LIMIT, 503),
        (CircuitOpenError("the endpoint fails"), 503),
        (GuardrailViolationError("output", "no", "write", "Writer"), 422),
        (ReviewDecidedError("by Ann"), 409),
        (RecordError("disk full"), 500),
        (UnknownOutcomeError("was it sent?"), 500),
    ],
)
def test_the_particular_cause_decides(cause: BaseException, status: int) -> None:
    """A failed task says less than why it failed."""
    error = chained(TaskExecutionError("Task failed: write"), AgentExecutionError("Agent failed"), cause, OSError("x"))
    assert status_of(error) == status
    assert failure_of(error).causes == [
        "AgentExecutionError: Agent failed",
        f"{type(cause).__name__}: {cause}",
    ]


def test_a_bad_definition_found_in_a_run_is_the_operators() -> None:
    """Nothing that the client could send would mend it."""
    error = ValidationError("tool 'serch' is unknown")
    error.trace = ExecutionTrace.model_construct()
    error.run_id = "begun"
    assert status_of(error) == 500
    assert failure_of(error, "begun").run_id == "begun"


def test_the_runs_own_id_wins_over_the_one_given() -> None:
    """They are the same where both are there; an unnamed run is named by its error."""
    error = TaskExecutionError("failed")
    error.run_id = "made"
    assert failure_of(error).run_id == "made"
    assert failure_of(PromptTemplateError("missing", ["a"])).missing == ["a"]


def test_a_circle_of_causes_ends() -> None:
    """Whoever raised it so."""
    first, second = AgentExecutionError("a"), AgentExecutionError("b")
    chained(first, second, first)
    assert failure_of(first).causes == ["AgentExecutionError: b"]
