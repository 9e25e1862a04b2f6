"""Persistent memory over database tables: scopes, long-term memory, facts and reflections (S-MEM-116 to S-MEM-119)."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from msgspec import Struct

from ensemble_ray.errors import ValidationError
from ensemble_ray.memory.embedding_models import resolve_embedding_model
from ensemble_ray.memory.embeddings import check_long_term_entry
from ensemble_ray.memory.store import (
    MemoryStore,
    check_entry,
    check_fact,
    check_policy,
    check_reflection,
    check_reflection_key,
    check_retrieval,
    check_scope,
)
from ensemble_ray.ports import EmbeddingModel
from ensemble_ray.process.concurrency import new_lock
from ensemble_ray.values.memory import EvictionPolicy, MemoryEntry, TaskReflection
from ensemble_ray.values.trace import jsonable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
#: Runs a statement once for each row of values, and returns the number of rows that it changed.
Execute = Callable[[str, Sequence[Sequence[object]]], int]
LONG_TERM = ""


class StoredEntry(Struct, frozen=True):
    row: int
    entry: MemoryEntry


class MemoryTables(ABC):
    """Tables of one database. A vector is the bytes of float32 numbers and has length 1.

    Statements have the form of SQLite, with tables in the schema `main` and `?` for values; other databases translate them.
    """

    #: columns of an entry
    COLUMNS: ClassVar[str]
    location: str

    @abstractmethod
    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]: ...

    @abstractmethod
    def change(self, query: str, *values: object) -> None:
        """Run an idempotent change."""

    @abstractmethod
    def close(self) -> None: ...

    def erase_traces(self) -> None:  # noqa: B027  most databases have nothing to do
        ...

    @abstractmethod
    def change_scope(self, scope: str, operation: Callable[[Execute], T]) -> T:
        """Run an idempotent operation in a transaction, after all earlier changes of the scope."""

    @abstractmethod
    def entry_columns(self, entry: MemoryEntry) -> tuple[object, ...]: ...

    @abstractmethod
    def entry_of(self, *columns: Any) -> MemoryEntry: ...

    @property
    def vector_mark(self) -> str:
        """Mark of a vector in a statement."""
        return "?"

    def vector_column(self, vector: bytes | None) -> object:
        return vector

    @abstractmethod
    def add(self, scope: str, entry: MemoryEntry, vector: bytes | None) -> None:
        """Add an entry, unless the scope accepted its id before."""

    def select(self, condition: str, *values: object) -> list[StoredEntry]:
        """Return the entries that meet a condition of SQL, which may also order and limit them."""
        rows = self.rows(f"select id, {self.COLUMNS} from main.entries where {condition}", *values)  # noqa: S608  texts of ours
        return [StoredEntry(row, self.entry_of(*columns)) for row, *columns in rows]

    def newest(self, scope: str, most: int) -> list[MemoryEntry]:
        return [each.entry for each in reversed(self.select("scope = ? order by id desc limit ?", scope, most))]

    def entries(self, scope: str) -> list[StoredEntry]:
        return self.select("scope = ? order by id", scope)

    def replace(self, scope: str, old: Sequence[int], new: Sequence[tuple[MemoryEntry, bytes | None]]) -> bool:
        """Delete rows of a scope, and append entries to it.

        Return False, without a change, if there are entries to add and another process deleted some of the rows.
        """

        def replacing(execute: Execute) -> None:
            deleted = execute("delete from main.entries where scope = ? and id = ?", [(scope, row) for row in old])
            if new and deleted != len(old):
                raise _OutdatedError
            self.insert(execute, scope, new)

        try:
            self.change_scope(scope, replacing)
        except _OutdatedError:
            return False
        if old:
            self.erase_traces()
        return True

    def clear(self, scope: str) -> None:
        """Delete the entries of a scope and its accepted ids."""

        def clearing(execute: Execute) -> None:
            for table in ("entries", "taken"):
                execute(f"delete from main.{table} where scope = ?", [(scope,)])  # noqa: S608  tables of ours

        self.change_scope(scope, clearing)
        self.erase_traces()

    def scopes(self) -> Mapping[str, int]:
        return dict(sorted(self.rows("select scope, count(*) from main.entries group by scope")))

    def nearest(self, scope: str, vector: bytes, most: int) -> list[MemoryEntry] | None:  # noqa: ARG002
        """Return the most similar entries with a cosine >= 0, best first; None: the database cannot search vectors."""
        return None

    def set_vectors(self, scope: str, vectors: Sequence[tuple[bytes, int]]) -> None:
        def setting(execute: Execute) -> None:
            query = f"update main.entries set vector = {self.vector_mark} where id = ? and vector is null"  # noqa: S608  a type of ours
            execute(query, [(self.vector_column(vector), row) for vector, row in vectors])

        self.change_scope(scope, setting)

    def embedding(self, model: str, dimensions: int) -> tuple[str, int]:
        """Return model and length of the vectors. The first call stores them."""
        self.change("insert into main.embedding values (1, ?, ?) on conflict do nothing", model, dimensions)
        return self.embedding_model() or (model, dimensions)

    def embedding_model(self) -> tuple[str, int] | None:
        rows = self.rows("select model, dimensions from main.embedding")
        return cast("tuple[str, int]", rows[0]) if rows else None

    def facts(self) -> dict[str, str]:
        rows = self.rows("select name, fact from main.entities order by id")
        return {name: self.text_of(fact) for name, fact in rows}

    def fact_text(self, fact: str) -> str:
        """Return a fact in the form of its column."""
        return fact

    def text_of(self, text: str) -> str:
        return text

    def remove_fact(self, name: str) -> None:
        self.change("delete from main.entities where name = ?", name)
        self.erase_traces()

    def insert(self, execute: Execute, scope: str, entries: Sequence[tuple[MemoryEntry, bytes | None]]) -> None:
        marks = ", ".join("?" for _ in self.COLUMNS.split(","))
        query = f"insert into main.entries (scope, {self.COLUMNS}, vector) values (?, {marks}, {self.vector_mark})"  # noqa: S608  texts of ours
        execute(query, [(scope, *self.entry_columns(entry), self.vector_column(vector)) for entry, vector in entries])


class _OutdatedError(Exception):
    """Another process changed the scope meanwhile."""


def data_of(entry: MemoryEntry) -> dict[str, object]:
    structured = entry.structured_content
    return {
        "content": entry.content,
        "structured": None if structured is None else jsonable(structured),
        "stored_at": None if entry.stored_at is None else entry.stored_at.isoformat(),
        "metadata": dict(entry.metadata),
        "entry_id": entry.entry_id,
    }


def entry_from(
    *, content: str, structured: object, stored_at: str | None, metadata: Mapping[str, str], entry_id: str
) -> MemoryEntry:
    return MemoryEntry(
        content=content,
        structured_content=structured,
        stored_at=None if stored_at is None else datetime.fromisoformat(stored_at),
        metadata=metadata,
        entry_id=entry_id,
    )


_EmbedAll = Callable[[Sequence[str]], Sequence[Sequence[float]]]
_BATCH_ENTRIES = 1000
_MAX_SCOPES = 8


class _Scope(Struct, frozen=True):
    extent: tuple[int, int]  # number of vectors and row of the newest one, which identify the set of vectors
    rows: NDArray[np.int64]
    vectors: NDArray[np.float32]


class VectorSearch:
    def __init__(self, tables: MemoryTables, model: EmbeddingModel) -> None:
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
        """Return the unit vector; `ValidationError` if the tables have vectors of another model."""
        return self._embed(text).tobytes()

    def search(self, scope: str, query: str, most: int) -> list[MemoryEntry]:
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
        wanted_rows = [int(known.rows[position]) for position in order if scores[position] >= 0.0]
        if not wanted_rows:
            return []
        stored = self._tables.select(f"id in ({', '.join('?' * len(wanted_rows))})", *wanted_rows)
        found = {each.row: each.entry for each in stored}
        return [found[row] for row in wanted_rows if row in found]  # without rows that were deleted meanwhile

    def _add_missing(self, scope: str) -> None:
        """Embed the entries that were stored without a model."""
        missing = self._tables.select("scope = ? and vector is null order by id", scope)
        embed_all = cast("_EmbedAll | None", getattr(self.model, "embed_all", None))
        for start in range(0, len(missing), _BATCH_ENTRIES):
            some = missing[start : start + _BATCH_ENTRIES]
            texts = [stored.entry.content for stored in some]
            vectors = map(self.model.embed, texts) if embed_all is None else embed_all(texts)
            pairs = zip(vectors, some, strict=True)
            self._tables.set_vectors(
                scope, [(self._unit_vector(vector).tobytes(), stored.row) for vector, stored in pairs]
            )

    def _embed(self, text: str) -> NDArray[np.float32]:
        return self._unit_vector(self.model.embed(text))

    def _unit_vector(self, numbers: Sequence[float]) -> NDArray[np.float32]:
        numpy = self._np
        vector: NDArray[np.float32] = numpy.array(numbers, dtype=numpy.float32)
        if not self._is_checked:
            name, dimensions = f"{type(self.model).__name__} {getattr(self.model, 'model', '')}".strip(), len(vector)
            model, found = self._tables.embedding(name, dimensions)
            if (model, found) != (name, dimensions):
                raise ValidationError(
                    f"{self._tables.location} has vectors of {model} ({found} numbers each), which cannot be compared with "
                    f"those of {name} ({dimensions}). Use that model, or another place"
                )
            self._is_checked = True
        length = float(numpy.linalg.norm(vector))
        if length:
            vector /= numpy.float32(length)
        return vector

    def _read(self, scope: str) -> _Scope:
        with self._lock:
            known = self._scopes.pop(scope, None)
            query = "select count(*), coalesce(max(id), 0) from main.entries where scope = ? and vector is not null"
            ((count, newest),) = self._tables.rows(query, scope)
            extent = int(count), int(newest)
            if known is None or known.extent != extent:
                known = self._update(scope, known, extent)
            self._scopes[scope] = known
            while len(self._scopes) > _MAX_SCOPES:
                self._scopes.popitem(last=False)
        return known

    def _update(self, scope: str, known: _Scope | None, extent: tuple[int, int]) -> _Scope:
        np = self._np
        added = [] if known is None else self._vectors(scope, known.extent[1])
        # Rows never change, and row numbers are not reused: an equal count means that no row was deleted.
        if known is None or known.extent[0] + sum(row <= extent[1] for row, _ in added) != extent[0]:
            known = _Scope((0, 0), np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.float32))
            added = self._vectors(scope, 0)
        if not added:
            return known
        rows = np.array([row for row, _ in added], dtype=np.int64)
        vectors = np.frombuffer(b"".join(vector for _, vector in added), dtype=np.float32).reshape(len(added), -1)
        if len(known.rows):
            rows, vectors = np.concatenate([known.rows, rows]), np.concatenate([known.vectors, vectors])
        return _Scope((len(rows), int(rows[-1])), rows, vectors)

    def _vectors(self, scope: str, after: int) -> list[tuple[int, bytes]]:
        query = "select id, vector from main.entries where scope = ? and id > ? and vector is not null order by id"
        return [(int(row), bytes(vector)) for row, vector in self._tables.rows(query, scope, after)]


class _Entries(Struct, frozen=True):
    tables: MemoryTables
    search: VectorSearch | None  # None: the newest entries are found

    def add(self, scope: str, entry: MemoryEntry) -> None:
        self.tables.add(scope, entry, self._vector_of(entry))

    def find(self, scope: str, query: str | None, most: int) -> Sequence[MemoryEntry]:
        if self.search is None:
            return self.tables.newest(scope, most)
        if query is None or not query.strip():
            return []
        return self.search.search(scope, query, most)

    def evict(self, scope: str, policy: EvictionPolicy) -> None:
        """Apply the policy, again if another process changed the scope meanwhile."""
        is_done = False
        while not is_done:
            stored = self.tables.entries(scope)
            kept = list(policy.apply([each.entry for each in stored]))
            positions = {id(each.entry): position for position, each in enumerate(stored)}
            found = [positions.get(id(entry), -1) for entry in kept]
            if -1 not in found and found == sorted(set(found)):
                left = set(found)
                gone = [each.row for position, each in enumerate(stored) if position not in left]
                is_done = self.tables.replace(scope, gone, [])
            else:  # the policy merged or reordered entries
                new = [(entry, self._vector_of(entry)) for entry in kept]
                is_done = self.tables.replace(scope, [each.row for each in stored], new)

    def _vector_of(self, entry: MemoryEntry) -> bytes | None:
        return None if self.search is None else self.search.vector_of(entry.content)


class LastingMemory(MemoryStore):
    """Memory that several processes share and that survives them. It ignores an entry whose id the scope accepted before."""

    def __init__(self, tables: MemoryTables, embedding_model: EmbeddingModel | str | None) -> None:
        self._tables = tables
        self._model = resolve_embedding_model(embedding_model)
        search = None if self._model is None else VectorSearch(tables, self._model)
        self._entries = _Entries(tables, search)

    @property
    def embedding_model(self) -> EmbeddingModel | None:
        """Model of the vectors; None: the newest entries are found."""
        return self._model

    @property
    def long_term(self) -> StoredLongTermMemory:
        """Long-term memory in the same tables. `ValidationError` without an embedding model."""
        if self._entries.search is None:
            name = type(self).__name__
            raise ValidationError(f"{name} long_term needs an embedding_model, such as embedding_model='local'")
        return StoredLongTermMemory(self._entries)

    @property
    def entities(self) -> StoredEntityMemory:
        """Facts in the same tables."""
        return StoredEntityMemory(self._tables)

    def store(self, scope: str, entry: MemoryEntry) -> None:
        check_scope(scope)
        check_entry(entry)
        self._entries.add(scope, entry)

    def retrieve(self, scope: str, query: str | None, max_results: int) -> Sequence[MemoryEntry]:
        """Return the most similar entries; without a model the newest ones."""
        check_retrieval(scope, max_results)
        return self._entries.find(scope, query, max_results)

    def evict(self, scope: str, policy: EvictionPolicy) -> None:
        check_scope(scope)
        check_policy(policy)
        self._entries.evict(scope, policy)

    def clear(self, scope: str) -> None:
        check_scope(scope)
        self._tables.clear(scope)

    def scopes(self) -> Mapping[str, int]:
        """Return the number of entries by scope."""
        return {scope: count for scope, count in self._tables.scopes().items() if scope != LONG_TERM}

    def close(self) -> None:
        """Close the connections. The next operation opens them again."""
        self._tables.close()


class StoredLongTermMemory:
    """Persistent long-term memory. Fulfils `LongTermMemory`."""

    def __init__(self, entries: _Entries) -> None:
        self._entries = entries

    @property
    def embedding_model(self) -> EmbeddingModel | None:
        """Model of the vectors."""
        return None if self._entries.search is None else self._entries.search.model

    def store(self, entry: MemoryEntry) -> None:
        """Store an entry, unless its id was accepted before."""
        check_long_term_entry(entry)
        self._entries.add(LONG_TERM, entry)

    def retrieve(self, query: str | None, max_results: int) -> Sequence[MemoryEntry]:
        """Return the most similar entries; none for a blank query."""
        return self._entries.find(LONG_TERM, query, max_results)

    def evict(self, policy: EvictionPolicy) -> None:
        """Replace the entries by those of the policy."""
        check_policy(policy)
        self._entries.evict(LONG_TERM, policy)

    def clear(self) -> None:
        """Delete all entries."""
        self._entries.tables.clear(LONG_TERM)


class StoredEntityMemory:
    """Persistent facts by name. Fulfils `EntityMemory`."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables

    def put(self, name: str, fact: str) -> None:
        """Store a fact, or replace it."""
        query = (
            "insert into main.entities (name, fact) values (?, ?) on conflict (name) do update set fact = excluded.fact"
        )
        self._tables.change(query, check_fact(name, fact), self._tables.fact_text(fact))

    def get(self, name: str | None) -> str | None:
        """Return the fact of a name, or None."""
        if name is None:
            return None
        rows = self._tables.rows("select fact from main.entities where name = ?", name.strip())
        return self._tables.text_of(rows[0][0]) if rows else None

    def get_all(self) -> Mapping[str, str]:
        """Return all facts by name, read-only."""
        return MappingProxyType(self._tables.facts())

    def is_empty(self) -> bool:
        """Return whether there are no facts."""
        return not self._tables.rows("select 1 from main.entities limit 1")

    def remove(self, name: str) -> None:
        """Delete a fact."""
        self._tables.remove_fact(name.strip())


class LastingReflectionStore(ABC):
    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables
        self._has_table = False

    @abstractmethod
    def _make_table(self) -> None:
        """Create the table if it is missing."""

    @abstractmethod
    def _put(self, key: str, reflection: TaskReflection) -> None: ...

    def _key_text(self, key: str) -> str:
        """Return a key in the form of its column."""
        return key

    def _open(self) -> MemoryTables:
        if not self._has_table:
            self._make_table()
            self._has_table = True
        return self._tables

    def store(self, key: str, reflection: TaskReflection) -> None:
        """Store a reflection, or replace it."""
        key = self._key_text(check_reflection_key(key))
        check_reflection(reflection)
        self._open()
        self._put(key, reflection)

    def retrieve(self, key: str) -> TaskReflection | None:
        """Return the reflection of a key, or None."""
        text = self._key_text(check_reflection_key(key))
        rows = self._open().rows("select body from main.reflections where key = ?", text)
        return TaskReflection(**json.loads(rows[0][0])) if rows else None

    def reflections(self) -> Mapping[str, TaskReflection]:
        """Return all reflections by key."""
        rows = self._open().rows("select key, body from main.reflections")
        found = {self._tables.text_of(key): TaskReflection(**json.loads(body)) for key, body in rows}
        return {key: found[key] for key in sorted(found)}

    def remove(self, key: str) -> None:
        """Delete the reflection of a key."""
        text = self._key_text(check_reflection_key(key))
        self._open().change("delete from main.reflections where key = ?", text)
        self._tables.erase_traces()

    def close(self) -> None:
        """Close the connections. The next operation opens them again."""
        self._tables.close()
