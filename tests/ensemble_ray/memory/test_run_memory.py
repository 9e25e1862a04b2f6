"""The memory of one run, in the process of the objects that the user passed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from ensemble_ray import (
    EnsembleMemory,
    EvictionPolicy,
    InMemoryEmbeddingStore,
    InMemoryEntityMemory,
    MemoryEntry,
    MemoryScope,
    MemoryStore,
    TaskOutput,
)
from ensemble_ray.memory.tools import LocalRunMemory, rules_of
from ensemble_ray.values.memory import MemoryNote, MemoryQuery, MemoryRules, ScopeReset
from tests.ensemble_ray.memory.doubles import WordsModel
from tests.ensemble_ray.memory.test_embeddings import long_term

AT = datetime(2026, 5, 1, tzinfo=UTC)


def output(raw: str, **fields: object) -> TaskOutput:
    """What a task gave."""
    given = {"task_description": "Write", "agent_role": "Writer", "completed_at": AT, "duration": timedelta(), **fields}
    return TaskOutput(raw=raw, **given)  # type: ignore[arg-type]  fields of an output


def note(raw: str, number: int = 0, **fields: object) -> MemoryNote:
    """What a task leaves."""
    instance = f"task-{number}#0"
    return MemoryNote(instance=instance, entry_id=f"run/{instance}/0/memory", output=output(raw), **fields)  # type: ignore[arg-type]  its fields


def query(*scopes: str, text: str = "money", uses_ensemble: bool = False) -> MemoryQuery:
    """What a task asks."""
    return MemoryQuery(scopes=scopes, text=text, uses_ensemble=uses_ensemble)


class Refusing:
    """A store that raises."""

    def __init__(self, *, is_open: bool = False) -> None:
        #: whether it takes entries
        self.is_open = is_open
        self.taken: list[MemoryEntry] = []

    async def store(self, scope: str, entry: MemoryEntry) -> None:
        """Take it, or not."""
        if not self.is_open:
            raise OSError(f"no room in {scope}")
        self.taken.append(entry)

    def retrieve(self, scope: str, query: str, max_results: int) -> list[MemoryEntry]:
        """Refuse."""
        raise OSError(f"{scope} cannot be read")

    def evict(self, scope: str, policy: EvictionPolicy) -> None:
        """Refuse."""
        raise NotImplementedError("no")

    def clear(self, scope: str) -> None:
        """Refuse."""
        raise NotImplementedError("Refusing keeps everything")


def test_the_rules_say_which_kinds_of_memory_there_are() -> None:
    """S-MEM-1, S-MEM-60: data, which travels."""
    assert rules_of(None, None) is None
    assert rules_of(None, MemoryStore.in_memory()) == MemoryRules(has_store=True)
    memory = EnsembleMemory(
        short_term=True, long_term=long_term(), entity_memory=InMemoryEntityMemory(), extractor=lambda found: found.raw
    )
    assert rules_of(memory, None) == MemoryRules(
        has_short_term=True, has_long_term=True, has_entities=True, has_extractor=True
    )


async def test_a_task_leaves_an_entry_in_each_of_its_scopes() -> None:
    """S-MEM-74, S-MEM-11, S-MEM-12: text, parsed output, time, role and description; then the scope's eviction."""
    store = MemoryStore.in_memory()
    memory = LocalRunMemory(None, store)
    scopes = (MemoryScope.of("all"), MemoryScope(name="last", keep_last_entries=1))
    await memory.remember(note("one", scopes=scopes))
    parsed = MemoryNote(
        instance="b#0", entry_id="run/b#0/0/memory", output=output("two", parsed_output={"n": 2}), scopes=scopes
    )
    await memory.remember(parsed)
    assert [entry.content for entry in store.retrieve("all", "", 9)] == ["one", "two"]
    (last,) = store.retrieve("last", "", 9)
    assert (last.content, last.structured_content, last.stored_at) == ("two", {"n": 2}, AT)
    assert last.metadata == {"agent_role": "Writer", "task_description": "Write"}


async def test_a_task_is_reminded_of_the_five_nearest_entries_of_each_scope() -> None:
    """S-MEM-73, S-MEM-76: query and scopes as the task says, in its order."""
    store = MemoryStore.in_memory()
    for number in range(7):
        store.store("a", MemoryEntry(content=str(number)))
    store.store("b", MemoryEntry(content="x"))
    found = await LocalRunMemory(None, store).recall(query("c", "a"))
    assert found.scopes == (("c", ()), ("a", ("2", "3", "4", "5", "6")))
    assert (found.short_term, found.long_term, found.entities) == (None, (), ())


async def test_short_term_memory_is_in_recording_order_and_a_copy() -> None:
    """S-MEM-20, S-MEM-21: what was recalled does not grow."""
    memory = LocalRunMemory(EnsembleMemory(short_term=True), None)
    assert (await memory.recall(query(uses_ensemble=True))).short_term == ()
    assert (await memory.remember(note("one", 1, uses_ensemble=True))).taken_by == ("short_term",)
    found = await memory.recall(query(uses_ensemble=True))
    await memory.remember(note("two", 0, uses_ensemble=True))
    assert found.short_term == (("Writer", "Write", "one"),)
    later = await memory.recall(query(uses_ensemble=True))
    assert later.short_term == (("Writer", "Write", "one"), ("Writer", "Write", "two"))
    assert (await memory.recall(query())).short_term is None


async def test_long_term_memory_is_asked_once_with_the_description() -> None:
    """S-MEM-31, S-MEM-30: `long_term_max_results` entries, most relevant first, and how long it took."""
    model, store = WordsModel(), InMemoryEmbeddingStore()
    from ensemble_ray import EmbeddingStoreLongTermMemory

    long = EmbeddingStoreLongTermMemory(embedding_store=store, embedding_model=model)
    memory = LocalRunMemory(EnsembleMemory(long_term=long, long_term_max_results=1), None)
    assert (await memory.remember(note("refund", 0, uses_ensemble=True))).taken_by == ("long_term",)
    await memory.remember(note("tide", 1, uses_ensemble=True))
    found = await memory.recall(query(text="money", uses_ensemble=True))
    assert found.long_term == ("refund",)
    assert model.asked == ["refund", "tide", "money"]
    assert found.retrieval_s is not None
    assert found.lookup_s is None


async def test_an_extractor_says_what_is_stored() -> None:
    """S-MEM-6: its text; nothing for None; sync or async."""
    store = InMemoryEmbeddingStore()

    async def extract(found: TaskOutput) -> str | None:
        await asyncio.sleep(0)
        return None if found.raw == "secret" else found.raw.upper()

    from ensemble_ray import EmbeddingStoreLongTermMemory

    long = EmbeddingStoreLongTermMemory(embedding_store=store, embedding_model=WordsModel())
    memory = LocalRunMemory(EnsembleMemory(long_term=long, extractor=extract), None)  # type: ignore[arg-type]  async too
    assert (await memory.remember(note("refund", 0, uses_ensemble=True))).taken_by == ("long_term",)
    assert (await memory.remember(note("secret", 1, uses_ensemble=True))).taken_by == ()
    assert [entry.content for entry in long.retrieve("money", 9)] == ["REFUND"]


async def test_entities_are_shown_in_order_of_first_put() -> None:
    """S-MEM-42, S-MEM-43: only the user writes them."""
    entities = InMemoryEntityMemory()
    entities.put("Bolt", "a screw")
    entities.put("Acme", "a firm")
    entities.put("Bolt", "a bolt")
    memory = LocalRunMemory(EnsembleMemory(entity_memory=entities), None)
    assert (await memory.remember(note("text", uses_ensemble=True))).taken_by == ()
    found = await memory.recall(query(uses_ensemble=True))
    assert found.entities == (("Bolt", "a bolt"), ("Acme", "a firm"))
    assert found.lookup_s is not None
    assert found.retrieval_s is None


async def test_a_note_is_taken_once() -> None:
    """S-MEM-112: also when it is left twice at the same time, by a process that died and its successor."""
    store = Refusing(is_open=True)
    memory = LocalRunMemory(EnsembleMemory(short_term=True), store)  # type: ignore[arg-type]  by its shape
    left = note("one", uses_ensemble=True, scopes=(MemoryScope.of("a"),))
    both = await asyncio.gather(memory.remember(left), memory.remember(left))
    assert [each.taken_by for each in both] == [("short_term",)] * 2
    assert (await memory.remember(left)).taken_by == ("short_term",)
    assert [entry.content for entry in store.taken] == ["one"]
    assert (await memory.recall(query(uses_ensemble=True))).short_term == (("Writer", "Write", "one"),)


async def test_a_note_that_stands_in_the_stores_goes_into_the_notes_of_the_run_alone() -> None:
    """S-MEM-112: those are gone with the process that had them."""
    store = Refusing()
    memory = LocalRunMemory(EnsembleMemory(short_term=True, long_term=long_term()), store)  # type: ignore[arg-type]  by its shape
    left = note("one", uses_ensemble=True, is_stored=True, scopes=(MemoryScope.of("a"),))
    assert (await memory.remember(left)).taken_by == ("short_term",)
    assert (await memory.recall(query(uses_ensemble=True))).long_term == ()


async def test_a_store_that_raises_is_heard_of_and_may_be_asked_again() -> None:
    """S-MEM-110: the error is the store's own."""
    store = Refusing()
    memory = LocalRunMemory(None, store)  # type: ignore[arg-type]  by its shape
    with pytest.raises(OSError, match="a cannot be read"):
        await memory.recall(query("a"))
    left = note("one", scopes=(MemoryScope.of("a"),))
    with pytest.raises(OSError, match="no room in a"):
        await memory.remember(left)
    store.is_open = True
    await memory.remember(left)
    assert [entry.content for entry in store.taken] == ["one"]


async def test_a_task_that_failed_by_its_store_is_not_among_the_notes_of_the_run() -> None:
    """S-MEM-7, S-MEM-110: whatever raised, the tasks behind it are not shown its output."""
    memory = LocalRunMemory(EnsembleMemory(short_term=True), Refusing())  # type: ignore[arg-type]  by its shape
    with pytest.raises(OSError, match="no room in a"):
        await memory.remember(note("one", uses_ensemble=True, scopes=(MemoryScope.of("a"),)))
    assert (await memory.recall(query(uses_ensemble=True))).short_term == ()


async def test_an_earlier_process_s_notes_come_first() -> None:
    """S-MEM-112: short-term memory of a run that goes on."""
    memory = LocalRunMemory(EnsembleMemory(short_term=True), None)
    memory.restore("task-1#0", output("one"))
    await memory.remember(note("two", 2, uses_ensemble=True))
    found = await memory.recall(query(uses_ensemble=True))
    assert found.short_term == (("Writer", "Write", "one"), ("Writer", "Write", "two"))


# Loops.


def _reset(mode: str, *scopes: str, window_size: int = 0) -> ScopeReset:
    return ScopeReset(loop="refine", mode=mode, scopes=scopes, window_size=window_size)  # type: ignore[arg-type]  a word


def _filled() -> MemoryStore:
    store = MemoryStore.in_memory()
    for scope in ("a", "b", "c"):
        for number in range(3):
            store.store(scope, MemoryEntry(content=str(number)))
    return store


async def test_a_loop_clears_the_scopes_of_its_body() -> None:
    """S-LOOP-91, S-LOOP-95: these alone."""
    store = _filled()
    await LocalRunMemory(None, store).reset(_reset("fresh_per_iteration", "a", "b"))
    assert [len(store.retrieve(scope, "", 9)) for scope in ("a", "b", "c")] == [0, 0, 3]


async def test_a_loop_cuts_the_scopes_of_its_body_to_a_window() -> None:
    """S-LOOP-93: the last entries stay; a store that cannot evict stays as it is."""
    store = _filled()
    await LocalRunMemory(None, store).reset(_reset("window", "b", window_size=2))
    assert [entry.content for entry in store.retrieve("b", "", 9)] == ["1", "2"]
    assert len(store.retrieve("a", "", 9)) == 3
    await LocalRunMemory(None, Refusing()).reset(_reset("window", "a", window_size=1))  # type: ignore[arg-type]  by its shape


async def test_a_loop_needs_a_store_that_can_clear() -> None:
    """S-LOOP-92: the text, with the store's own and both ways out; S-LOOP-94: without a store nothing is done."""
    memory = LocalRunMemory(None, Refusing())  # type: ignore[arg-type]  by its shape
    with pytest.raises(NotImplementedError) as caught:
        await memory.reset(_reset("fresh_per_iteration", "a"))
    assert str(caught.value).startswith(
        "Loop 'refine' has memory_mode=fresh_per_iteration but the configured MemoryStore (Refusing) does not support "
        "per-scope clear for scope 'a'. Refusing keeps everything"
    )
    assert "accumulate" in str(caught.value)
    assert "MemoryStore.in_memory()" in str(caught.value)
    await LocalRunMemory(EnsembleMemory(short_term=True), None).reset(_reset("fresh_per_iteration", "a"))
