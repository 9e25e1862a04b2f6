"""What travels between the page and its server. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from ensemble_ray.record.history.execution import ExecutionKind, ExecutionStatus
from ensemble_ray.text.foreign_text import whole_data, whole_text


def _check_argument(text: str) -> str:
    if "\0" in text or whole_text(text) != text:
        raise ValueError("it holds a character that no name has: NUL, or half of a surrogate pair")
    return text


#: A text of a model, a tool or a user.
Text = Annotated[str, AfterValidator(whole_text)]
#: A text that becomes an argument of a program, which can hold no NUL and no half of a surrogate pair.
Argument = Annotated[str, AfterValidator(_check_argument)]
#: JSON data of them.
Data = Annotated[JsonValue, BeforeValidator(whole_data)]
#: An instant, ms of Unix time; or a duration, ms, where the name says so.
Millis = int


class StudioSchema(BaseModel):
    """Refuses fields that it does not know, so that a misspelt one is not taken for none."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class CostSchema(StudioSchema):
    """Money, as decimal text."""

    amount: str
    currency: str


class FailureSchema(StudioSchema):
    """Every answer that is no success (S-STU-40).

    Attributes:
        error: Class of the error.
        code: Stable name of the reason for programs, such as `RUN_NOT_FOUND`.
        message: What happened, where, and what to do.
    """

    error: str
    code: str
    message: Text


#: How a run stands, in the words of the endpoint (S-SRV-3).
RunStatus = Literal[
    "accepted",
    "running",
    "waiting",
    "completed",
    "failed",
    "cancelled",
    "rejected",
    "budget_exhausted",
    "interrupted",
]


class Decision(StudioSchema):
    """Body of `POST api/studio/reviews/RUN/GATE`.

    Attributes:
        text: Of an edit: what takes the place of the old text; it may be empty.
    """

    decision: Literal["approve", "edit", "exit"]
    text: str | None = None
    comment: str = ""


class NewFork(StudioSchema):
    """Body of `POST api/studio/runs/ID/fork`.

    Attributes:
        from_: The step to do again, as `fork_spec` of a step says it.
        run_id: Name of the new run; null: it gets one.
    """

    from_: Argument = Field(validation_alias="from", min_length=1, max_length=1000)
    run_id: str | None = Field(default=None, min_length=1, max_length=128)


class AcceptedAction(StudioSchema):
    """Answer 202: the run that goes on, ends or begins."""

    run_id: str


class PreviewedStep(StudioSchema):
    """A step of a run that would go on."""

    step: str
    title: Text


class PreviewedCall(StudioSchema):
    """A call of which nobody knows whether it was done."""

    step: str
    tool: Text
    arguments: Text


class RunPreview(StudioSchema):
    """What a resumed or forked run would take from the record, and what it would do again.

    Attributes:
        reused: Steps whose outputs come from the record.
        asked_again: Steps that were begun, and are done again or to their end; of a fork, all from its step on.
        unknown_effects: Calls that a person has to decide of before.
        blocked: Why it cannot be done; null: it can.
    """

    reused: list[PreviewedStep] = Field(default_factory=list[PreviewedStep])
    asked_again: list[PreviewedStep] = Field(default_factory=list[PreviewedStep])
    unknown_effects: list[PreviewedCall] = Field(default_factory=list[PreviewedCall])
    blocked: Text | None = None


class TaskHere(StudioSchema):
    """A step that a process has.

    Attributes:
        since: When it began there; null: it waits there, or is on its way there.
        deaths: How many processes died with it.
    """

    run_id: str
    step: str
    since: Millis | None = None
    deaths: int = 0


class RunHere(StudioSchema):
    """A run that has a process.

    Attributes:
        known: Whether it is recorded here.
        agents: Roles of its agents that live there.
        replica: Which of the processes of these agents it is, of so many.
    """

    run_id: str
    known: bool = True
    agents: list[Text] = Field(default_factory=list[str])
    more_agents: int = 0
    replica: int = 1
    replicas: int = 1


class ProcessInfo(StudioSchema):
    """A process of a cluster, or one that owns a run.

    Attributes:
        state: `silent`: it does not answer; `kept`: for a next run; `retiring`: it ends with the runs that it has.
        queue: Work that waits there; null: nobody knows.
        in_flight: Steps that it has, those that began first, and how many more there are.
        restarts: How many processes died in its place; null: nobody knows.
        reserved: What it reserves on its node.
    """

    pid: int | None = None
    name: str
    kind: Literal["scheduler", "agent", "manager", "callables", "journal", "limiter", "events", "driver"]
    state: Literal["ready", "starting", "silent", "kept", "retiring"] = "ready"
    runs: list[RunHere] = Field(default_factory=list[RunHere])
    more_runs: int = 0
    queue: int | None = None
    in_flight: list[TaskHere] = Field(default_factory=list[TaskHere])
    more_in_flight: int = 0
    restarts: int | None = None
    scheduler: str | None = None
    reserved: Text | None = None
    memory_mb: float | None = None
    note: Text | None = None


class NodeActors(StudioSchema):
    """A node of a cluster, and the processes on it."""

    node: str
    address: str | None = None
    processes: list[ProcessInfo]


class LimiterSchema(StudioSchema):
    """A limit of requests.

    Attributes:
        queue: Requests that wait for a permit.
        permits: Permits that are there just now.
        leased: Permits that processes hold and have not used.
        agents: Who lives in the processes that asked for permits.
    """

    name: str
    requests: int
    period_s: float
    queue: int
    permits: int
    leased: int = 0
    agents: list[Text] = Field(default_factory=list[str])


class BreakerSchema(StudioSchema):
    """Whether an endpoint of models is asked, by all processes together.

    Attributes:
        state: Of the process in which it is worst.
        open_in: In how many of the processes it is not closed.
        probe_at: When the next call may try it; null: nobody waits for that.
        sent: Calls on their way.
        queue: Calls that wait.
        limit: Calls that may be on their way at once, since it asked for fewer; null: any number.
    """

    name: str
    state: Literal["closed", "open", "half_open"]
    processes: int
    open_in: int = 0
    probe_at: Millis | None = None
    last_failure: Text | None = None
    sent: int = 0
    queue: int = 0
    limit: int | None = None


class Actors(StudioSchema):
    """Answer to `GET api/studio/actors`.

    Attributes:
        clusters: Addresses of the clusters that were asked.
        note: Why nothing, or not all, is known.
    """

    nodes: list[NodeActors] = Field(default_factory=list[NodeActors])
    limiters: list[LimiterSchema] = Field(default_factory=list[LimiterSchema])
    breakers: list[BreakerSchema] = Field(default_factory=list[BreakerSchema])
    clusters: list[str] = Field(default_factory=list[str])
    note: Text | None = None


#: A graph, a trace, or what `Export` wrote.
FileKind = Literal["dag", "trace", "run"]


class FileEntry(StudioSchema):
    """A file.

    Attributes:
        kind: What it is; null: nothing that the page shows, and `problem` says why.
        problem: What is wrong with it; one of a kind is shown as far as it goes.
        tasks: How many tasks it has; null: nobody knows.
    """

    name: Text
    kind: FileKind | None
    problem: Text | None = None
    size_bytes: int
    modified_at: Millis
    workflow: Text = ""
    tasks: int | None = None
    duration_ms: int | None = None


class FileList(StudioSchema):
    """Answer to `GET api/studio/files`: those that were changed last first.

    Attributes:
        folder: Where they lie.
        left_out: How many more there are.
    """

    folder: Text
    files: list[FileEntry]
    left_out: int = 0


EdgeKind = Literal["dependency", "conditional", "unconditional", "delegation", "loop"]
GroupKind = Literal["phase", "loop", "graph", "map-level", "manager"]


class FlowNodeSchema(StudioSchema):
    """What is declared, or what ran.

    Attributes:
        kind: That of its steps.
        group: Group that it lies in.
        steps: Steps that it stands for; null where it is folded, and `count` says how many.
        counts: Of a folded node: how many steps there are of each status.
        badges: Short words on it, such as `CP`, `L0`, `MAP`.
    """

    id: str
    x: float
    y: float
    w: float
    h: float
    kind: str
    title: Text
    agent: Text = ""
    level: int | None = None
    critical: bool = False
    group: str | None = None
    steps: list[str] | None = None
    count: int | None = None
    counts: dict[str, int] | None = None
    badges: list[str] = Field(default_factory=list)


class FlowEdgeSchema(StudioSchema):
    """What leads to what.

    Attributes:
        points: The line from one to the other, by x and y.
        label_at: Middle of the label.
        fired: Of a graph's edge: whether the run took it; null: not run, or no such edge.
    """

    from_: str = Field(validation_alias="from", serialization_alias="from")
    to: str
    points: list[tuple[float, float]]
    kind: EdgeKind
    label: Text | None = None
    label_at: tuple[float, float] | None = None
    critical: bool = False
    fired: bool | None = None


class FlowGroupSchema(StudioSchema):
    """A frame around nodes."""

    id: str
    title: Text
    kind: GroupKind
    x: float
    y: float
    w: float
    h: float


class FlowSchema(StudioSchema):
    """Answer to `GET api/studio/runs/ID/flow`."""

    width: float
    height: float
    nodes: list[FlowNodeSchema]
    edges: list[FlowEdgeSchema]
    groups: list[FlowGroupSchema] = Field(default_factory=list[FlowGroupSchema])
    mode: Literal["dag", "graph"] = "dag"
    critical_path: list[str] = Field(default_factory=list)


#: What may be done with a run.
Action = Literal["cancel", "resume", "fork", "decide"]


class StudioInfo(StudioSchema):
    """Answer to `GET api/studio/info`.

    Attributes:
        actions: What may be done here; none where the page only reads.
        has_actors: Whether processes of a cluster can be shown.
        has_files: Whether there is a folder with graphs and traces.
        title: Which place this is, for people.
        read_only_reason: Why nothing may be done; null where something may.
    """

    version: str
    actions: list[Action]
    has_actors: bool
    has_files: bool = False
    title: str
    read_only_reason: str | None = None


class RunRow(StudioSchema):
    """A run as the list shows it.

    Attributes:
        ensemble: Name of the team, or where its definition came from; empty: nobody knows.
        summary: One line: the beginning of its output, or else of its first task.
        open_reviews: How many of its gates wait for a person.
        origin_run: Of a fork: the run that it is of.
        place: Where its record lies.
        workflow: How its tasks are ordered; empty: its record does not say.
        tasks: How many tasks its plan has; of a run whose tasks are made while it goes on, those that have ended.
    """

    run_id: str
    ensemble: Text
    status: RunStatus
    tags: dict[str, str] = Field(default_factory=dict)
    summary: Text = ""
    created_at: Millis
    ended_at: Millis | None = None
    duration_ms: int | None = None
    tokens: int | None = None
    cost: CostSchema | None = None
    open_reviews: int = 0
    origin_run: str | None = None
    place: str = ""
    workflow: str = ""
    tasks: int = 0


class RunList(StudioSchema):
    """Answer to `GET api/studio/runs`: newest first.

    Attributes:
        next_cursor: Asks for the next page; null: there is none.
        total_known: How many runs there are, whatever is looked for.
    """

    runs: list[RunRow]
    next_cursor: str | None = None
    total_known: int


class RunSeries(StudioSchema):
    """Answer to `GET api/studio/runs/ID/series`: a run among those that began before and behind it (S-VIZ-76).

    Attributes:
        first: Number of the first of them; null where not all runs before it were counted (S-STU-9).
        runs: In the order in which they began.
    """

    first: int | None
    runs: list[RunRow]


class RunError(StudioSchema):
    """Why a run failed.

    Attributes:
        class_: Class of the error.
        causes: What caused it, nearest first, each with its class.
        place: Line of user code that raised; empty: none did.
        first_failed_step: Where it began; null: in no step.
    """

    class_: str = Field(serialization_alias="class")
    message: Text
    causes: list[Text] = Field(default_factory=list)
    place: Text = ""
    first_failed_step: str | None = None


class ForkOrigin(StudioSchema):
    """Which run a fork is of, and from which step it does it again."""

    run_id: str
    step: str


class ReviewSchema(StudioSchema):
    """A gate: what is asked, and what was decided.

    Attributes:
        gate_id: Names it where it is decided.
        step: Whose gate it is.
        expires_at: When it is decided without anybody; null: never.
        on_timeout: What happens then: `continue`, `exit_early` or `fail`.
        decision: `approve`, `edit` or `exit`; null while it is open.
        decidable: Whether it waits, and may be decided here.
    """

    run_id: str
    gate_id: str
    ensemble: Text = ""
    timing: str
    step: str
    task_description: Text
    task_output: Text
    prompt: Text | None = None
    required_role: str | None = None
    created_at: Millis
    expires_at: Millis | None = None
    on_timeout: str
    decision: str | None = None
    text: Text | None = None
    comment: Text | None = None
    timed_out: bool = False
    decided_by: Text | None = None
    decided_at: Millis | None = None
    decidable: bool = False


class ReviewListSchema(StudioSchema):
    """Answer to `GET api/studio/reviews`: those that are open, the oldest first."""

    reviews: list[ReviewSchema]


class SpentTokens(StudioSchema):
    """Tokens; null: unknown, or without a limit."""

    spent: int | None = None
    allowed: int | None = None


class SpentCost(StudioSchema):
    """Money as decimal text; null: unknown, or without a limit."""

    spent: str | None = None
    allowed: str | None = None
    currency: str | None = None


class AgentBudget(StudioSchema):
    """What one agent spent."""

    agent: Text
    tokens: int | None = None
    cost: str | None = None
    steps: int = 0


class BudgetSchema(StudioSchema):
    """What was spent of what was allowed.

    Attributes:
        end_reason: Why the run ended, in words; null while it goes on.
    """

    tokens: SpentTokens = SpentTokens()
    cost: SpentCost = SpentCost()
    by_agent: list[AgentBudget] = Field(default_factory=list[AgentBudget])
    end_reason: str | None = None


class RunDetailSchema(RunRow):
    """Answer to `GET api/studio/runs/ID`.

    Attributes:
        counts: How many steps there are of each status.
        forks: Runs that are forks of this one, as far as they were seen.
        cursor: Position in the record up to which this is told.
        is_live: Whether it may change without anybody asking for it.
        problem: Why the record could not be read to its end; null: it could.
        resume_advice: How to go on with a run that was interrupted; null: it was not.
    """

    inputs: dict[str, Data] = Field(default_factory=dict)
    exit_reason: str | None = None
    exit_reason_text: str | None = None
    error: RunError | None = None
    first_error_step: str | None = None
    counts: dict[str, int] = Field(default_factory=dict)
    reviews: list[ReviewSchema] = Field(default_factory=list[ReviewSchema])
    budget: BudgetSchema = BudgetSchema()
    forked_from: ForkOrigin | None = None
    forks: list[str] = Field(default_factory=list)
    cursor: int
    is_live: bool = False
    problem: Text | None = None
    resume_advice: Text | None = None


class ComparedSide(StudioSchema):
    """One step of one of two runs."""

    status: str
    tokens: int | None = None
    duration_ms: int | None = None
    output_digest: str | None = None


class ComparedStep(StudioSchema):
    """One step in two runs; null where one has it not.

    Attributes:
        same: Whether both gave the same output.
    """

    id: str
    title: Text
    a: ComparedSide | None = None
    b: ComparedSide | None = None
    same: bool


class ComparedRuns(StudioSchema):
    """Answer to `GET api/studio/compare`."""

    a: RunRow
    b: RunRow
    steps: list[ComparedStep]


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
