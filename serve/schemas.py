"""Request and answer bodies of the HTTP interface. Answers copy the core's values, so that a changed field shows up here."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from http import HTTPStatus
from typing import Annotated, Any, Literal, Self, cast

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from ensemble_ray import CostEstimate, EnsembleOutput, ExecutionMetrics, TaskMetrics, TaskOutput
from ensemble_ray.access.quotas import Quantity, Standing, show_amount
from ensemble_ray.definition.fields import LONGEST_CONTEXT
from ensemble_ray.definition.run_options import LONGEST_WORD, MOST_TAGS
from ensemble_ray.text.foreign_text import whole_data, whole_text
from ensemble_ray.values.reviews import LONGEST_DIRECTIVE


def _expressible(value: object) -> object:
    """Replace lone surrogates (S-SEC-100), and reject NaN and Infinity."""
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


def is_none(value: object) -> bool:
    return value is None


Expressible = BeforeValidator(_expressible)
#: Models may write lone surrogates.
Text = Annotated[str, AfterValidator(whole_text)]
Data = Annotated[JsonValue, BeforeValidator(whole_data)]


class Wire(BaseModel):
    """Base of all bodies. A misspelt field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Cost(Wire):
    """Cost of tokens, as decimal text."""

    input: str
    output: str
    total: str
    currency: str

    @classmethod
    def of(cls, estimate: CostEstimate | None) -> Self | None:
        if estimate is None:
            return None
        return cls(
            input=str(estimate.input_cost),
            output=str(estimate.output_cost),
            total=str(estimate.total_cost),
            currency=estimate.currency,
        )


class Metrics(Wire):
    """Usage of a task or a run. A token count is null if the provider did not report it."""

    input_tokens: int | None
    output_tokens: int | None
    total_tokens: int | None
    #: part of the output tokens; left out if 0
    reasoning_tokens: int = Field(default=0, exclude_if=lambda count: count == 0)
    #: parts of the input tokens that providers' caches had, and that they stored; left out if 0
    cached_tokens: int = Field(default=0, exclude_if=lambda count: count == 0)
    cache_write_tokens: int = Field(default=0, exclude_if=lambda count: count == 0)
    llm_calls: int
    #: answers of earlier runs, and their tokens, which are in no other count; left out if 0
    reused_calls: int = Field(default=0, exclude_if=lambda count: count == 0)
    reused_tokens: int | None = Field(default=0, exclude_if=lambda count: count == 0)
    tool_calls: int
    llm_latency_s: float
    tool_execution_s: float
    cost: Cost | None
    #: model calls of unknown price, which `cost` lacks; left out if 0
    unpriced_calls: int = Field(default=0, exclude_if=lambda count: count == 0)

    @classmethod
    def of_task(cls, metrics: TaskMetrics) -> Self:
        return cls(
            input_tokens=_count_or_none(metrics.input_tokens),
            output_tokens=_count_or_none(metrics.output_tokens),
            total_tokens=_count_or_none(metrics.total_tokens),
            reasoning_tokens=metrics.reasoning_tokens,
            cached_tokens=metrics.cached_tokens,
            cache_write_tokens=metrics.cache_write_tokens,
            llm_calls=metrics.llm_call_count,
            reused_calls=metrics.reused_calls,
            reused_tokens=_count_or_none(metrics.reused_tokens),
            tool_calls=metrics.tool_call_count,
            llm_latency_s=metrics.llm_latency.total_seconds(),
            tool_execution_s=metrics.tool_execution_time.total_seconds(),
            cost=Cost.of(metrics.cost_estimate),
            unpriced_calls=metrics.unpriced_calls,
        )

    @classmethod
    def of_run(cls, metrics: ExecutionMetrics) -> Self:
        return cls(
            input_tokens=_count_or_none(metrics.total_input_tokens),
            output_tokens=_count_or_none(metrics.total_output_tokens),
            total_tokens=_count_or_none(metrics.total_tokens),
            reasoning_tokens=metrics.total_reasoning_tokens,
            cached_tokens=metrics.total_cached_tokens,
            cache_write_tokens=metrics.total_cache_write_tokens,
            llm_calls=metrics.total_llm_call_count,
            reused_calls=metrics.total_reused_calls,
            reused_tokens=_count_or_none(metrics.total_reused_tokens),
            tool_calls=metrics.total_tool_calls,
            llm_latency_s=metrics.total_llm_latency.total_seconds(),
            tool_execution_s=metrics.total_tool_execution_time.total_seconds(),
            cost=Cost.of(metrics.total_cost_estimate),
            unpriced_calls=metrics.total_unpriced_calls,
        )


class FinishedTask(Wire):
    """The result of one task.

    Attributes:
        role: Role of the agent.
        description: The task, with its variables filled in.
        text: The answer.
        structured: The answer as data, if the task declares an output type.
        reasoning: The model's reasoning; left out if there is none.
    """

    role: Text
    description: Text
    text: Text
    structured: Data
    reasoning: Text | None = Field(default=None, exclude_if=is_none)
    completed_at: datetime
    duration_s: float
    metrics: Metrics

    @classmethod
    def of(cls, output: TaskOutput) -> Self:
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
    """The result of a run.

    Attributes:
        raw: Text of the last task.
        exit_reason: `completed`, or the reason for an early end.
        tasks: Finished tasks, in order of completion.
    """

    run_id: str | None
    raw: Text
    exit_reason: str
    duration_s: float
    metrics: Metrics
    tasks: list[FinishedTask]

    @classmethod
    def of(cls, output: EnsembleOutput) -> Self:
        return cls(
            run_id=output.run_id,
            raw=output.raw,
            exit_reason=output.exit_reason.value,
            duration_s=output.total_duration.total_seconds(),
            metrics=Metrics.of_run(output.metrics),
            tasks=[FinishedTask.of(task) for task in output.task_outputs],
        )


class Failure(Wire):
    """The body of every answer that is not 2xx.

    Attributes:
        error: Class of the error, such as `PromptTemplateError`.
        code: Stable name of the reason for programs, such as `RUN_NOT_FOUND`.
        status: HTTP status of the answer, or of the error of a failed run.
        message: What happened, where, and what to do.
        run_id: The run, if there is one or the request named one.
        missing: Required inputs that the request lacks.
        causes: Class and text of the errors behind this one, nearest first.
        tasks: Tasks that completed before the failure.
        retry_after_ms: Delay before a retry, ms; null if a retry does not help.
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
    """Translate the core's -1 for an unknown token count."""
    return None if tokens < 0 else tokens


MOST_TASKS = 200
_LONGEST_NAME, _LONGEST_TEXT, _MOST_TOOLS = 256, 100_000, 100
#: Characters of a comment, and of a replaced output.
_LONGEST_COMMENT, _LONGEST_EDIT = 10_000, 4_000_000
#: About 30 years, s.
_LONGEST_TTL_S = 1e9
_MOST_DIGITS = 28
_LONGEST_URL, _MOST_EVENTS = 2048, 16
_MOST_ITERATIONS = 10_000


def _in_utc(instant: datetime) -> datetime:
    try:
        return instant.astimezone(UTC)
    except (OverflowError, ValueError):
        raise ValueError("it is before the year 1 or after 9999 in UTC") from None


_Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME), BeforeValidator(whole_data)]
_Template = Annotated[str, Field(min_length=1, max_length=_LONGEST_TEXT, pattern=r"\S"), BeforeValidator(whole_data)]
_Tools = Annotated[list[_Name], Field(max_length=_MOST_TOOLS)]
_TagName = Annotated[str, Field(min_length=1, max_length=LONGEST_WORD), BeforeValidator(whole_data)]
_TagValue = Annotated[str, Field(max_length=LONGEST_WORD), BeforeValidator(whole_data)]
Instant = Annotated[datetime, AfterValidator(_in_utc)]
RunTags = Annotated[dict[_TagName, _TagValue], Field(max_length=MOST_TAGS)]


class ToolChanges(Wire):
    """Changes of the tools of a task's agent, or of the task if it names no agent.

    Attributes:
        add: Names of tools of `GET /capabilities`.
        remove: Names of tools that the agent or the task has.
    """

    add: _Tools = Field(default_factory=list[str])
    remove: _Tools = Field(default_factory=list[str])


_Context = Annotated[str, Field(min_length=1, max_length=LONGEST_CONTEXT, pattern=r"\S"), BeforeValidator(whole_data)]
_Schema = Annotated[dict[str, JsonValue], Expressible]
_Count = Annotated[int, Field(gt=0, le=_MOST_ITERATIONS)]


class TaskOverride(Wire):
    """Changes of one task for this run. A null field keeps the team's value.

    Attributes:
        description: The instruction; a template, as in the team.
        expected_output: A description of the result; a template.
        model: Name of a model of `GET /capabilities`.
        tools: Names of tools of `GET /capabilities`; they replace the task's tools. An object adds and removes tools.
        max_iterations: Tool requests allowed to its agent.
        additional_context: Text for its prompt, in a section of its own; no template.
        output_schema: JSON schema of its answer, which appears as `structured` in the result.
    """

    description: _Template | None = None
    expected_output: _Template | None = None
    model: _Name | None = None
    tools: _Tools | ToolChanges | None = None
    max_iterations: _Count | None = Field(default=None, exclude_if=is_none)
    additional_context: _Context | None = Field(default=None, exclude_if=is_none)
    output_schema: _Schema | None = Field(default=None, exclude_if=is_none)


class NewTask(Wire):
    """A task that the team does not declare.

    Attributes:
        name: Name for the `context` of other tasks; may be left out.
        description: The instruction; a template, as in the team.
        expected_output: A description of the result; a template.
        agent: Role of an agent of the team; null creates an agent for the task.
        model: Name of a model of `GET /capabilities`.
        tools: Names of tools of `GET /capabilities`, in place of the agent's. An object adds to them and removes some.
        context: Names of tasks of the list whose outputs this task receives.
        max_iterations: Tool requests allowed to its agent.
        additional_context: Text for its prompt, in a section of its own; no template.
        output_schema: JSON schema of its answer, which appears as `structured` in the result.
    """

    name: _Name | None = None
    description: _Template
    expected_output: _Template | None = None
    agent: _Name | None = None
    model: _Name | None = None
    tools: _Tools | ToolChanges | None = None
    context: Annotated[list[_Name], Field(max_length=MOST_TASKS)] = Field(default_factory=list)
    max_iterations: _Count | None = Field(default=None, exclude_if=is_none)
    additional_context: _Context | None = Field(default=None, exclude_if=is_none)
    output_schema: _Schema | None = Field(default=None, exclude_if=is_none)


TaskOverrides = Annotated[dict[_Name, TaskOverride], Field(max_length=MOST_TASKS)]
TaskSelection = Annotated[list[_Name | NewTask], Field(min_length=1, max_length=MOST_TASKS)]


class RunStatus(StrEnum):
    """State of a run, in every answer (S-SRV-3)."""

    #: accepted, not started
    ACCEPTED = "accepted"
    RUNNING = "running"
    #: nothing runs until a person decides a review
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    #: could not be started
    REJECTED = "rejected"
    BUDGET_EXHAUSTED = "budget_exhausted"
    #: has no owner and no end; its record is complete up to here
    INTERRUPTED = "interrupted"

    @property
    def is_final(self) -> bool:
        """Whether only a resume continues the run."""
        return self not in {RunStatus.ACCEPTED, RunStatus.RUNNING, RunStatus.WAITING}


class RunLimits(Wire):
    """Limits of one run. The operator's own limits apply as well.

    Attributes:
        max_tokens: Input and output tokens together.
        max_cost: Money, in USD or the currency of the team's cost configuration.
        max_parallel_tasks: Tasks that run at the same time.
        max_iterations: Tool requests of an agent for one task. It lowers the team's limits and raises none.
    """

    max_tokens: int | None = Field(default=None, gt=0)
    max_cost: Decimal | None = Field(default=None, gt=0, max_digits=_MOST_DIGITS)
    max_parallel_tasks: int | None = Field(default=None, gt=0)
    max_iterations: _Count | None = Field(default=None, exclude_if=is_none)


class ItemsFile(Wire):
    """A file of items in a format that `ensemble-ray map` reads, such as `.jsonl` or `.csv`.

    Attributes:
        file: Its path below the directory that the operator shares with clients.
    """

    file: _Name


class ItemsDataset(Wire):
    """A Ray Dataset whose rows are the items.

    Attributes:
        dataset: Name under which the operator serves it.
    """

    dataset: _Name


class WebhookEvent(StrEnum):
    """An event of a run that a webhook delivers."""

    #: in whatever way the run ended
    RUN_ENDED = "run.ended"
    #: a gate is open, at which the run waits for a person
    REVIEW_REQUESTED = "review.requested"


class NewWebhook(Wire):
    """A receiver of events.

    Attributes:
        url: Receives signed POST requests in the form of Standard Webhooks. Its host must be public, and its scheme https.
        events: Default: all.
    """

    url: Annotated[str, Field(min_length=1, max_length=_LONGEST_URL), BeforeValidator(whole_data)]
    events: Annotated[list[WebhookEvent], Field(min_length=1, max_length=_MOST_EVENTS)] = Field(
        default_factory=lambda: [*WebhookEvent]
    )


class RunPriority(StrEnum):
    """Priority of a run in the queue of its team."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


class QueuePlace(Wire):
    """The place of a run that waits for its turn.

    Attributes:
        position: 1: the next run of its team.
        estimated_start_s: Seconds until its turn, by recent durations of the team's runs; null: unknown.
    """

    priority: RunPriority
    position: int
    estimated_start_s: float | None


class NewRun(Wire):
    """Body of `POST /runs`.

    Attributes:
        ensemble: The team; may be left out if the endpoint serves only one.
        inputs: Values of the variables in the team's texts.
        run_id: Id of the run and its record. A repeated request with this id is answered from the record.
        options: Limits of this run.
        tags: Labels of the client, to find the run again.
        items: Items of a map-reduce, in place of the team's items.
        task_overrides: Changes of the team's tasks, by name; needs the right `admin`.
        tasks: Tasks of this run, in place of the team's: names of its tasks, and new tasks; needs the right `admin`.
        traceparent: The client's span in W3C trace context format; same as the request header of that name.
        priority: Order in the queue; null: `normal`. Runs that wait for long overtake runs of a higher priority.
        webhook: Receiver of the end of this run and of its reviews.
        user: For whom the run is; needs the right `admin`. Default: the name of the caller's key.
        version: A version of the team from `GET /ensembles/{ensemble}/versions`; null: the shares of the versions decide.
        additional_context: Text for the prompts of all tasks, in a section of its own; no template.
        output_schema: JSON schema of the last task's answer, which appears as `structured` in the result; needs the right
            `admin`.
    """

    ensemble: _Name | None = None
    inputs: Annotated[dict[str, JsonValue], Expressible] = Field(default_factory=dict)
    run_id: _Name | None = None
    options: RunLimits = RunLimits()
    tags: RunTags = Field(default_factory=dict)
    items: Annotated[list[JsonValue], Expressible] | ItemsFile | ItemsDataset | None = None
    task_overrides: TaskOverrides | None = Field(default=None, exclude_if=is_none)
    tasks: TaskSelection | None = Field(default=None, exclude_if=is_none)
    traceparent: Annotated[str, Field(max_length=256)] | None = None
    priority: RunPriority | None = Field(default=None, exclude_if=is_none)
    webhook: NewWebhook | None = Field(default=None, exclude_if=is_none)
    user: Annotated[str, Expressible, Field(min_length=1, max_length=256)] | None = Field(
        default=None, exclude_if=is_none
    )
    version: _Name | None = Field(default=None, exclude_if=is_none)
    additional_context: _Context | None = Field(default=None, exclude_if=is_none)
    output_schema: _Schema | None = Field(default=None, exclude_if=is_none)

    @property
    def changes_tasks(self) -> bool:
        """Whether the request changes what tasks do, which needs the right `admin`."""
        return any(each is not None for each in (self.task_overrides, self.tasks, self.output_schema))


class AcceptedRun(Wire):
    """Answer 202 to `POST /runs`.

    Attributes:
        tasks: Number of tasks; null if the run creates its tasks.
        queue: Left out unless the run waits for its turn.
    """

    run_id: str
    status: RunStatus
    ensemble: str
    tasks: int | None
    workflow: str
    queue: QueuePlace | None = Field(default=None, exclude_if=is_none)


class RunSummary(Wire):
    """A run in a list.

    Attributes:
        queue: Left out unless the run waits for its turn.
        version: Version of the team's file; left out if the team has no file.
    """

    run_id: str
    status: RunStatus
    ensemble: str
    tags: dict[str, str]
    created_at: datetime
    ended_at: datetime | None
    queue: QueuePlace | None = Field(default=None, exclude_if=is_none)
    version: str | None = Field(default=None, exclude_if=is_none)


class OpenReview(Wire):
    """A gate at which a run waits for a person.

    Attributes:
        gate_id: Id of the gate for `POST /reviews/{run_id}/{gate_id}`.
        expires_at: Time at which the gate is decided automatically; null: never.
    """

    run_id: str
    gate_id: str
    timing: str
    task_description: Text
    task_output: Text
    prompt: Text
    required_role: str | None
    created_at: datetime
    expires_at: datetime | None


class RunDetail(RunSummary):
    """Answer to `GET /runs/{run_id}`, and to a `POST /runs` that waited for the end.

    Attributes:
        result: The output; null before the end, and for a failed or rejected run.
        error: Reason if the run failed or was rejected.
        reviews: Open gates.
    """

    result: FinishedRun | None = None
    error: Failure | None = None
    reviews: list[OpenReview] = Field(default_factory=list[OpenReview])


class DeliveryState(StrEnum):
    """State of the delivery of a webhook."""

    #: its next attempt is due at `next_attempt_at`
    PENDING = "pending"
    DELIVERED = "delivered"
    #: no attempt succeeded in 24 hours, or the receiver answered 410
    FAILED = "failed"


class WebhookAttempt(Wire):
    """An attempt to deliver a webhook.

    Attributes:
        status: HTTP status of the answer; null: there was none.
        error: Reason of the failure; null after a success.
    """

    at: datetime
    duration_s: float
    status: int | None
    error: Text | None


class WebhookDelivery(Wire):
    """The delivery of one event to one receiver.

    Attributes:
        delivery_id: The `webhook-id` of all its attempts.
        receiver: Scheme, host and port of the URL, whose other parts may be secret.
        gate_id: The gate of `review.requested`; else null.
        attempt_count: Number of attempts so far.
        attempts: The last 10 attempts, oldest first.
        next_attempt_at: Null unless the delivery is pending.
        ended_at: Time of the delivery, or of the last failure; null while it is pending.
    """

    delivery_id: str
    event: WebhookEvent
    receiver: str
    gate_id: str | None
    state: DeliveryState
    created_at: datetime
    attempt_count: int
    attempts: list[WebhookAttempt]
    next_attempt_at: datetime | None
    ended_at: datetime | None


class DeliveryList(Wire):
    """Answer to `GET /runs/{run_id}/deliveries`: oldest first."""

    deliveries: list[WebhookDelivery]


class RunFilter(Wire):
    """Selects runs by state, names of teams (null: all), tags and earliest time of acceptance."""

    status: RunStatus | None = None
    ensembles: frozenset[str] | None = None
    tags: dict[str, str] = Field(default_factory=dict)
    since: Instant | None = None


class RunPage(Wire):
    """Answer to `GET /runs`: newest first.

    Attributes:
        next_cursor: Cursor of the next page; null on the last page.
    """

    runs: list[RunSummary]
    next_cursor: str | None


class ChatInfo(Wire):
    """How the team answers as a model of the OpenAI API.

    Attributes:
        input: Variable for the user's message; null if the team has no single such variable.
        takes_history: Whether the team's texts contain the variable `history`, for the earlier messages.
        streamed_task: Instance of the task whose tokens are streamed as the answer; null: the answer is only known at
            the end.
    """

    input: str | None = None
    takes_history: bool = False
    streamed_task: str | None = None


class EnsembleInfo(Wire):
    """A served team.

    Attributes:
        name: Its name on this endpoint and in keys.
        description: Its purpose, if it declares one.
        tags: Tags of all its runs.
        inputs: Variables that every run must set.
        tasks: Number of tasks; null if a run creates its tasks.
        takes_items: Whether a run may bring its own items.
        chat: How it answers as a model.
        version: Version of its file that gets most new runs; left out if the team has no file.
        loaded_at: Time at which that version was first loaded.
    """

    name: str
    description: str | None = None
    tags: dict[str, str] = Field(default_factory=dict)
    inputs: list[str]
    workflow: str
    tasks: int | None
    takes_items: bool = False
    chat: ChatInfo = ChatInfo()
    version: str | None = Field(default=None, exclude_if=is_none)
    loaded_at: datetime | None = Field(default=None, exclude_if=is_none)


class EnsembleList(Wire):
    """Answer to `GET /ensembles`."""

    ensembles: list[EnsembleInfo]


_Share = Annotated[float, Field(ge=0, le=1)]


class NewVersion(Wire):
    """Body of `POST /ensembles/{ensemble}/versions`.

    Attributes:
        share: Part of the new runs that the version gets, 0 to 1.
    """

    share: _Share = 1.0


class NewShare(Wire):
    """Body of `POST /ensembles/{ensemble}/versions/{version}`.

    Attributes:
        share: Part of the new runs that the version gets: 1 promotes it, 0 rolls it back.
    """

    share: _Share


class TeamVersionInfo(Wire):
    """A loaded version of a team's file.

    Attributes:
        share: Part of the new runs that it gets, 0 to 1.
        open_runs: Accepted runs of this version that have not ended.
    """

    version: str
    share: float
    loaded_at: datetime
    open_runs: int


class TeamVersionList(Wire):
    """Answer to the requests below `/ensembles/{ensemble}/versions`: the newest version first."""

    ensemble: str
    versions: list[TeamVersionInfo]


class NewDrain(Wire):
    """Body of `POST /drain`.

    Attributes:
        timeout_s: The endpoint accepts runs again if some are still open after this time, s; null: it drains until an end.
    """

    timeout_s: float | None = Field(default=None, gt=0, le=_LONGEST_TTL_S)


class OpenRuns(Wire):
    """Numbers of accepted runs that have not ended: not started, running, waiting for people."""

    accepted: int
    running: int
    waiting: int

    @property
    def total(self) -> int:
        return self.accepted + self.running + self.waiting


class DrainInfo(Wire):
    """Answer to `GET /drain`, `POST /drain` and `POST /drain/end`.

    Attributes:
        state: `serving`; `draining`: new runs are refused, accepted ones continue; `drained`: no run is open any more.
        since: Start of the drain; null while serving.
        until: Time at which the drain ends if runs are still open; null: no limit.
        by: Name of the caller that started it; empty if unknown.
    """

    state: Literal["serving", "draining", "drained"]
    open: OpenRuns
    since: datetime | None = None
    until: datetime | None = None
    by: Text = ""


class RunEvent(Wire):
    """A server-sent event. `cursor` is the position behind it; null for a live event, such as a token."""

    type: str
    data: dict[str, JsonValue]
    cursor: str | None = None


class ToolInfo(Wire):
    """A tool that clients can call.

    Attributes:
        parameters: JSON schema of its arguments.
    """

    name: str
    description: Text
    parameters: Data


class TaskInfo(Wire):
    """A task of a team.

    Attributes:
        agent_role: Role of its agent; in brackets if the team does not declare that agent.
    """

    ensemble: str
    name: str
    agent_role: Text


class ModelInfo(Wire):
    """A model to which runs of a team can switch."""

    ensemble: str
    name: str


class Capabilities(Wire):
    """Answer to `GET /capabilities`.

    Attributes:
        tasks: Tasks of all teams that declare their tasks before a run.
    """

    tools: list[ToolInfo]
    models: list[ModelInfo]
    tasks: list[TaskInfo]


class ToolCallBody(Wire):
    """Body of `POST /tools/{name}/invoke`.

    Attributes:
        arguments: Arguments in the form that a model would send.
    """

    arguments: Annotated[dict[str, JsonValue], Expressible] = Field(default_factory=dict)


class ToolReply(Wire):
    """Result of a tool call.

    Attributes:
        outcome: `failure`: the tool reported a failure; `error`: it raised, or its arguments are invalid.
        output: The text that a model would read.
    """

    name: str
    outcome: Literal["success", "failure", "error"]
    output: Text
    duration_s: float


class NewDirective(Wire):
    """Body of `POST /runs/{run_id}/inject`.

    Attributes:
        text: Instruction for tasks that start after this request.
        ttl_s: How long it applies, s; null: until the run ends.
    """

    text: Annotated[str, Field(min_length=1, max_length=LONGEST_DIRECTIVE, pattern=r"\S"), BeforeValidator(whole_data)]
    ttl_s: float | None = Field(default=None, gt=0, le=_LONGEST_TTL_S)


class NewModel(Wire):
    """Body of `POST /runs/{run_id}/model`.

    Attributes:
        model: Name of one of the team's models in `GET /capabilities`; null restores each agent's own model.
        agent: Role of the agent to switch; null: all agents.
    """

    model: _Name | None
    agent: _Name | None = None


class Verdict(StrEnum):
    """Decision at a gate."""

    APPROVE = "approve"
    EDIT = "edit"
    #: the run ends early
    EXIT = "exit"


class NewDecision(Wire):
    """Body of `POST /reviews/{run_id}/{gate_id}`.

    Attributes:
        decision: `approve`, `edit` or `exit`.
        text: Replacement of the shown text; only with `edit`.
        comment: Reason; it is recorded.
    """

    decision: Verdict
    text: Annotated[str | None, Field(max_length=_LONGEST_EDIT), BeforeValidator(whole_data)] = None
    comment: Annotated[str | None, Field(max_length=_LONGEST_COMMENT), BeforeValidator(whole_data)] = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.text is not None) is not (self.decision is Verdict.EDIT):
            raise ValueError("text belongs to the decision 'edit', and to it alone")
        return self


class DecidedReview(Wire):
    """Answer to `POST /reviews/{run_id}/{gate_id}`.

    Attributes:
        status: State of the run; a waiting run continues without another request.
    """

    run_id: str
    gate_id: str
    decision: Verdict
    status: RunStatus


class FirstDecision(Wire):
    """The decision of a gate that counts.

    Attributes:
        decision: `approve`, `edit` or `exit`; after a timeout, the default decision.
        by: Name of the person; `(timeout)` after a timeout.
    """

    decision: str
    by: Text
    decided_at: datetime | None
    comment: Text


class ReviewConflict(Failure):
    """Answer 409 to a second decision at a gate.

    Attributes:
        first: The decision that counts.
    """

    first: FirstDecision


class ReviewOfEnsemble(OpenReview):
    """An open gate, and the team of its run."""

    ensemble: str


class ReviewList(Wire):
    """Answer to `GET /reviews`: oldest first."""

    reviews: list[ReviewOfEnsemble]


class ScheduleFire(Wire):
    """A run of a schedule, or times or a file without a run.

    Attributes:
        trigger: `time`, `file`, or `manual` for a run that a caller asked for.
        at: The scheduled time; of other runs, when the file was found or the run was asked for.
        decided_at: When the endpoint started the run or skipped the time.
        run_id: Null if no run was started.
        status: State of the run; null if there is no run, or the endpoint no longer lists it.
        reason: Why no run was started.
        times: Number of skipped times in succession; `since` is the first of them.
        file: Name of the file.
    """

    trigger: Literal["time", "file", "manual"]
    at: datetime
    decided_at: datetime
    run_id: str | None = None
    status: RunStatus | None = None
    reason: Text = ""
    times: int = 1
    since: datetime | None = None
    file: Text | None = None


class ScheduleInfo(Wire):
    """A schedule of a team. It has one of `cron`, `every_s` and `folder`.

    Attributes:
        every_s: Interval, s; of a folder: the time between two looks, or null for the default.
        next_at: Its next time; null if it is paused or watches a folder.
        waiting: Times that wait for their runs.
        last: The newest entry of its history.
        problem: Why it cannot start runs at the moment; the endpoint tries again.
    """

    ensemble: str
    name: str
    cron: str | None
    every_s: float | None
    folder: Text | None
    pattern: Text | None
    timezone: str
    overlap: str
    missed: str
    is_paused: bool
    next_at: datetime | None
    waiting: int
    last: ScheduleFire | None
    problem: Text | None


class ScheduleDetail(ScheduleInfo):
    """A schedule with its history, newest first."""

    history: list[ScheduleFire]


class ScheduleList(Wire):
    """Answer to `GET /schedules`: sorted by team and name."""

    schedules: list[ScheduleInfo]


class QuotaUsage(Wire):
    """One quota of a key, and the usage of today. Amounts are decimal text: runs, tokens, or money.

    Attributes:
        limit: Limit per day; null: none.
        reserved: Budgets of runs that have not ended.
        remaining: What a new run could use; null: no limit.
    """

    quantity: Quantity
    limit: str | None
    used: str
    reserved: str
    remaining: str | None


class KeyUsage(Wire):
    """Quotas and usage of one key.

    Attributes:
        day: The current day, in the time zone of the endpoint.
        resets_at: End of that day.
    """

    key: str
    day: str
    resets_at: datetime
    quotas: list[QuotaUsage]

    @classmethod
    def of(cls, standing: Standing) -> Self:
        def show(quantity: Quantity, amount: int | None) -> str | None:
            return None if amount is None else show_amount(quantity, amount)

        quotas = [
            QuotaUsage(
                quantity=each,
                limit=show(each, standing.quotas.limit(each)),
                used=show_amount(each, standing.used.amount(each)),
                reserved=show_amount(each, standing.reserved_of(each)),
                remaining=show(each, standing.remaining(each)),
            )
            for each in Quantity
        ]
        return cls(key=standing.key, day=standing.day, resets_at=standing.resets_at, quotas=quotas)


class QuotaList(Wire):
    """Answer to `GET /quota`, sorted by name."""

    keys: list[KeyUsage]


class Refusal(Exception):  # noqa: N818  it is an answer, no defect
    """The endpoint rejects a request. The answer is a `Failure` (S-SRV-4).

    Attributes:
        code: Stable name of the reason, such as `RUN_NOT_FOUND`.
        message: The mistake, and what to do.
        retry_after_s: None if a retry does not help.
        missing: Required inputs that the request lacks.
        error: `InvalidRequest`, or the class of the error that the run would raise.
        param: The only wrong field of the request.
    """

    def __init__(  # noqa: PLR0917  positional, so that it can be pickled
        self,
        status: HTTPStatus,
        code: str,
        message: str,
        retry_after_s: int | None = None,
        missing: tuple[str, ...] = (),
        run_id: str | None = None,
        error: str = "InvalidRequest",
        param: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(status, code, message, retry_after_s, missing, run_id, error, param, headers)
        self.status, self.code, self.message = status, code, message
        self.retry_after_s, self.missing, self.run_id = retry_after_s, missing, run_id
        self.error, self.param, self.headers = error, param, headers

    def __str__(self) -> str:
        return self.message

    @property
    def all_headers(self) -> dict[str, str]:
        delay = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return {**dict(self.headers), **delay}


#: Types that clients can subscribe to.
MESSAGE_TYPES = frozenset({
    "ensemble_started", "task_started", "task_input", "task_completed", "task_failed", "tool_called",
    "delegation_started", "delegation_completed", "delegation_failed", "review_requested", "review_timed_out",
    "review_decided", "llm_iteration_started", "llm_iteration_completed", "token", "ensemble_completed",
    "loop_iteration_completed", "graph_state_completed", "heartbeat", "run_result",
})  # fmt: skip
_ALL = "*"
_MOST_SHOWN, _MOST_TYPES = 10, 64


class _Message(Wire):
    """A message of a client. A misspelt field is an error, as in bodies."""

    type: Text = ""
    request_id: _Name | None = None


class RunRequestMessage(_Message):
    """`run_request` starts a run with the fields of `NewRun`."""

    new_run: NewRun

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, message: dict[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in message.items() if name in _Message.model_fields}
        known = NewRun.model_fields.keys()
        fields = {
            name: each for name, each in message.items() if name not in own and (each is not None or name not in known)
        }
        return {**own, "new_run": fields}


class RunControl(_Message):
    run_id: _Name
    action: Literal["cancel", "inject", "switch_model"]
    text: Annotated[str | None, Field(max_length=LONGEST_DIRECTIVE), BeforeValidator(whole_data)] = None
    ttl_s: Annotated[float | None, Field(gt=0, le=_LONGEST_TTL_S)] = None
    model: _Name | None = None
    agent: _Name | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.action == "inject" and not (self.text or "").strip():
            raise ValueError("inject needs a text")
        if self.action == "switch_model" and "model" not in self.model_fields_set:
            raise ValueError("switch_model needs a model, or null for each agent's own")
        return self


class Subscribe(_Message):
    """Selects broadcast messages. Null, or `*` in `events`, means all."""

    events: Annotated[list[_Name], Field(min_length=1, max_length=_MOST_TYPES)] | None = None
    run_id: _Name | None = None

    @pydantic.field_validator("events")
    @classmethod
    def _check_known(cls, names: list[str] | None) -> list[str] | None:
        if unknown := sorted(set(names or ()) - MESSAGE_TYPES - {_ALL}):
            raise ValueError(f"unknown types [{', '.join(unknown)}]. Known: [{', '.join(sorted(MESSAGE_TYPES))}]")
        return names

    @property
    def types(self) -> frozenset[str] | None:
        """The selected types; None: all."""
        return None if self.events is None or _ALL in self.events else frozenset(self.events)


def problems_of(error: pydantic.ValidationError) -> Refusal:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    problems = (f"{'.'.join(map(str, each['loc'][:4]))[:_LONGEST_NAME]}: {each['msg']}" for each in found[:_MOST_SHOWN])
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", "; ".join(problems))
