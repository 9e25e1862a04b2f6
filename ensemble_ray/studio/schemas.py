"""Requests and answers between the page and its server. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, RootModel

from ensemble_ray.record.history.executions import ROUND_KINDS, UNIT_KINDS, ExecutionKind, ExecutionStatus
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
    """The body of every failure (S-STU-40)."""

    error: str  # class of the error
    code: str  # stable name of the reason for programs, such as `RUN_NOT_FOUND`
    message: Text  # what happened, where, and what to do


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
    """Body of `POST api/studio/reviews/RUN/GATE`."""

    decision: Literal["approve", "edit", "exit"]
    text: str | None = None  # the new text of an edit; may be empty
    comment: str = ""


class NewFork(StudioSchema):
    """Body of `POST api/studio/runs/ID/fork`."""

    #: the step to repeat: `fork_spec` of a step
    from_: Argument = Field(validation_alias="from", min_length=1, max_length=1000)
    #: name of the new run; null: studio generates one
    run_id: str | None = Field(default=None, min_length=1, max_length=128)


class AcceptedAction(StudioSchema):
    """Answer 202: the run to resume, cancel or start."""

    run_id: str


class PreviewedStep(StudioSchema):
    step: str
    title: Text


class PreviewedCall(StudioSchema):
    """A tool call with an unknown outcome."""

    step: str
    tool: Text
    arguments: Text


class RunPreview(StudioSchema):
    """Preview of a resumed or forked run: reused steps and repeated steps."""

    reused: list[PreviewedStep] = []  # steps with an output in the record
    #: started steps to repeat or finish. For a fork, its step and all later ones.
    asked_again: list[PreviewedStep] = []
    unknown_effects: list[PreviewedCall] = []  # calls that need a decision of a person first
    blocked: Text | None = None  # why the run cannot be resumed or forked; null: it can


class TaskHere(StudioSchema):
    run_id: str
    step: str
    since: Millis | None = None  # when the process started it; null: it waits there, or was just sent
    deaths: int = 0  # number of processes that died while they executed it


class RunHere(StudioSchema):
    """A run that uses a process."""

    run_id: str
    known: bool = True  # whether this store has its record
    agents: list[Text] = []  # roles of its agents in the process
    more_agents: int = 0
    replica: int = 1  # number of the process among the `replicas` processes of these agents
    replicas: int = 1


class ProcessInfo(StudioSchema):
    """A process of a cluster, or one that owns a run."""

    pid: int | None = None
    name: str
    kind: Literal["scheduler", "agent", "manager", "callables", "journal", "limiter", "events", "driver"]
    #: `silent`: it does not answer; `kept`: idle until the next run; `retiring`: it ends after its current runs
    state: Literal["ready", "starting", "silent", "kept", "retiring"] = "ready"
    runs: list[RunHere] = []
    more_runs: int = 0
    queue: int | None = None  # waiting work; null: unknown
    #: its steps that began first. `more_in_flight` counts the others.
    in_flight: list[TaskHere] = []
    more_in_flight: int = 0
    restarts: int | None = None  # number of dead processes that it replaces; null: unknown
    scheduler: str | None = None
    reserved: Text | None = None  # the resources that it reserves on its node
    memory_mb: float | None = None
    note: Text | None = None


class NodeActors(StudioSchema):
    node: str
    address: str | None = None
    processes: list[ProcessInfo]


class LimiterSchema(StudioSchema):
    name: str
    requests: int
    period_s: float
    queue: int  # requests that wait for a permit
    permits: int  # permits available now
    leased: int = 0  # unused permits that processes hold
    agents: list[Text] = []  # agents in the processes that requested permits


class BreakerSchema(StudioSchema):
    """The circuit breaker of a model endpoint, over all processes."""

    name: str
    state: Literal["closed", "open", "half_open"]  # the worst state in any process
    processes: int
    open_in: int = 0  # number of processes in which it is not closed
    probe_at: Millis | None = None  # when the next call may try the endpoint; null: no probe is due
    last_failure: Text | None = None
    sent: int = 0  # concurrent calls
    queue: int = 0  # waiting calls
    limit: int | None = None  # most concurrent calls, after the endpoint asked for fewer; null: no limit


class Actors(StudioSchema):
    """Answer to `GET api/studio/actors`."""

    nodes: list[NodeActors] = []
    limiters: list[LimiterSchema] = []
    breakers: list[BreakerSchema] = []
    clusters: list[str] = []  # addresses of the queried clusters
    note: Text | None = None  # why the answer is empty or incomplete


#: A graph, a trace, or a run written by `Export`.
FileKind = Literal["dag", "trace", "run"]


class FileEntry(StudioSchema):
    name: Text
    kind: FileKind | None  # its kind; null: the page cannot show it, for the reason in `problem`
    problem: Text | None = None  # the error in the file. A file with a kind is shown as far as possible.
    size_bytes: int
    modified_at: Millis
    workflow: Text = ""
    tasks: int | None = None  # number of its tasks; null: unknown
    duration_ms: int | None = None


class FileList(StudioSchema):
    """Answer to `GET api/studio/files`: the last changed files first."""

    folder: Text  # path of their folder
    files: list[FileEntry]
    left_out: int = 0  # number of files that are not in the list


class FlowSchema(RootModel[dict[str, Data]]):
    """Answer to `GET api/studio/runs/ID/flow`: a graph as `visualization.flow.flow_data` returns it."""


#: An action on a run.
Action = Literal["cancel", "resume", "fork", "decide"]


class StudioInfo(StudioSchema):
    """Answer to `GET api/studio/info`."""

    version: str
    actions: list[Action]  # the allowed actions; empty: the page only reads
    has_actors: bool  # whether the page can show processes of a cluster
    has_files: bool = False  # whether there is a folder with graphs and traces
    title: str  # name of the place, for people
    read_only_reason: str | None = None  # why no action is allowed; null: actions are allowed


class RunRow(StudioSchema):
    """A run as the list shows it."""

    run_id: str
    ensemble: Text  # name of the team, or the source of its definition; empty: unknown
    status: RunStatus
    tags: dict[str, str] = {}
    summary: Text = ""  # one line: the beginning of its output, or else of its first task
    created_at: Millis
    ended_at: Millis | None = None
    duration_ms: int | None = None
    tokens: int | None = None
    cost: CostSchema | None = None
    open_reviews: int = 0  # number of its gates that wait for a person
    origin_run: str | None = None  # the forked run, if this run is a fork
    place: str = ""  # location of its record
    workflow: str = ""  # order of its tasks; empty: unknown
    tasks: int = 0  # number of tasks in its plan. If the run creates its tasks while running: number of ended tasks.


class RunList(StudioSchema):
    """Answer to `GET api/studio/runs`: newest first."""

    runs: list[RunRow]
    next_cursor: str | None = None  # cursor of the next page; null: this is the last page
    total_known: int  # number of all runs, without the filter


class RunSeries(StudioSchema):
    """Answer to `GET api/studio/runs/ID/series`: a run and its neighbours by start time (S-VIZ-76)."""

    first: int | None  # number of the first run in the list; null: not all runs before it were counted (S-STU-9)
    runs: list[RunRow]  # the runs in the order in which they began


class StepError(StudioSchema):
    class_: str = Field(serialization_alias="class")  # class of the error
    message: Text
    causes: list[Text] = []  # its causes, nearest first, each with its class


class RunError(StepError):
    place: Text = ""  # line of user code that raised; empty: no user code raised
    first_failed_step: str | None = None  # the step that failed first; null: no step failed


class ForkOrigin(StudioSchema):
    run_id: str
    step: str


class ReviewSchema(StudioSchema):
    run_id: str
    gate_id: str  # id of the gate, for the decision
    ensemble: Text = ""
    timing: str
    step: str  # the step of the gate
    task_description: Text
    task_output: Text
    prompt: Text | None = None
    required_role: str | None = None
    created_at: Millis
    expires_at: Millis | None = None  # when the gate times out; null: never
    on_timeout: str  # effect of a timeout: `continue`, `exit_early` or `fail`
    decision: str | None = None  # `approve`, `edit` or `exit`; null: the gate is open
    text: Text | None = None
    comment: Text | None = None
    timed_out: bool = False
    decided_by: Text | None = None
    decided_at: Millis | None = None
    decidable: bool = False  # whether the gate waits and this page accepts its decision


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
    agent: Text
    tokens: int | None = None
    cost: str | None = None
    steps: int = 0


class BudgetSchema(StudioSchema):
    tokens: SpentTokens = SpentTokens()
    cost: SpentCost = SpentCost()
    by_agent: list[AgentBudget] = []
    end_reason: str | None = None  # why the run ended, in words; null: it is active


class RunDetailSchema(RunRow):
    """Answer to `GET api/studio/runs/ID`."""

    inputs: dict[str, Data] = {}
    exit_reason: str | None = None
    exit_reason_text: str | None = None
    error: RunError | None = None
    first_error_step: str | None = None
    counts: dict[str, int] = {}  # number of steps by status
    reviews: list[ReviewSchema] = []
    budget: BudgetSchema = BudgetSchema()
    forked_from: ForkOrigin | None = None
    forks: list[str] = []  # known forks of this run
    cursor: int  # position of the last fact in this answer
    is_live: bool = False  # whether the run can change by itself
    problem: Text | None = None  # why the record could not be read to the end; null: it could
    resume_advice: Text | None = None  # how to resume an interrupted run; null: the run is not interrupted


class ComparedSide(StudioSchema):
    status: str
    tokens: int | None = None
    duration_ms: int | None = None
    output_digest: str | None = None


class ComparedStep(StudioSchema):
    """One step in two runs; null: this run has no such step."""

    id: str
    title: Text
    a: ComparedSide | None = None
    b: ComparedSide | None = None
    same: bool  # whether both outputs are equal


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
    """One execution of a task, a delegation or a unit."""

    id: str  # its instance, such as `writer#0`. Unique in the run.
    #: key of the declared task or unit, as in the nodes of the flow; null: created during the run
    node: str | None = None
    parent: str | None = None  # the step around it: the delegating task, the loop of an iteration, the unit of a branch
    kind: ExecutionKind
    title: Text  # at most 120 characters
    agent: Text = ""  # role of its agent; empty: no agent, or unknown so far
    status: ExecutionStatus
    number: int | None = None  # number of the iteration, attempt or graph step, from 1; or the item of a map
    attempts: int = 0  # number of starts
    started_at: Millis | None = None
    ended_at: Millis | None = None
    segments: list[tuple[SegmentKind, Millis, Millis]] = []  # how it spent its time: kind, start, end
    tools: list[tuple[Text, str, Millis]] = []  # its calls: name, outcome, end
    tokens: StepTokens | None = None
    cost: CostSchema | None = None
    level: int | None = None  # level in a map-reduce: 0 for maps
    error: Text | None = None  # its error, in one line
    effect: Effect | None = None
    place: StepPlace | None = None
    reviewed: bool = False  # whether one of its gates was decided

    @property
    def is_unit(self) -> bool:
        """Whether it is a loop, a phase, a graph or an execution of one."""
        return self.kind in UNIT_KINDS or self.kind in ROUND_KINDS


class StepList(StudioSchema):
    """Answer to `GET api/studio/runs/ID/steps`."""

    steps: list[StepSchema]
    cursor: int  # position for the next request, which returns later changes


class LiveSteps(StepList):
    """An update in the live stream of a run."""

    run: RunDetailSchema


class MessageSchema(StudioSchema):
    role: str
    content: Text


class RequestedCall(StudioSchema):
    """A call that a model requested, with its arguments unchanged."""

    id: str
    name: Text
    arguments: Text


class AnswerSchema(StudioSchema):
    """An answer of a model. The first iteration is 0."""

    iteration: int
    text: Text | None = None
    reasoning: Text | None = None  # the reasoning before the answer
    tool_calls: list[RequestedCall] = []
    input_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None  # part of the output tokens
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
    kind: str  # the checked side: `input` or `output`
    name: Text = ""  # its code, as `module.name`; empty: unknown, since a refusal does not record it
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


class StepDetail(StepSchema):
    """Answer to `GET api/studio/runs/ID/steps/STEP`."""

    prompt: list[MessageSchema] = []
    answers: list[AnswerSchema] = []
    tools_offered: list[Text] = []  # names of the tools that its model could call
    tool_calls: list[ToolCallDetail] = []
    output: Text | None = None
    structured_output: Data = None
    guardrails: list[GuardrailCheck] = []
    constraints: list[ConstraintCheck] = []
    context_cuts: list[ContextCut] = []
    directives: list[Text] = []
    reviews: list[ReviewSchema] = []
    failure: StepError | None = None
    #: argument of `ensemble-ray fork --from` that repeats the step; null: the run cannot be forked there
    fork_spec: str | None = None
    #: full lengths of shortened texts, by field. `.../text?field=` returns the full texts.
    cut: dict[str, int] = {}
