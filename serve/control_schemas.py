"""What clients say to runs that go on, and to gates that wait, as it travels over HTTP."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from ensemble_ray.serve.run_schemas import OpenReview, RunStatus
from ensemble_ray.serve.schemas import Failure, Text, Wire
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.reviews import LONGEST_DIRECTIVE

#: Characters of a comment, and of a text that takes the place of an output.
_LONGEST_COMMENT, _LONGEST_EDIT = 10_000, 4_000_000
#: Characters of a name of a model, or of a role.
_LONGEST_NAME = 256
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

    model: Annotated[str | None, Field(min_length=1, max_length=_LONGEST_NAME), BeforeValidator(whole_data)]
    agent: Annotated[str | None, Field(min_length=1, max_length=_LONGEST_NAME), BeforeValidator(whole_data)] = None


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
