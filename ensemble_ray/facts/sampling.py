"""What a model answered that a tool's server asked for in the middle of a call. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ensemble_ray.facts.fact import TIME_OF_FACT, FactData, Key
from ensemble_ray.facts.shapes import DURATION, INSTANT, NUMBER, TEXT, list_of, optional


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingAnswered(FactData):
    """The agent's model answered a tool's server."""

    KIND: ClassVar = "sampling"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "request_digest": Key(TEXT, ""),
        "started_at": Key(INSTANT, TIME_OF_FACT, is_needed=True),
        "latency_s": Key(DURATION, 0.0, is_needed=True),
        "text": Key(optional(TEXT), is_needed=True),
        "input_tokens": Key(NUMBER, -1, is_needed=True),
        "output_tokens": Key(NUMBER, -1, is_needed=True),
        "finish_reason": Key(optional(TEXT), is_optional=True),
        "estimated_tokens": Key(list_of(NUMBER), (), is_optional=True, read=tuple, write=list),
    }

    #: of the request: the same one finds its answer when the call is made again
    request_digest: str
    started_at: float
    latency_s: float
    text: str | None
    #: -1: unknown
    input_tokens: int = -1
    output_tokens: int = -1
    finish_reason: str | None = None
    #: input and output tokens that its run's budget counted in place of what the provider did not count (S-BUD-2)
    estimated_tokens: tuple[int, ...] = ()
