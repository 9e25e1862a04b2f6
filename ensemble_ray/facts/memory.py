"""What tasks were reminded of, and what they left in memory. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from ensemble_ray.facts.fact import FactData, Key
from ensemble_ray.facts.shapes import DURATION, NUMBER, TEXT, Check, list_of, optional
from ensemble_ray.values.memory import RecalledMemory

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
