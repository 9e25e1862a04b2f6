"""Memory in one file: what lasts, what is shared, what is deleted."""

from __future__ import annotations

import pickle
import sqlite3
import stat
from datetime import UTC, datetime
from pathlib import Path

import pydantic
import pytest

from ensemble_ray import EnsembleError, EvictionPolicy, MemoryEntry, SqliteMemory, ValidationError
from tests.ensemble_ray.memory.doubles import WordsModel

AT = datetime(2026, 5, 1, tzinfo=UTC)


class Report(pydantic.BaseModel):
    """What a task gave."""

    title: str


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a file may be."""
    return tmp_path / "folder" / "memory.db"


def stored(memory: SqliteMemory, scope: str = "a") -> list[str]:
    """All contents of a scope."""
    return [entry.content for entry in memory.retrieve(scope, "money", 10_000)]


def test_the_file_outlasts_the_object(path: Path) -> None:
    """S-MEM-116: all three kinds of memory."""
    memory = SqliteMemory(path, embedding_model=WordsModel())
    memory.store("a", MemoryEntry(content="refund", structured_content=Report(title="R"), stored_at=AT))
    memory.long_term.store(MemoryEntry(content="price", metadata={"agent_role": "Writer"}))
    memory.entities.put("Acme", "a firm")
    memory.close()
    again = SqliteMemory(path, embedding_model=WordsModel())
    (entry,) = again.retrieve("a", "money", 5)
    assert (entry.content, entry.structured_content, entry.stored_at) == ("refund", {"title": "R"}, AT)
    assert [found.metadata for found in again.long_term.retrieve("money", 5)] == [{"agent_role": "Writer"}]
    assert dict(again.entities.get_all()) == {"Acme": "a firm"}
    assert again.scopes() == {"a": 1}


def test_only_the_owner_may_read_the_file(path: Path) -> None:
    """S-MEM-116: what is remembered may be about people."""
    SqliteMemory(path).store("a", MemoryEntry(content="x"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_long_term_memory_is_apart_from_scopes_and_needs_a_model(path: Path) -> None:
    """S-MEM-116, S-MEM-33."""
    memory = SqliteMemory(path, embedding_model=WordsModel())
    memory.long_term.store(MemoryEntry(content="refund"))
    memory.store("a", MemoryEntry(content="price"))
    assert [entry.content for entry in memory.long_term.retrieve("money", 5)] == ["refund"]
    assert list(memory.long_term.retrieve(" ", 5)) == []
    assert stored(memory) == ["price"]
    memory.long_term.clear()
    assert list(memory.long_term.retrieve("money", 5)) == []
    assert stored(memory) == ["price"]
    with pytest.raises(ValidationError, match="long_term needs an embedding_model"):
        _ = SqliteMemory(path).long_term


def test_facts_are_kept_by_trimmed_names(path: Path) -> None:
    """S-MEM-40, S-MEM-41, S-MEM-118: as in memory; and they can be removed."""
    facts = SqliteMemory(path).entities
    assert facts.is_empty()
    facts.put(" Bolt ", "a screw")
    facts.put("Acme", "a firm")
    facts.put("Bolt", "a bolt")
    assert (facts.get("Bolt "), facts.get("bolt"), facts.get(None)) == ("a bolt", None, None)
    assert list(facts.get_all().items()) == [("Bolt", "a bolt"), ("Acme", "a firm")]
    with pytest.raises(ValueError, match=r"^entity_name must not be None or blank$"):
        facts.put(" ", "fact")
    with pytest.raises(ValueError, match=r"^fact must not be None$"):
        facts.put("Acme", None)  # type: ignore[arg-type]  what is refused
    facts.remove(" Bolt")
    assert (facts.is_empty(), dict(facts.get_all())) == (False, {"Acme": "a firm"})


def test_entries_of_before_the_model_are_found_too(path: Path) -> None:
    """S-MEM-116: they get their vectors at the first search."""
    SqliteMemory(path).store("a", MemoryEntry(content="refund"))
    model = WordsModel()
    memory = SqliteMemory(path, embedding_model=model)
    assert stored(memory) == ["refund"]
    assert stored(memory) == ["refund"]
    assert sorted(model.asked) == ["money", "money", "refund"]


def test_a_search_sees_what_others_stored_and_deleted(path: Path) -> None:
    """S-MEM-117: what is kept in memory of a file is checked against it."""
    mine, theirs = (SqliteMemory(path, embedding_model=WordsModel()) for _ in range(2))
    for number in range(4):
        mine.store("a", MemoryEntry(content=f"refund {number}"))
        assert sorted(stored(theirs)) == [f"refund {each}" for each in range(number + 1)]
    theirs.evict("a", EvictionPolicy.keep_last_entries(2))
    assert sorted(stored(mine)) == ["refund 2", "refund 3"]
    theirs.evict("a", EvictionPolicy.keep_last_entries(1))
    theirs.store("a", MemoryEntry(content="price"))
    assert sorted(stored(mine)) == ["price", "refund 3"]


def test_another_model_s_vectors_are_not_compared(path: Path) -> None:
    """S-MEM-119: by name and by length."""
    SqliteMemory(path, embedding_model=WordsModel()).store("a", MemoryEntry(content="refund"))
    other = SqliteMemory(path, embedding_model=WordsModel({"one": ("one",)}))
    for use in (lambda: other.store("a", MemoryEntry(content="x")), lambda: other.retrieve("a", "x", 1)):
        with pytest.raises(ValidationError, match=r"vectors of WordsModel \(3 numbers each\).*WordsModel \(1\)"):
            use()


def test_what_is_no_memory_file_is_told(path: Path) -> None:
    """S-MEM-119."""
    path.parent.mkdir()
    path.write_text("this is no database, and long enough to be looked at as one " * 20, encoding="utf-8")
    with pytest.raises(EnsembleError, match="cannot be used as a memory file"):
        SqliteMemory(path).store("a", MemoryEntry(content="x"))
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("pragma user_version = 99")
    connection.close()
    with pytest.raises(EnsembleError, match="written by a later version"):
        SqliteMemory(path).store("a", MemoryEntry(content="x"))


def test_it_pickles_as_its_path_and_model(path: Path) -> None:
    """S-MEM-117: wherever it is loaded, it is the same file."""
    memory = SqliteMemory(path, embedding_model=WordsModel())
    memory.store("a", MemoryEntry(content="refund"))
    again = pickle.loads(pickle.dumps(memory))  # noqa: S301  our own
    assert again.path == path
    assert stored(again) == ["refund"]


def test_what_is_deleted_is_overwritten(path: Path) -> None:
    """S-MEM-118: in the file and in its log."""
    memory = SqliteMemory(path, embedding_model=WordsModel())
    for number in range(50):
        memory.store("people", MemoryEntry(content=f"Ann owes us money {number}"))
    memory.store("people", MemoryEntry(content="Bob paid"))
    files = [path, path.with_name(path.name + "-wal")]

    def text() -> bytes:
        return b"".join(file.read_bytes() for file in files if file.exists())

    assert b"Ann owes" in text()
    memory.evict("people", _Without("Ann"))
    assert stored(memory, "people") == ["Bob paid"]
    assert b"Ann owes" not in text()
    memory.clear("people")
    assert b"Bob paid" not in text()


class _Without(EvictionPolicy):
    def __init__(self, word: str) -> None:
        self._word = word

    def apply(self, entries: object) -> list[MemoryEntry]:
        assert isinstance(entries, list | tuple)
        return [entry for entry in entries if self._word not in entry.content]
