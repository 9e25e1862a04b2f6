"""SqliteMemory: scopes, long-term memory and entities in one file (S-MEM-116 to S-MEM-121). Package: memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ensemble_ray.errors import ValidationError
from ensemble_ray.memory.embedding_models import resolve_embedding_model
from ensemble_ray.memory.embeddings import check_long_term_entry
from ensemble_ray.memory.in_memory import check_fact
from ensemble_ray.memory.sqlite.file import LONG_TERM, MemoryFile
from ensemble_ray.memory.sqlite.vectors import VectorSearch
from ensemble_ray.memory.store import MemoryStore, check_entry, check_policy, check_retrieval, check_scope
from ensemble_ray.ports.memory import EmbeddingModel
from ensemble_ray.values.memory import EvictionPolicy, MemoryEntry

__all__ = ["SqliteEntityMemory", "SqliteLongTermMemory", "SqliteMemory"]


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries of a file, and how they are found."""

    file: MemoryFile
    #: None: by recency
    search: VectorSearch | None

    def add(self, scope: str, entry: MemoryEntry) -> None:
        """Keep an entry; one of an id that was there already is left out."""
        self.file.add(scope, entry, None if self.search is None else self.search.vector_of(entry.content))

    def find(self, scope: str, query: str | None, most: int) -> Sequence[MemoryEntry]:
        """Return the nearest entries; without a model the most recent ones."""
        if self.search is None:
            return self.file.newest(scope, most)
        if query is None or not query.strip():
            return []
        return self.search.search(scope, query, most)

    def evict(self, scope: str, policy: EvictionPolicy) -> None:
        """Keep what the policy returns."""
        stored = self.file.entries(scope)
        kept = list(policy.apply([each.entry for each in stored]))
        places = {id(each.entry): place for place, each in enumerate(stored)}
        found = [places.get(id(entry), -1) for entry in kept]
        if -1 not in found and found == sorted(set(found)):
            left = set(found)
            self.file.replace(scope, [each.row for place, each in enumerate(stored) if place not in left], [])
            return
        # A policy of the user's may bring entries together, or in another order.
        search = self.search
        new = [(entry, None if search is None else search.vector_of(entry.content)) for entry in kept]
        self.file.replace(scope, [each.row for each in stored], new)


class SqliteMemory(MemoryStore):
    """Memory in one file, which processes share and which outlasts them.

    It is a store of scopes; `long_term` and `entities` are the other two kinds of memory, in the same file.

    Example:
        >>> SqliteMemory("/var/lib/team/memory.db").path.name
        'memory.db'
    """

    def __init__(self, path: str | Path, *, embedding_model: EmbeddingModel | str | None = None) -> None:
        """Make one; the file is made when it is first used.

        Args:
            path: The file.
            embedding_model: Finds entries by meaning: a model, `"local"` or `"openai:MODEL"`. None: the most recent entries of
                a scope are found, whatever the query, and there is no long-term memory.

        Raises:
            ValidationError: the model is unknown, or what it needs is not installed.
        """
        self._file = MemoryFile(Path(path).expanduser().absolute())
        self._model = resolve_embedding_model(embedding_model)
        search = None if self._model is None else VectorSearch(self._file, self._model)
        self._entries = _Entries(self._file, search)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def long_term(self) -> SqliteLongTermMemory:
        """Long-term memory in the same file.

        Raises:
            ValidationError: there is no embedding model.
        """
        if self._entries.search is None:
            raise ValidationError("SqliteMemory long_term needs an embedding_model, such as embedding_model='local'")
        return SqliteLongTermMemory(self._entries)

    @property
    def entities(self) -> SqliteEntityMemory:
        """Facts by name in the same file."""
        return SqliteEntityMemory(self._file)

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
        self._file.clear(scope)

    def scopes(self) -> Mapping[str, int]:
        """Return how many entries each scope has; long-term memory is none."""
        return {scope: count for scope, count in self._file.scopes().items() if scope != LONG_TERM}

    def close(self) -> None:
        """Let go of the file; it is opened again when it is needed."""
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_open, (str(self.path), self._model))

    def __repr__(self) -> str:
        return f"SqliteMemory({str(self.path)!r})"


class SqliteLongTermMemory:
    """Long-term memory in a memory file. Fulfils `LongTermMemory`."""

    def __init__(self, entries: _Entries) -> None:
        self._entries = entries

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
        self._entries.file.clear(LONG_TERM)


class SqliteEntityMemory:
    """Facts by name in a memory file. Fulfils `EntityMemory`."""

    def __init__(self, file: MemoryFile) -> None:
        self._file = file

    def put(self, name: str, fact: str) -> None:
        """Keep a fact, in place of an earlier one of that name.

        Raises:
            ValidationError: the name is blank, or the fact None.
        """
        name = check_fact(name, fact)
        with self._file.changing() as connection:
            connection.execute(
                "insert into entities (name, fact) values (?, ?) on conflict (name) do update set fact = excluded.fact",
                (name, fact),
            )

    def get(self, name: str | None) -> str | None:
        """Return the fact; None where none is known."""
        if name is None:
            return None
        with self._file.reading() as connection:
            row = connection.execute("select fact from entities where name = ?", (name.strip(),)).fetchone()
        return None if row is None else str(row[0])

    def get_all(self) -> Mapping[str, str]:
        """Return all facts by name, in order of first put; nobody can change them."""
        with self._file.reading() as connection:
            rows = connection.execute("select name, fact from entities order by id").fetchall()
        return MappingProxyType({str(name): str(fact) for name, fact in rows})

    def is_empty(self) -> bool:
        """Return whether nothing is known."""
        with self._file.reading() as connection:
            return connection.execute("select 1 from entities limit 1").fetchone() is None

    def remove(self, name: str) -> None:
        """Delete a fact."""
        with self._file.changing() as connection:
            connection.execute("delete from entities where name = ?", (name.strip(),))


def _open(path: str, model: EmbeddingModel | None) -> SqliteMemory:
    return SqliteMemory(path, embedding_model=model)
