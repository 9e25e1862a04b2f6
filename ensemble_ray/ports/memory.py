"""Contracts of memory. Their methods may be called from any thread, several at a time (S-MEM-68)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ensemble_ray.values.memory import (
        EmbeddingMatch,
        MemoryEntry,
        MemoryNote,
        MemoryQuery,
        RecalledMemory,
        RememberedNote,
    )

__all__ = [
    "EmbeddingModel",
    "EmbeddingStore",
    "EntityMemory",
    "LongTermMemory",
    "MemoryOperationListener",
    "RunMemory",
]


@runtime_checkable
class EmbeddingModel(Protocol):
    """Places texts in a space in which texts of like meaning are near to each other."""

    def embed(self, text: str) -> Sequence[float]:
        """Return the vector of a text."""
        ...


@runtime_checkable
class EmbeddingStore(Protocol):
    """Keeps texts by their vectors."""

    def add(self, vector: Sequence[float], text: str, metadata: Mapping[str, str]) -> None:
        """Keep a text."""
        ...

    def search(
        self,
        vector: Sequence[float],
        max_results: int,
        min_score: float = 0.0,
        filter: Mapping[str, str] | None = None,  # noqa: A002  the name of the port
    ) -> Sequence[EmbeddingMatch]:
        """Return the nearest texts whose score is at least `min_score`, nearest first.

        Args:
            vector: What they are near to.
            max_results: How many at most.
            min_score: The least score.
            filter: Metadata that a text must have, before results are counted; None: any.
        """
        ...


@runtime_checkable
class LongTermMemory(Protocol):
    """Keeps entries across runs and finds them by meaning."""

    def store(self, entry: MemoryEntry) -> None:
        """Keep an entry."""
        ...

    def retrieve(self, query: str | None, max_results: int) -> Sequence[MemoryEntry]:
        """Return entries that have to do with the query, most relevant first."""
        ...


@runtime_checkable
class EntityMemory(Protocol):
    """Knows a fact about each of some things."""

    def put(self, name: str, fact: str) -> None:
        """Keep a fact, in place of an earlier one of that name."""
        ...

    def get(self, name: str | None) -> str | None:
        """Return the fact; None where none is known."""
        ...

    def get_all(self) -> Mapping[str, str]:
        """Return all facts by name, in the order in which the names came."""
        ...

    def is_empty(self) -> bool:
        """Return whether nothing is known."""
        ...


class MemoryOperationListener(Protocol):
    """Hears how one task uses the memory of its ensemble."""

    def on_stm_write(self) -> None:
        """Take note of an entry that short-term memory took."""
        ...

    def on_ltm_store(self) -> None:
        """Take note of an entry that long-term memory took."""
        ...

    def on_ltm_retrieval(self, duration: float) -> None:
        """Take note of a retrieval from long-term memory, which took so many seconds."""
        ...

    def on_entity_lookup(self, duration: float) -> None:
        """Take note of a look at the entities, which took so many seconds."""
        ...


class RunMemory(Protocol):
    """The memory of one run, as its tasks reach it wherever they are (S-MEM-69)."""

    async def recall(self, query: MemoryQuery) -> RecalledMemory:
        """Return what a task is to be reminded of; what a store raises is raised here."""
        ...

    async def remember(self, note: MemoryNote) -> RememberedNote:
        """Keep what a completed task leaves; what a store raises is raised here.

        A note that was taken already is not taken again.
        """
        ...
