"""Memory in one file: who may read it, what is deleted, what is no such file. What lasts is a contract of its own."""

from __future__ import annotations

import os
import pickle
import sqlite3
import stat
from pathlib import Path

import pytest

from ensemble_ray import EnsembleError, EvictionPolicy, MemoryEntry, SqliteMemory
from tests.ensemble_ray.memory.doubles import WordsModel
from tests.forking import Child


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a file may be."""
    return tmp_path / "folder" / "memory.db"


def stored(memory: SqliteMemory, scope: str = "a") -> list[str]:
    """All contents of a scope."""
    return [entry.content for entry in memory.retrieve(scope, "money", 10_000)]


def test_only_the_owner_may_read_the_file(path: Path) -> None:
    """S-MEM-116: what is remembered may be about people."""
    SqliteMemory(path).store("a", MemoryEntry(content="x"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


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
    memory.entities.put("Carl", "is left-handed")
    assert b"left-handed" in text()
    memory.entities.remove("Carl")
    assert b"left-handed" not in text()


class _Without(EvictionPolicy):
    def __init__(self, word: str) -> None:
        self._word = word

    def apply(self, entries: object) -> list[MemoryEntry]:
        assert isinstance(entries, list | tuple)
        return [entry for entry in entries if self._word not in entry.content]


@pytest.mark.program
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_child_and_parent_of_a_fork_lose_nothing_of_each_other(path: Path) -> None:
    """S-ENG-81, S-MEM-117: the child's locks are its own, also when its parent lets go of the file."""
    memory = SqliteMemory(path)
    memory.store("a", MemoryEntry(content="before"))
    reading, writing = os.pipe()
    told, telling = os.pipe()

    def store() -> None:
        memory.store("a", MemoryEntry(content="child"))
        os.write(telling, b"x")
        os.read(reading, 1)
        memory.store("a", MemoryEntry(content="child, later"))

    child = Child(store)
    os.read(told, 1)
    memory.store("a", MemoryEntry(content="parent"))
    memory.close()
    os.write(writing, b"x")
    child.result()
    assert stored(memory) == ["before", "child", "parent", "child, later"]
    for each in (reading, writing, told, telling):
        os.close(each)
