"""Effects of a task: answers of models, calls of tools, work that is handed on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, cast, get_args

from ensemble_ray.errors import RecordError, message_of
from ensemble_ray.facts.fact import TIME_OF_FACT, Fact, FactData, Key
from ensemble_ray.facts.lenient import as_text
from ensemble_ray.facts.shapes import (
    ANY,
    DURATION,
    FLAG,
    INSTANT,
    NUMBER,
    OBJECT,
    TEXT,
    list_of,
    one_of,
    optional,
    type_of,
)
from ensemble_ray.values.delegation import DelegationRequest
from ensemble_ray.values.messages import Effect, ProviderFields, ToolCall

#: End of the names of model calls that made a task's agent, before the task began (S-SET-46).
_MAKING = "/synthesis"


def _is_true(value: object) -> bool:
    return value is True


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _read_calls(value: Sequence[Mapping[str, object]]) -> tuple[ToolCall, ...]:
    return tuple([ToolCall(as_text(c.get("id")), as_text(c.get("name")), as_text(c.get("arguments"))) for c in value])


def _write_calls(calls: Sequence[ToolCall]) -> list[dict[str, str]]:
    return [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in calls]


def _read_fields(value: Mapping[str, object]) -> ProviderFields:
    calls = value.get("tool_calls")
    texts = cast("Sequence[object]", calls) if isinstance(calls, list | tuple) else ()
    return ProviderFields(
        origin=as_text(value.get("origin")),
        message=as_text(value.get("message")),
        tool_calls=tuple([as_text(each) for each in texts]),
    )


def _write_fields(fields: ProviderFields) -> dict[str, object]:
    return {"origin": fields.origin, "message": fields.message, "tool_calls": list(fields.tool_calls)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswered(FactData):
    """A model answered."""

    KIND: ClassVar = "model"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "request_digest": Key(TEXT, ""),
        "started_at": Key(INSTANT, TIME_OF_FACT, is_needed=True),
        "latency_s": Key(DURATION, 0.0, is_needed=True),
        "text": Key(optional(TEXT), is_needed=True),
        "tool_calls": Key(list_of(OBJECT), (), is_needed=True, read=_read_calls, write=_write_calls),
        # Of users' own models: what they give is recorded as it is.
        "input_tokens": Key(type_of("a number", int, float), -1, is_needed=True),
        "output_tokens": Key(type_of("a number", int, float), -1, is_needed=True),
        "finish_reason": Key(ANY, is_optional=True, read=_text_or_none),
        "reasoning": Key(ANY, is_optional=True, read=_text_or_none),
        "reasoning_tokens": Key(type_of("a number", int, float), -1, is_optional=True),
        "provider_fields": Key(OBJECT, is_optional=True, read=_read_fields, write=_write_fields),
        "estimated_tokens": Key(list_of(NUMBER), (), is_optional=True, read=tuple, write=list),
        "retries": Key(NUMBER, 0, is_optional=True),
        "attempts_failed": Key(list_of(TEXT), (), is_optional=True, read=tuple, write=list),
        "waited_s": Key(DURATION, 0.0, is_optional=True),
        "is_copied": Key(ANY, default=False, is_optional=True, read=bool),
    }

    #: of the request; empty for calls outside any task
    request_digest: str
    started_at: float
    latency_s: float
    text: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    #: -1: unknown
    input_tokens: int = -1
    output_tokens: int = -1
    finish_reason: str | None = None
    #: what the model thought, apart from `text` (S-LLM-4)
    reasoning: str | None = None
    #: part of `output_tokens`; -1: unknown
    reasoning_tokens: int = -1
    #: what its provider expects back with the message; None: nothing
    provider_fields: ProviderFields | None = None
    #: input and output tokens that its run's budget counted in place of what the provider did not count (S-BUD-2)
    estimated_tokens: tuple[int, ...] = ()
    retries: int = 0
    #: why each attempt before the answered one failed (S-DUR-66)
    attempts_failed: tuple[str, ...] = ()
    #: how much of `latency_s`, from its beginning, it waited for permits of rate limits; whole milliseconds (S-RATE-35)
    waited_s: float = 0.0
    #: whether a fork took it over from the run that it was forked from, which paid for it (S-BUD-9)
    is_copied: bool = False

    @classmethod
    def from_data(cls, data: Mapping[str, object], at: float) -> Self:
        """Return what is recorded; see `FactData`."""
        found = super(ModelAnswered, cls).from_data(data, at)
        calls = cast("Sequence[Mapping[str, object]]", data.get("tool_calls", ()))
        missing = [f"tool_calls.{name}" for name in ("id", "name", "arguments") if any(name not in c for c in calls)]
        if missing:
            object.__setattr__(found, "absent", (*found.absent, *missing))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolIntended(FactData):
    """A tool or a handler is about to be called."""

    KIND: ClassVar = "tool_intent"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "tool_name": Key(TEXT, ""),
        "arguments": Key(ANY, "", read=as_text),
        "effect": Key(one_of(*get_args(Effect)), "once"),
        "is_lost": Key(ANY, default=False, is_optional=True, read=_is_true),
    }

    tool_name: str
    #: JSON text as the model wrote it; empty for a handler
    arguments: str
    #: what calling it does to the world
    effect: Effect
    #: whether it only stands for a call that may have been made in a part of the record that is lost
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReturned(FactData):
    """A call of a tool, of a handler or of the delegation tool is over."""

    KIND: ClassVar = "tool_result"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "outcome": Key(TEXT, "error", is_needed=True),
        "text": Key(TEXT, "", is_needed=True),
        "structured_output": Key(ANY, is_needed=True),
        "started_at": Key(INSTANT, TIME_OF_FACT, is_needed=True),
        "duration_s": Key(DURATION, 0.0, is_needed=True),
        "asks_again": Key(ANY, default=False, is_optional=True, read=_is_true),
        "repairs": Key(list_of(TEXT), (), is_optional=True, read=tuple, write=list),
    }

    #: `success`, `failure`, `error`, `unknown` or `skipped_max_iterations`
    outcome: str
    text: str
    started_at: float
    duration_s: float
    structured_output: object = None
    #: whether the tool asked the model to try again
    asks_again: bool = False
    #: what was repaired in the arguments before the call (S-LLM-43)
    repairs: tuple[str, ...] = ()

    @property
    def is_success(self) -> bool:
        """Whether the call gave what was asked for."""
        return self.outcome == "success"

    @property
    def is_unknown(self) -> bool:
        """Whether nobody knows whether it was done (S-DUR-26)."""
        return self.outcome == "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeDecided(FactData):
    """Somebody decided what becomes of a call of unknown outcome."""

    KIND: ClassVar = "decision"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {"answer": Key(TEXT, "", is_needed=True)}

    #: `done`, `repeat` or `fail`
    answer: str


class RecordedRefusal(NamedTuple):
    """Why nobody was asked."""

    reason: str
    #: what helps the model to do better
    hint: str


def _read_refusal(value: Mapping[str, object] | None) -> RecordedRefusal | None:
    return RecordedRefusal(str(value.get("reason") or ""), str(value.get("hint") or "")) if value else None


def _write_refusal(refusal: RecordedRefusal | None) -> dict[str, str] | None:
    return None if refusal is None else refusal._asdict()


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegationDecided(FactData):
    """It was decided whom a call that hands work on asks."""

    KIND: ClassVar = "delegation"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "request": Key(OBJECT, {}, is_needed=True),
        "worker": Key(optional(TEXT), is_needed=True),
        "charged": Key(optional(TEXT)),
        "started_at": Key(INSTANT, TIME_OF_FACT),
        "refusal": Key(optional(OBJECT), is_optional=True, read=_read_refusal, write=_write_refusal),
        "is_error": Key(FLAG, is_optional=True),
    }

    #: the `DelegationRequest` as JSON data
    request: Mapping[str, object]
    #: key of the agent who is asked; None: nobody
    worker: str | None
    #: role whose cap it counts for; None: none's
    charged: str | None
    started_at: float
    refusal: RecordedRefusal | None = None
    #: of a refusal: whether a policy failed, so that the model is told of an error
    is_error: bool | None = None


def read_request(fact: Fact[DelegationDecided]) -> DelegationRequest:
    """Return the request that was decided of.

    Raises:
        RecordError: it is none.
    """
    try:
        return DelegationRequest(**cast("Mapping[str, Any]", fact.data.request))
    except ValueError as error:
        raise RecordError(f"The record is damaged: delegation '{fact.name}': {message_of(error)}") from error


def began_at(fact: Fact) -> float:
    """Return when what a fact tells of began, Unix time, s."""
    match fact.data:
        case ModelAnswered(started_at=at) | ToolReturned(started_at=at) | DelegationDecided(started_at=at):
            return at
        case _:
            return fact.at


def is_making_agent(fact: Fact) -> bool:
    """Whether it is of a call that made a task's agent, before the task began (S-SET-46)."""
    return fact.name.endswith(_MAKING)
