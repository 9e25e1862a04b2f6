"""Steps of a run as the page shows them: as a row, and in all detail. Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ensemble_ray.record.history.execution import ExecutionKind, ExecutionStatus
from ensemble_ray.studio.schemas.runs import ReviewSchema, RunDetailSchema
from ensemble_ray.studio.schemas.wire import CostSchema, Data, Millis, StudioSchema, Text

#: What the time of a step went to.
SegmentKind = Literal["queue", "rate_limit", "model", "tool", "person", "other"]
#: Whether what was done is known: recorded, done again after an interruption, or nobody knows.
Effect = Literal["recorded", "repeated", "unknown"]


class StepTokens(StudioSchema):
    """Tokens of a step; null: the provider did not say."""

    input: int | None = None
    output: int | None = None


class StepPlace(StudioSchema):
    """Where a step runs or ran; null: nobody knows."""

    pid: int | None = None
    node: str | None = None
    replica: str | None = None


class StepSchema(StudioSchema):
    """One execution of anything.

    Attributes:
        id: Names it in the run: its instance, such as `writer#0`.
        node: Key of what is declared, which the flow's nodes bear; null: it was made while the run went on.
        parent: Step that it is part of: a delegation of its asker, an iteration of its loop, a branch of its unit.
        title: At most 120 characters.
        agent: Role of who does it; empty: nobody, or nobody knows yet.
        number: Of an iteration, an attempt or a graph's step, from 1; of a map, its item.
        attempts: How often it was begun.
        segments: What its time went to: kind, beginning, end.
        tools: Its calls: name, outcome, end.
        level: Of a map-reduce: 0 for maps.
        error: In one line.
        reviewed: Whether somebody decided at one of its gates.
    """

    id: str
    node: str | None = None
    parent: str | None = None
    kind: ExecutionKind
    title: Text
    agent: Text = ""
    status: ExecutionStatus
    number: int | None = None
    attempts: int = 0
    started_at: Millis | None = None
    ended_at: Millis | None = None
    segments: list[tuple[SegmentKind, Millis, Millis]] = Field(default_factory=list[tuple[SegmentKind, Millis, Millis]])
    tools: list[tuple[Text, str, Millis]] = Field(default_factory=list[tuple[Text, str, Millis]])
    tokens: StepTokens | None = None
    cost: CostSchema | None = None
    level: int | None = None
    error: Text | None = None
    effect: Effect | None = None
    place: StepPlace | None = None
    reviewed: bool = False


class StepList(StudioSchema):
    """Answer to `GET api/studio/runs/ID/steps`.

    Attributes:
        cursor: Asks for what changed behind it.
    """

    steps: list[StepSchema]
    cursor: int


class LiveSteps(StepList):
    """What a run's live stream says."""

    run: RunDetailSchema


class MessageSchema(StudioSchema):
    """A message of a prompt."""

    role: str
    content: Text


class RequestedCall(StudioSchema):
    """A call that a model asked for; its arguments as it wrote them."""

    id: str
    name: Text
    arguments: Text


class AnswerSchema(StudioSchema):
    """What a model answered, from iteration 0 on.

    Attributes:
        reasoning: What it thought, apart from the answer.
        reasoning_tokens: Part of the output tokens.
    """

    iteration: int
    text: Text | None = None
    reasoning: Text | None = None
    tool_calls: list[RequestedCall] = Field(default_factory=list[RequestedCall])
    input_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    latency_ms: int | None = None
    model: str | None = None
    started_at: Millis | None = None


class ToolCallDetail(StudioSchema):
    """A call of a tool, and what came of it; its result is null where nobody knows."""

    name: Text
    arguments: Text
    result: Text | None = None
    outcome: str
    duration_ms: int | None = None
    started_at: Millis | None = None
    effect: str | None = None
    iteration: int | None = None


class GuardrailCheck(StudioSchema):
    """What a guardrail said.

    Attributes:
        kind: Which side it watches: `input` or `output`.
        name: Which code it is, as `module.name`; empty: of the one that refused nobody knows.
    """

    kind: str
    name: Text = ""
    accepted: bool
    message: Text = ""


class ConstraintCheck(StudioSchema):
    """What a rule of delegation said."""

    rule: str
    allowed: bool
    message: Text = ""


class ContextCut(StudioSchema):
    """What was left out of a prompt, so that it fits."""

    section: Text
    kept_tokens: int | None = None
    cut_tokens: int | None = None
    how: str = ""


class StepError(StudioSchema):
    """Why a step failed."""

    class_: str = Field(serialization_alias="class")
    message: Text
    causes: list[Text] = Field(default_factory=list)


class StepDetail(StepSchema):
    """Answer to `GET api/studio/runs/ID/steps/STEP`.

    Attributes:
        tools_offered: Names of the tools that its model could call.
        fork_spec: What `ensemble-ray fork --from` takes to do it again; null: a run cannot be forked there.
        cut: Of texts that are not whole here: their lengths, by field; `.../text?field=` has them.
    """

    prompt: list[MessageSchema] = Field(default_factory=list[MessageSchema])
    answers: list[AnswerSchema] = Field(default_factory=list[AnswerSchema])
    tools_offered: list[Text] = Field(default_factory=list)
    tool_calls: list[ToolCallDetail] = Field(default_factory=list[ToolCallDetail])
    output: Text | None = None
    structured_output: Data = None
    guardrails: list[GuardrailCheck] = Field(default_factory=list[GuardrailCheck])
    constraints: list[ConstraintCheck] = Field(default_factory=list[ConstraintCheck])
    context_cuts: list[ContextCut] = Field(default_factory=list[ContextCut])
    directives: list[Text] = Field(default_factory=list)
    reviews: list[ReviewSchema] = Field(default_factory=list[ReviewSchema])
    failure: StepError | None = None
    fork_spec: str | None = None
    cut: dict[str, int] = Field(default_factory=dict)
