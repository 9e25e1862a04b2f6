"""Runs as the page shows them: in the list, and one of them. Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ensemble_ray.studio.schemas.wire import CostSchema, Data, Millis, RunStatus, StudioSchema, Text

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
