"""What a task reads of memory and leaves in it: facts, order, counts, failures."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from ensemble_ray import (
    CaptureMode,
    EnsembleMemory,
    GuardrailResult,
    InMemoryEntityMemory,
    MemoryOperationCounts,
    MemoryStore,
    Task,
    TokenUsage,
)
from ensemble_ray.execute.memory import remember_edit
from ensemble_ray.execute.scope import Slot
from ensemble_ray.facts.effects import MemoryStored
from ensemble_ray.facts.fact import Fact
from ensemble_ray.memory.tools import LocalRunMemory, rules_of
from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.ports import RunMemory
from ensemble_ray.testing import Reply, ScriptedCall, ScriptedModel
from ensemble_ray.values.memory import MemoryNote, MemoryQuery, RecalledMemory, RememberedNote, ScopeReset
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, writer
from tests.ensemble_ray.memory.test_embeddings import long_term
from tests.ensemble_ray.memory.test_run_memory import Refusing

SCOPED = Task(description="Do draft", expected_output="Prose", memory_scopes="notes")


def bench(
    *answers: object,
    memory: EnsembleMemory | None = None,
    store: object = None,
    mode: CaptureMode = CaptureMode.OFF,
    known: list[Fact] | None = None,
    run_memory: RunMemory | None = None,
) -> Bench:
    """A runner of one task with memory."""
    context = replace(RUN_CONTEXT, memory=rules_of(memory, store), capture_mode=mode)  # type: ignore[arg-type]  by shape
    return Bench(
        agents={"draft": writer(ScriptedModel(*(answers or ("Text",))))},  # type: ignore[arg-type]  entries of a script
        context=context,
        memory=run_memory or LocalRunMemory(memory, store),  # type: ignore[arg-type]  by its shape
        known=known or [],
    )


async def test_reading_and_writing_are_effects_in_their_order() -> None:
    """S-MEM-111, S-MEM-112, S-MEM-74: before the model's answer, and after it before the output."""
    store = MemoryStore.in_memory()
    made = bench(store=store)
    result = await made.run(task=SCOPED)
    assert result.status == "completed"
    assert made.named == [
        ("memory_recalled", "draft#0/0/memory"),
        ("model", "draft#0/0/model"),
        ("memory_stored", "draft#0/0/memory"),
        ("output", "draft#0"),
    ]
    (entry,) = store.retrieve("notes", "", 5)
    assert result.output is not None
    assert (entry.content, entry.stored_at) == ("Text", result.output.completed_at)
    assert entry.entry_id == "run/draft#0/0/memory"


@pytest.mark.parametrize("store", [None, MemoryStore.in_memory()])
async def test_a_task_without_memory_records_what_it_recorded_before(store: MemoryStore | None) -> None:
    """S-MEM-113: no fact more; also a task without scopes in a run with a store."""
    made = bench(store=store)
    await made.run()
    assert [kind for kind, _ in made.named] == ["model", "output"]


async def test_scopes_without_a_store_are_ignored() -> None:
    """S-MEM-78: silently."""
    made = bench(memory=EnsembleMemory(short_term=True))
    result = await made.run(task=SCOPED)
    assert result.output is not None
    assert "## Memory" not in (
        result.output.trace.prompts.user_prompt if result.output.trace and result.output.trace.prompts else ""
    )
    facts = [fact.data for fact in made.journal.facts() if isinstance(fact.data, MemoryStored)]
    assert facts == [MemoryStored(taken_by=("short_term",))]


async def test_a_task_that_is_done_again_sees_and_stores_what_is_recorded() -> None:
    """S-MEM-111, S-MEM-112: nothing is retrieved, nothing is stored a second time."""
    first_store = MemoryStore.in_memory()
    first = bench(store=first_store)
    await first.run(task=SCOPED)
    known = first.journal.facts()[:-1]  # its process died before the output was recorded
    second_store = Refusing()
    second = bench(store=second_store, known=list(known))
    result = await second.run(task=SCOPED, epoch=1)
    assert (result.status, result.output and result.output.raw) == ("completed", "Text")
    assert second_store.taken == []
    assert [kind for kind, _ in second.named][len(known) :] == ["output"]


async def test_the_prompt_of_a_task_that_is_done_again_is_the_recorded_one() -> None:
    """S-MEM-111: whatever the store has by now."""
    store = MemoryStore.in_memory()
    run_memory = LocalRunMemory(None, store)
    await run_memory.remember(_note_of("before"))
    first = bench(store=store, run_memory=run_memory)
    await first.run(task=SCOPED)
    known = [fact for fact in first.journal.facts() if fact.kind == "memory_recalled"]
    await run_memory.remember(_note_of("meanwhile"))
    prompts: list[str] = []

    def answer(asked: ScriptedCall) -> str:
        prompts.append(asked.messages[1].content or "")
        return "Again"

    second = bench(answer, store=store, run_memory=run_memory, known=known)
    await second.run(task=SCOPED, epoch=1)
    assert "before" in prompts[0]
    assert "meanwhile" not in prompts[0]


def _note_of(raw: str) -> object:
    from ensemble_ray import MemoryScope
    from tests.ensemble_ray.memory.test_run_memory import note

    return replace(note(raw, scopes=(MemoryScope.of("notes"),)), entry_id=raw)


async def test_a_task_that_fails_leaves_nothing() -> None:
    """S-MEM-7, S-MEM-75, S-GRD-9: an answer that a guardrail refuses is not stored either."""
    store = MemoryStore.in_memory()
    memory = EnsembleMemory(short_term=True, long_term=long_term())
    made = bench(RuntimeError("no"), "Text", memory=memory, store=store)
    assert (await made.run(task=SCOPED)).status == "failed"
    refused = Task(
        description="Do draft",
        expected_output="Prose",
        memory_scopes="notes",
        output_guardrails=[lambda _: GuardrailResult.failure("no")],
    )
    made.tasks["draft"] = refused
    assert (await made.run(task=refused, output_guardrails=1)).status == "failed"
    assert list(store.retrieve("notes", "", 5)) == []
    assert "memory_stored" not in [kind for kind, _ in made.named]


async def test_nothing_is_read_for_a_task_that_a_guardrail_refuses() -> None:
    """S-GRD-4: no memory before the input guardrails."""
    refused = Task(
        description="Do draft",
        expected_output="Prose",
        memory_scopes="notes",
        input_guardrails=[lambda _: GuardrailResult.failure("no")],
    )
    made = bench(store=Refusing())
    made.tasks["draft"] = refused
    assert (await made.run(task=refused, input_guardrails=1)).status == "failed"
    assert [kind for kind, _ in made.named] == ["task_failed"]


@pytest.mark.parametrize("text", ["cannot be read", "no room"])
async def test_a_store_that_raises_fails_the_task(text: str) -> None:
    """S-MEM-110: reading and writing."""
    store = Refusing()
    if text == "no room":
        store.retrieve = lambda *_: []  # type: ignore[method-assign]  only writing fails
    result = await bench(store=store).run(task=SCOPED)
    assert result.status == "failed"
    assert isinstance(result.error, OSError)
    assert text in str(result.error)


async def test_a_handler_writes_and_reads_nothing() -> None:
    """S-MEM-75, S-MEM-4, S-DET-4: it has no prompt; its role is that of handlers; after the output guardrails."""
    store = MemoryStore.in_memory()
    memory = EnsembleMemory(short_term=True)
    context = replace(RUN_CONTEXT, memory=rules_of(memory, store))
    run_memory = LocalRunMemory(memory, store)
    made = Bench(handlers={"count": lambda _: "3"}, context=context, memory=run_memory)
    task = Task(description="Count", expected_output="n", handler=lambda _: "3", memory_scopes="notes")
    assert (await made.run("count", task=task)).status == "completed"
    assert [kind for kind, _ in made.named] == ["tool_intent", "tool_result", "memory_stored", "output"]
    (entry,) = store.retrieve("notes", "", 5)
    assert entry.get_meta("agent_role") == "(deterministic)"


async def test_a_manager_uses_no_memory() -> None:
    """S-HIER-8."""
    memory = EnsembleMemory(short_term=True)
    made = bench(memory=memory)
    made.runner.context = replace(made.runner.context, hierarchy=HierarchyRules())
    await made.run(task=SCOPED)
    assert "memory_recalled" not in [kind for kind, _ in made.named]
    assert "memory_stored" not in [kind for kind, _ in made.named]


# Counts.


def _all_kinds() -> EnsembleMemory:
    return EnsembleMemory(short_term=True, long_term=long_term(), entity_memory=InMemoryEntityMemory())


@pytest.mark.parametrize("mode", list(CaptureMode))
async def test_uses_are_counted_for_each_task(mode: CaptureMode) -> None:
    """S-MEM-100, S-MEM-101, S-MEM-102, S-MET-26, S-CAP-10: in every capture mode; scopes are not counted."""
    memory, store = _all_kinds(), MemoryStore.in_memory()
    made = bench("One", "Two", memory=memory, store=store, mode=mode)
    results = await asyncio.gather(
        made.run(task=SCOPED), made.run(agent_key="draft", key="draft", instance="draft#1", task=SCOPED)
    )
    for result in results:
        assert result.output is not None
        metrics = result.output.metrics
        assert metrics.memory_operations == MemoryOperationCounts(
            short_term_entries_written=1, long_term_stores=1, long_term_retrievals=1, entity_lookups=1
        )
        assert result.output.trace is not None
        assert result.output.trace.metrics == metrics


async def test_the_listener_is_gone_when_the_task_is_over() -> None:
    """S-MEM-100, S-CAP-19: also when it failed; what it counted until then is in the trace."""
    seen: list[object] = []
    made = bench(RuntimeError("no"), memory=_all_kinds())
    scope_of = made.runner._scope

    def watched(*arguments: object) -> object:
        scope = scope_of(*arguments)  # type: ignore[arg-type]  passed on
        seen.append(scope.effects)
        return scope

    made.runner._scope = watched  # type: ignore[method-assign, assignment]  to look at the effects
    result = await made.run()
    assert result.status == "failed"
    assert [effects.memory_listener for effects in seen] == [None]  # type: ignore[attr-defined]  effects of a task
    assert result.trace is not None
    assert result.trace.metrics.memory_operations == MemoryOperationCounts(long_term_retrievals=1, entity_lookups=1)


async def test_counts_of_a_task_that_is_done_again_are_those_of_the_first_time() -> None:
    """S-MEM-112: what was stored is not stored again, and was stored by this task."""
    first = bench(memory=_all_kinds())
    before = await first.run()
    second = bench(memory=_all_kinds(), known=list(first.journal.facts()[:-1]))
    after = await second.run(epoch=1)
    assert before.output is not None
    assert after.output is not None
    assert after.output.metrics.memory_operations == before.output.metrics.memory_operations


async def test_an_edit_is_a_further_entry_of_the_same_time() -> None:
    """S-MEM-79: the edited text without structured content, then the eviction; once."""
    store = MemoryStore.in_memory()
    made = bench(store=store)
    result = await made.run(task=SCOPED)
    assert result.output is not None
    scope = made.runner._scope(made.order("draft", task=SCOPED), {}, Slot())
    edited = result.output.replace(raw="Edited", parsed_output={"n": 1})
    await remember_edit(scope, edited)
    again = made.runner._scope(made.order("draft", task=SCOPED), await made.journal.lookup_recorded("draft#0"), Slot())
    await remember_edit(again, edited)
    entries = store.retrieve("notes", "", 5)
    assert [(entry.content, entry.structured_content) for entry in entries] == [("Text", None), ("Edited", None)]
    assert {entry.stored_at for entry in entries} == {result.output.completed_at}


class Paid:
    """Memory that has an endpoint embed things. Fulfils `RunMemory`."""

    def __init__(self) -> None:
        self.asked = 0

    async def recall(self, query: MemoryQuery) -> RecalledMemory:
        """Find something."""
        self.asked += 1
        return RecalledMemory(scopes=tuple((scope, ("found",)) for scope in query.scopes), embedding_tokens=7)

    async def remember(self, note: MemoryNote) -> RememberedNote:
        """Take it."""
        self.asked += 1
        del note
        return RememberedNote(embedding_tokens=5)

    async def reset(self, reset: ScopeReset) -> None:
        """Do nothing."""


@pytest.mark.parametrize("kept", [1, 2, 3])
async def test_embedded_tokens_are_counted_again_from_the_record(kept: int) -> None:
    """S-MEM-128: those that are recorded are not asked for again, and the sum is the same."""
    answer = Reply(text="Text", usage=TokenUsage(10, 5))
    first = bench(answer, store=MemoryStore.in_memory(), run_memory=Paid())
    whole = await first.run(task=SCOPED)
    assert whole.output is not None
    assert whole.output.metrics.input_tokens == 10 + 12
    assert [fact.data.to_data().get("embedding_tokens") for fact in first.journal.facts()] == [7, None, 5, None]
    memory = Paid()
    again = bench(answer, store=MemoryStore.in_memory(), run_memory=memory, known=list(first.journal.facts()[:kept]))
    result = await again.run(task=SCOPED, epoch=1)
    assert result.output is not None
    assert result.output.metrics.input_tokens == 22
    assert memory.asked == (0 if kept == 3 else 1)
    assert result.output.trace is not None
    assert result.output.trace.metadata == {"embedding_tokens": "12"}
