"""Runs as they travel over HTTP: how they are asked for, how they stand, what happens in them.

One vocabulary for all routes. Units stand in the names; instants are UTC. Whatever drives runs gives these values, too, so that
they are data alone and travel between processes.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from ensemble_ray.definition.run_options import LONGEST_WORD, MOST_TAGS
from ensemble_ray.serve.schemas import Expressible, Failure, FinishedRun, Text, Wire
from ensemble_ray.serve.task_schemas import TaskOverrides, TaskSelection
from ensemble_ray.text.foreign_text import whole_data

#: Ids that name a record are shorter; the text of a longer one need not be repeated to anybody.
_LONGEST_NAME = 256
#: Digits of money; more are no amount but work for the parser.
_MOST_DIGITS = 28


def _in_utc(instant: datetime) -> datetime:
    try:
        return instant.astimezone(UTC)
    except (OverflowError, ValueError):
        raise ValueError("it is before the year 1 or after 9999 in UTC") from None


_Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME), BeforeValidator(whole_data)]
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
