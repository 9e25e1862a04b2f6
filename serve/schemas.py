"""What travels over HTTP.

In: requests as JSON. Out: answers as JSON. Classes of the core stay inside: each answer is copied field by field, so
that a change over there shows up here and not at a client. Units stand in the names; unknown token counts are null.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Self, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from ensemble_ray.text.foreign_text import whole_data, whole_text

if TYPE_CHECKING:
    from ensemble_ray import CostEstimate, EnsembleOutput, ExecutionMetrics, TaskMetrics, TaskOutput


def _expressible(value: object) -> object:
    """Return what was sent, in characters that can be encoded: halves of surrogate pairs are replaced (S-SEC-100).

    Raises:
        ValueError: it has a number that is none.
    """
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += cast("dict[object, object]", each).values()
        elif isinstance(each, list):
            left += cast("list[object]", each)
        elif isinstance(each, float) and not math.isfinite(each):
            raise ValueError("NaN and Infinity are no numbers of JSON")
    return whole_data(value)


def _is_none(value: object) -> bool:
    return value is None


def _is_zero(value: object) -> bool:
    return value == 0


#: Data that a client sent.
Expressible = BeforeValidator(_expressible)
#: A text of an answer: models write what they like.
Text = Annotated[str, AfterValidator(whole_text)]
Data = Annotated[JsonValue, BeforeValidator(whole_data)]


class Wire(BaseModel):
    """Refuses fields that it does not know, so that a misspelt one is not taken for none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Cost(Wire):
    """Money for tokens, as decimal text."""

    input: str
    output: str
    total: str
    currency: str

    @classmethod
    def of(cls, estimate: CostEstimate | None) -> Self | None:
        """Return the estimate; None when there is none."""
        if estimate is None:
            return None
        return cls(
            input=str(estimate.input_cost),
            output=str(estimate.output_cost),
            total=str(estimate.total_cost),
            currency=estimate.currency,
        )


class Metrics(Wire):
    """What a task or a run cost.

    Attributes:
        reasoning_tokens: Part of the output tokens that endpoints counted as reasoning; left out where there are none.
    """

    input_tokens: int | None
    output_tokens: int | None
    total_tokens: int | None
    reasoning_tokens: int = Field(default=0, exclude_if=_is_zero)
    llm_calls: int
    tool_calls: int
    llm_latency_s: float
    tool_execution_s: float
    cost: Cost | None

    @classmethod
    def of_task(cls, metrics: TaskMetrics) -> Self:
        """Return those of one task."""
        return cls(
            input_tokens=_count_or_none(metrics.input_tokens),
            output_tokens=_count_or_none(metrics.output_tokens),
            total_tokens=_count_or_none(metrics.total_tokens),
            reasoning_tokens=metrics.reasoning_tokens,
            llm_calls=metrics.llm_call_count,
            tool_calls=metrics.tool_call_count,
            llm_latency_s=metrics.llm_latency.total_seconds(),
            tool_execution_s=metrics.tool_execution_time.total_seconds(),
            cost=Cost.of(metrics.cost_estimate),
        )

    @classmethod
    def of_run(cls, metrics: ExecutionMetrics) -> Self:
        """Return the sum over a run's tasks."""
        return cls(
            input_tokens=_count_or_none(metrics.total_input_tokens),
            output_tokens=_count_or_none(metrics.total_output_tokens),
            total_tokens=_count_or_none(metrics.total_tokens),
            reasoning_tokens=metrics.total_reasoning_tokens,
            llm_calls=metrics.total_llm_call_count,
            tool_calls=metrics.total_tool_calls,
            llm_latency_s=metrics.total_llm_latency.total_seconds(),
            tool_execution_s=metrics.total_tool_execution_time.total_seconds(),
            cost=Cost.of(metrics.total_cost_estimate),
        )


class FinishedTask(Wire):
    """What one task gave.

    Attributes:
        role: Role of the agent.
        description: The task, with its variables filled in.
        text: The answer.
        structured: The answer as data, where the task declares a type.
        reasoning: What its model thought, apart from the answer; left out where there is none.
    """

    role: Text
    description: Text
    text: Text
    structured: Data
    reasoning: Text | None = Field(default=None, exclude_if=_is_none)
    completed_at: datetime
    duration_s: float
    metrics: Metrics

    @classmethod
    def of(cls, output: TaskOutput) -> Self:
        """Return the task's output."""
        answers = () if output.trace is None else output.trace.llm_interactions
        return cls(
            role=output.agent_role,
            description=output.task_description,
            text=output.raw,
            structured=output.model_dump(mode="json", include={"parsed_output"})["parsed_output"],
            reasoning="\n\n".join([each.reasoning for each in answers if each.reasoning]) or None,
            completed_at=output.completed_at,
            duration_s=output.duration.total_seconds(),
            metrics=Metrics.of_task(output.metrics),
        )


class FinishedRun(Wire):
    """What a run gave.

    Attributes:
        raw: Text of the last task.
        exit_reason: `completed`, or why it ended early.
        tasks: In the order in which they were completed.
    """

    run_id: str | None
    raw: Text
    exit_reason: str
    duration_s: float
    metrics: Metrics
    tasks: list[FinishedTask]

    @classmethod
    def of(cls, output: EnsembleOutput) -> Self:
        """Return the run's output."""
        return cls(
            run_id=output.run_id,
            raw=output.raw,
            exit_reason=output.exit_reason.value,
            duration_s=output.total_duration.total_seconds(),
            metrics=Metrics.of_run(output.metrics),
            tasks=[FinishedTask.of(task) for task in output.task_outputs],
        )


class Failure(Wire):
    """Every answer that is not 2xx.

    Attributes:
        error: Class of the error, such as `PromptTemplateError`.
        code: Stable name of the reason for programs, such as `RUN_NOT_FOUND`.
        status: HTTP status of the answer; of a run that failed, the one that its error is answered with.
        message: What happened, where, and what to do.
        run_id: The run, where there is one or one was named.
        missing: Inputs that the team needs and did not get.
        causes: Class and text of our errors that led to this one, nearest first.
        tasks: What was completed before the failure.
        retry_after_ms: After how long it may be asked again, ms; null: that would not help.
    """

    error: str
    code: str
    status: int
    message: Text
    run_id: str | None = None
    missing: list[Text] = Field(default_factory=list)
    causes: list[Text] = Field(default_factory=list)
    tasks: list[FinishedTask] = Field(default_factory=list[FinishedTask])
    retry_after_ms: int | None = None


class Health(Wire):
    """Answer to `GET /healthz` and `GET /readyz`."""

    status: str


def _count_or_none(tokens: int) -> int | None:
    """Return a token count; the core says -1 where the provider gave none."""
    return None if tokens < 0 else tokens
