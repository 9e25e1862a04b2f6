"""Memory of a team as a file."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ensemble_ray import LocalEmbeddingModel, MemoryScope, PostgresMemory, SqliteMemory
from ensemble_ray.memory.lasting import StoredEntityMemory, StoredLongTermMemory
from ensemble_ray.memory.store import InMemoryStore
from tests.ensemble_ray.teamfile.conftest import Load, Refused
from tests.ensemble_ray.teamfile.test_json_schema import schema_errors

CODE = """
class Store:
    def store(self, scope, entry): ...
    def retrieve(self, scope, query, max_results): return []
    def evict(self, scope, policy): ...
    def clear(self, scope): ...

class Long:
    def store(self, entry): ...
    def retrieve(self, query, max_results): return []

class Facts:
    def put(self, name, fact): ...
    def get(self, name): ...
    def get_all(self): return {}
    def is_empty(self): return True

class Model:
    def embed(self, text): return [1.0]

def shorten(output): return output.raw[:10]
"""
FILED = """
llm: local
memory_store:
  sqlite: {path: data/memory.db, embedding_model: local}
memory:
  short_term: true
  long_term: {sqlite: {path: data/memory.db, embedding_model: own:Model}}
  entity_memory: {sqlite: {path: data/memory.db}}
  long_term_max_results: 3
  extractor: own:shorten
tasks:
  a: {description: do a, memory_scopes: notes}
  b:
    description: do b
    memory_scopes: [notes, {name: last, keep_last_entries: 5}, {name: new, keep_entries_within: 60}]
"""
IN_DATABASE = """
llm: local
memory_store:
  postgres: {url_env: TEAM_MEMORY, embedding_model: local}
memory:
  long_term: {postgres: {url: "postgresql://${DB_HOST:-db}/team", embedding_model: local}}
  entity_memory: {postgres: {url: postgresql://db/team}}
tasks:
  a: {description: do a, memory_scopes: notes}
"""
REST = "llm: local\ntasks: {t: {description: d}}\n"


@pytest.fixture(autouse=True)
def code(folder: Path) -> None:
    """The user's own."""
    (folder / "own.py").write_text(CODE, encoding="utf-8")


def test_context_budgets_in_a_file(load: Load) -> None:
    """S-MEM-131: of the team, and of a task."""
    team = load(
        "llm: local\ncontext_budget: 8000\ntasks:\n  a: {description: d, context_budget: 500}\n  b: {description: e}\n"
    )
    assert (team.context_budget, [task.context_budget for task in team.tasks]) == (8000, [500, None])


def test_memory_in_a_file(load: Load, folder: Path) -> None:
    """S-MEM-122, S-MEM-72: paths are seen from the team file; nothing is made yet."""
    team = load(FILED)
    store, memory = team.memory_store, team.memory
    assert isinstance(store, SqliteMemory)
    assert store.path == folder / "data" / "memory.db"
    assert not store.path.exists()
    assert memory is not None
    assert isinstance(memory.long_term, StoredLongTermMemory)
    assert isinstance(memory.entity_memory, StoredEntityMemory)
    assert (memory.short_term, memory.long_term_max_results) == (True, 3)
    assert memory.extractor is not None
    assert [task.memory_scopes for task in team.tasks] == [
        (MemoryScope.of("notes"),),
        (
            MemoryScope.of("notes"),
            MemoryScope(name="last", keep_last_entries=5),
            MemoryScope(name="new", keep_entries_within=timedelta(seconds=60)),
        ),
    ]
    assert store._model == LocalEmbeddingModel()


def test_memory_in_a_database(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MEM-145: a URL with a password comes from the environment; nothing is connected yet."""
    monkeypatch.setenv("TEAM_MEMORY", "postgresql://me:secret@elsewhere:5433/team")
    team = load(IN_DATABASE)
    store, memory = team.memory_store, team.memory
    assert isinstance(store, PostgresMemory)
    assert repr(store) == "PostgresMemory('postgresql://elsewhere:5433/team')"
    assert store._model == LocalEmbeddingModel()
    assert memory is not None
    assert isinstance(memory.long_term, StoredLongTermMemory)
    assert isinstance(memory.entity_memory, StoredEntityMemory)


def test_memory_of_ones_own(load: Load) -> None:
    """S-MEM-122: by module:attribute, and a store of the process by its word."""
    team = load(f"{REST}memory_store: own:Store\nmemory: {{long_term: own:Long, entity_memory: own:Facts}}\n")
    assert type(team.memory_store).__name__ == "Store"
    assert team.memory is not None
    assert type(team.memory.long_term).__name__ == "Long"
    assert type(team.memory.entity_memory).__name__ == "Facts"
    assert isinstance(load(f"{REST}memory_store: in_memory\n").memory_store, InMemoryStore)


@pytest.mark.parametrize(
    "text",
    [
        FILED,
        IN_DATABASE,
        f"{REST}memory_store: in_memory\n",
        f"{REST}memory_store: own:Store\nmemory: {{short_term: true}}\n",
    ],
)
def test_the_schema_knows_memory(text: str) -> None:
    """S-MEM-122: editors accept what the loader takes."""
    assert schema_errors(text) == []


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        ("memory: {long_term_max_results: 3}\n", "at least one memory type enabled"),
        (
            "memory_store: redis\n",
            "must be `in_memory`, {sqlite: {path: FILE}}, {postgres: {url: URL}}, or module:attribute, which names a memory store",
        ),
        (
            "memory: {entity_memory: redis}\n",
            "must be {sqlite: {path: FILE}}, {postgres: {url: URL}}, or module:attribute, which names an entity memory",
        ),
        ("memory_store: own:Long\n", "not a memory store"),
        ("memory_store: {sqlite: {}}\n", "needs the key 'path'"),
        ("memory_store: {redis: {}}\n", "unknown key"),
        ("memory_store: {}\n", "must have one of the keys 'sqlite' and 'postgres'"),
        (
            "memory_store: {sqlite: {path: a.db}, postgres: {url: postgresql:///a}}\n",
            "must have one of the keys 'sqlite'",
        ),
        ("memory_store: {postgres: {}}\n", "must have one of the keys 'url' and 'url_env'"),
        (
            "memory_store: {postgres: {url: postgresql:///a, url_env: A}}\n",
            "must have one of the keys 'url' and 'url_env'",
        ),
        ("memory_store: {postgres: {url_env: NOBODY_SETS_THIS}}\n", "'NOBODY_SETS_THIS' is not set"),
        ("memory_store: {postgres: {url: 'postgresql://me:pw@db/a'}}\n", "a password does not belong in a file"),
        ("memory_store: {postgres: {url: 'http://db'}}\n", "write postgresql://USER:PASSWORD@HOST:PORT/DATABASE"),
        ("memory_store: {postgres: {dsn: 'postgresql://db'}}\n", "the key is 'url'"),
        ("memory_store: {sqlite: {path: a.db, embedding_model: best}}\n", "Unknown embedding_model 'best'"),
        ("memory: {long_term: {sqlite: {path: a.db}}}\n", "needs an embedding_model"),
        ("memory: {entity_memory: own:Long}\n", "not an entity memory"),
    ],
)
def test_what_is_no_memory_is_told_with_its_place(refused: Refused, rest: str, text: str) -> None:
    """S-MEM-122, S-MEM-2."""
    assert any(text in line for line in refused(f"{REST}{rest}")), refused(f"{REST}{rest}")


def test_a_map_reduce_has_no_scopes(refused: Refused) -> None:
    """S-MEM-122: it has no store that they could be of."""
    text = "llm: local\nmap_reduce: {items: [1], map: {description: d, memory_scopes: notes}}\n"
    assert any("unknown key" in line for line in refused(text)), refused(text)


@pytest.mark.parametrize(
    ("scopes", "text"),
    [
        ("[notes, notes]", "more than once"),
        ("[5]", "must be text"),
        ("{keep_last_entries: 3}", "needs the key 'name'"),
        ("{name: a, keep_last_entries: 3, keep_entries_within: 3}", "both keep_last_entries and keep_entries_within"),
    ],
)
def test_scopes_that_mean_nothing_are_told_with_their_place(refused: Refused, scopes: str, text: str) -> None:
    """S-MEM-122, S-MEM-71, S-MEM-72."""
    lines = refused(f"llm: local\ntasks: {{t: {{description: d, memory_scopes: {scopes}}}}}\n")
    assert any(text in line for line in lines), lines
