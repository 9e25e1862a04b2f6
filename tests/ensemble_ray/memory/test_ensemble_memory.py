"""What an ensemble may remember by."""

from __future__ import annotations

import pytest

from ensemble_ray import (
    Ensemble,
    EnsembleMemory,
    InMemoryEmbeddingStore,
    InMemoryEntityMemory,
    MemoryStore,
    ValidationError,
)
from tests.ensemble_ray.memory.test_embeddings import long_term


def test_the_fields_have_their_defaults() -> None:
    """S-MEM-1."""
    memory = EnsembleMemory(short_term=True)
    assert (memory.long_term, memory.entity_memory, memory.long_term_max_results, memory.extractor) == (
        None,
        None,
        5,
        None,
    )


def test_short_term_memory_is_switched_on_and_off() -> None:
    """S-MEM-1: what is neither is refused as any field of a wrong type is."""
    with pytest.raises(ValidationError, match="EnsembleMemory: 'short_term': Input should be a valid boolean"):
        EnsembleMemory(short_term=[])  # type: ignore[arg-type]  what is refused


@pytest.mark.parametrize("fields", [{}, {"short_term": False}, {"long_term": None, "long_term_max_results": 3}])
def test_memory_that_remembers_nothing_is_refused(fields: dict[str, object]) -> None:
    """S-MEM-2."""
    with pytest.raises(ValidationError) as caught:
        EnsembleMemory(**fields)
    assert str(caught.value) == (
        "EnsembleMemory must have at least one memory type enabled: short_term=true, long_term, or entity_memory"
    )


def test_no_results_of_long_term_memory_are_refused() -> None:
    """S-MEM-3: checked with long-term memory alone."""
    with pytest.raises(ValidationError, match=r"^EnsembleMemory long_term_max_results must be > 0, got: 0$"):
        EnsembleMemory(long_term=long_term(), long_term_max_results=0)
    assert EnsembleMemory(short_term=True, long_term_max_results=0).long_term_max_results == 0


def test_a_bare_embedding_store_is_no_long_term_memory() -> None:
    """S-MEM-1: it needs a model."""
    with pytest.raises(ValidationError, match=r"got the embedding store InMemoryEmbeddingStore, which needs a model"):
        EnsembleMemory(long_term=InMemoryEmbeddingStore())  # type: ignore[arg-type]  what is refused


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"long_term": InMemoryEntityMemory()}, "long_term (InMemoryEntityMemory) has no method 'store' and no method 'retrieve'"),
        ({"entity_memory": {"Acme": "a firm"}}, "entity_memory (dict) has no method 'put' and no method 'get_all' and no method 'is_empty'"),
        ({"short_term": True, "extractor": 5}, "extractor must be callable, got: int"),
    ],
)  # fmt: skip
def test_what_is_no_memory_is_refused(fields: dict[str, object], text: str) -> None:
    """S-MEM-1: the methods of the ports are needed."""
    with pytest.raises(ValidationError) as caught:
        EnsembleMemory(**fields)
    assert str(caught.value) == f"EnsembleMemory {text}"


def test_a_store_has_four_methods() -> None:
    """S-MEM-60, S-MEM-115: by inheritance or not."""

    class Own:
        def store(self, scope: str, entry: object) -> None: ...
        def retrieve(self, scope: str, query: str, max_results: int) -> list[object]: ...
        def evict(self, scope: str, policy: object) -> None: ...
        def clear(self, scope: str) -> None: ...

    own = Own()
    assert Ensemble(memory_store=own).memory_store is own  # type: ignore[arg-type]  by its shape
    assert Ensemble(memory_store=MemoryStore.in_memory(), memory=EnsembleMemory(short_term=True)).memory is not None
    with pytest.raises(ValidationError, match=r"^Ensemble memory_store \(dict\) has no method 'store' and .*'evict'$"):
        Ensemble(memory_store={})  # type: ignore[arg-type]  what is refused
