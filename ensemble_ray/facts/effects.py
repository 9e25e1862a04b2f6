"""Facts about effects of a task: model and tool calls, delegated work, memory, reflection."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, cast, get_args

import msgspec

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
    is_true,
    list_of,
    object_of,
    one_of,
    optional,
    type_of,
    written,
)
from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.delegation import DelegationRequest
from ensemble_ray.values.memory import RecalledMemory, TaskReflection
from ensemble_ray.values.messages import Effect, ProviderFields, ToolCall

_MAKING = "/synthesis"  # Suffix of model calls that created a task's agent, before the task started (S-SET-46).


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def row_of(*checks: Check) -> Check:
    """Return a check for a list with one value per check."""

    def check(value: object) -> str | None:
        row = as_sequence(value)
        if len(row) != len(checks) or any(each(one) is not None for each, one in zip(checks, row, strict=True)):
            return f"a list of {len(checks)} values of their types"
        return None

    return check


MOST_WAITS = 50  # of a model call; later ones are not recorded


class ModelWait(NamedTuple):
    """A wait of a model call before its last attempt: after a failed attempt, or for its endpoint."""

    #: `retry`: an attempt failed; `repeat`: an answer was incomplete; `breaker`, `limit`: calls of the endpoint wait;
    #: of a chain: `fallback`: its model failed; `skipped`: it was not asked; `rule`: a rule left it out
    cause: str
    reason: str
    at: float
    wait_s: float

    def __str__(self) -> str:
        reason = f"{self.reason}; then the next model" if self.cause in {"fallback", "skipped"} else self.reason
        return f"{reason}, waited {self.wait_s:.3g} s" if self.wait_s else reason


WAITS = list_of(row_of(TEXT, TEXT, INSTANT, DURATION))


def read_waits(rows: Sequence[Sequence[Any]]) -> tuple[ModelWait, ...]:
    return tuple([ModelWait(*row) for row in rows])


def write_waits(waits: Sequence[ModelWait]) -> list[list[object]]:
    return [list(wait) for wait in waits]


class ModelAnswered(FactData):
    KIND: ClassVar = "model"
    IS_EFFECT: ClassVar = True

    request_digest: str = written(TEXT, missing="")  # empty for calls outside any task
    started_at: float = written(INSTANT, missing=TIME_OF_FACT, is_needed=True)
    latency_s: float = written(DURATION, missing=0.0, is_needed=True)
    text: str | None = written(optional(TEXT), missing=None, is_needed=True)
    tool_calls: tuple[ToolCall, ...] = written(
        list_of(OBJECT),
        missing=(),
        default=(),
        is_needed=True,
        read=lambda value: tuple(
            [ToolCall(as_text(c.get("id")), as_text(c.get("name")), as_text(c.get("arguments"))) for c in value]
        ),
        write=lambda calls: [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in calls],
    )
    # -1: unknown. Users' own models may return other numbers, which are recorded unchanged.
    input_tokens: int = written(type_of("a number", int, float), missing=-1, default=-1, is_needed=True)
    output_tokens: int = written(type_of("a number", int, float), missing=-1, default=-1, is_needed=True)
    finish_reason: str | None = written(ANY, default=None, read=_text_or_none)
    reasoning: str | None = written(ANY, default=None, read=_text_or_none)  # separate from `text` (S-LLM-4)
    reasoning_tokens: int = written(type_of("a number", int, float), default=-1)  # part of `output_tokens`; -1: unknown
    #: the provider expects them back with the message
    provider_fields: ProviderFields | None = written(
        OBJECT,
        default=None,
        read=lambda value: ProviderFields(
            origin=as_text(value.get("origin")),
            message=as_text(value.get("message")),
            tool_calls=tuple(map(as_text, as_sequence(value.get("tool_calls")))),
        ),
        write=lambda found: {"origin": found.origin, "message": found.message, "tool_calls": list(found.tool_calls)},
    )
    #: input and output, as the run's budget counted them if the provider reported no counts (S-BUD-2)
    estimated_tokens: tuple[int, ...] = written(list_of(NUMBER), default=(), read=tuple, write=list)
    retries: int = written(NUMBER, default=0)
    #: reasons, before the successful attempt (S-DUR-66)
    attempts_failed: tuple[str, ...] = written(list_of(TEXT), default=(), read=tuple, write=list)
    #: before the attempt that was answered (S-DUR-66)
    waits: tuple[ModelWait, ...] = written(WAITS, default=(), read=read_waits, write=write_waits)
    max_attempts: int = written(NUMBER, default=0)  # of the retry policy; 0: no waits
    waited_s: float = written(DURATION, default=0.0)  # for rate limits, within `latency_s`; whole ms (S-RATE-35)
    is_copied: bool = written(ANY, default=False, read=bool)  # by a fork; the original run paid for it (S-BUD-9)
    #: of the model that answered; None: as the definition in the record declares it, see `recorded_names` (S-FBK-41)
    model: str | None = written(ANY, default=None, read=_text_or_none)
    provider: str | None = written(ANY, default=None, read=_text_or_none)
    reuse_digest: str = written(TEXT, default="")  # of the whole request, if its task has `reuse` (S-USE-10)
    reused: str = written(TEXT, default="")  # id of the run that the answer was taken from; empty: the model was asked
    reused_tokens: tuple[int, ...] = written(list_of(NUMBER), default=(), read=tuple, write=list)  # input, output there
    #: parts of `input_tokens` that the provider's cache had, and that it stored (S-PRC-1); -1: unknown
    cached_tokens: int = written(type_of("a number", int, float), default=-1)
    cache_write_tokens: int = written(type_of("a number", int, float), default=-1)
    #: None: the run's first price; a text: another of its prices, "" if it is unknown; an object: the price itself (S-PRC-14)
    price: str | Mapping[str, object] | None = written(type_of("a text or an object", str, Mapping), default=None)
    delivery: str = written(TEXT, default="")  # `batch`: from a batch, at its price (S-BAT-30)

    @classmethod
    def from_data(cls, data: Mapping[str, object], at: float) -> Self:
        found = super().from_data(data, at)
        calls = cast("Sequence[Mapping[str, object]]", data.get("tool_calls", ()))
        missing = [f"tool_calls.{name}" for name in ("id", "name", "arguments") if any(name not in c for c in calls)]
        if missing:
            msgspec.structs.force_setattr(found, "absent", (*found.absent, *missing))
        return found


class ToolIntended(FactData):
    KIND: ClassVar = "tool_intent"
    IS_EFFECT: ClassVar = True

    tool_name: str = written(TEXT, missing="")
    arguments: str = written(ANY, missing="", read=as_text)  # JSON text as the model wrote it; empty for a handler
    effect: Effect = written(one_of(*get_args(Effect)), missing="once")
    #: whether it represents a call that a lost part of the record may have contained
    is_lost: bool = written(ANY, default=False, read=is_true)


class ToolReturned(FactData):
    KIND: ClassVar = "tool_result"
    IS_EFFECT: ClassVar = True

    #: `success`, `failure`, `error`, `unknown` or `skipped_max_iterations`
    outcome: str = written(TEXT, missing="error", is_needed=True)
    text: str = written(TEXT, missing="", is_needed=True)
    structured_output: object = written(ANY, missing=None, default=None, is_needed=True)
    started_at: float = written(INSTANT, missing=TIME_OF_FACT, is_needed=True)
    duration_s: float = written(DURATION, missing=0.0, is_needed=True)
    asks_again: bool = written(ANY, default=False, read=is_true)  # whether the model should try again
    #: of the arguments, before the call (S-LLM-43)
    repairs: tuple[str, ...] = written(list_of(TEXT), default=(), read=tuple, write=list)
    #: lines that the call logged and printed (S-TOOL-35)
    log: tuple[str, ...] = written(list_of(TEXT), default=(), read=tuple, write=list)
    #: references; the run's store has the contents
    attachments: tuple[Attachment, ...] = written(
        list_of(OBJECT),
        default=(),
        read=lambda rows: tuple(map(Attachment.from_json, rows)),
        write=lambda found: [each.to_json() for each in found],
    )

    @property
    def is_success(self) -> bool:
        return self.outcome == "success"

    @property
    def is_unknown(self) -> bool:
        """Whether the outcome is unknown (S-DUR-26)."""
        return self.outcome == "unknown"


class OutcomeDecided(FactData):
    """A user decided about a call with an unknown outcome."""

    KIND: ClassVar = "decision"
    IS_EFFECT: ClassVar = True

    answer: str = written(TEXT, missing="", is_needed=True)  # `done`, `repeat` or `fail`


class RecordedRefusal(NamedTuple):
    """Why a delegation was refused."""

    reason: str
    hint: str  # for the model's next attempt


class ValueRedacted(FactData):
    """A value that a placeholder stands for, encrypted. Its fact has the name of the placeholder (S-RED-40)."""

    KIND: ClassVar = "redacted"

    token: str = written(TEXT, missing="", is_needed=True)


class DelegationDecided(FactData):
    """A worker was chosen, or the delegation was refused."""

    KIND: ClassVar = "delegation"
    IS_EFFECT: ClassVar = True

    request: Mapping[str, object] = written(OBJECT, missing={}, is_needed=True)  # the `DelegationRequest` as JSON data
    worker: str | None = written(optional(TEXT), missing=None, is_needed=True)  # key; None if refused
    charged: str | None = written(optional(TEXT), missing=None)  # role whose cap counts the delegation
    started_at: float = written(INSTANT, missing=TIME_OF_FACT)
    refusal: RecordedRefusal | None = written(
        optional(OBJECT),
        default=None,
        read=lambda value: (
            RecordedRefusal(str(value.get("reason") or ""), str(value.get("hint") or "")) if value else None
        ),
        write=RecordedRefusal._asdict,
    )
    is_error: bool | None = written(FLAG, default=None)


def read_request(fact: Fact[DelegationDecided]) -> DelegationRequest:
    try:
        return DelegationRequest(**cast("Mapping[str, Any]", fact.data.request))
    except ValueError as error:
        raise RecordError(f"The record is damaged: delegation '{fact.name}': {message_of(error)}") from error


def began_at(fact: Fact) -> float:
    """Return the start of an effect, Unix time, s; for other facts, their time."""
    match fact.data:
        case ModelAnswered(started_at=at) | ToolReturned(started_at=at) | DelegationDecided(started_at=at):
            return at
        case _:
            return fact.at


def is_making_agent(fact: Fact) -> bool:
    """Return whether the call created a task's agent, before the task started (S-SET-46)."""
    return fact.name.endswith(_MAKING)


class SamplingAnswered(FactData):
    """The agent's model answered a sampling request of a tool's server."""

    KIND: ClassVar = "sampling"
    IS_EFFECT: ClassVar = True

    request_digest: str = written(TEXT, missing="")  # a repeated call finds its recorded answer by it
    started_at: float = written(INSTANT, missing=TIME_OF_FACT, is_needed=True)
    latency_s: float = written(DURATION, missing=0.0, is_needed=True)
    text: str | None = written(optional(TEXT), missing=None, is_needed=True)
    input_tokens: int = written(NUMBER, missing=-1, default=-1, is_needed=True)  # -1: unknown
    output_tokens: int = written(NUMBER, missing=-1, default=-1, is_needed=True)
    finish_reason: str | None = written(optional(TEXT), default=None)
    #: these and the following fields: see `ModelAnswered`
    estimated_tokens: tuple[int, ...] = written(list_of(NUMBER), default=(), read=tuple, write=list)
    model: str | None = written(ANY, default=None, read=_text_or_none)
    provider: str | None = written(ANY, default=None, read=_text_or_none)
    cached_tokens: int = written(NUMBER, default=-1)
    cache_write_tokens: int = written(NUMBER, default=-1)
    price: str | Mapping[str, object] | None = written(type_of("a text or an object", str, Mapping), default=None)


_MANY_NOTES = 16  # From this number on, notes are recorded as one text.


_NOTES = list_of(row_of(TEXT, TEXT, TEXT))


def _to_tuples(value: object) -> object:
    return tuple([_to_tuples(each) for each in as_sequence(value)]) if isinstance(value, list | tuple) else value


def _to_lists(value: object) -> object:
    return [_to_lists(each) for each in as_sequence(value)] if isinstance(value, list | tuple) else value


def _check_notes(value: object) -> str | None:
    """Accept rows of three texts, or JSON text of such rows."""
    if not isinstance(value, str):
        return _NOTES(value)
    try:
        return _NOTES(json.loads(value))
    except ValueError:
        return "JSON text of a list"


class MemoryRecalled(FactData):
    KIND: ClassVar = "memory_recalled"
    IS_EFFECT: ClassVar = True

    #: (scope, contents)
    scopes: tuple[tuple[str, tuple[str, ...]], ...] = written(
        list_of(row_of(TEXT, list_of(TEXT))), default=(), read=_to_tuples, write=_to_lists
    )
    #: (agent's role, description, content); None: no short-term memory
    short_term: tuple[tuple[str, str, str], ...] | None = written(
        optional(_check_notes),
        default=None,
        read=lambda value: _to_tuples(json.loads(value) if isinstance(value, str) else value),
        # A store can share the common prefix of one text with earlier texts.
        write=lambda rows: (
            json.dumps(rows, ensure_ascii=False) if rows is not None and len(rows) >= _MANY_NOTES else _to_lists(rows)
        ),
    )
    long_term: tuple[str, ...] = written(list_of(TEXT), default=(), read=tuple, write=list)
    #: (name, fact)
    entities: tuple[tuple[str, str], ...] = written(
        list_of(row_of(TEXT, TEXT)), default=(), read=_to_tuples, write=_to_lists
    )
    retrieval_s: float | None = written(optional(DURATION), default=None)
    lookup_s: float | None = written(optional(DURATION), default=None)
    embedding_tokens: int = written(NUMBER, default=0)

    @classmethod
    def of(cls, found: RecalledMemory) -> MemoryRecalled:
        return cls(**{name: getattr(found, name) for name in cls.KEYS})

    @property
    def recalled(self) -> RecalledMemory:
        return RecalledMemory(**{name: getattr(self, name) for name in self.KEYS})


class MemoryStored(FactData):
    """An output was stored in memory; it must not be stored again."""

    KIND: ClassVar = "memory_stored"
    IS_EFFECT: ClassVar = True

    scopes: tuple[str, ...] = written(list_of(TEXT), default=(), read=tuple, write=list)
    #: memories of the ensemble: `short_term`, `long_term`
    taken_by: tuple[str, ...] = written(list_of(TEXT), default=(), read=tuple, write=list)
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


class ReflectionRecalled(FactData):
    KIND: ClassVar = "reflection_recalled"
    IS_EFFECT: ClassVar = True

    key: str = written(TEXT, missing="")
    reflection: Mapping[str, object] | None = written(optional(_REFLECTION), default=None)

    @classmethod
    def of(cls, key: str, reflection: TaskReflection | None) -> ReflectionRecalled:
        return cls(key=key, reflection=None if reflection is None else reflection.to_data())

    @property
    def recalled(self) -> TaskReflection | None:
        return None if self.reflection is None else _value_of(self.reflection)


class ReflectionRecorded(FactData):
    """A reflection was created; it must not be created again."""

    KIND: ClassVar = "reflection_made"
    IS_EFFECT: ClassVar = True

    key: str = written(TEXT, missing="")
    reflection: Mapping[str, object] = written(
        _REFLECTION, missing=None, default_factory=dict[str, object], is_needed=True
    )
    input_tokens: int = written(NUMBER, default=0)  # estimated if the model reported no counts; 0: no model was called
    output_tokens: int = written(NUMBER, default=0)
    is_first: bool = written(FLAG, default=False)  # whether the store had no earlier reflection on the task
    #: see `ModelAnswered`; None, too: no model was called
    model: str | None = written(ANY, default=None, read=_text_or_none)
    provider: str | None = written(ANY, default=None, read=_text_or_none)
    cached_tokens: int = written(NUMBER, default=-1)
    cache_write_tokens: int = written(NUMBER, default=-1)
    price: str | Mapping[str, object] | None = written(type_of("a text or an object", str, Mapping), default=None)

    @property
    def reflection_value(self) -> TaskReflection:
        return _value_of(self.reflection)


class ReflectionStored(FactData):
    """The reflection was stored; it must not be stored again."""

    KIND: ClassVar = "reflection_stored"
    IS_EFFECT: ClassVar = True

    key: str = written(TEXT, missing="")
