"""The stores of memory that contracts are held to, and how a test gets an empty one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from ensemble_ray import EmbeddingModel, InMemoryEmbeddingStore, MemoryStore, PostgresMemory, SqliteMemory
from ensemble_ray.memory import postgres as schema
from ensemble_ray.memory.lasting import LastingMemory
from tests.ensemble_ray.memory.doubles import WordsModel

__all__ = ["ADAPTERS", "LASTING", "PARAMETERS", "Adapter", "Place", "parameters", "without_pgvector"]

#: Another object of the same place, with a model or without one.
Place = Callable[[EmbeddingModel | None], LastingMemory]


@dataclass(frozen=True)
class Adapter:
    """A store and what it can do."""

    make: Callable[[pytest.FixtureRequest], MemoryStore]
    #: whether it finds the most recent entries, whatever the query
    is_by_recency: bool = False
    #: whether it deletes
    forgets: bool = True
    keeps_structure: bool = True
    keeps_ids: bool = True
    #: whether it needs a server
    is_remote: bool = False


def _embeddings(_request: pytest.FixtureRequest) -> MemoryStore:
    return MemoryStore.embeddings(embedding_model=WordsModel(), embedding_store=InMemoryEmbeddingStore())


def _sqlite(request: pytest.FixtureRequest) -> Place:
    path = request.getfixturevalue("tmp_path") / "memory.db"
    return lambda model: SqliteMemory(path, embedding_model=model)


def _pgvector(request: pytest.FixtureRequest) -> Place:
    url = request.getfixturevalue("postgres").empty_database()
    return lambda model: PostgresMemory(url, embedding_model=model)


def _postgres_alone(request: pytest.FixtureRequest) -> Place:
    without_pgvector(request.getfixturevalue("monkeypatch"))
    return _pgvector(request)


def without_pgvector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tables that are made from now on as on a server without the extension."""
    monkeypatch.setattr(schema, "_extension", lambda _connection: None)


#: Memory that lasts, by name: makes an empty place.
LASTING: dict[str, Callable[[pytest.FixtureRequest], Place]] = {
    "sqlite": _sqlite,
    "pgvector": _pgvector,
    "postgres_alone": _postgres_alone,
}

ADAPTERS = {
    "in_memory": Adapter(make=lambda _request: MemoryStore.in_memory(), is_by_recency=True),
    "embeddings": Adapter(make=_embeddings, forgets=False, keeps_structure=False, keeps_ids=False),
    "sqlite": Adapter(make=lambda request: _sqlite(request)(None), is_by_recency=True),
    "sqlite_by_meaning": Adapter(make=lambda request: _sqlite(request)(WordsModel())),
    "postgres_by_recency": Adapter(make=lambda request: _pgvector(request)(None), is_by_recency=True, is_remote=True),
    "pgvector": Adapter(make=lambda request: _pgvector(request)(WordsModel()), is_remote=True),
    "postgres_alone": Adapter(make=lambda request: _postgres_alone(request)(WordsModel()), is_remote=True),
}


def parameters(names: Iterable[str]) -> list[Any]:
    """Return parameters of a fixture; those that need a server are marked."""
    remote = {name for name, each in ADAPTERS.items() if each.is_remote} | (LASTING.keys() - {"sqlite"})
    return [pytest.param(name, marks=pytest.mark.program) if name in remote else name for name in names]


PARAMETERS = parameters(ADAPTERS)
