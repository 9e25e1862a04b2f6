"""Requests and answers between the page and its server. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, RootModel

from ensemble_ray.access.quotas import Standing, show_amount
from ensemble_ray.record.history.executions import ROUND_KINDS, UNIT_KINDS, ExecutionKind, ExecutionStatus
from ensemble_ray.text.foreign_text import whole_data, whole_text


def _check_argument(text: str) -> str:
    if "\0" in text or whole_text(text) != text:
        raise ValueError("it contains an invalid character: NUL, or half of a surrogate pair")
    return text


Text = Annotated[str, AfterValidator(whole_text)]  # a text of a model, a tool or a user
Argument = Annotated[str, AfterValidator(_check_argument)]  # an argument of a program
Data = Annotated[JsonValue, BeforeValidator(whole_data)]
Millis = int  # Unix time in ms; in `*_ms` fields a duration


class StudioSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class CostSchema(StudioSchema):
    """Money, as decimal text."""

    amount: str
    currency: str
    unpriced_calls: int = 0  # model calls of unknown price, which the amount lacks


class FailureSchema(StudioSchema):
    """The body of every failure (S-STU-40)."""

    error: str
    code: str  # such as `RUN_NOT_FOUND`
    message: Text  # what happened, where, and what to do


#: In the words of the endpoint (S-SRV-3).
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
    text: str | None = None  # of an edit
    comment: str = ""
    role: str | None = Field(default=None, max_length=1000)  # that a reader without a key has confirmed


class NewFork(StudioSchema):
    """Body of `POST api/studio/runs/ID/fork`."""

    from_: Argument = Field(validation_alias="from", min_length=1, max_length=1000)  # `fork_spec` of a step
    run_id: str | None = Field(default=None, min_length=1, max_length=128)  # null: studio generates a name


class AcceptedAction(StudioSchema):
    """Answer 202."""

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
    """Reused and repeated steps of a resumed or forked run."""

    reused: list[PreviewedStep] = []
    asked_again: list[PreviewedStep] = []  # started steps to repeat or finish; of a fork its step and all later ones
    unknown_effects: list[PreviewedCall] = []  # a person decides first
    blocked: Text | None = None  # why not


class ProcessTask(StudioSchema):
    run_id: str
    step: str
    since: Millis | None = None  # null: it waits there, or was just sent
    deaths: int = 0  # of processes that executed it


class ProcessRun(StudioSchema):
    run_id: str
    ensemble: Text = ""  # name of the team, and its subject, as in the row of the run
    subject: Text = ""
    known: bool = True  # this store has its record
    agents: list[Text] = []  # roles
    more_agents: int = 0
    replica: int = 1  # number among `replicas`
    replicas: int = 1


class ProcessInfo(StudioSchema):
    """A process of a cluster, or one that owns a run."""

    pid: int | None = None
    name: str
    kind: Literal["scheduler", "agent", "manager", "callables", "journal", "limiter", "events", "driver"]
    #: `silent`: does not answer; `kept`: idle until the next run; `retiring`: ends after its runs
    state: Literal["ready", "starting", "silent", "kept", "retiring"] = "ready"
    runs: list[ProcessRun] = []
    more_runs: int = 0
    queue: int | None = None  # waiting work
    in_flight: list[ProcessTask] = []  # the first; `more_in_flight` counts the others
    more_in_flight: int = 0
    restarts: int | None = None  # dead processes that it replaces
    scheduler: str | None = None
    reserved: Text | None = None  # resources
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
    queue: int
    permits: int  # available
    leased: int = 0  # held by processes, unused
    agents: list[Text] = []  # in the processes that request permits


class BreakerSchema(StudioSchema):
    """The circuit breaker of a model endpoint, over all processes."""

    name: str
    state: Literal["closed", "open", "half_open"]  # the worst of all processes
    processes: int
    open_in: int = 0  # processes in which it is not closed
    probe_at: Millis | None = None  # of the next probe
    last_failure: Text | None = None
    sent: int = 0  # concurrent calls
    queue: int = 0  # waiting calls
    limit: int | None = None  # of concurrent calls, if the endpoint asked for one


class Actors(StudioSchema):
    """Answer to `GET api/studio/actors`."""

    nodes: list[NodeActors] = []
    limiters: list[LimiterSchema] = []
    breakers: list[BreakerSchema] = []
    clusters: list[str] = []  # addresses
    note: Text | None = None  # why the answer is incomplete


FileKind = Literal["dag", "trace", "run"]


class FileEntry(StudioSchema):
    name: Text
    kind: FileKind | None  # null: not shown, for the reason in `problem`
    problem: Text | None = None  # a file with a kind is shown as far as possible
    size_bytes: int
    modified_at: Millis
    workflow: Text = ""
    tasks: int | None = None
    duration_ms: int | None = None


class FileList(StudioSchema):
    """Answer to `GET api/studio/files`: the last changed first."""

    folder: Text
    files: list[FileEntry]
    left_out: int = 0  # number of further files


class FlowSchema(RootModel[dict[str, Data]]):
    """Answer to `GET api/studio/runs/ID/flow`: the data of `visualization.flow.flow_data`."""


Action = Literal["cancel", "resume", "fork", "decide", "delete"]


class StudioInfo(StudioSchema):
    """Answer to `GET api/studio/info`."""

    version: str
    actions: list[Action]  # empty: the page only reads
    has_actors: bool
    has_files: bool = False  # a folder with graphs and traces
    has_deliveries: bool = False  # runs may have webhooks
    has_teams: bool = False  # an endpoint's, with versions
    has_schedules: bool = False
    title: str  # of the place
    read_only_reason: str | None = None
    roles: list[Text] | None = None  # of the reader's key; null: no key identifies the reader
    has_quotas: bool = False  # the reader's key


class QuotaBar(StudioSchema):
    """One quota of the reader's key, and today's usage. Amounts are decimal text."""

    quantity: str  # `runs`, `tokens` or `cost`
    limit: str
    used: str
    reserved: str  # by runs that have not ended
    used_share: float  # 0 to 1
    reserved_share: float


class QuotaSchema(StudioSchema):
    """Answer to `GET api/studio/quota`."""

    key: str = ""
    quotas: list[QuotaBar] = []
    resets_at: Millis | None = None

    @classmethod
    def of(cls, standing: Standing | None) -> QuotaSchema:
        if standing is None:
            return cls()
        bars: list[QuotaBar] = []
        for each in standing.quotas.limited:
            limit, used = standing.quotas.limit(each) or 1, standing.used.amount(each)
            reserved = standing.reserved_of(each)
            bars.append(
                QuotaBar(
                    quantity=each,
                    limit=show_amount(each, limit),
                    used=show_amount(each, used),
                    reserved=show_amount(each, reserved),
                    used_share=min(1.0, used / limit),
                    reserved_share=min(max(0.0, 1.0 - used / limit), reserved / limit),
                )
            )
        return cls(key=standing.key, quotas=bars, resets_at=round(standing.resets_at.timestamp() * 1000))


class VersionRow(StudioSchema):
    version: str
    share: float  # of new runs, 0 to 1
    open_runs: int
    loaded_at: Millis


class VersionedTeam(StudioSchema):
    ensemble: Text
    versions: list[VersionRow]  # newest first; empty: the team has no file


class EndpointState(StudioSchema):
    """Answer to `GET api/studio/endpoint`."""

    drain: Literal["serving", "draining", "drained"]
    open_runs: int | None  # None: the visitor sees only some teams
    teams: list[VersionedTeam]  # empty unless versions are requested


class RunRow(StudioSchema):
    run_id: str
    ensemble: Text  # name of the team, or source of its definition
    status: RunStatus
    tags: dict[str, str] = {}
    summary: Text = ""  # beginning of its output, or else its subject
    subject: Text = ""  # its inputs in one line, or else its items, or its first task
    failure: Text = ""  # class and message of the error that ended or interrupted it
    created_at: Millis
    ended_at: Millis | None = None
    duration_ms: int | None = None
    tokens: int | None = None
    estimated_tokens: int | None = None  # by the budget, if a provider did not report the tokens of each call
    reused_calls: int = 0  # answers of earlier runs
    reused_tokens: int | None = None  # that they had there, not part of `tokens`
    cost: CostSchema | None = None
    attempts: int = 1  # starts: 1, and 1 for each resume
    can_resume: bool = False  # its record has what a command needs to resume it
    open_reviews: int = 0  # number of waiting gates
    origin_run: str | None = None  # of a fork
    place: str = ""  # of its record
    workflow: str = ""
    tasks: int = 0  # in its plan; ended tasks of a run without a plan of all tasks


class RunGroup(StudioSchema):
    """Runs with the same team, tag or error."""

    key: Text  # name of the team, `name:value` of the tag, or the error without its numbers; empty: none
    statuses: dict[str, int]  # number of runs by status
    latest_at: Millis  # start of the newest


class RunList(StudioSchema):
    """Answer to `GET api/studio/runs`: newest first, if it is not sorted."""

    runs: list[RunRow]
    next_cursor: str | None = None  # null: this is the last page
    total_known: int  # without the filter
    counts: dict[str, int] = {}  # runs by status that match all filters except `status`
    unread: int = 0  # runs that may match or change the order: their records are read by the next requests
    groups: list[RunGroup] = []  # with `group`, instead of runs: the largest first


class TrendSums(StudioSchema):
    """Runs of a team in some time, by their beginnings. null: unknown."""

    runs: int
    open: int = 0  # have not ended: in no other number
    failed: int = 0  # or their process died
    p50_ms: int | None = None  # durations of completed runs
    p95_ms: int | None = None
    tokens: int | None = None  # of ended runs with a count
    tokens_unknown: int = 0  # number of ended runs without one
    cost: str | None = None
    cost_unknown: int = 0


class TrendDay(TrendSums):
    day: str  # date of the reader, such as `2026-11-29`
    since: Millis  # its beginning


TrendMeasure = Literal["duration", "tokens", "cost"]


class UnusualRun(StudioSchema):
    run_id: str
    status: RunStatus
    created_at: Millis
    duration_ms: int | None = None
    tokens: int | None = None
    cost: str | None = None
    times: dict[TrendMeasure, float]  # unusual measures, as multiples of the team's medians


class TeamTrend(StudioSchema):
    ensemble: Text
    currency: str | None = None
    total: TrendSums
    days: list[TrendDay]  # those with runs, oldest first
    unusual: list[UnusualRun] = []  # the furthest from the median first


class Trends(StudioSchema):
    """Answer to `GET api/studio/trends`."""

    first_day: str
    last_day: str
    teams: list[TeamTrend]  # most runs first
    more_teams: int = 0
    runs: int  # of all teams in these days
    counted: int  # runs whose records were read
    is_complete: bool  # no more records will be read


class EvaluationRow(StudioSchema):
    id: str
    team: Text
    created_at: Millis  # start of its newest run
    runs: dict[str, int]  # runs of the team by status
    has_result: bool  # whether it ran to its end
    cases: int = 0
    means: dict[str, float | None] = {}  # of its result, by scorer; null: without a score


class Evaluations(StudioSchema):
    """Answer to `GET api/studio/evaluations`: newest first."""

    evaluations: list[EvaluationRow]
    more: int = 0  # number of older ones
    is_complete: bool  # no more records will be read


class ScoreRow(StudioSchema):
    """Scores of one scorer, of all cases or of those with a tag."""

    scorer: Text
    tag: Text | None = None
    cases: int
    mean: float | None
    low: float | None = None
    high: float | None = None
    method: str = ""
    errors: int = 0


class ComparisonRow(StudioSchema):
    scorer: Text
    cases: int
    earlier: float
    later: float
    p_value: float
    verdict: Literal["worse", "better", "same"]


class EvaluationScore(StudioSchema):
    value: float | None
    reason: Text = ""
    error: Text = ""
    run_id: str = ""  # of a judge


class EvaluationRun(StudioSchema):
    run_id: str
    repeat: int
    state: str
    output: Text
    error: Text
    duration_ms: int | None
    cost: str
    scores: dict[str, EvaluationScore]


class EvaluationCase(StudioSchema):
    id: Text
    inputs: dict[str, Text]
    expected: Data = None
    tags: list[Text] = []
    runs: list[EvaluationRun]
    earlier: list[EvaluationRun] = []  # of the compared evaluation
    change: float = 0.0  # of the scores, added over the scorers; < 0: a regression


class EvaluationDetail(StudioSchema):
    """Answer to `GET api/studio/evaluations/ID`."""

    id: str
    team: Text
    repeats: int
    currency: str
    scores: list[ScoreRow]
    runs: int
    errors: int  # runs without an output
    p50_ms: int | None
    p95_ms: int | None
    tokens: int
    cost: str
    judge_cost: str
    cases: list[EvaluationCase]  # with a comparison, regressions first
    more_cases: int = 0
    compared: str | None = None
    comparison: list[ComparisonRow] = []


class RunSeries(StudioSchema):
    """Answer to `GET api/studio/runs/ID/series`: a run and its neighbours in time (S-VIZ-76)."""

    first: int | None  # number of the first run; null: runs before it were not counted (S-STU-9)
    runs: list[RunRow]  # in order of their starts


class StepError(StudioSchema):
    class_: str = Field(serialization_alias="class")
    message: Text
    causes: list[Text] = []  # nearest first, with their classes


class FailedAttemptSchema(StudioSchema):
    """One start of the failed step."""

    started_at: Millis
    ended_at: Millis
    waited_ms: Millis = 0  # for rate limits


class RunError(StepError):
    place: Text = ""  # line of user code
    first_failed_step: str | None = None
    what: Text = ""  # what failed
    lines: list[Text] = []  # the whole text, as `ensemble-ray trace` and the exception show it
    step: str | None = None  # the failed one, or the failed unit; null: the run itself
    fork_from: str | None = None  # argument of `ensemble-ray fork --from`
    others: int = 0  # number of further errors
    answer: Text | None = None  # the last answer, if it did not have the declared type
    refusal: Text = ""  # why that answer was refused
    attempts: list[FailedAttemptSchema] = []
    requests: int = 0  # of its last model call
    remedy: Text = ""


class NextStepSchema(StudioSchema):
    """What to do with a run."""

    text: Text
    command: Text = ""  # at the command line, or in the program that began the run


class ForkOrigin(StudioSchema):
    run_id: str
    step: str


class ReviewSchema(StudioSchema):
    run_id: str
    gate_id: str
    ensemble: Text = ""
    subject: Text = ""  # as in the row of its run
    timing: str
    step: str
    task_description: Text
    task_output: Text
    prompt: Text | None = None
    required_role: str | None = None
    created_at: Millis
    expires_at: Millis | None = None  # null: never
    on_timeout: str  # `continue`, `exit_early` or `fail`
    decision: str | None = None  # `approve`, `edit` or `exit`
    text: Text | None = None
    comment: Text | None = None
    timed_out: bool = False
    decided_by: Text | None = None
    decided_role: Text | None = None  # that the gate required
    decided_at: Millis | None = None
    decidable: bool = False  # this page accepts a decision


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
    end_reason: str | None = None  # in words


class ItemRetry(StudioSchema):
    """How to repeat the failed items of a map-reduce (S-STU-245)."""

    action: Literal["resume", "fork", "run"]  # `run`: a new run over these items
    step: str | None = None  # from which a fork repeats
    command: Text  # with `INDICES` for the positions of the items, or `DEAD_LETTERS` for a file that is not recorded
    is_shell: bool  # else Python of the program that started the run


class BatchSchema(StudioSchema):
    """Requests of maps in one batch at the provider."""

    batch: str
    state: str  # `planned`, `uploaded`, `submitted`, `cancelled`, `collected` or `void`
    status: Text = ""  # the provider's word
    total: int
    answered: int
    failed: int = 0
    provider_batch: Text = ""  # the provider's id


class RunDetailSchema(RunRow):
    """Answer to `GET api/studio/runs/ID`."""

    inputs: dict[str, Data] = {}
    exit_reason: str | None = None
    exit_reason_text: str | None = None
    error: RunError | None = None
    first_error_step: str | None = None
    counts: dict[str, int] = {}  # steps by status
    reviews: list[ReviewSchema] = []
    budget: BudgetSchema = BudgetSchema()
    forked_from: ForkOrigin | None = None
    forks: list[str] = []  # known forks
    cursor: int  # position of the last fact
    is_live: bool = False  # the run can change by itself
    problem: Text | None = None  # why the record cannot be read to the end
    resume_advice: Text | None = None  # of an interrupted run
    batches: list[BatchSchema] = []  # of maps, oldest first
    item_retry: ItemRetry | None = None  # of a map-reduce with failed items that does not run
    next_step: NextStepSchema | None = None
    offers: list[Action] = []  # actions that would not be refused
    can_reveal: bool = False  # the reader may see the values of its redactor


class RevealedValues(StudioSchema):
    """Answer to `POST api/studio/runs/ID/reveal`: the values by their placeholders."""

    values: dict[str, Text]


class DeliverySchema(StudioSchema):
    """A webhook of a run behind an endpoint."""

    event: str
    receiver: Text  # without its path
    state: Literal["pending", "delivered", "failed"]
    attempt_count: int
    error: Text | None = None  # of the last attempt
    next_attempt_at: Millis | None = None


class DeliveryListSchema(StudioSchema):
    """Answer to `GET api/studio/runs/ID/deliveries`: oldest first."""

    deliveries: list[DeliverySchema]


class ComparedSide(StudioSchema):
    status: str
    tokens: int | None = None
    duration_ms: int | None = None
    output_digest: str | None = None


class ComparedStep(StudioSchema):
    """One step in two runs; null: no such step."""

    id: str
    title: Text
    a: ComparedSide | None = None
    b: ComparedSide | None = None
    same: bool  # equal outputs


class ComparedRuns(StudioSchema):
    """Answer to `GET api/studio/compare`."""

    a: RunRow
    b: RunRow
    steps: list[ComparedStep]


SegmentKind = Literal["queue", "rate_limit", "model", "tool", "person", "other"]
#: Of calls: recorded, repeated after an interruption, or with an unknown outcome.
Effect = Literal["recorded", "repeated", "unknown"]


class StepTokens(StudioSchema):
    """null: the provider did not report them."""

    input: int | None = None
    output: int | None = None
    cached: int | None = None  # part of the input; null: no provider counted it


class StepPlace(StudioSchema):
    """The process of a step; null: unknown."""

    pid: int | None = None
    node: str | None = None
    replica: str | None = None


class StepSchema(StudioSchema):
    """One execution of a task, a delegation or a unit."""

    id: str  # its instance, such as `writer#0`
    node: str | None = None  # key of the declared task or unit; null: created during the run
    parent: str | None = None  # the delegating task, the loop of an iteration, the unit of a branch
    kind: ExecutionKind
    title: Text  # at most 120 characters
    agent: Text = ""  # role
    status: ExecutionStatus
    number: int | None = None  # of the iteration, attempt or graph step, from 1; or the item of a map
    attempts: int = 0  # starts
    started_at: Millis | None = None
    ended_at: Millis | None = None
    segments: list[tuple[SegmentKind, Millis, Millis]] = []  # kind, start, end
    tools: list[tuple[Text, str, Millis]] = []  # name, outcome, end
    tokens: StepTokens | None = None
    cost: CostSchema | None = None
    level: int | None = None  # in a map-reduce; 0: maps
    error: Text | None = None  # one line
    effect: Effect | None = None
    place: StepPlace | None = None
    reviewed: bool = False  # one of its gates was decided

    @property
    def is_unit(self) -> bool:
        """Whether it is a loop, a phase, a graph or an execution of one."""
        return self.kind in UNIT_KINDS or self.kind in ROUND_KINDS


class StepList(StudioSchema):
    """Answer to `GET api/studio/runs/ID/steps`."""

    steps: list[StepSchema]
    cursor: int  # for the next request


class LiveSteps(StepList):
    """An update in the live stream of a run."""

    run: RunDetailSchema


class AttachmentSchema(StudioSchema):
    """A picture, audio or a file. `GET api/studio/runs/ID/attachments/SHA256` returns its content."""

    kind: str  # `image`, `audio` or `file`
    name: Text
    media_type: Text
    size_bytes: int
    sha256: str


class MessageSchema(StudioSchema):
    role: str
    content: Text
    attachments: list[AttachmentSchema] = []


class RequestedCall(StudioSchema):
    id: str
    name: Text
    arguments: Text


class ModelWaitSchema(StudioSchema):
    """A wait of a model call: after a failed attempt, for its endpoint, or for a permit."""

    cause: str  # `retry`, `repeat`, `breaker`, `limit`, `permit`, `fallback`, `skipped` or `rule`
    reason: Text = ""
    at: Millis | None = None
    wait_ms: int | None = None  # null: unknown


class ModelAttempts(StudioSchema):
    waits: list[ModelWaitSchema]  # before the last attempt, in order
    number: int  # of the last attempt, from 1
    most: int | None = None  # by the retry policy; null: unknown


class AnswerSchema(StudioSchema):
    """An answer of a model; the first iteration is 0."""

    iteration: int
    text: Text | None = None
    reasoning: Text | None = None  # before the answer
    tool_calls: list[RequestedCall] = []
    input_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None
    latency_ms: int | None = None
    model: str | None = None
    started_at: Millis | None = None
    attempts: ModelAttempts | None = None  # null: one attempt, without a wait
    reused: str | None = None  # run that the answer was taken from; null: the model was asked
    reused_tokens: int | None = None  # input and output that it had there


class ToolCallDetail(StudioSchema):
    """A tool call; null: the result is unknown."""

    name: Text
    arguments: Text
    result: Text | None = None
    outcome: str
    duration_ms: int | None = None
    started_at: Millis | None = None
    effect: str | None = None
    iteration: int | None = None
    repairs: list[Text] = []  # of the arguments
    log: list[Text] = []  # lines that it logged and printed
    attachments: list[AttachmentSchema] = []


class GuardrailCheck(StudioSchema):
    kind: str  # `input` or `output`
    name: Text = ""  # `module.name`; a refusal does not record it
    accepted: bool
    message: Text = ""


class ConstraintCheck(StudioSchema):
    """The result of a delegation rule."""

    rule: str
    allowed: bool
    message: Text = ""


class ContextCut(StudioSchema):
    """A part that was removed from a prompt."""

    section: Text
    kept_tokens: int | None = None
    cut_tokens: int | None = None
    how: str = ""


class StepDetail(StepSchema):
    """Answer to `GET api/studio/runs/ID/steps/STEP`."""

    prompt: list[MessageSchema] = []
    answers: list[AnswerSchema] = []
    tools_offered: list[Text] = []  # names
    tool_calls: list[ToolCallDetail] = []
    output: Text | None = None
    structured_output: Data = None
    guardrails: list[GuardrailCheck] = []
    constraints: list[ConstraintCheck] = []
    context_cuts: list[ContextCut] = []
    directives: list[Text] = []
    reviews: list[ReviewSchema] = []
    failure: StepError | None = None
    failed_attempts: ModelAttempts | None = None  # of the model call that failed
    fork_spec: str | None = None  # argument of `ensemble-ray fork --from`
    cut: dict[str, int] = {}  # full lengths of shortened texts; `.../text?field=` returns the texts


class ScheduleEntry(StudioSchema):
    """A run of a schedule, or skipped times or a skipped file."""

    trigger: Literal["time", "file", "manual"]
    at: Millis
    since: Millis | None = None  # of the first of several skipped times
    times: int = 1
    run_id: str | None = None
    status: str | None = None  # null: no run, or it was deleted
    reason: Text = ""
    file: Text | None = None


class ScheduleSchema(StudioSchema):
    ensemble: str
    name: str
    cron: str | None
    every_s: float | None
    folder: Text | None
    pattern: Text | None
    timezone: str
    is_paused: bool
    next_at: Millis | None
    waiting: int
    problem: Text | None
    history: list[ScheduleEntry]  # newest first


class ScheduleTable(StudioSchema):
    """Answer to `GET api/studio/schedules`."""

    schedules: list[ScheduleSchema]


class ControlledSchedule(StudioSchema):
    """Answer to `POST api/studio/schedules/ENSEMBLE/NAME/ACTION`."""

    run_id: str | None = None  # of the run that the action started
