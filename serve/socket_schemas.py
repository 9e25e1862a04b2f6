"""Messages of the control API over a WebSocket, as clients send them (S-CTL-33 to S-CTL-36).

Unknown keys are passed over, as in all messages of a page (S-WEB-31); what is known is held to the rules of the same calls over HTTP.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.run_schemas import NewRun
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.reviews import LONGEST_DIRECTIVE

#: What clients can subscribe to: the messages to everybody of file 27, and ends of runs that they asked for.
MESSAGE_TYPES = frozenset({
    "ensemble_started", "task_started", "task_input", "task_completed", "task_failed", "tool_called",
    "delegation_started", "delegation_completed", "delegation_failed", "review_requested", "review_timed_out",
    "review_decided", "llm_iteration_started", "llm_iteration_completed", "token", "ensemble_completed",
    "loop_iteration_completed", "graph_state_completed", "heartbeat", "run_result",
})  # fmt: skip
_EVERYTHING = "*"
_LONGEST_NAME, _MOST_SHOWN, _MOST_TYPES = 256, 10, 64

_Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME), BeforeValidator(whole_data)]


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
    places = (f"{'.'.join(map(str, each['loc'][:4]))[:_LONGEST_NAME]}: {each['msg']}" for each in found[:_MOST_SHOWN])
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", "; ".join(places))
