"""Embedding stores, long-term memory over them, entities."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime

import pytest

from ensemble_ray import (
    EmbeddingStoreLongTermMemory,
    InMemoryEmbeddingStore,
    InMemoryEntityMemory,
    MemoryEntry,
    MemoryStore,
    PostgresMemory,
    SqliteMemory,
)
from tests.ensemble_ray.memory.doubles import WordsModel

AT = datetime(2026, 5, 1, tzinfo=UTC)


def long_term(store: InMemoryEmbeddingStore | None = None) -> EmbeddingStoreLongTermMemory:
    """A long-term memory."""
    return EmbeddingStoreLongTermMemory(embedding_store=store or InMemoryEmbeddingStore(), embedding_model=WordsModel())


def test_stores_and_models_are_given_by_name() -> None:
    """S-MEM-32, S-MEM-61, S-MEM-116, S-MEM-140: which is which cannot be mixed up."""
    model, store = WordsModel(), InMemoryEmbeddingStore()
    for make, arguments in (
        (EmbeddingStoreLongTermMemory, (store, model)),
        (MemoryStore.embeddings, (model, store)),
        (SqliteMemory, ("memory.db", model)),
        (PostgresMemory, ("postgresql://db/team", model)),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            make(*arguments)  # type: ignore[operator]  what is refused


def test_search_is_by_the_angle_between_vectors() -> None:
    """S-MEM-35: cosine similarity, whatever the lengths; scores below the least one are left out."""
    store = InMemoryEmbeddingStore()
    store.add([0.0, 5.0], "up", {})
    store.add([1.0, 1.0], "between", {"a": "b"})
    store.add([-3.0, 0.0], "left", {})
    found = store.search([0.0, 0.1], 5)
    assert [(match.text, round(match.score, 3)) for match in found] == [("up", 1.0), ("between", 0.707), ("left", 0.0)]
    assert [match.text for match in store.search([0.0, 1.0], 5, min_score=0.5)] == ["up", "between"]
    assert [match.text for match in store.search([-1.0, 0.0], 5)] == ["left", "up"]
    assert [match.text for match in store.search([0.0, 1.0], 1)] == ["up"]
    assert [match.text for match in store.search([0.0, 1.0], 5, filter={"a": "b"})] == ["between"]


def test_a_vector_without_a_direction_is_near_to_nothing() -> None:
    """S-MEM-35: the null vector has no angle."""
    store = InMemoryEmbeddingStore()
    store.add([0.0, 0.0], "nothing", {})
    assert store.search([1.0, 0.0], 5, min_score=0.1) == []


@pytest.mark.parametrize("order", [["sea tide", "refund"], ["refund", "sea tide"]])
def test_entries_are_found_by_meaning(order: list[str]) -> None:
    """S-MEM-36: the nearest one, whatever the storing order."""
    memory = long_term()
    for content in order:
        memory.store(MemoryEntry(content=content))
    assert [entry.content for entry in memory.retrieve("money", 1)] == ["refund"]
    assert [entry.content for entry in memory.retrieve("money", 2)] == ["refund", "sea tide"]


def test_a_round_trip_keeps_what_an_entry_says() -> None:
    """S-MEM-34: content, time, role, description."""
    memory = long_term()
    metadata = {"agent_role": "Writer", "task_description": "Write"}
    memory.store(MemoryEntry(content="refund", stored_at=AT, metadata=metadata, structured_content=[1]))
    (found,) = memory.retrieve("money", 5)
    assert found == MemoryEntry(content="refund", stored_at=AT, metadata=metadata)


def test_a_text_without_a_time_is_of_the_epoch() -> None:
    """S-MEM-34: something else stored it."""
    store = InMemoryEmbeddingStore()
    store.add(WordsModel().embed("refund"), "refund", {"agent_role": "Writer"})
    (found,) = long_term(store).retrieve("money", 5)
    assert found.stored_at == datetime(1970, 1, 1, tzinfo=UTC)
    assert found.get_meta("agent_role") == "Writer"


@pytest.mark.parametrize("query", ["", "  ", None])
def test_a_blank_query_asks_no_model(query: str | None) -> None:
    """S-MEM-33: no embedding call."""
    model = WordsModel()
    memory = EmbeddingStoreLongTermMemory(embedding_store=InMemoryEmbeddingStore(), embedding_model=model)
    memory.store(MemoryEntry(content="refund"))
    assert memory.retrieve(query, 5) == []
    assert model.asked == ["refund"]


def test_nothing_is_no_entry() -> None:
    """S-MEM-33: None is refused."""
    with pytest.raises(ValueError, match=r"^MemoryEntry must not be None$"):
        long_term().store(None)  # type: ignore[arg-type]  what is refused


@pytest.mark.parametrize("make", [EmbeddingStoreLongTermMemory, MemoryStore.embeddings])
def test_both_parts_are_needed(make: type[EmbeddingStoreLongTermMemory]) -> None:
    """S-MEM-32: a store and a model, by keyword."""
    with pytest.raises(ValueError, match=r"^embedding_store must not be None$"):
        make(embedding_store=None, embedding_model=WordsModel())  # type: ignore[arg-type]  what is refused
    with pytest.raises(ValueError, match=r"^embedding_model must not be None$"):
        make(embedding_store=InMemoryEmbeddingStore(), embedding_model=None)  # type: ignore[arg-type]  what is refused


def test_facts_are_kept_by_trimmed_names() -> None:
    """S-MEM-40, S-MEM-41: trimmed, case kept, the second put replaces, the view is read-only."""
    memory = InMemoryEntityMemory()
    assert memory.is_empty()
    memory.put(" Acme ", "a firm")
    memory.put("Bolt", "a screw")
    memory.put("Acme", "a company")
    assert not memory.is_empty()
    assert memory.get("  Acme") == "a company"
    assert memory.get("acme") is None
    assert memory.get(None) is None
    found = memory.get_all()
    assert list(found.items()) == [("Acme", "a company"), ("Bolt", "a screw")]
    with pytest.raises(TypeError):
        found["Acme"] = "mine"  # type: ignore[index]  what is refused


def test_facts_need_a_name_and_a_text() -> None:
    """S-MEM-41: the texts of the refusals."""
    memory = InMemoryEntityMemory()
    for name in ("", " ", None):
        with pytest.raises(ValueError, match=r"^entity_name must not be None or blank$"):
            memory.put(name, "fact")  # type: ignore[arg-type]  what is refused
    with pytest.raises(ValueError, match=r"^fact must not be None$"):
        memory.put("Acme", None)  # type: ignore[arg-type]  what is refused


@pytest.mark.parametrize("memory", [InMemoryEntityMemory(), InMemoryEmbeddingStore(), MemoryStore.in_memory()])
def test_memory_of_a_process_is_not_copied_to_another(memory: object) -> None:
    """S-MEM-114: a copy would not be what its owner reads."""
    with pytest.raises(TypeError, match="lives in the process that made it and cannot be copied to another"):
        pickle.dumps(memory)
