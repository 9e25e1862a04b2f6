"""Words of the ReAct machine: what it is told and what it wants done. Package: execute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from ensemble_ray.values.messages import ChatResponse, ToolCall

__all__ = [
    "AnswerReceived",
    "CallModel",
    "CallTools",
    "Fail",
    "Finish",
    "StepInstruction",
    "StepStimulus",
    "ToolsReturned",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReceived:
    """The model answered."""

    response: ChatResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsReturned:
    """The texts of the allowed requests, in request order."""

    texts: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallModel:
    """Ask the model with the whole conversation. `turn` counts from 0."""

    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTools:
    """Run these requests; the stopped ones are over the limit and only get the stop text (S-ENG-40, S-ENG-41)."""

    turn: int
    allowed: Sequence[ToolCall]
    stopped: Sequence[ToolCall]
    #: number of answers with stopped requests so far, this one included; one WARN each (S-ENG-42)
    stop_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """This text is the answer."""

    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The agent went on calling tools; end the task (S-ENG-43)."""

    tool_calls_made: int


StepStimulus = Union[AnswerReceived, ToolsReturned]  # noqa: UP007  a name for the union, also at run time
StepInstruction = Union[CallModel, CallTools, Finish, Fail]  # noqa: UP007
