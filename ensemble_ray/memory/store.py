"""MemoryStore: entries by scope, and the two stores that its factories return. Package: memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn

from ensemble_ray.errors import ValidationError
from ensemble_ray.memory.embeddings import SCOPE, check_parts, entry_of, metadata_of
from ensemble_ray.memory.in_memory import StaysHere
from ensemble_ray.ports.memory import EmbeddingModel, EmbeddingStore
from ensemble_ray.process.forks import new_lock
from ensemble_ray.values.memory import EvictionPolicy, MemoryEntry

__all__ = [
    "STORE_METHODS",
    "EmbeddingMemoryStore",
    "InMemoryStore",
    "MemoryStore",
    "check_entry",
    "check_policy",
    "check_retrieval",
    "check_scope",
]

#: What an object must have to be used as a store (S-MEM-60).
STORE_METHODS = ("store", "retrieve", "evict", "clear")


class MemoryStore(ABC):
    """Keeps entries by scope. Its methods may be called from any thread, several at a time.

    Derive from it for a store of your own, or bring any object with these four methods; they may be async.
    """

    @abstractmethod
    def store(self, scope: str, entry: MemoryEntry) -> None:
        """Keep an entry.

        Raises:
            ValidationError: the scope is blank, or the entry None.
        """

    @abstractmethod
    def retrieve(self, scope: str, query: str | None, max_results: int) -> Sequence[MemoryEntry]:
        """Return entries of that scope that have to do with the query.

        Raises:
            ValidationError: the scope is blank, or `max_results` is 0 or less.
        """

    @abstractmethod
    def evict(self, scope: str, policy: EvictionPolicy) -> None:
        """Keep only what the policy returns of a scope's entries.

        Raises:
            ValidationError: the scope is blank, or the policy None.
        """

    @abstractmethod
    def clear(self, scope: str) -> None:
        """Forget the entries of a scope.

        Raises:
            ValidationError: the scope is blank.
            NotImplementedError: the store cannot do that.
        """

    @staticmethod
    def in_memory() -> MemoryStore:
        """Return a store that lasts as long as the process and gives the most recent entries, whatever the query."""
        return InMemoryStore()

    @staticmethod
    def embeddings(*, embedding_model: EmbeddingModel, embedding_store: EmbeddingStore) -> MemoryStore:
        """Return a store that finds entries by meaning."""
        return EmbeddingMemoryStore(embedding_model=embedding_model, embedding_store=embedding_store)


class InMemoryStore(StaysHere, MemoryStore):
    """Entries by scope; the most recent ones are found, whatever the query (S-MEM-63)."""

    def __init__(self) -> None:
        self._scopes: dict[str, list[MemoryEntry]] = {}
        #: scope -> ids that it took; also of entries that were evicted since, which are not taken again either
        self._ids: dict[str, set[str]] = {}
        self._lock = new_lock()

    def store(self, scope: str, entry: MemoryEntry) -> None:
        """Keep an entry, behind the others of its scope; one of an id that is there already stays as it is."""
        check_scope(scope)
        check_entry(entry)
        with self._lock:
            ids = self._ids.setdefault(scope, set())
            if entry.entry_id in ids:
                return
            if entry.entry_id:
                ids.add(entry.entry_id)
            self._scopes.setdefault(scope, []).append(entry)

    def retrieve(self, scope: str, query: str | None, max_results: int) -> Sequence[MemoryEntry]:
        """Return the most recent entries, the oldest of them first."""
        del query
        check_retrieval(scope, max_results)
        with self._lock:
            return self._scopes.get(scope, [])[-max_results:]

    def evict(self, scope: str, policy: EvictionPolicy) -> None:
        """Keep what the policy returns."""
        check_scope(scope)
        check_policy(policy)
        with self._lock:
            if scope in self._scopes:
                self._scopes[scope] = list(policy.apply(tuple(self._scopes[scope])))

    def clear(self, scope: str) -> None:
        """Forget the entries of a scope."""
        check_scope(scope)
        with self._lock:
            self._scopes.pop(scope, None)
            self._ids.pop(scope, None)


class EmbeddingMemoryStore(MemoryStore):
    """Scopes over any embedding store (S-MEM-65 to S-MEM-67)."""

    def __init__(self, *, embedding_model: EmbeddingModel, embedding_store: EmbeddingStore) -> None:
        """Make one.

        Raises:
            ValidationError: one of the two is None.
        """
        check_parts(embedding_model=embedding_model, embedding_store=embedding_store)
        self._texts = embedding_store
        self._model = embedding_model

    @property
    def embedding_model(self) -> EmbeddingModel:
        """What makes its vectors."""
        return self._model

    def store(self, scope: str, entry: MemoryEntry) -> None:
        """Keep an entry; its structured content is not kept."""
        check_scope(scope)
        check_entry(entry)
        self._texts.add(self._model.embed(entry.content), entry.content, {**metadata_of(entry), SCOPE: scope})

    def retrieve(self, scope: str, query: str | None, max_results: int) -> Sequence[MemoryEntry]:
        """Return the entries of that scope that are nearest to the query; none for a blank one."""
        check_retrieval(scope, max_results)
        if query is None or not query.strip():
            return []
        found = self._texts.search(self._model.embed(query), max_results, filter={SCOPE: scope})
        return [entry_of(match) for match in found]

    def evict(self, scope: str, policy: EvictionPolicy) -> None:
        """Do nothing: embedding stores do not list what they have."""
        check_scope(scope)
        check_policy(policy)

    def clear(self, scope: str) -> NoReturn:
        """Refuse.

        Raises:
            NotImplementedError: always.
        """
        check_scope(scope)
        raise NotImplementedError(
            "EmbeddingMemoryStore does not support per-scope clear: embedding stores cannot delete by metadata. Use "
            "MemoryStore.in_memory() where scopes must be cleared"
        )


def check_scope(scope: str | None) -> None:
    """Refuse a scope without a name (S-MEM-62)."""
    if scope is None or not scope.strip():
        raise ValidationError("scope must not be None or blank")


def check_entry(entry: MemoryEntry | None) -> None:
    """Refuse None (S-MEM-62)."""
    if entry is None:
        raise ValidationError("entry must not be None")


def check_policy(policy: EvictionPolicy | None) -> None:
    """Refuse None (S-MEM-62)."""
    if policy is None:
        raise ValidationError("policy must not be None")


def check_retrieval(scope: str | None, max_results: int) -> None:
    """Refuse a scope without a name, and a retrieval of nothing (S-MEM-62)."""
    check_scope(scope)
    if max_results <= 0:
        raise ValidationError(f"max_results must be > 0, got: {max_results}")
