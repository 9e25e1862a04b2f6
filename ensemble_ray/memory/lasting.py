"""Memory that lasts: scopes, long-term memory and entities over one set of tables (S-MEM-116 to S-MEM-119). Package: memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ensemble_ray.errors import ValidationError
from ensemble_ray.memory.embedding_models import resolve_embedding_model
from ensemble_ray.memory.embeddings import check_long_term_entry
from ensemble_ray.memory.in_memory import check_fact
from ensemble_ray.memory.store import MemoryStore, check_entry, check_policy, check_retrieval, check_scope
from ensemble_ray.memory.tables import LONG_TERM, MemoryTables
from ensemble_ray.memory.vectors import VectorSearch
from ensemble_ray.ports.memory import EmbeddingModel
from ensemble_ray.values.memory import EvictionPolicy, MemoryEntry

__all__ = ["LastingMemory", "StoredEntityMemory", "StoredLongTermMemory"]


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries of some tables, and how they are found."""

    tables: MemoryTables
    #: None: by recency
    search: VectorSearch | None

    def add(self, scope: str, entry: MemoryEntry) -> None:
        """Keep an entry; one of an id that was there already is left out."""
        self.tables.add(scope, entry, self._vector_of(entry))

    def find(self, scope: str, query: str | None, most: int) -> Sequence[MemoryEntry]:
        """Return the nearest entries; without a model the most recent ones."""
        if self.search is None:
            return self.tables.newest(scope, most)
        if query is None or not query.strip():
            return []
        return self.search.search(scope, query, most)

    def evict(self, scope: str, policy: EvictionPolicy) -> None:
        """Keep what the policy returns; it is asked again where another process changed the scope meanwhile."""
        while not self._evict(scope, policy):
            pass

    def _evict(self, scope: str, policy: EvictionPolicy) -> bool:
        stored = self.tables.entries(scope)
        kept = list(policy.apply([each.entry for each in stored]))
        positions = {id(each.entry): position for position, each in enumerate(stored)}
        found = [positions.get(id(entry), -1) for entry in kept]
        if -1 not in found and found == sorted(set(found)):
            left = set(found)
            return self.tables.replace(
                scope, [each.row for position, each in enumerate(stored) if position not in left], []
            )
        # A policy of the user's may bring entries together, or in another order.
        new = [(entry, self._vector_of(entry)) for entry in kept]
        return self.tables.replace(scope, [each.row for each in stored], new)

    def _vector_of(self, entry: MemoryEntry) -> bytes | None:
        return None if self.search is None else self.search.vector_of(entry.content)


class LastingMemory(MemoryStore):
    """Memory that processes share and that outlasts them. Derived classes say where its tables are."""

    def __init__(self, tables: MemoryTables, embedding_model: EmbeddingModel | str | None) -> None:
        """Make one.

        Raises:
            ValidationError: the model is unknown, or what it needs is not installed.
        """
        self._tables = tables
        self._model = resolve_embedding_model(embedding_model)
        search = None if self._model is None else VectorSearch(tables, self._model)
        self._entries = _Entries(tables, search)

    @property
    def embedding_model(self) -> EmbeddingModel | None:
        """What makes its vectors; None: it finds the most recent entries."""
        return self._model

    @property
    def long_term(self) -> StoredLongTermMemory:
        """Long-term memory in the same place.

        Raises:
            ValidationError: there is no embedding model.
        """
        if self._entries.search is None:
            name = type(self).__name__
            raise ValidationError(f"{name} long_term needs an embedding_model, such as embedding_model='local'")
        return StoredLongTermMemory(self._entries)

    @property
    def entities(self) -> StoredEntityMemory:
        """Facts by name in the same place."""
        return StoredEntityMemory(self._tables)

    def store(self, scope: str, entry: MemoryEntry) -> None:
        """Keep an entry, behind the others of its scope; one of an id that was there already is left out."""
        check_scope(scope)
        check_entry(entry)
        self._entries.add(scope, entry)

    def retrieve(self, scope: str, query: str | None, max_results: int) -> Sequence[MemoryEntry]:
        """Return the entries nearest to the query; without a model the most recent ones, the oldest of them first."""
        check_retrieval(scope, max_results)
        return self._entries.find(scope, query, max_results)

    def evict(self, scope: str, policy: EvictionPolicy) -> None:
        """Keep what the policy returns."""
        check_scope(scope)
        check_policy(policy)
        self._entries.evict(scope, policy)

    def clear(self, scope: str) -> None:
        """Delete the entries of a scope."""
        check_scope(scope)
        self._tables.clear(scope)

    def scopes(self) -> Mapping[str, int]:
        """Return how many entries each scope has; long-term memory is none."""
        return {scope: count for scope, count in self._tables.scopes().items() if scope != LONG_TERM}

    def close(self) -> None:
        """Let go of the place; it is opened again when it is needed."""
        self._tables.close()


class StoredLongTermMemory:
    """Long-term memory that lasts. Fulfils `LongTermMemory`."""

    def __init__(self, entries: _Entries) -> None:
        self._entries = entries

    @property
    def embedding_model(self) -> EmbeddingModel | None:
        """What makes its vectors."""
        return None if self._entries.search is None else self._entries.search.model

    def store(self, entry: MemoryEntry) -> None:
        """Keep an entry; one of an id that was there already is left out.

        Raises:
            ValidationError: it is None.
        """
        check_long_term_entry(entry)
        self._entries.add(LONG_TERM, entry)

    def retrieve(self, query: str | None, max_results: int) -> Sequence[MemoryEntry]:
        """Return the entries nearest to the query; none for a blank one."""
        return self._entries.find(LONG_TERM, query, max_results)

    def evict(self, policy: EvictionPolicy) -> None:
        """Keep what the policy returns."""
        check_policy(policy)
        self._entries.evict(LONG_TERM, policy)

    def clear(self) -> None:
        """Delete all entries."""
        self._entries.tables.clear(LONG_TERM)


class StoredEntityMemory:
    """Facts by name that last. Fulfils `EntityMemory`."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables

    def put(self, name: str, fact: str) -> None:
        """Keep a fact, in place of an earlier one of that name.

        Raises:
            ValidationError: the name is blank, or the fact None.
        """
        self._tables.put_fact(check_fact(name, fact), fact)

    def get(self, name: str | None) -> str | None:
        """Return the fact; None where none is known."""
        return None if name is None else self._tables.fact(name.strip())

    def get_all(self) -> Mapping[str, str]:
        """Return all facts by name, in order of first put; nobody can change them."""
        return MappingProxyType(self._tables.facts())

    def is_empty(self) -> bool:
        """Return whether nothing is known."""
        return not self._tables.has_facts()

    def remove(self, name: str) -> None:
        """Delete a fact."""
        self._tables.remove_fact(name.strip())
