"""`ensemble-ray memory`: what a memory file has, what is found in it, and how it is deleted."""

from __future__ import annotations

import io
import json
import sqlite3
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ensemble_ray import MemoryEntry, OpenAIEmbeddingModel, SqliteMemory
from tests.command_line import Call
from tests.ensemble_ray.memory.doubles import WordsModel

AT = datetime(2026, 5, 1, 12, 30, tzinfo=UTC)


def entry(content: str, **metadata: str) -> MemoryEntry:
    """One of that time."""
    return MemoryEntry(content=content, stored_at=AT, metadata=metadata)


@pytest.fixture
def memory(folder: Path) -> SqliteMemory:
    """What was stored by recency in the file that commands look for."""
    memory = SqliteMemory(folder / "memory.db")
    memory.store("letters", entry("Ann wants her refund\nsoon", agent_role="Writer", task_description="Answer"))
    memory.store("letters", entry("The lid broke"))
    memory.store("sea", entry("High tide"))
    memory.entities.put("Ann", "prefers short answers")
    memory.entities.put("Acme", "a firm")
    return memory


def test_parts_of_a_file_are_listed(call: Call, memory: SqliteMemory) -> None:
    """S-MEM-123, S-MEM-124: for people, and as data."""
    called = call("memory", "ls")
    assert (called.code, called.said) == (0, "")
    assert called.printed.splitlines() == ["letters     2 entries", "sea         1 entry", "(entities)  2 facts"]
    assert json.loads(call("memory", "ls", "--json").printed) == {
        "place": str(memory.path),
        "embedding_model": None,
        "scopes": {"letters": 2, "sea": 1},
        "long_term": 0,
        "entities": 2,
    }


def test_file_is_that_of_the_option_or_of_the_environment(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-MEM-123: the option counts first; what is not there is not made."""
    SqliteMemory(folder / "one.db").store("one", entry("x"))
    SqliteMemory(folder / "two.db").store("two", entry("x"))
    monkeypatch.setenv("ENSEMBLE_RAY_MEMORY", "two.db")
    assert call("memory", "ls").printed == "two  1 entry\n"
    assert call("memory", "ls", "--file", "one.db").printed == "one  1 entry\n"
    missing = call("memory", "ls", "-f", "three.db")
    assert missing.code == 2
    assert f"There is no memory file {folder / 'three.db'}. Name the file" in missing.said
    assert "export ENSEMBLE_RAY_MEMORY=PATH" in missing.said
    assert not (folder / "three.db").exists()


def test_entries_of_a_scope_are_shown(call: Call, memory: SqliteMemory) -> None:
    """S-MEM-124: oldest first, whole; as data with what belongs to them."""
    assert call("memory", "show", "letters").printed.splitlines() == [
        "2026-05-01 12:30 UTC  Writer: Answer",
        "  Ann wants her refund",
        "  soon",
        "2026-05-01 12:30 UTC",
        "  The lid broke",
    ]
    (data,) = json.loads(call("memory", "show", "sea", "--json").printed)
    assert data == {"content": "High tide", "structured_content": None, "stored_at": AT.isoformat(), "metadata": {}}
    assert call("memory", "show", "--entities").printed == "Ann: prefers short answers\nAcme: a firm\n"
    unknown = call("memory", "show", "letter", "--file", str(memory.path))
    assert (unknown.code, "Known: [letters, sea]" in unknown.said) == (2, True)


def test_newest_entries_are_shown_unless_all_are_asked_for(call: Call, memory: SqliteMemory) -> None:
    """S-MEM-124."""
    for number in range(22):
        memory.store("many", entry(f"n{number}"))
    called = call("memory", "show", "many")
    assert called.printed.split()[3::4] == [f"n{number}" for number in range(2, 22)]
    assert "and 2 older ones; all of them: --all" in called.said
    assert len(json.loads(call("memory", "show", "many", "--all", "--json").printed)) == 22


@pytest.mark.parametrize(
    "arguments", [("show",), ("show", "sea", "--entities"), ("clear", "--long-term", "--entities")]
)
@pytest.mark.usefixtures("memory")
def test_one_part_must_be_named(call: Call, arguments: tuple[str, ...]) -> None:
    """S-MEM-124."""
    called = call("memory", *arguments)
    assert (called.code, "Name one of SCOPE, --long-term and --entities" in called.said) == (2, True)


@pytest.mark.usefixtures("memory")
def test_text_is_found_where_a_file_has_no_vectors(call: Call) -> None:
    """S-MEM-125: without regard to capitals; facts too; in one scope alone where it is named."""
    called = call("memory", "search", "ann")
    assert called.printed.splitlines() == [
        "letters",
        "  2026-05-01 12:30 UTC  Writer: Answer",
        "    Ann wants her refund",
        "    soon",
        "(entities)",
        "  Ann: prefers short answers",
    ]
    assert json.loads(call("memory", "search", "ann", "--scope", "sea", "--json").printed) == {
        "entries": [],
        "entities": {},
    }
    assert "No entry was found" in call("memory", "search", "moon").said
    assert "TEXT must not be blank" in call("memory", "search", " ").said


def test_text_is_found_where_the_model_is_unknown_here(call: Call, folder: Path) -> None:
    """S-MEM-125: a model of the user's cannot be made from its name; it is said."""
    memory = SqliteMemory(folder / "memory.db", embedding_model=WordsModel())
    memory.store("a", entry("a refund"))
    memory.long_term.store(entry("the price"))
    called = call("memory", "search", "price")
    assert called.printed.splitlines()[0] == "(long-term memory)"
    assert "vectors of WordsModel, which is not available here" in called.said
    assert call("memory", "show", "--long-term").printed.splitlines()[1] == "  the price"


def test_meaning_is_found_with_the_model_of_the_file(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MEM-125: the nearest first, `--limit` of each scope; `--words` asks no model."""
    words = WordsModel()
    monkeypatch.setattr(OpenAIEmbeddingModel, "embed", lambda _, text: words.embed(text))
    memory = SqliteMemory(folder / "memory.db", embedding_model=OpenAIEmbeddingModel("m"))
    for content in ("ship", "refund", "price refund"):
        memory.store("a", entry(content))
    words.asked.clear()
    found = json.loads(call("memory", "search", "money", "--limit", "2", "--json").printed)
    assert {each["content"] for each in found["entries"]} == {"refund", "price refund"}
    assert words.asked == ["money"]
    assert json.loads(call("memory", "search", "money", "--words", "--json").printed)["entries"] == []
    assert words.asked == ["money"]


def test_scope_is_deleted_when_it_is_sure(call: Call, memory: SqliteMemory) -> None:
    """S-MEM-126: where nobody can be asked, only with `--yes`."""
    refused = call("memory", "clear", "letters")
    assert refused.code == 2
    assert "Delete 2 entries of scope 'letters' in " in refused.said
    assert "repeat the command with --yes" in refused.said
    assert memory.scopes() == {"letters": 2, "sea": 1}
    assert call("memory", "clear", "letters", "--yes").printed == "Deleted 2 entries of scope 'letters'\n"
    assert memory.scopes() == {"sea": 1}
    assert call("memory", "clear", "--entities", "--yes").printed == "Deleted 2 facts about entities\n"
    assert memory.entities.is_empty()


class Terminal(io.StringIO):
    """Somebody who types."""

    def isatty(self) -> bool:
        """They do so at a terminal."""
        return True


@pytest.mark.parametrize(
    ("answer", "code", "is_left"), [("n\n", 1, True), ("\n", 1, True), ("", 1, True), ("y\n", 0, False)]
)
def test_somebody_at_a_terminal_is_asked(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, *, is_left: bool
) -> None:
    """S-MEM-126: only a yes deletes."""
    SqliteMemory(folder / "memory.db").store("sea", entry("High tide"))
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    called = call("memory", "clear", "sea")
    assert called.code == code
    assert ("Nothing was deleted" in called.said) == is_left
    assert SqliteMemory(folder / "memory.db").scopes() == ({"sea": 1} if is_left else {})


def test_database_of_something_else_is_refused_and_left_alone(call: Call, folder: Path) -> None:
    """S-MEM-127."""
    other = folder / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("create table facts (id integer)")
    connection.close()
    before = other.read_bytes()
    called = call("memory", "ls", "--file", str(other))
    assert called.code == 1
    assert "it is a database of something else" in called.said
    assert other.read_bytes() == before
