"""What all data of the page has in common. Pure.

Rules: unknown is null and nothing else; instants are whole milliseconds of Unix time, UTC; texts are raw, and fit for UTF-8.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, JsonValue

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
