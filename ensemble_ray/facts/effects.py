"""Effects of a task: answers of models, calls of tools, work that is handed on. Pure."""

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


#: From so many notes on they are recorded as one text.
_MANY_NOTES = 16


def _row_of(*checks: Check) -> Check:
    """Return a check for a list of so many values, each as its place says."""

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
    """Return notes as they are recorded: many as one text, of which a store keeps what earlier texts began with once."""
    if rows is None or len(rows) < _MANY_NOTES:
        return None if rows is None else _write_rows(rows)
    return json.dumps(_write_rows(rows), ensure_ascii=False)


def _check_notes(value: object) -> str | None:
    """Refuse what are no rows of three texts, nor JSON text of such rows."""
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
    """Memory reminded a task of what its prompt shows."""

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
    #: (agent's role, description, content); None: there was no short-term memory
    short_term: tuple[tuple[str, str, str], ...] | None = None
    long_term: tuple[str, ...] = ()
    #: (name, fact)
    entities: tuple[tuple[str, str], ...] = ()
    retrieval_s: float | None = None
    lookup_s: float | None = None
    #: tokens that an endpoint read to find it
    embedding_tokens: int = 0

    @classmethod
    def of(cls, found: RecalledMemory) -> MemoryRecalled:
        """Return what is recorded of it."""
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
        """What the task was reminded of."""
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
    """Memory took what a task left; it is not stored again."""

    KIND: ClassVar = "memory_stored"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "scopes": Key(list_of(TEXT), (), is_optional=True, read=tuple, write=list),
        "taken_by": Key(list_of(TEXT), (), is_optional=True, read=tuple, write=list),
        "embedding_tokens": Key(NUMBER, 0, is_optional=True),
    }

    #: names of the scopes that have it
    scopes: tuple[str, ...] = ()
    #: memories of the ensemble that have it: `short_term`, `long_term`
    taken_by: tuple[str, ...] = ()
    #: tokens that an endpoint read to store it
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
    """A task was told what earlier runs learned of it, or that they learned nothing."""

    KIND: ClassVar = "reflection_recalled"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {"key": Key(TEXT, ""), "reflection": Key(optional(_REFLECTION), is_optional=True)}

    #: of the task in the store
    key: str
    #: as data; None: there was none
    reflection: Mapping[str, object] | None = None

    @classmethod
    def of(cls, key: str, reflection: TaskReflection | None) -> ReflectionRecalled:
        """Return what is recorded of it."""
        return cls(key=key, reflection=None if reflection is None else reflection.to_data())

    @property
    def recalled(self) -> TaskReflection | None:
        """What the task was told."""
        return None if self.reflection is None else _value_of(self.reflection)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflectionRecorded(FactData):
    """An output was reflected on; nobody is asked again."""

    KIND: ClassVar = "reflection_made"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "key": Key(TEXT, ""),
        "reflection": Key(_REFLECTION, is_needed=True),
        "input_tokens": Key(NUMBER, 0, is_optional=True),
        "output_tokens": Key(NUMBER, 0, is_optional=True),
        "is_first": Key(FLAG, default=False, is_optional=True),
    }

    #: of the task in the store
    key: str
    #: as data
    reflection: Mapping[str, object] = field(default_factory=dict[str, object])
    #: as the model counted, or estimated where it counted nothing; 0: no model was asked
    input_tokens: int = 0
    output_tokens: int = 0
    #: whether nothing was known of the task before
    is_first: bool = False

    @property
    def reflection_value(self) -> TaskReflection:
        """What was made of the output."""
        return _value_of(self.reflection)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflectionStored(FactData):
    """The store has what was made; it is not stored again."""

    KIND: ClassVar = "reflection_stored"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {"key": Key(TEXT, "")}

    #: of the task in the store
    key: str
