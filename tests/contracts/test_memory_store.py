"""One contract for all stores of scopes: `MemoryStore` (S-MEM-60 to S-MEM-68)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ensemble_ray import EvictionPolicy, MemoryEntry, MemoryStore
from tests.contracts.memory_adapters import ADAPTERS, PARAMETERS, Adapter, parameters

START = datetime(2026, 5, 1, tzinfo=UTC)


@pytest.fixture(params=PARAMETERS)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    """Each adapter in turn."""
    return ADAPTERS[request.param]


@pytest.fixture
def store(adapter: Adapter, request: pytest.FixtureRequest) -> MemoryStore:
    """A store that is empty."""
    return adapter.make(request)


def entry(content: str, **fields: object) -> MemoryEntry:
    """An entry."""
    return MemoryEntry(**{"content": content, "stored_at": START, **fields})


def contents(store: MemoryStore, scope: str, query: str = "refund", most: int = 100) -> list[str]:
    """What a scope gives."""
    return [each.content for each in store.retrieve(scope, query, most)]


@pytest.mark.parametrize("scope", ["", "  ", None])
def test_a_scope_without_a_name_is_refused(store: MemoryStore, scope: str) -> None:
    """S-MEM-62: by every operation."""
    calls: list[Callable[[], object]] = [
        lambda: store.store(scope, entry("x")),
        lambda: store.retrieve(scope, "x", 1),
        lambda: store.evict(scope, EvictionPolicy.keep_last_entries(1)),
        lambda: store.clear(scope),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^scope must not be None or blank$"):
            call()


def test_what_is_no_argument_is_refused(store: MemoryStore) -> None:
    """S-MEM-62: the texts."""
    with pytest.raises(ValueError, match=r"^entry must not be None$"):
        store.store("a", None)  # type: ignore[arg-type]  what is refused
    with pytest.raises(ValueError, match=r"^policy must not be None$"):
        store.evict("a", None)  # type: ignore[arg-type]  what is refused
    for most in (0, -1):
        with pytest.raises(ValueError, match=rf"^max_results must be > 0, got: {most}$"):
            store.retrieve("a", "x", most)


def test_a_scope_gives_its_own_entries_alone(store: MemoryStore) -> None:
    """S-MEM-65, S-MEM-76: the scope is applied before results are counted."""
    for number in range(5):
        store.store("a", entry(f"refund {number}"))
    store.store("b", entry("price"))
    assert contents(store, "b", most=1) == ["price"]
    assert sorted(contents(store, "a")) == [f"refund {number}" for number in range(5)]
    assert contents(store, "c") == []


def test_an_entry_comes_back_as_it_was(store: MemoryStore, adapter: Adapter) -> None:
    """S-MEM-10, S-MEM-67: content, time, metadata; structured content where the store keeps it."""
    kept = entry(
        "refund", metadata={"agent_role": "Writer", "mine": "1"}, structured_content={"amount": [1, 2.5, None]}
    )
    store.store("a", kept)
    (found,) = store.retrieve("a", "money", 5)
    assert (found.content, found.stored_at, found.metadata) == (kept.content, kept.stored_at, kept.metadata)
    assert found.structured_content == (kept.structured_content if adapter.keeps_structure else None)


def test_the_most_recent_entries_are_found_oldest_first(store: MemoryStore, adapter: Adapter) -> None:
    """S-MEM-63: without a model the query says nothing."""
    if not adapter.is_by_recency:
        pytest.skip("it finds by meaning")
    for content in ("sea", "refund", "soup"):
        store.store("a", entry(content))
    for query in ("sea", "", None):
        assert [each.content for each in store.retrieve("a", query, 2)] == ["refund", "soup"]


def test_the_nearest_entries_are_found(store: MemoryStore, adapter: Adapter) -> None:
    """S-MEM-65: by meaning; nothing for a blank query."""
    if adapter.is_by_recency:
        pytest.skip("it finds by recency")
    for content in ("sea tide", "refund price", "soup"):
        store.store("a", entry(content))
    assert contents(store, "a", "money", 1) == ["refund price"]
    assert contents(store, "a", "ship", 1) == ["sea tide"]
    assert contents(store, "a", " ") == []
    assert list(store.retrieve("a", None, 5)) == []


def test_eviction_keeps_what_the_policy_returns(store: MemoryStore, adapter: Adapter) -> None:
    """S-MEM-64, S-MEM-66: of that scope; an unknown one stays unknown; a store of embeddings does nothing."""
    for content in ("refund 1", "refund 2", "refund 3"):
        store.store("a", entry(content))
        store.store("b", entry(content))
    store.evict("a", EvictionPolicy.keep_last_entries(1))
    store.evict("c", EvictionPolicy.keep_last_entries(1))
    left = ["refund 3"] if adapter.forgets else ["refund 1", "refund 2", "refund 3"]
    assert sorted(contents(store, "a")) == left
    assert len(contents(store, "b")) == 3
    assert contents(store, "c") == []


class _Rewriting(EvictionPolicy):
    """Brings entries together in a new one."""

    def apply(self, entries: object) -> list[MemoryEntry]:
        assert isinstance(entries, tuple | list)
        return [entry("refund " + "+".join(each.content for each in entries))]


def test_a_policy_may_return_entries_of_its_own(store: MemoryStore, adapter: Adapter) -> None:
    """S-MEM-64, S-MEM-82: the scope has what the policy returned."""
    if not adapter.forgets:
        pytest.skip("it forgets nothing")
    store.store("a", entry("one"))
    store.store("a", entry("two"))
    store.evict("a", _Rewriting())
    assert contents(store, "a") == ["refund one+two"]


def test_a_scope_is_cleared_alone(store: MemoryStore, adapter: Adapter) -> None:
    """S-MEM-64; S-MEM-66: a store of embeddings refuses, and says what can."""
    store.store("a", entry("refund"))
    store.store("b", entry("refund"))
    if not adapter.forgets:
        with pytest.raises(
            NotImplementedError, match=r"^EmbeddingMemoryStore does not support per-scope clear.*in_memory"
        ):
            store.clear("a")
        return
    store.clear("a")
    store.clear("c")
    assert contents(store, "a") == []
    assert contents(store, "b") == ["refund"]


def test_an_id_is_taken_once_in_a_scope(store: MemoryStore, adapter: Adapter) -> None:
    """S-MEM-112: also where the first one was evicted since; clearing forgets it."""
    if not adapter.keeps_ids:
        pytest.skip("it keeps no ids")
    for content in ("refund 1", "refund 2"):
        store.store("a", entry(content, entry_id="run/task#0/0/memory"))
    store.store("b", entry("refund 3", entry_id="run/task#0/0/memory"))
    store.store("a", entry("refund 4"))
    store.store("a", entry("refund 4"))
    assert sorted(contents(store, "a")) == ["refund 1", "refund 4", "refund 4"]
    assert contents(store, "b") == ["refund 3"]
    store.evict("a", EvictionPolicy.keep_last_entries(1))
    store.store("a", entry("refund 1", entry_id="run/task#0/0/memory"))
    assert contents(store, "a") == ["refund 4"]
    store.clear("a")
    store.store("a", entry("refund 1", entry_id="run/task#0/0/memory"))
    assert contents(store, "a") == ["refund 1"]


def test_threads_store_side_by_side(store: MemoryStore) -> None:
    """S-MEM-68: n parallel stores give n entries."""
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for each in range(25):
            store.store("a", entry(f"refund {number} {each}"))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(contents(store, "a", most=1000))) == 200


# What stores that forget do is what a list of entries does.


@dataclass
class _Model:
    """A store as simple as can be."""

    scopes: dict[str, list[MemoryEntry]] = field(default_factory=dict[str, list[MemoryEntry]])

    def evict(self, scope: str, policy: EvictionPolicy) -> None:
        """Keep what the policy returns."""
        if scope in self.scopes:
            self.scopes[scope] = list(policy.apply(self.scopes[scope]))


_SCOPES = st.sampled_from(["a", "b"])
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), _SCOPES, st.integers(min_value=0, max_value=9)),
        st.tuples(st.just("last"), _SCOPES, st.integers(min_value=1, max_value=4)),
        st.tuples(st.just("within"), _SCOPES, st.integers(min_value=1, max_value=9)),
        st.tuples(st.just("clear"), _SCOPES, st.just(0)),
    ),
    max_size=25,
)
_FORGETTING = parameters(name for name, each in ADAPTERS.items() if each.forgets)


@pytest.fixture(params=_FORGETTING)
def forgetting(request: pytest.FixtureRequest) -> tuple[Adapter, MemoryStore]:
    """A store that is used over and over; each example clears its scopes."""
    found = ADAPTERS[request.param]
    return found, found.make(request)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS)
def test_a_store_behaves_like_lists_of_entries(
    forgetting: tuple[Adapter, MemoryStore], steps: list[tuple[str, str, int]]
) -> None:
    """S-MEM-63, S-MEM-64, S-MEM-80, S-MEM-81: any sequence of operations."""
    adapter, fresh = forgetting
    model = _Model()
    for scope in ("a", "b"):
        fresh.clear(scope)
    for position, (what, scope, number) in enumerate(steps):
        match what:
            case "store":
                kept = entry(f"{position}", stored_at=START - timedelta(seconds=number))
                fresh.store(scope, kept)
                model.scopes.setdefault(scope, []).append(kept)
            case "clear":
                fresh.clear(scope)
                model.scopes.pop(scope, None)
            case _:
                last = what == "last"
                policy = (
                    EvictionPolicy.keep_last_entries(number)
                    if last
                    else EvictionPolicy.keep_entries_within(number, now=lambda: START)
                )
                fresh.evict(scope, policy)
                model.evict(scope, policy)
        for each in ("a", "b"):
            expected = [kept.content for kept in model.scopes.get(each, [])]
            found, few = contents(fresh, each), contents(fresh, each, most=2)
            if adapter.is_by_recency:
                assert (found, few) == (expected, expected[-2:])
            else:  # all are equally near
                assert sorted(found, key=int) == expected
                assert len(few) == min(2, len(expected))
                assert set(few) <= set(expected)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.text(alphabet=st.characters()),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
def test_any_text_comes_back(forgetting: tuple[Adapter, MemoryStore], content: str, metadata: dict[str, str]) -> None:
    """S-MEM-10, S-MEM-147: models may say whatever a Python text can hold, NUL and halves of surrogate pairs too."""
    _, store = forgetting
    store.clear("a")
    store.store("a", entry(content, metadata=metadata, structured_content={"text": content}))
    (found,) = store.retrieve("a", "refund", 5)
    assert (found.content, found.metadata, found.structured_content) == (content, metadata, {"text": content})
