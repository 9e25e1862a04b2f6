"""One error of each class."""

from datetime import UTC, datetime, timedelta

from ensemble_ray import (
    AgentExecutionError,
    BatchError,
    CircuitOpenError,
    ConstraintViolationError,
    EnsembleError,
    ExitEarlyError,
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
    ReviewTimeoutError,
    RunExistsError,
    StaleEpochError,
    TaskExecutionError,
    TaskOutput,
    ToolConfigurationError,
    ToolExecutionError,
    TryAgain,
    UnknownOutcomeError,
    ValidationError,
)
from ensemble_ray.errors import BudgetExhaustedError
from ensemble_ray.values.value import utc_of

DONE = TaskOutput(
    raw="text",
    task_description="Research",
    agent_role="Researcher",
    completed_at=utc_of(5),
    duration=1.5,
    parsed_output={"topics": ["Ray"]},
    output_type=dict,
)
LIMIT = RateLimit(requests=2, period=timedelta(minutes=1))

#: One of each class, with all its fields.
EVERY = [
    EnsembleError("anything"),
    ValidationError("Agent role must not be blank"),
    PromptTemplateError("2 are missing", ("a", "b"), "{a} {b}"),
    TaskExecutionError("Task failed: Write", "Write", "Writer", [DONE]),
    OutputParsingError("no JSON", "raw", dict, ["line 1"], 4, "Write", "Writer", [DONE]),
    ParallelExecutionError("1 of 2 tasks failed", [DONE], {"Write": AgentExecutionError("model")}),
    ConstraintViolationError(["too few", "too many"], [DONE]),
    AgentExecutionError("LLM failed", "Writer", "Write"),
    MaxIterationsExceededError("Writer", "Write", 5, 8),
    ToolExecutionError("broken", "search", '{"q": 1}'),
    GuardrailViolationError("input", "no secrets", "Write", "Writer"),
    RateLimitTimeoutError(LIMIT, timedelta(seconds=1.5)),
    RateLimitInterruptedError("interrupted"),
    MaxLoopIterationsExceededError("refine", 3, [DONE]),
    GraphNoEdgeMatchedError("triage", "write", "a page", ("→ critique (predicate)",), [DONE]),
    MaxGraphStepsExceededError("triage", 50, "write", [DONE]),
    RunExistsError("Run 'r' is running"),
    RecordError("Cannot write", "/record"),
    StaleEpochError("r", "facts#0", 1, 2),
    UnknownOutcomeError("Nobody knows whether it was sent", "facts#0/1/call-0", "send"),
    CircuitOpenError("The endpoint is not asked for now", "model at 127.0.0.1"),
    IllegalStateError("closed"),
    ToolConfigurationError("approval without handler"),
    ExitEarlyError("enough", timed_out=True),
    TryAgain("Give the date as YYYY-MM-DD"),
    BudgetExhaustedError("Budget exhausted: the limit is max_tokens 5"),
    ManagerStalledError(3, ["first", "second"], "Coordinate"),
    ReviewDecidedError("It is decided", "run", "gate", "edit", "ann", datetime(2026, 1, 1, tzinfo=UTC), "too long"),
    ReviewTimeoutError("Review gate timed out after 60s (on_timeout=fail)"),
    BatchError("HTTP 404", "4f2a"),
]
