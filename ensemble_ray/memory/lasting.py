"""Memory that lasts: scopes, long-term memory and entities over one set of tables (S-MEM-116 to S-MEM-119)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, cast

from ensemble_ray.errors import ValidationError
from ensemble_ray.memory.embedding_models import resolve_embedding_model
from ensemble_ray.memory.embeddings import check_long_term_entry
from ensemble_ray.memory.store import MemoryStore, check_entry, check_fact, check_policy, check_retrieval, check_scope
from ensemble_ray.ports import EmbeddingModel
from ensemble_ray.process.forks import new_lock
from ensemble_ray.values.memory import EvictionPolicy, MemoryEntry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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


_EmbedAll = Callable[[Sequence[str]], Sequence[Sequence[float]]]
#: Entries that get their vectors in one go.
_AT_ONCE = 1000
#: Scopes whose vectors stay in memory.
_MOST_SCOPES = 8


@dataclass(frozen=True, slots=True)
class _Scope:
    """The vectors of a scope as they were read last."""

    extent: tuple[int, int]
    rows: NDArray[np.int64]
    vectors: NDArray[np.float32]


class VectorSearch:
    """Searches the scopes of one place with one model."""

    def __init__(self, tables: MemoryTables, model: EmbeddingModel) -> None:
        """Make one.

        Raises:
            ValidationError: numpy is not installed.
        """
        try:
            import numpy as np
        except ImportError:
            raise ValidationError('Memory by meaning needs numpy: pip install "ensemble-ray[memory]"') from None
        self._np = np
        self._tables = tables
        self.model = model
        self._scopes: OrderedDict[str, _Scope] = OrderedDict()
        self._lock = new_lock()
        self._is_checked = False

    def vector_of(self, text: str) -> bytes:
        """Return the vector of a text as it is kept: of length 1.

        Raises:
            ValidationError: the place was filled with another model.
        """
        return self._embed(text).tobytes()

    def search(self, scope: str, query: str, most: int) -> list[MemoryEntry]:
        """Return the entries whose angle to the query is the smallest, none beyond a right angle; nearest first."""
        self._add_missing(scope)
        wanted = self._embed(query)
        if (nearest := self._tables.nearest(scope, wanted.tobytes(), most)) is not None:
            return nearest
        known = self._read(scope)
        if not len(known.rows):
            return []
        scores = known.vectors @ wanted
        best = self._np.argpartition(-scores, most - 1)[:most] if most < len(scores) else self._np.arange(len(scores))
        order = sorted((int(position) for position in best), key=lambda position: (-float(scores[position]), position))
        return self._tables.entries_of([int(known.rows[position]) for position in order if scores[position] >= 0.0])

    def _add_missing(self, scope: str) -> None:
        """Give vectors to the entries that were stored without a model; a model that takes many texts at once gets them so."""
        missing = self._tables.without_vector(scope)
        embed_all = cast("_EmbedAll | None", getattr(self.model, "embed_all", None))
        for start in range(0, len(missing), _AT_ONCE):
            some = missing[start : start + _AT_ONCE]
            texts = [stored.entry.content for stored in some]
            vectors = map(self.model.embed, texts) if embed_all is None else embed_all(texts)
            self._tables.set_vectors(
                [(self._as_kept(vector).tobytes(), stored.row) for vector, stored in zip(vectors, some, strict=True)]
            )

    def _embed(self, text: str) -> NDArray[np.float32]:
        return self._as_kept(self.model.embed(text))

    def _as_kept(self, numbers_of_text: Sequence[float]) -> NDArray[np.float32]:
        numbers = self._np
        vector: NDArray[np.float32] = numbers.array(numbers_of_text, dtype=numbers.float32)
        if not self._is_checked:
            self._check(len(vector))
            self._is_checked = True
        length = float(numbers.linalg.norm(vector))
        if length:
            vector /= numbers.float32(length)
        return vector

    def _check(self, dimensions: int) -> None:
        name = f"{type(self.model).__name__} {getattr(self.model, 'model', '')}".strip()
        model, found = self._tables.embedding(name, dimensions)
        if (model, found) != (name, dimensions):
            raise ValidationError(
                f"{self._tables.location} has vectors of {model} ({found} numbers each), which cannot be compared with those of "
                f"{name} ({dimensions}). Use that model, or another place"
            )

    def _read(self, scope: str) -> _Scope:
        """Return the vectors of a scope as they are now."""
        with self._lock:
            known = self._scopes.pop(scope, None)
            extent = self._tables.extent(scope)
            if known is None or known.extent != extent:
                known = self._update(scope, known, extent)
            self._scopes[scope] = known
            while len(self._scopes) > _MOST_SCOPES:
                self._scopes.popitem(last=False)
        return known

    def _update(self, scope: str, known: _Scope | None, extent: tuple[int, int]) -> _Scope:
        np = self._np
        if known is not None:
            added = self._tables.vectors(scope, known.extent[1])
            # Rows are never changed, and numbers never used again: as many as there are means that none is gone.
            if known.extent[0] + sum(row <= extent[1] for row, _ in added) == extent[0]:
                return self._join(known, added)
        found = self._tables.vectors(scope, 0)
        empty = _Scope((0, 0), np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.float32))
        return self._join(empty, found)

    def _join(self, known: _Scope, added: Sequence[tuple[int, bytes]]) -> _Scope:
        np = self._np
        if not added:
            return known
        rows = np.array([row for row, _ in added], dtype=np.int64)
        vectors = np.frombuffer(b"".join(vector for _, vector in added), dtype=np.float32).reshape(len(added), -1)
        if len(known.rows):
            rows, vectors = np.concatenate([known.rows, rows]), np.concatenate([known.vectors, vectors])
        return _Scope((len(rows), int(rows[-1])), rows, vectors)


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
