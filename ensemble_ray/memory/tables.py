"""MemoryTables: what memory that lasts needs of a store, whichever it is. Package: memory. Contracts only.

Adapters: a file of SQLite, a database of PostgreSQL. Any thread and any process may use the same tables: a change is whole or
not there, nobody reads half of it, and rows are numbered in the order in which their scope took them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ensemble_ray.values.memory import MemoryEntry

__all__ = ["LONG_TERM", "MemoryTables", "StoredEntry"]

#: Where the entries of long-term memory stand: no scope has that name.
LONG_TERM = ""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry and its row."""

    row: int
    entry: MemoryEntry


class MemoryTables(Protocol):
    """Entries by scope with their vectors, and facts by name. Vectors are float32 numbers of length 1, as bytes."""

    @property
    def location(self) -> str:
        """Where it is, for people."""
        ...

    def close(self) -> None:
        """Let go of it; it is opened again when it is needed."""
        ...

    # Entries.

    def add(self, scope: str, entry: MemoryEntry, vector: bytes | None) -> None:
        """Add an entry; one whose id the scope took before is left out."""
        ...

    def newest(self, scope: str, most: int) -> list[MemoryEntry]:
        """Return the newest entries of a scope, the oldest of them first."""
        ...

    def entries(self, scope: str) -> list[StoredEntry]:
        """Return all entries of a scope, in storing order."""
        ...

    def entries_of(self, rows: Sequence[int]) -> list[MemoryEntry]:
        """Return the entries of these rows, in this order; those that are gone are left out."""
        ...

    def replace(self, scope: str, old: Sequence[int], new: Sequence[tuple[MemoryEntry, bytes | None]]) -> bool:
        """Delete rows of a scope, and add entries behind the others.

        Where some of the rows are gone and there is something to add, nothing is changed: False. Somebody else was faster.
        """
        ...

    def clear(self, scope: str) -> None:
        """Delete the entries of a scope, and what ids it took."""
        ...

    def scopes(self) -> Mapping[str, int]:
        """Return how many entries each scope has, by name."""
        ...

    # Vectors.

    def nearest(self, scope: str, vector: bytes, most: int) -> list[MemoryEntry] | None:
        """Return the entries nearest to a vector, none beyond a right angle, nearest first; None: it cannot search itself."""
        ...

    def extent(self, scope: str) -> tuple[int, int]:
        """Return how many vectors a scope has and the newest one's row: two that are equal have the same vectors."""
        ...

    def vectors(self, scope: str, after: int) -> list[tuple[int, bytes]]:
        """Return rows and vectors of a scope, of the rows behind that one."""
        ...

    def without_vector(self, scope: str) -> list[StoredEntry]:
        """Return the entries that were stored without a model."""
        ...

    def set_vectors(self, vectors: Sequence[tuple[bytes, int]]) -> None:
        """Add the vectors of rows that have none."""
        ...

    def embedding(self, model: str, dimensions: int) -> tuple[str, int]:
        """Return the model and the length of the vectors; these, where there are none yet."""
        ...

    def embedding_model(self) -> tuple[str, int] | None:
        """Return the model and the length of the vectors; None where there are none."""
        ...

    # Facts about entities.

    def put_fact(self, name: str, fact: str) -> None:
        """Keep a fact, in place of an earlier one of that name."""
        ...

    def fact(self, name: str) -> str | None:
        """Return a fact; None where none is known."""
        ...

    def facts(self) -> dict[str, str]:
        """Return all facts by name, in order of first put."""
        ...

    def has_facts(self) -> bool:
        """Return whether there is any."""
        ...

    def remove_fact(self, name: str) -> None:
        """Delete a fact."""
        ...
