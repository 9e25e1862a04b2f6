"""Requests and answers between the page and its server. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from ensemble_ray.record.history.executions import ExecutionKind, ExecutionStatus
from ensemble_ray.text.foreign_text import whole_data, whole_text


def _check_argument(text: str) -> str:
    if "\0" in text or whole_text(text) != text:
        raise ValueError("it contains an invalid character: NUL, or half of a surrogate pair")
    return text


#: A text of a model, a tool or a user.
Text = Annotated[str, AfterValidator(whole_text)]
#: A text that becomes an argument of a program, without NUL and without half of a surrogate pair.
Argument = Annotated[str, AfterValidator(_check_argument)]
#: JSON data of a model, a tool or a user.
Data = Annotated[JsonValue, BeforeValidator(whole_data)]
#: An instant, ms of Unix time; or, in `*_ms` fields, a duration, ms.
Millis = int


class StudioSchema(BaseModel):
    """Refuses unknown fields, so that a misspelt field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class CostSchema(StudioSchema):
    """Money, as decimal text."""

    amount: str
    currency: str


class FailureSchema(StudioSchema):
    """The body of every failure (S-STU-40).

    Attributes:
        error: Class of the error.
        code: Stable name of the reason for programs, such as `RUN_NOT_FOUND`.
        message: What happened, where, and what to do.
    """

    error: str
    code: str
    message: Text


#: State of a run, in the words of the endpoint (S-SRV-3).
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
        text: The new text of an edit; may be empty.
    """

    decision: Literal["approve", "edit", "exit"]
    text: str | None = None
    comment: str = ""


class NewFork(StudioSchema):
    """Body of `POST api/studio/runs/ID/fork`.

    Attributes:
        from_: The step to repeat: `fork_spec` of a step.
        run_id: Name of the new run; null: studio generates one.
    """

    from_: Argument = Field(validation_alias="from", min_length=1, max_length=1000)
    run_id: str | None = Field(default=None, min_length=1, max_length=128)


class AcceptedAction(StudioSchema):
    """Answer 202: the run to resume, cancel or start."""

    run_id: str


class PreviewedStep(StudioSchema):
    """A step in the preview of a run."""

    step: str
    title: Text


class PreviewedCall(StudioSchema):
    """A tool call with an unknown outcome."""

    step: str
    tool: Text
    arguments: Text


class RunPreview(StudioSchema):
    """Preview of a resumed or forked run: reused steps and repeated steps.

    Attributes:
        reused: Steps with an output in the record.
        asked_again: Started steps to repeat or finish. For a fork, its step and all later ones.
        unknown_effects: Calls that need a decision of a person first.
        blocked: Why the run cannot be resumed or forked; null: it can.
    """

    reused: list[PreviewedStep] = Field(default_factory=list[PreviewedStep])
    asked_again: list[PreviewedStep] = Field(default_factory=list[PreviewedStep])
    unknown_effects: list[PreviewedCall] = Field(default_factory=list[PreviewedCall])
    blocked: Text | None = None


class TaskHere(StudioSchema):
    """A step assigned to a process.

    Attributes:
        since: When the process started it; null: it waits there, or was just sent.
        deaths: Number of processes that died while they executed it.
    """

    run_id: str
    step: str
    since: Millis | None = None
    deaths: int = 0


class RunHere(StudioSchema):
    """A run that uses a process.

    Attributes:
        known: Whether this store has its record.
        agents: Roles of its agents in the process.
        replica: Number of the process among the `replicas` processes of these agents.
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
        state: `silent`: it does not answer; `kept`: idle until the next run; `retiring`: it ends after its current runs.
        queue: Waiting work; null: unknown.
        in_flight: Its steps that began first. `more_in_flight` counts the others.
        restarts: Number of dead processes that it replaces; null: unknown.
        reserved: The resources that it reserves on its node.
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
        permits: Permits available now.
        leased: Unused permits that processes hold.
        agents: Agents in the processes that requested permits.
    """

    name: str
    requests: int
    period_s: float
    queue: int
    permits: int
    leased: int = 0
    agents: list[Text] = Field(default_factory=list[str])


class BreakerSchema(StudioSchema):
    """The circuit breaker of a model endpoint, over all processes.

    Attributes:
        state: The worst state in any process.
        open_in: Number of processes in which it is not closed.
        probe_at: When the next call may try the endpoint; null: no probe is due.
        sent: Concurrent calls.
        queue: Waiting calls.
        limit: Most concurrent calls, after the endpoint asked for fewer; null: no limit.
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
        clusters: Addresses of the queried clusters.
        note: Why the answer is empty or incomplete.
    """

    nodes: list[NodeActors] = Field(default_factory=list[NodeActors])
    limiters: list[LimiterSchema] = Field(default_factory=list[LimiterSchema])
    breakers: list[BreakerSchema] = Field(default_factory=list[BreakerSchema])
    clusters: list[str] = Field(default_factory=list[str])
    note: Text | None = None


#: A graph, a trace, or a run written by `Export`.
FileKind = Literal["dag", "trace", "run"]


class FileEntry(StudioSchema):
    """A file.

    Attributes:
        kind: Its kind; null: the page cannot show it, for the reason in `problem`.
        problem: The error in the file. A file with a kind is shown as far as possible.
        tasks: Number of its tasks; null: unknown.
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
    """Answer to `GET api/studio/files`: the last changed files first.

    Attributes:
        folder: Path of their folder.
        left_out: Number of files that are not in the list.
    """

    folder: Text
    files: list[FileEntry]
    left_out: int = 0


EdgeKind = Literal["dependency", "conditional", "unconditional", "delegation", "loop"]
GroupKind = Literal["phase", "loop", "graph", "map-level", "manager"]


class FlowNodeSchema(StudioSchema):
    """A declared or an executed task.

    Attributes:
        kind: Kind of its steps.
        group: The group around it.
        steps: The steps of the node; null: the node is folded, and `count` is their number.
        counts: Number of steps by status, if the node is folded.
        badges: Short labels, such as `CP`, `L0`, `MAP`.
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
    """An edge between two nodes.

    Attributes:
        points: The line between the nodes, as (x, y).
        label_at: Middle of the label.
        fired: Whether the run followed this edge of a graph; null: not run, or not an edge of a graph.
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


#: An action on a run.
Action = Literal["cancel", "resume", "fork", "decide"]


class StudioInfo(StudioSchema):
    """Answer to `GET api/studio/info`.

    Attributes:
        actions: The allowed actions; empty: the page only reads.
        has_actors: Whether the page can show processes of a cluster.
        has_files: Whether there is a folder with graphs and traces.
        title: Name of the place, for people.
        read_only_reason: Why no action is allowed; null: actions are allowed.
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
        ensemble: Name of the team, or the source of its definition; empty: unknown.
        summary: One line: the beginning of its output, or else of its first task.
        open_reviews: Number of its gates that wait for a person.
        origin_run: The forked run, if this run is a fork.
        place: Location of its record.
        workflow: Order of its tasks; empty: unknown.
        tasks: Number of tasks in its plan. If the run creates its tasks while running: number of ended tasks.
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
        next_cursor: Cursor of the next page; null: this is the last page.
        total_known: Number of all runs, without the filter.
    """

    runs: list[RunRow]
    next_cursor: str | None = None
    total_known: int


class RunSeries(StudioSchema):
    """Answer to `GET api/studio/runs/ID/series`: a run and its neighbours by start time (S-VIZ-76).

    Attributes:
        first: Number of the first run in the list; null: not all runs before it were counted (S-STU-9).
        runs: The runs in the order in which they began.
    """

    first: int | None
    runs: list[RunRow]


class RunError(StudioSchema):
    """Why a run failed.

    Attributes:
        class_: Class of the error.
        causes: Its causes, nearest first, each with its class.
        place: Line of user code that raised; empty: no user code raised.
        first_failed_step: The step that failed first; null: no step failed.
    """

    class_: str = Field(serialization_alias="class")
    message: Text
    causes: list[Text] = Field(default_factory=list)
    place: Text = ""
    first_failed_step: str | None = None


class ForkOrigin(StudioSchema):
    """The forked run, and the first repeated step."""

    run_id: str
    step: str


class ReviewSchema(StudioSchema):
    """A review gate and its decision.

    Attributes:
        gate_id: Id of the gate, for the decision.
        step: The step of the gate.
        expires_at: When the gate times out; null: never.
        on_timeout: Effect of a timeout: `continue`, `exit_early` or `fail`.
        decision: `approve`, `edit` or `exit`; null: the gate is open.
        decidable: Whether the gate waits and this page accepts its decision.
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
    """Answer to `GET api/studio/reviews`: the open reviews, oldest first."""

    reviews: list[ReviewSchema]


class SpentTokens(StudioSchema):
    """Tokens; null: unknown, or no limit."""

    spent: int | None = None
    allowed: int | None = None


class SpentCost(StudioSchema):
    """Money as decimal text; null: unknown, or no limit."""

    spent: str | None = None
    allowed: str | None = None
    currency: str | None = None


class AgentBudget(StudioSchema):
    """Spending of one agent."""

    agent: Text
    tokens: int | None = None
    cost: str | None = None
    steps: int = 0


class BudgetSchema(StudioSchema):
    """Spending of a run and its limits.

    Attributes:
        end_reason: Why the run ended, in words; null: it is active.
    """

    tokens: SpentTokens = SpentTokens()
    cost: SpentCost = SpentCost()
    by_agent: list[AgentBudget] = Field(default_factory=list[AgentBudget])
    end_reason: str | None = None


class RunDetailSchema(RunRow):
    """Answer to `GET api/studio/runs/ID`.

    Attributes:
        counts: Number of steps by status.
        forks: Known forks of this run.
        cursor: Position of the last fact in this answer.
        is_live: Whether the run can change by itself.
        problem: Why the record could not be read to the end; null: it could.
        resume_advice: How to resume an interrupted run; null: the run is not interrupted.
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
    """One step in one of two runs."""

    status: str
    tokens: int | None = None
    duration_ms: int | None = None
    output_digest: str | None = None


class ComparedStep(StudioSchema):
    """One step in two runs; null: this run has no such step.

    Attributes:
        same: Whether both outputs are equal.
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


#: How a step spent its time.
SegmentKind = Literal["queue", "rate_limit", "model", "tool", "person", "other"]
#: Whether the calls of a step are recorded, repeated after an interruption, or have an unknown outcome.
Effect = Literal["recorded", "repeated", "unknown"]


class StepTokens(StudioSchema):
    """Tokens of a step; null: the provider did not report them."""

    input: int | None = None
    output: int | None = None


class StepPlace(StudioSchema):
    """The process that executes or executed a step; null: unknown."""

    pid: int | None = None
    node: str | None = None
    replica: str | None = None


class StepSchema(StudioSchema):
    """One execution of a task, a delegation or a unit.

    Attributes:
        id: Its instance, such as `writer#0`. Unique in the run.
        node: Key of the declared task or unit, as in the nodes of the flow; null: created during the run.
        parent: The step around it: the delegating task, the loop of an iteration, the unit of a branch.
        title: At most 120 characters.
        agent: Role of its agent; empty: no agent, or unknown so far.
        number: Number of the iteration, attempt or graph step, from 1; or the item of a map.
        attempts: Number of starts.
        segments: How it spent its time: kind, start, end.
        tools: Its calls: name, outcome, end.
        level: Level in a map-reduce: 0 for maps.
        error: Its error, in one line.
        reviewed: Whether one of its gates was decided.
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
        cursor: Position for the next request, which returns later changes.
    """

    steps: list[StepSchema]
    cursor: int


class LiveSteps(StepList):
    """An update in the live stream of a run."""

    run: RunDetailSchema


class MessageSchema(StudioSchema):
    """A message of a prompt."""

    role: str
    content: Text


class RequestedCall(StudioSchema):
    """A call that a model requested, with its arguments unchanged."""

    id: str
    name: Text
    arguments: Text


class AnswerSchema(StudioSchema):
    """An answer of a model. The first iteration is 0.

    Attributes:
        reasoning: The reasoning before the answer.
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
    """A call of a tool and its result; null: the result is unknown."""

    name: Text
    arguments: Text
    result: Text | None = None
    outcome: str
    duration_ms: int | None = None
    started_at: Millis | None = None
    effect: str | None = None
    iteration: int | None = None


class GuardrailCheck(StudioSchema):
    """The result of a guardrail.

    Attributes:
        kind: The checked side: `input` or `output`.
        name: Its code, as `module.name`; empty: unknown, since a refusal does not record it.
    """

    kind: str
    name: Text = ""
    accepted: bool
    message: Text = ""


class ConstraintCheck(StudioSchema):
    """The result of a delegation rule."""

    rule: str
    allowed: bool
    message: Text = ""


class ContextCut(StudioSchema):
    """A part that was removed from a prompt, so that the prompt fits."""

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
        fork_spec: Argument of `ensemble-ray fork --from` that repeats the step; null: the run cannot be forked there.
        cut: Full lengths of shortened texts, by field. `.../text?field=` returns the full texts.
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
