"""What travels over HTTP.

In: requests as JSON. Out: answers as JSON. Classes of the core stay inside: each answer is copied field by field, so
that a change over there shows up here and not at a client. Units stand in the names; unknown token counts are null.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from ensemble_ray.definition.run_options import LONGEST_WORD, MOST_TAGS
from ensemble_ray.text.foreign_text import whole_data, whole_text
from ensemble_ray.values.reviews import LONGEST_DIRECTIVE

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


#: Tasks that one request may name.
MOST_TASKS = 200
_LONGEST_NAME, _LONGEST_TEXT, _MOST_TOOLS = 256, 100_000, 100

TaskName = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME), BeforeValidator(whole_data)]
_Template = Annotated[str, Field(min_length=1, max_length=_LONGEST_TEXT, pattern=r"\S"), BeforeValidator(whole_data)]
_Tools = Annotated[list[TaskName], Field(max_length=_MOST_TOOLS)]


class TaskOverride(Wire):
    """What is different of a task in this run; what is null is as the team says.

    Attributes:
        description: What to do; a template, as in the team.
        expected_output: What the result looks like; a template.
        model: Name of a model of `GET /capabilities`.
        tools: Names of tools of `GET /capabilities`, in place of those that it has.
    """

    description: _Template | None = None
    expected_output: _Template | None = None
    model: TaskName | None = None
    tools: _Tools | None = None


class NewTask(Wire):
    """A task that the team does not have.

    Attributes:
        name: What others call it; may be left out.
        description: What to do; a template, as in the team.
        expected_output: What the result looks like; a template.
        agent: Role of an agent of the team; null: one is made for it.
        model: Name of a model of `GET /capabilities`.
        tools: Names of tools of `GET /capabilities`.
        context: Names of tasks of the list whose outputs it is given.
    """

    name: TaskName | None = None
    description: _Template
    expected_output: _Template | None = None
    agent: TaskName | None = None
    model: TaskName | None = None
    tools: _Tools | None = None
    context: Annotated[list[TaskName], Field(max_length=MOST_TASKS)] = Field(default_factory=list)


#: By the tasks' names.
TaskOverrides = Annotated[dict[TaskName, TaskOverride], Field(max_length=MOST_TASKS)]
#: Names of the team's tasks, and new ones.
TaskSelection = Annotated[list[TaskName | NewTask], Field(min_length=1, max_length=MOST_TASKS)]


#: Ids that name a record are shorter; the text of a longer one need not be repeated to anybody.
_LONGEST_NAME_RUN_SCHEMAS = 256
#: Digits of money; more are no amount but work for the parser.
_MOST_DIGITS = 28


def _in_utc(instant: datetime) -> datetime:
    try:
        return instant.astimezone(UTC)
    except (OverflowError, ValueError):
        raise ValueError("it is before the year 1 or after 9999 in UTC") from None


_Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME_RUN_SCHEMAS), BeforeValidator(whole_data)]
_TagName = Annotated[str, Field(min_length=1, max_length=LONGEST_WORD), BeforeValidator(whole_data)]
_TagValue = Annotated[str, Field(max_length=LONGEST_WORD), BeforeValidator(whole_data)]
#: An instant of a query, in UTC.
Instant = Annotated[datetime, AfterValidator(_in_utc)]
#: Words of the client's own about a run, by name.
RunTags = Annotated[dict[_TagName, _TagValue], Field(max_length=MOST_TAGS)]


class RunStatus(StrEnum):
    """How a run stands, in every answer (S-SRV-3)."""

    #: taken and not begun yet
    ACCEPTED = "accepted"
    RUNNING = "running"
    #: nothing runs; a person has to decide
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    #: it never began: what was asked for could not be run
    REJECTED = "rejected"
    BUDGET_EXHAUSTED = "budget_exhausted"
    #: nobody works on it; what is recorded is kept
    INTERRUPTED = "interrupted"

    @property
    def is_final(self) -> bool:
        """Whether nothing will happen any more unless somebody resumes the run."""
        return self not in {RunStatus.ACCEPTED, RunStatus.RUNNING, RunStatus.WAITING}


class RunLimits(Wire):
    """What one run may use; the operator's own limits hold in any case.

    Attributes:
        max_tokens: Tokens of input and output together.
        max_cost: Money, in the currency of the team's cost configuration.
        max_parallel_tasks: Tasks at the same time.
    """

    max_tokens: int | None = Field(default=None, gt=0)
    max_cost: Decimal | None = Field(default=None, gt=0, max_digits=_MOST_DIGITS)
    max_parallel_tasks: int | None = Field(default=None, gt=0)


class ItemsFile(Wire):
    """A file of items: `.jsonl`, `.csv` and what else `ensemble-ray map` reads.

    Attributes:
        file: Its path below the directory that the operator shares with clients.
    """

    file: _Name


class ItemsDataset(Wire):
    """A Ray Dataset, whose rows are the items.

    Attributes:
        dataset: The name under which the operator offers it.
    """

    dataset: _Name


class NewRun(Wire):
    """Body of `POST /runs`.

    Attributes:
        ensemble: The team; may be left out where one alone is served.
        inputs: Values of the variables in the team's texts.
        run_id: Name of the run and of its record; asking again under it answers from the record.
        options: What this run may use.
        tags: Words of the client's own, to find the run again.
        items: What a map-reduce maps, in place of its own items.
        task_overrides: What is different of the team's tasks, by their names; needs the right `admin`.
        tasks: The tasks of this run, in place of the team's: names of these, and new ones; needs the right `admin`.
        traceparent: The client's span, as W3C's trace context names it; the request's header of that name says the same.
    """

    ensemble: _Name | None = None
    inputs: Annotated[dict[str, JsonValue], Expressible] = Field(default_factory=dict)
    run_id: _Name | None = None
    options: RunLimits = RunLimits()
    tags: RunTags = Field(default_factory=dict)
    items: Annotated[list[JsonValue], Expressible] | ItemsFile | ItemsDataset | None = None
    task_overrides: TaskOverrides | None = None
    tasks: TaskSelection | None = None
    traceparent: Annotated[str, Field(max_length=256)] | None = None


class AcceptedRun(Wire):
    """Answer 202 to `POST /runs`.

    Attributes:
        tasks: How many tasks it will have; null where they are made while it runs.
    """

    run_id: str
    status: RunStatus
    ensemble: str
    tasks: int | None
    workflow: str


class RunSummary(Wire):
    """A run as lists show it."""

    run_id: str
    status: RunStatus
    ensemble: str
    tags: dict[str, str]
    created_at: datetime
    ended_at: datetime | None


class OpenReview(Wire):
    """A gate at which a run waits for a person.

    Attributes:
        gate_id: Names it in `POST /reviews/{run_id}/{gate_id}`.
        expires_at: When it is decided without anybody; null: never.
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
    """Answer to `GET /runs/{run_id}`, and to `POST /runs` that waited for the end.

    Attributes:
        result: What it gave; null unless it ended, and where it failed or was rejected.
        error: Why it failed or was rejected.
        reviews: Gates that are open.
    """

    result: FinishedRun | None = None
    error: Failure | None = None
    reviews: list[OpenReview] = Field(default_factory=list[OpenReview])


class RunFilter(Wire):
    """Which runs a list shows; what is not said leaves nothing out.

    Attributes:
        ensembles: Names of teams; null: all.
        tags: All of them must be the run's.
        since: Runs that were accepted then or later.
    """

    status: RunStatus | None = None
    ensembles: frozenset[str] | None = None
    tags: dict[str, str] = Field(default_factory=dict)
    since: Instant | None = None


class RunPage(Wire):
    """Answer to `GET /runs`: newest first.

    Attributes:
        next_cursor: Asks for the next page; null: there is none.
    """

    runs: list[RunSummary]
    next_cursor: str | None


class ChatInfo(Wire):
    """How a team is asked as a model of the OpenAI API.

    Attributes:
        input: Variable that takes the user's message; null: none could, or several.
        takes_history: Whether its texts have the variable `history`, for what was said before.
        streamed_task: Instance of the task whose tokens are the answer while it is said; null: the answer is known at the
            end alone.
    """

    input: str | None = None
    takes_history: bool = False
    streamed_task: str | None = None


class EnsembleInfo(Wire):
    """A team that is served.

    Attributes:
        name: What it is called, here and in keys.
        description: What it is for; null where it does not say.
        tags: Its own; all its runs have them.
        inputs: Variables that every run has to give.
        tasks: How many tasks; null where they are made while a run goes on.
        takes_items: Whether runs may bring their own items.
        chat: How it is asked as a model.
    """

    name: str
    description: str | None = None
    tags: dict[str, str] = Field(default_factory=dict)
    inputs: list[str]
    workflow: str
    tasks: int | None
    takes_items: bool = False
    chat: ChatInfo = ChatInfo()


class EnsembleList(Wire):
    """Answer to `GET /ensembles`."""

    ensembles: list[EnsembleInfo]


class RunEvent(Wire):
    """What happened in a run, as one server-sent event.

    Attributes:
        type: A type of the wire format of file 27, such as `task_started`.
        data: Its fields.
        cursor: Where a reader goes on that has had it; null: it is shown as it happens and never again, as a token is.
    """

    type: str
    data: dict[str, JsonValue]
    cursor: str | None = None


class ToolInfo(Wire):
    """A tool that can be called.

    Attributes:
        parameters: JSON schema of its arguments.
    """

    name: str
    description: Text
    parameters: Data


class TaskInfo(Wire):
    """A task of a team.

    Attributes:
        agent_role: Who does it; in brackets where that is not an agent that the team declares.
    """

    ensemble: str
    name: str
    agent_role: Text


class ModelInfo(Wire):
    """A model that runs of a team can be told to ask."""

    ensemble: str
    name: str


class Capabilities(Wire):
    """Answer to `GET /capabilities`.

    Attributes:
        tasks: Of the teams whose tasks are known before they run.
    """

    tools: list[ToolInfo]
    models: list[ModelInfo]
    tasks: list[TaskInfo]


class ToolCallBody(Wire):
    """Body of `POST /tools/{name}/invoke`.

    Attributes:
        arguments: As a model would send them.
    """

    arguments: Annotated[dict[str, JsonValue], Expressible] = Field(default_factory=dict)


class ToolReply(Wire):
    """What a call gave.

    Attributes:
        outcome: `failure`: the tool said no; `error`: it raised, or its arguments do not fit.
        output: What a model would read.
    """

    name: str
    outcome: Literal["success", "failure", "error"]
    output: Text
    duration_s: float


#: Characters of a comment, and of a text that takes the place of an output.
_LONGEST_COMMENT, _LONGEST_EDIT = 10_000, 4_000_000
#: Characters of a name of a model, or of a role.
_LONGEST_NAME_CONTROL_SCHEMAS = 256
#: About 30 years, s.
_LONGEST_TTL_S = 1e9


class NewDirective(Wire):
    """Body of `POST /runs/{run_id}/inject`.

    Attributes:
        text: What tasks that start from now on are told.
        ttl_s: For how long, s; null: until the run ends.
    """

    text: Annotated[str, Field(min_length=1, max_length=LONGEST_DIRECTIVE, pattern=r"\S"), BeforeValidator(whole_data)]
    ttl_s: float | None = Field(default=None, gt=0, le=_LONGEST_TTL_S)


class NewModel(Wire):
    """Body of `POST /runs/{run_id}/model`.

    Attributes:
        model: Name of one of the team's models in `GET /capabilities`; null: each agent's own again.
        agent: Role of the agent whose tasks are meant; null: those of all.
    """

    model: Annotated[
        str | None, Field(min_length=1, max_length=_LONGEST_NAME_CONTROL_SCHEMAS), BeforeValidator(whole_data)
    ]
    agent: Annotated[
        str | None, Field(min_length=1, max_length=_LONGEST_NAME_CONTROL_SCHEMAS), BeforeValidator(whole_data)
    ] = None


class Verdict(StrEnum):
    """What is decided at a gate."""

    APPROVE = "approve"
    EDIT = "edit"
    #: the run ends early
    EXIT = "exit"


class NewDecision(Wire):
    """Body of `POST /reviews/{run_id}/{gate_id}`.

    Attributes:
        decision: `approve`, `edit` or `exit`.
        text: What takes the place of what was shown; with `edit` alone.
        comment: Why; it is recorded.
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
        status: How the run stands; one that waits goes on by itself.
    """

    run_id: str
    gate_id: str
    decision: Verdict
    status: RunStatus


class FirstDecision(Wire):
    """The decision of a gate that counts.

    Attributes:
        decision: `approve`, `edit` or `exit`; where the time was up, what applies then.
        by: Who decided; `(timeout)` where the time was up.
    """

    decision: str
    by: Text
    decided_at: datetime | None
    comment: Text


class ReviewConflict(Failure):
    """Answer 409 to a decision that comes second.

    Attributes:
        first: The one that counts.
    """

    first: FirstDecision


class ReviewOfEnsemble(OpenReview):
    """An open gate, and whose run it is of."""

    ensemble: str


class ReviewList(Wire):
    """Answer to `GET /reviews`: oldest first."""

    reviews: list[ReviewOfEnsemble]


class Refusal(Exception):  # noqa: N818  it is an answer, no defect
    """A request is not carried out; raised by services and routes, answered as a `Failure` (S-SRV-4).

    Attributes:
        status: Of the answer.
        code: Stable name of the reason for programs, such as `RUN_NOT_FOUND`.
        message: What is wrong and what to do.
        retry_after_s: After how long it may be asked again; None: that would not help.
        missing: Inputs that the team needs.
        run_id: The run that it is about.
        error: Class of the error, in the answer: `InvalidRequest`, but for what a run would raise.
        param: The field of the request that is wrong, where one alone is.
        headers: More headers of the answer.
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
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.missing = missing
        self.run_id = run_id
        self.error = error
        self.param = param
        self.headers = headers

    def __str__(self) -> str:
        return self.message


#: What clients can subscribe to: the messages to everybody of file 27, and ends of runs that they asked for.
MESSAGE_TYPES = frozenset({
    "ensemble_started", "task_started", "task_input", "task_completed", "task_failed", "tool_called",
    "delegation_started", "delegation_completed", "delegation_failed", "review_requested", "review_timed_out",
    "review_decided", "llm_iteration_started", "llm_iteration_completed", "token", "ensemble_completed",
    "loop_iteration_completed", "graph_state_completed", "heartbeat", "run_result",
})  # fmt: skip
_EVERYTHING = "*"
_LONGEST_NAME_SOCKET_SCHEMAS, _MOST_SHOWN, _MOST_TYPES = 256, 10, 64


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    #: comes back in every answer
    request_id: _Name | None = None


class RunRequestMessage(_Message):
    """`run_request`: the fields of a body of `POST /runs`."""

    new_run: NewRun

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, message: dict[str, Any]) -> dict[str, Any]:
        fields = {name: value for name, value in message.items() if name in NewRun.model_fields and value is not None}
        return {"request_id": message.get("request_id"), "new_run": fields}


class RunControl(_Message):
    """`run_control`: cancel a run, tell it something, or let it ask another model."""

    run_id: _Name
    action: Literal["cancel", "inject", "switch_model"]
    text: Annotated[str | None, Field(max_length=LONGEST_DIRECTIVE), BeforeValidator(whole_data)] = None
    ttl_s: Annotated[float | None, Field(gt=0, le=1e9)] = None
    model: _Name | None = None
    agent: _Name | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.action == "inject" and not (self.text or "").strip():
            raise ValueError("inject needs a text")
        if self.action == "switch_model" and "model" not in self.model_fields_set:
            raise ValueError("switch_model needs a model, or null for each agent's own")
        return self


def _check_known(names: list[str]) -> list[str]:
    unknown = sorted({name for name in names if name not in MESSAGE_TYPES and name != _EVERYTHING})
    if unknown:
        raise ValueError(f"unknown types [{', '.join(unknown)}]. Known: [{', '.join(sorted(MESSAGE_TYPES))}]")
    return names


class Subscribe(_Message):
    """`subscribe`: which messages the client wants of those that are sent to everybody.

    Attributes:
        events: Types; null, or with `*` among them: all.
        run_id: Of this run alone; null: of all.
    """

    events: Annotated[list[_Name], Field(min_length=1, max_length=_MOST_TYPES), AfterValidator(_check_known)] | None = (
        None
    )
    run_id: _Name | None = None

    @property
    def types(self) -> frozenset[str] | None:
        """The types that are wanted; None: all."""
        return None if self.events is None or _EVERYTHING in self.events else frozenset(self.events)


def problems_of(error: pydantic.ValidationError) -> Refusal:
    """Return why a message is none, as a refusal."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    places = (
        f"{'.'.join(map(str, each['loc'][:4]))[:_LONGEST_NAME_SOCKET_SCHEMAS]}: {each['msg']}"
        for each in found[:_MOST_SHOWN]
    )
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", "; ".join(places))
