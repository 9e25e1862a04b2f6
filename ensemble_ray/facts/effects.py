"""Facts about effects of a task: model answers, tool calls, delegated work, memory and reflection."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, cast, get_args

from ensemble_ray.errors import RecordError, message_of
from ensemble_ray.facts.fact import (
    ANY,
    DURATION,
    FLAG,
    INSTANT,
    NUMBER,
    OBJECT,
    TEXT,
    TIME_OF_FACT,
    Check,
    Fact,
    FactData,
    as_sequence,
    as_text,
    fact_kind,
    is_true,
    list_of,
    object_of,
    one_of,
    optional,
    type_of,
    written,
)
from ensemble_ray.values.delegation import DelegationRequest
from ensemble_ray.values.memory import RecalledMemory, TaskReflection
from ensemble_ray.values.messages import Effect, ProviderFields, ToolCall

#: Suffix of the names of model calls that created a task's agent, before the task started (S-SET-46).
_MAKING = "/synthesis"


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _read_calls(value: Sequence[Mapping[str, object]]) -> tuple[ToolCall, ...]:
    return tuple([ToolCall(as_text(c.get("id")), as_text(c.get("name")), as_text(c.get("arguments"))) for c in value])


def _write_calls(calls: Sequence[ToolCall]) -> list[dict[str, str]]:
    return [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in calls]


def _read_fields(value: Mapping[str, object]) -> ProviderFields:
    return ProviderFields(
        origin=as_text(value.get("origin")),
        message=as_text(value.get("message")),
        tool_calls=tuple(map(as_text, as_sequence(value.get("tool_calls")))),
    )


def _write_fields(fields: ProviderFields) -> dict[str, object]:
    return {"origin": fields.origin, "message": fields.message, "tool_calls": list(fields.tool_calls)}


@fact_kind
class ModelAnswered(FactData):
    """A model answered."""

    KIND: ClassVar = "model"
    IS_EFFECT: ClassVar = True

    #: digest of the request; empty for calls outside any task
    request_digest: str = written(TEXT, missing="")
    started_at: float = written(INSTANT, missing=TIME_OF_FACT, is_needed=True)
    latency_s: float = written(DURATION, missing=0.0, is_needed=True)
    text: str | None = written(optional(TEXT), missing=None, is_needed=True)
    tool_calls: tuple[ToolCall, ...] = written(
        list_of(OBJECT), missing=(), default=(), is_needed=True, read=_read_calls, write=_write_calls
    )
    # Users' own models may return other numbers, which are recorded unchanged.
    #: -1: unknown
    input_tokens: int = written(type_of("a number", int, float), missing=-1, default=-1, is_needed=True)
    output_tokens: int = written(type_of("a number", int, float), missing=-1, default=-1, is_needed=True)
    finish_reason: str | None = written(ANY, default=None, read=_text_or_none)
    #: the model's reasoning, separate from `text` (S-LLM-4)
    reasoning: str | None = written(ANY, default=None, read=_text_or_none)
    #: part of `output_tokens`; -1: unknown
    reasoning_tokens: int = written(type_of("a number", int, float), default=-1)
    #: fields that the provider expects back with the message; None: no fields
    provider_fields: ProviderFields | None = written(OBJECT, default=None, read=_read_fields, write=_write_fields)
    #: input and output tokens that the run's budget counted if the provider reported no counts (S-BUD-2)
    estimated_tokens: tuple[int, ...] = written(list_of(NUMBER), default=(), read=tuple, write=list)
    retries: int = written(NUMBER, default=0)
    #: failure reason of each attempt before the successful one (S-DUR-66)
    attempts_failed: tuple[str, ...] = written(list_of(TEXT), default=(), read=tuple, write=list)
    #: initial part of `latency_s` spent waiting for permits of rate limits; whole milliseconds (S-RATE-35)
    waited_s: float = written(DURATION, default=0.0)
    #: whether a fork copied it from the original run, which paid for it (S-BUD-9)
    is_copied: bool = written(ANY, default=False, read=bool)

    @classmethod
    def from_data(cls, data: Mapping[str, object], at: float) -> Self:
        found = super(ModelAnswered, cls).from_data(data, at)  # noqa: UP008  `fact_kind` replaces the class
        calls = cast("Sequence[Mapping[str, object]]", data.get("tool_calls", ()))
        missing = [f"tool_calls.{name}" for name in ("id", "name", "arguments") if any(name not in c for c in calls)]
        if missing:
            object.__setattr__(found, "absent", (*found.absent, *missing))
        return found


@fact_kind
class ToolIntended(FactData):
    """A tool or a handler is about to be called."""

    KIND: ClassVar = "tool_intent"
    IS_EFFECT: ClassVar = True

    tool_name: str = written(TEXT, missing="")
    #: JSON text as the model wrote it; empty for a handler
    arguments: str = written(ANY, missing="", read=as_text)
    #: side effect of the call
    effect: Effect = written(one_of(*get_args(Effect)), missing="once")
    #: whether it represents a call that a lost part of the record may have contained
    is_lost: bool = written(ANY, default=False, read=is_true)


@fact_kind
class ToolReturned(FactData):
    """A call of a tool, a handler or the delegation tool ended."""

    KIND: ClassVar = "tool_result"
    IS_EFFECT: ClassVar = True

    #: `success`, `failure`, `error`, `unknown` or `skipped_max_iterations`
    outcome: str = written(TEXT, missing="error", is_needed=True)
    text: str = written(TEXT, missing="", is_needed=True)
    structured_output: object = written(ANY, missing=None, default=None, is_needed=True)
    started_at: float = written(INSTANT, missing=TIME_OF_FACT, is_needed=True)
    duration_s: float = written(DURATION, missing=0.0, is_needed=True)
    #: whether the tool asked the model to try again
    asks_again: bool = written(ANY, default=False, read=is_true)
    #: repairs of the arguments before the call (S-LLM-43)
    repairs: tuple[str, ...] = written(list_of(TEXT), default=(), read=tuple, write=list)

    @property
    def is_success(self) -> bool:
        return self.outcome == "success"

    @property
    def is_unknown(self) -> bool:
        """Whether the outcome of the call is unknown (S-DUR-26)."""
        return self.outcome == "unknown"


@fact_kind
class OutcomeDecided(FactData):
    """A user decided about a call with an unknown outcome."""

    KIND: ClassVar = "decision"
    IS_EFFECT: ClassVar = True

    #: `done`, `repeat` or `fail`
    answer: str = written(TEXT, missing="", is_needed=True)


class RecordedRefusal(NamedTuple):
    """Why a delegation was refused."""

    reason: str
    #: advice for the model's next attempt
    hint: str


def _read_refusal(value: Mapping[str, object] | None) -> RecordedRefusal | None:
    return RecordedRefusal(str(value.get("reason") or ""), str(value.get("hint") or "")) if value else None


@fact_kind
class DelegationDecided(FactData):
    """The worker of a delegating call was chosen, or the delegation was refused."""

    KIND: ClassVar = "delegation"
    IS_EFFECT: ClassVar = True

    #: the `DelegationRequest` as JSON data
    request: Mapping[str, object] = written(OBJECT, missing={}, is_needed=True)
    #: key of the worker; None if the delegation was refused
    worker: str | None = written(optional(TEXT), missing=None, is_needed=True)
    #: role whose cap counts the delegation, or None
    charged: str | None = written(optional(TEXT), missing=None)
    started_at: float = written(INSTANT, missing=TIME_OF_FACT)
    refusal: RecordedRefusal | None = written(
        optional(OBJECT), default=None, read=_read_refusal, write=RecordedRefusal._asdict
    )
    #: of a refusal: whether a policy failed, so that the model receives an error
    is_error: bool | None = written(FLAG, default=None)


def read_request(fact: Fact[DelegationDecided]) -> DelegationRequest:
    try:
        return DelegationRequest(**cast("Mapping[str, Any]", fact.data.request))
    except ValueError as error:
        raise RecordError(f"The record is damaged: delegation '{fact.name}': {message_of(error)}") from error


def began_at(fact: Fact) -> float:
    """Return the start of the effect in Unix time, s; for other facts, their time."""
    match fact.data:
        case ModelAnswered(started_at=at) | ToolReturned(started_at=at) | DelegationDecided(started_at=at):
            return at
        case _:
            return fact.at


def is_making_agent(fact: Fact) -> bool:
    """Return whether it belongs to a call that created a task's agent, before the task started (S-SET-46)."""
    return fact.name.endswith(_MAKING)


@fact_kind
class SamplingAnswered(FactData):
    """The agent's model answered a sampling request of a tool's server."""

    KIND: ClassVar = "sampling"
    IS_EFFECT: ClassVar = True

    #: digest of the request: a repeated call finds its recorded answer by it
    request_digest: str = written(TEXT, missing="")
    started_at: float = written(INSTANT, missing=TIME_OF_FACT, is_needed=True)
    latency_s: float = written(DURATION, missing=0.0, is_needed=True)
    text: str | None = written(optional(TEXT), missing=None, is_needed=True)
    #: -1: unknown
    input_tokens: int = written(NUMBER, missing=-1, default=-1, is_needed=True)
    output_tokens: int = written(NUMBER, missing=-1, default=-1, is_needed=True)
    finish_reason: str | None = written(optional(TEXT), default=None)
    #: input and output tokens that the run's budget counted if the provider reported no counts (S-BUD-2)
    estimated_tokens: tuple[int, ...] = written(list_of(NUMBER), default=(), read=tuple, write=list)


#: From this number of notes on they are recorded as one text.
_MANY_NOTES = 16


def _row_of(*checks: Check) -> Check:
    """Return a check for a list with one value per check."""

    def check(value: object) -> str | None:
        row = as_sequence(value)
        if len(row) != len(checks) or any(each(one) is not None for each, one in zip(checks, row, strict=True)):
            return f"a list of {len(checks)} values of their types"
        return None

    return check


_NOTES = list_of(_row_of(TEXT, TEXT, TEXT))


def _to_tuples(value: object) -> object:
    """Convert lists to tuples, at any depth."""
    return tuple([_to_tuples(each) for each in as_sequence(value)]) if isinstance(value, list | tuple) else value


def _to_lists(value: object) -> object:
    """Convert tuples to lists, at any depth."""
    return [_to_lists(each) for each in as_sequence(value)] if isinstance(value, list | tuple) else value


def _read_notes(value: object) -> object:
    return _to_tuples(json.loads(value) if isinstance(value, str) else value)


def _write_notes(rows: Sequence[Sequence[str]] | None) -> object:
    """Encode notes; many become one text, so that a store can share its common prefix with earlier texts."""
    is_long = rows is not None and len(rows) >= _MANY_NOTES
    return json.dumps(rows, ensure_ascii=False) if is_long else _to_lists(rows)


def _check_notes(value: object) -> str | None:
    """Check for rows of three texts, or JSON text of such rows."""
    if not isinstance(value, str):
        return _NOTES(value)
    try:
        return _NOTES(json.loads(value))
    except ValueError:
        return "JSON text of a list"


@fact_kind
class MemoryRecalled(FactData):
    """Memory returned the contents that a task's prompt shows."""

    KIND: ClassVar = "memory_recalled"
    IS_EFFECT: ClassVar = True

    #: (scope, contents)
    scopes: tuple[tuple[str, tuple[str, ...]], ...] = written(
        list_of(_row_of(TEXT, list_of(TEXT))), default=(), read=_to_tuples, write=_to_lists
    )
    #: (agent's role, description, content); None: no short-term memory
    short_term: tuple[tuple[str, str, str], ...] | None = written(
        optional(_check_notes), default=None, read=_read_notes, write=_write_notes
    )
    long_term: tuple[str, ...] = written(list_of(TEXT), default=(), read=tuple, write=list)
    #: (name, fact)
    entities: tuple[tuple[str, str], ...] = written(
        list_of(_row_of(TEXT, TEXT)), default=(), read=_to_tuples, write=_to_lists
    )
    retrieval_s: float | None = written(optional(DURATION), default=None)
    lookup_s: float | None = written(optional(DURATION), default=None)
    #: embedding tokens of the lookup
    embedding_tokens: int = written(NUMBER, default=0)

    @classmethod
    def of(cls, found: RecalledMemory) -> MemoryRecalled:
        return cls(**{name: getattr(found, name) for name in cls.KEYS})

    @property
    def recalled(self) -> RecalledMemory:
        return RecalledMemory(**{name: getattr(self, name) for name in self.KEYS})


@fact_kind
class MemoryStored(FactData):
    """Memory stored a task's output; it must not be stored again."""

    KIND: ClassVar = "memory_stored"
    IS_EFFECT: ClassVar = True

    #: names of the scopes that store it
    scopes: tuple[str, ...] = written(list_of(TEXT), default=(), read=tuple, write=list)
    #: memories of the ensemble that store it: `short_term`, `long_term`
    taken_by: tuple[str, ...] = written(list_of(TEXT), default=(), read=tuple, write=list)
    #: embedding tokens of the storage
    embedding_tokens: int = written(NUMBER, default=0)


_REFLECTION = object_of(
    refined_description=TEXT,
    refined_expected_output=TEXT,
    observations=list_of(TEXT),
    suggestions=list_of(TEXT),
    reflected_at=TEXT,
    run_count=NUMBER,
)


def _value_of(data: Mapping[str, object]) -> TaskReflection:
    return TaskReflection(**cast("dict[str, Any]", data))


@fact_kind
class ReflectionRecalled(FactData):
    """A task looked up the reflection of earlier runs and found one or none."""

    KIND: ClassVar = "reflection_recalled"
    IS_EFFECT: ClassVar = True

    #: key of the task in the store
    key: str = written(TEXT, missing="")
    #: as data, or None
    reflection: Mapping[str, object] | None = written(optional(_REFLECTION), default=None)

    @classmethod
    def of(cls, key: str, reflection: TaskReflection | None) -> ReflectionRecalled:
        return cls(key=key, reflection=None if reflection is None else reflection.to_data())

    @property
    def recalled(self) -> TaskReflection | None:
        return None if self.reflection is None else _value_of(self.reflection)


@fact_kind
class ReflectionRecorded(FactData):
    """A reflection on an output was created; it must not be created again."""

    KIND: ClassVar = "reflection_made"
    IS_EFFECT: ClassVar = True

    #: key of the task in the store
    key: str = written(TEXT, missing="")
    #: as data
    reflection: Mapping[str, object] = written(
        _REFLECTION, missing=None, default_factory=dict[str, object], is_needed=True
    )
    #: reported by the model, or estimated if it reported no counts; 0: no model was called
    input_tokens: int = written(NUMBER, default=0)
    output_tokens: int = written(NUMBER, default=0)
    #: whether the store had no earlier reflection on the task
    is_first: bool = written(FLAG, default=False)

    @property
    def reflection_value(self) -> TaskReflection:
        return _value_of(self.reflection)


@fact_kind
class ReflectionStored(FactData):
    """The reflection was stored; it must not be stored again."""

    KIND: ClassVar = "reflection_stored"
    IS_EFFECT: ClassVar = True

    #: key of the task in the store
    key: str = written(TEXT, missing="")
