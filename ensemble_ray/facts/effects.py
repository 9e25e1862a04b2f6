"""Facts about effects of a task: model answers, tool calls, delegated work, memory and reflection."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    Key,
    as_text,
    list_of,
    object_of,
    one_of,
    optional,
    type_of,
)
from ensemble_ray.values.delegation import DelegationRequest
from ensemble_ray.values.memory import RecalledMemory, TaskReflection
from ensemble_ray.values.messages import Effect, ProviderFields, ToolCall

#: Suffix of the names of model calls that created a task's agent, before the task started (S-SET-46).
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
        # Users' own models may return other numbers, which are recorded unchanged.
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

    #: digest of the request; empty for calls outside any task
    request_digest: str
    started_at: float
    latency_s: float
    text: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    #: -1: unknown
    input_tokens: int = -1
    output_tokens: int = -1
    finish_reason: str | None = None
    #: the model's reasoning, separate from `text` (S-LLM-4)
    reasoning: str | None = None
    #: part of `output_tokens`; -1: unknown
    reasoning_tokens: int = -1
    #: fields that the provider expects back with the message; None: no fields
    provider_fields: ProviderFields | None = None
    #: input and output tokens that the run's budget counted if the provider reported no counts (S-BUD-2)
    estimated_tokens: tuple[int, ...] = ()
    retries: int = 0
    #: failure reason of each attempt before the successful one (S-DUR-66)
    attempts_failed: tuple[str, ...] = ()
    #: initial part of `latency_s` spent waiting for permits of rate limits; whole milliseconds (S-RATE-35)
    waited_s: float = 0.0
    #: whether a fork copied it from the original run, which paid for it (S-BUD-9)
    is_copied: bool = False

    @classmethod
    def from_data(cls, data: Mapping[str, object], at: float) -> Self:
        """Decode recorded data; see `FactData`."""
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
    #: side effect of the call
    effect: Effect
    #: whether it represents a call that a lost part of the record may have contained
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReturned(FactData):
    """A call of a tool, a handler or the delegation tool ended."""

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
    #: repairs of the arguments before the call (S-LLM-43)
    repairs: tuple[str, ...] = ()

    @property
    def is_success(self) -> bool:
        """Whether the call succeeded."""
        return self.outcome == "success"

    @property
    def is_unknown(self) -> bool:
        """Whether the outcome of the call is unknown (S-DUR-26)."""
        return self.outcome == "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeDecided(FactData):
    """A user decided about a call with an unknown outcome."""

    KIND: ClassVar = "decision"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {"answer": Key(TEXT, "", is_needed=True)}

    #: `done`, `repeat` or `fail`
    answer: str


class RecordedRefusal(NamedTuple):
    """Why a delegation was refused."""

    reason: str
    #: advice for the model's next attempt
    hint: str


def _read_refusal(value: Mapping[str, object] | None) -> RecordedRefusal | None:
    return RecordedRefusal(str(value.get("reason") or ""), str(value.get("hint") or "")) if value else None


def _write_refusal(refusal: RecordedRefusal | None) -> dict[str, str] | None:
    return None if refusal is None else refusal._asdict()


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegationDecided(FactData):
    """The worker of a delegating call was chosen, or the delegation was refused."""

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
    #: key of the worker; None if the delegation was refused
    worker: str | None
    #: role whose cap counts the delegation, or None
    charged: str | None
    started_at: float
    refusal: RecordedRefusal | None = None
    #: of a refusal: whether a policy failed, so that the model receives an error
    is_error: bool | None = None


def read_request(fact: Fact[DelegationDecided]) -> DelegationRequest:
    """Return the delegation request.

    Raises:
        RecordError: the recorded data is not a request.
    """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingAnswered(FactData):
    """The agent's model answered a sampling request of a tool's server."""

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

    #: digest of the request: a repeated call finds its recorded answer by it
    request_digest: str
    started_at: float
    latency_s: float
    text: str | None
    #: -1: unknown
    input_tokens: int = -1
    output_tokens: int = -1
    finish_reason: str | None = None
    #: input and output tokens that the run's budget counted if the provider reported no counts (S-BUD-2)
    estimated_tokens: tuple[int, ...] = ()


#: From this number of notes on they are recorded as one text.
_MANY_NOTES = 16


def _row_of(*checks: Check) -> Check:
    """Return a check for a list with one value per check."""

    def check(value: object) -> str | None:
        row = cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()
        if len(row) != len(checks) or any(each(one) is not None for each, one in zip(checks, row, strict=True)):
            return f"a list of {len(checks)} values of their types"
        return None

    return check


_NOTES = list_of(_row_of(TEXT, TEXT, TEXT))


def _read_rows(value: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple([tuple(row) for row in value])


def _write_rows(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [list(row) for row in rows]


def _read_notes(value: str | Sequence[Sequence[str]] | None) -> tuple[tuple[str, ...], ...] | None:
    if value is None:
        return None
    return _read_rows(cast("Sequence[Sequence[str]]", json.loads(value)) if isinstance(value, str) else value)


def _write_notes(rows: Sequence[Sequence[str]] | None) -> str | list[list[str]] | None:
    """Encode notes; many become one text, so that a store can share its common prefix with earlier texts."""
    if rows is None or len(rows) < _MANY_NOTES:
        return None if rows is None else _write_rows(rows)
    return json.dumps(_write_rows(rows), ensure_ascii=False)


def _check_notes(value: object) -> str | None:
    """Check for rows of three texts, or JSON text of such rows."""
    if not isinstance(value, str):
        return _NOTES(value)
    try:
        return _NOTES(json.loads(value))
    except ValueError:
        return "JSON text of a list"


def _read_scopes(value: Sequence[tuple[str, Sequence[str]]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple([(name, tuple(contents)) for name, contents in value])


def _write_scopes(scopes: Sequence[tuple[str, Sequence[str]]]) -> list[list[object]]:
    return [[name, list(contents)] for name, contents in scopes]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecalled(FactData):
    """Memory returned the contents that a task's prompt shows."""

    KIND: ClassVar = "memory_recalled"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "scopes": Key(
            list_of(_row_of(TEXT, list_of(TEXT))), (), is_optional=True, read=_read_scopes, write=_write_scopes
        ),
        "short_term": Key(optional(_check_notes), is_optional=True, read=_read_notes, write=_write_notes),
        "long_term": Key(list_of(TEXT), (), is_optional=True, read=tuple, write=list),
        "entities": Key(list_of(_row_of(TEXT, TEXT)), (), is_optional=True, read=_read_rows, write=_write_rows),
        "retrieval_s": Key(optional(DURATION), is_optional=True),
        "lookup_s": Key(optional(DURATION), is_optional=True),
        "embedding_tokens": Key(NUMBER, 0, is_optional=True),
    }  # fmt: skip

    #: (scope, contents)
    scopes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    #: (agent's role, description, content); None: no short-term memory
    short_term: tuple[tuple[str, str, str], ...] | None = None
    long_term: tuple[str, ...] = ()
    #: (name, fact)
    entities: tuple[tuple[str, str], ...] = ()
    retrieval_s: float | None = None
    lookup_s: float | None = None
    #: embedding tokens of the lookup
    embedding_tokens: int = 0

    @classmethod
    def of(cls, found: RecalledMemory) -> MemoryRecalled:
        """Return the fact of this value."""
        return cls(
            scopes=found.scopes,
            short_term=found.short_term,
            long_term=found.long_term,
            entities=found.entities,
            retrieval_s=found.retrieval_s,
            lookup_s=found.lookup_s,
            embedding_tokens=found.embedding_tokens,
        )

    @property
    def recalled(self) -> RecalledMemory:
        """The recalled memory."""
        return RecalledMemory(
            scopes=self.scopes,
            short_term=self.short_term,
            long_term=self.long_term,
            entities=self.entities,
            retrieval_s=self.retrieval_s,
            lookup_s=self.lookup_s,
            embedding_tokens=self.embedding_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStored(FactData):
    """Memory stored a task's output; it must not be stored again."""

    KIND: ClassVar = "memory_stored"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "scopes": Key(list_of(TEXT), (), is_optional=True, read=tuple, write=list),
        "taken_by": Key(list_of(TEXT), (), is_optional=True, read=tuple, write=list),
        "embedding_tokens": Key(NUMBER, 0, is_optional=True),
    }

    #: names of the scopes that store it
    scopes: tuple[str, ...] = ()
    #: memories of the ensemble that store it: `short_term`, `long_term`
    taken_by: tuple[str, ...] = ()
    #: embedding tokens of the storage
    embedding_tokens: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflectionRecalled(FactData):
    """A task looked up the reflection of earlier runs and found one or none."""

    KIND: ClassVar = "reflection_recalled"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {"key": Key(TEXT, ""), "reflection": Key(optional(_REFLECTION), is_optional=True)}

    #: key of the task in the store
    key: str
    #: as data, or None
    reflection: Mapping[str, object] | None = None

    @classmethod
    def of(cls, key: str, reflection: TaskReflection | None) -> ReflectionRecalled:
        """Return the fact of this value."""
        return cls(key=key, reflection=None if reflection is None else reflection.to_data())

    @property
    def recalled(self) -> TaskReflection | None:
        """The recalled reflection, or None."""
        return None if self.reflection is None else _value_of(self.reflection)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflectionRecorded(FactData):
    """A reflection on an output was created; it must not be created again."""

    KIND: ClassVar = "reflection_made"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "key": Key(TEXT, ""),
        "reflection": Key(_REFLECTION, is_needed=True),
        "input_tokens": Key(NUMBER, 0, is_optional=True),
        "output_tokens": Key(NUMBER, 0, is_optional=True),
        "is_first": Key(FLAG, default=False, is_optional=True),
    }

    #: key of the task in the store
    key: str
    #: as data
    reflection: Mapping[str, object] = field(default_factory=dict[str, object])
    #: reported by the model, or estimated if it reported no counts; 0: no model was called
    input_tokens: int = 0
    output_tokens: int = 0
    #: whether the store had no earlier reflection on the task
    is_first: bool = False

    @property
    def reflection_value(self) -> TaskReflection:
        """The reflection."""
        return _value_of(self.reflection)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflectionStored(FactData):
    """The reflection was stored; it must not be stored again."""

    KIND: ClassVar = "reflection_stored"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {"key": Key(TEXT, "")}

    #: key of the task in the store
    key: str
