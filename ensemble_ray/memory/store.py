"""Memory in this process, the port `MemoryStore`, and the memory settings of an ensemble."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias, cast

from pydantic import SkipValidation, Strict, model_validator

from ensemble_ray.errors import ValidationError
from ensemble_ray.memory.embeddings import SCOPE, check_methods, check_parts, entry_of, metadata_of
from ensemble_ray.ports import EmbeddingModel, EmbeddingStore, EntityMemory, LongTermMemory
from ensemble_ray.process.concurrency import new_lock
from ensemble_ray.values.memory import EmbeddingMatch, EvictionPolicy, MemoryEntry, TaskReflection
from ensemble_ray.values.value import Value


class NotPicklable:
    """Memory that exists only in its process: a copy would miss later changes."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} lives in the process that made it and cannot be copied to another. Give it to the "
            "ensemble (memory_store=, memory=), to a MemoryTool or to an EntityMemoryTool, which reach it from there"
        )


class InMemoryEntityMemory(NotPicklable):
    """Facts by name, in this process. Fulfils `EntityMemory`."""

    def __init__(self) -> None:
        self._facts: dict[str, str] = {}
        self._lock = new_lock()

    def put(self, name: str, fact: str) -> None:
        """Store a fact and replace an earlier one of that name.

        Raises:
            ValidationError: The name is blank, or the fact is None.
        """
        name = check_fact(name, fact)
        with self._lock:
            self._facts[name] = fact

    def get(self, name: str | None) -> str | None:
        """Return the fact of a name, or None."""
        return None if name is None else self._facts.get(name.strip())

    def get_all(self) -> Mapping[str, str]:
        """Return all facts by name, in the order of their first storage, read-only."""
        with self._lock:
            return MappingProxyType(dict(self._facts))

    def is_empty(self) -> bool:
        """Return whether there are no facts."""
        return not self._facts


def check_fact(name: str | None, fact: str | None) -> str:
    if name is None or not name.strip():
        raise ValidationError("entity_name must not be None or blank")
    if fact is None:
        raise ValidationError("fact must not be None")
    return name.strip()


class InMemoryEmbeddingStore(NotPicklable):
    """Texts by vector, in this process. A search compares all of them. Fulfils `EmbeddingStore`."""

    def __init__(self) -> None:
        self._texts: list[tuple[tuple[float, ...], str, Mapping[str, str]]] = []  # (unit vector, text, metadata)
        self._lock = new_lock()

    def add(self, vector: Sequence[float], text: str, metadata: Mapping[str, str]) -> None:
        """Store a text."""
        kept = (_of_length_one(vector), text, dict(metadata))
        with self._lock:
            self._texts.append(kept)

    def search(
        self,
        vector: Sequence[float],
        max_results: int,
        min_score: float = 0.0,
        filter: Mapping[str, str] | None = None,  # noqa: A002  the name of the port
    ) -> Sequence[EmbeddingMatch]:
        """Return the most similar texts in descending order; ties in storing order."""
        wanted = (filter or {}).items()
        with self._lock:
            texts = list(self._texts)
        asked = _of_length_one(vector)
        scored = [
            (sum(a * b for a, b in zip(asked, vector, strict=True)), text, metadata)
            for vector, text, metadata in texts
            if wanted <= metadata.items()
        ]
        near = sorted((found for found in scored if found[0] >= min_score), key=lambda found: -found[0])
        return [
            EmbeddingMatch(text=text, metadata=metadata, score=score) for score, text, metadata in near[:max_results]
        ]


def _of_length_one(vector: Sequence[float]) -> tuple[float, ...]:
    """Return the unit vector; the null vector stays, with a similarity of 0 to all others."""
    length = math.hypot(*vector)
    return tuple(each / length for each in vector) if length else tuple(vector)


STORE_METHODS = ("store", "retrieve", "evict", "clear")


class MemoryStore(ABC):
    """Stores entries by scope. Threads may call the methods at the same time.

    Derive from it for a store of your own, or pass any object with these four methods; they may be async.
    """

    @abstractmethod
    def store(self, scope: str, entry: MemoryEntry) -> None:
        """Store an entry.

        Raises:
            ValidationError: The scope is blank, or the entry is None.
        """

    @abstractmethod
    def retrieve(self, scope: str, query: str | None, max_results: int) -> Sequence[MemoryEntry]:
        """Return entries of a scope that are relevant to the query.

        Raises:
            ValidationError: The scope is blank, or `max_results` is not positive.
        """

    @abstractmethod
    def evict(self, scope: str, policy: EvictionPolicy) -> None:
        """Replace the entries of a scope by the entries that the policy returns.

        Raises:
            ValidationError: The scope is blank, or the policy is None.
        """

    @abstractmethod
    def clear(self, scope: str) -> None:
        """Delete the entries of a scope.

        Raises:
            ValidationError: The scope is blank.
            NotImplementedError: The store cannot delete a scope.
        """

    @staticmethod
    def in_memory() -> MemoryStore:
        """Return a store in this process. It returns the most recent entries, whatever the query."""
        return InMemoryStore()

    @staticmethod
    def embeddings(*, embedding_model: EmbeddingModel, embedding_store: EmbeddingStore) -> MemoryStore:
        """Return a store that finds entries by similarity of their embeddings."""
        return EmbeddingMemoryStore(embedding_model=embedding_model, embedding_store=embedding_store)


class InMemoryStore(NotPicklable, MemoryStore):
    """Entries by scope. A retrieval returns the newest, oldest first; an entry with an accepted id is ignored (S-MEM-63)."""

    def __init__(self) -> None:
        self._scopes: dict[str, list[MemoryEntry]] = {}
        self._ids: dict[str, set[str]] = {}  # accepted ids by scope, with those of evicted entries
        self._lock = new_lock()

    def store(self, scope: str, entry: MemoryEntry) -> None:
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
        del query
        check_retrieval(scope, max_results)
        with self._lock:
            return self._scopes.get(scope, [])[-max_results:]

    def evict(self, scope: str, policy: EvictionPolicy) -> None:
        check_scope(scope)
        check_policy(policy)
        with self._lock:
            if scope in self._scopes:
                self._scopes[scope] = list(policy.apply(tuple(self._scopes[scope])))

    def clear(self, scope: str) -> None:
        check_scope(scope)
        with self._lock:
            self._scopes.pop(scope, None)
            self._ids.pop(scope, None)


class EmbeddingMemoryStore(MemoryStore):
    """Scopes over any embedding store (S-MEM-65 to S-MEM-67)."""

    def __init__(self, *, embedding_model: EmbeddingModel, embedding_store: EmbeddingStore) -> None:
        check_parts(embedding_model=embedding_model, embedding_store=embedding_store)
        self._texts = embedding_store
        self._model = embedding_model

    @property
    def embedding_model(self) -> EmbeddingModel:
        return self._model

    def store(self, scope: str, entry: MemoryEntry) -> None:
        """Store an entry without its structured content."""
        check_scope(scope)
        check_entry(entry)
        self._texts.add(self._model.embed(entry.content), entry.content, {**metadata_of(entry), SCOPE: scope})

    def retrieve(self, scope: str, query: str | None, max_results: int) -> Sequence[MemoryEntry]:
        check_retrieval(scope, max_results)
        if query is None or not query.strip():
            return []
        found = self._texts.search(self._model.embed(query), max_results, filter={SCOPE: scope})
        return [entry_of(match) for match in found]

    def evict(self, scope: str, policy: EvictionPolicy) -> None:
        """Check the arguments only: embedding stores cannot list their texts."""
        check_scope(scope)
        check_policy(policy)

    def clear(self, scope: str) -> NoReturn:
        check_scope(scope)
        raise NotImplementedError(
            "EmbeddingMemoryStore does not support per-scope clear: embedding stores cannot delete by metadata. Use "
            "MemoryStore.in_memory() where scopes must be cleared"
        )


def check_scope(scope: str | None) -> None:
    if scope is None or not scope.strip():
        raise ValidationError("scope must not be None or blank")


def check_entry(entry: MemoryEntry | None) -> None:
    if entry is None:
        raise ValidationError("entry must not be None")


def check_policy(policy: EvictionPolicy | None) -> None:
    if policy is None:
        raise ValidationError("policy must not be None")


def check_retrieval(scope: str | None, max_results: int) -> None:
    check_scope(scope)
    if max_results <= 0:
        raise ValidationError(f"max_results must be > 0, got: {max_results}")


REFLECTION_METHODS = ("store", "retrieve")


class InMemoryReflectionStore(NotPicklable):
    """Reflections by key, in this process. Fulfils `ReflectionStore`."""

    def __init__(self) -> None:
        self._reflections: dict[str, TaskReflection] = {}
        self._lock = new_lock()

    def store(self, key: str, reflection: TaskReflection) -> None:
        """Store a reflection and replace an earlier one of that key.

        Raises:
            ValidationError: The key is blank, or the value is not a `TaskReflection`.
        """
        key = check_reflection_key(key)
        check_reflection(reflection)
        with self._lock:
            self._reflections[key] = reflection

    def retrieve(self, key: str) -> TaskReflection | None:
        """Return the reflection of a key, or None.

        Raises:
            ValidationError: The key is blank.
        """
        with self._lock:
            return self._reflections.get(check_reflection_key(key))


def check_reflection_key(key: str | None) -> str:
    if key is None or not key.strip():
        raise ValidationError("reflection key must not be None or blank")
    return key


def check_reflection(reflection: object) -> None:
    if not isinstance(reflection, TaskReflection):
        raise ValidationError(f"reflection must be a TaskReflection, got: {type(reflection).__name__}")


if TYPE_CHECKING:
    from ensemble_ray.values.task_output import TaskOutput

    _Extractor: TypeAlias = Callable[[TaskOutput], str | None] | None
else:
    _Extractor = Annotated[Any, SkipValidation]


class EnsembleMemory(Value):
    """Memory of all tasks of an ensemble: it appears in their prompts, and their outputs are stored in it.

    Attributes:
        short_term: Whether each task sees the earlier outputs of the same run.
        long_term: Stores outputs across runs; a task sees the relevant ones.
        entity_memory: Facts that each task sees. Only the user writes them.
        long_term_max_results: How many entries of `long_term` a task sees; > 0.
        extractor: Returns the text of a `TaskOutput` that `long_term` stores, or None to store no entry. Default: its raw text.
    """

    short_term: Annotated[bool, Strict()] = False
    long_term: Annotated[LongTermMemory | None, SkipValidation] = None
    entity_memory: Annotated[EntityMemory | None, SkipValidation] = None
    long_term_max_results: Annotated[int, Strict()] = 5
    extractor: _Extractor = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        arguments = cast("Mapping[str, Any]", data)
        long_term, entities = arguments.get("long_term"), arguments.get("entity_memory")
        if arguments.get("short_term") in (None, False) and long_term is None and entities is None:
            raise ValidationError(
                "EnsembleMemory must have at least one memory type enabled: short_term=true, long_term, or entity_memory"
            )
        if hasattr(long_term, "search") and not hasattr(long_term, "retrieve"):
            raise ValidationError(
                f"EnsembleMemory long_term must be a long-term memory, got the embedding store {type(long_term).__name__}, "
                "which needs a model: EmbeddingStoreLongTermMemory(embedding_store=..., embedding_model=...)"
            )
        check_methods(long_term, ("store", "retrieve"), "EnsembleMemory long_term")
        most = arguments.get("long_term_max_results")
        if long_term is not None and isinstance(most, int) and most <= 0:
            raise ValidationError(f"EnsembleMemory long_term_max_results must be > 0, got: {most}")
        check_methods(entities, ("put", "get", "get_all", "is_empty"), "EnsembleMemory entity_memory")
        extractor = arguments.get("extractor")
        if extractor is not None and not callable(extractor):
            raise ValidationError(f"EnsembleMemory extractor must be callable, got: {type(extractor).__name__}")
        return arguments
