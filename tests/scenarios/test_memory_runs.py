"""Teams that remember: what tasks see, and what the objects that the user passed hold afterwards."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    Ensemble,
    EnsembleMemory,
    EntityMemoryTool,
    InlineRuntime,
    InMemoryEntityMemory,
    MemoryEntry,
    MemoryScope,
    MemoryStore,
    MemoryTool,
    Review,
    ReviewDecision,
    ReviewRequest,
    RunState,
    Runtime,
    Task,
    TaskExecutionError,
    Workflow,
    fork,
    resume,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import ScriptedModel, replay
from tests.builders import agent, call, task
from tests.ensemble_ray.memory.test_embeddings import long_term
from tests.scenarios.delegating import hand
from tests.scenarios.teams import by_task, prompt_of


class Found(BaseModel):
    """What a task gives."""

    n: int


class Full:
    """A store without room."""

    def store(self, scope: str, entry: MemoryEntry) -> None:
        """Refuse."""
        raise OSError(f"no room for {scope}")

    def retrieve(self, scope: str, query: str, max_results: int) -> Sequence[MemoryEntry]:
        """Find nothing."""
        return []

    def evict(self, scope: str, policy: object) -> None:
        """Do nothing."""

    def clear(self, scope: str) -> None:
        """Do nothing."""


def seen(model: ScriptedModel) -> dict[str, str]:
    """The newest prompt of each task, by its description."""
    prompts = [prompt_of(asked) for asked in model.calls]
    return {prompt.partition("## Task\n")[2].partition("\n")[0]: prompt for prompt in prompts}


def test_the_objects_that_were_passed_have_the_data(runtime: Runtime) -> None:
    """S-MEM-69, S-MEM-77, S-MEM-4, S-MEM-5, S-MEM-74: wherever tasks ran, in a second run too."""
    model = ScriptedModel(*[by_task(find='{"n": 2}', write="Prose")] * 4)
    by, store, long = agent(model), MemoryStore.in_memory(), long_term()
    entities = InMemoryEntityMemory()
    entities.put("Acme", "a firm")
    team = Ensemble(
        tasks=[
            task("find", by, output_type=Found, memory_scopes="notes"),
            task("count", handler=lambda _: "three", memory_scopes="notes"),
            task("write", by, memory_scopes=["notes", MemoryScope(name="last", keep_last_entries=1)]),
        ],
        memory_store=store,
        memory=EnsembleMemory(short_term=True, long_term=long, entity_memory=entities, long_term_max_results=9),
        capture_mode="standard",
    )
    first = team.run(runtime=runtime)
    entries = store.retrieve("notes", "", 9)
    assert [entry.content for entry in entries] == ['{"n": 2}', "three", "Prose"]
    assert [entry.get_meta("agent_role") for entry in entries] == ["Writer", "(deterministic)", "Writer"]
    assert entries[0].structured_content == Found(n=2)
    assert [entry.stored_at for entry in entries] == [output.completed_at for output in first.task_outputs]
    prompt = seen(model)["write"]
    assert prompt.count("three") == 3  # scope, notes of the run, long-term memory
    assert "### (deterministic): count\nthree" in prompt
    assert "- **Acme**: a firm" in prompt
    assert first.metrics.memory_operations.long_term_stores == 3
    assert first.metrics.memory_operations.entity_lookups == 2
    team.run(runtime=runtime)
    assert [entry.content for entry in store.retrieve("last", "", 9)] == ["Prose"]
    assert len(store.retrieve("notes", "", 9)) == 6
    prompt = seen(model)["find"]
    assert "## Memory: notes" in prompt
    assert "## Long-Term Memory" in prompt
    assert "## Short-Term Memory" not in prompt  # it starts empty in every run


def test_a_store_that_raises_fails_the_run(runtime: Runtime) -> None:
    """S-MEM-110: with the store's own error."""
    team = Ensemble(tasks=[task("write", agent(ScriptedModel("Prose")), memory_scopes="notes")], memory_store=Full())  # type: ignore[arg-type]  by its shape
    with pytest.raises(TaskExecutionError) as caught:
        team.run(runtime=runtime)
    assert isinstance(caught.value.__cause__, OSError)
    assert str(caught.value.__cause__) == "no room for notes"


def test_tools_reach_the_memory_that_they_were_given(runtime: Runtime) -> None:
    """S-MEM-69, S-MEM-94, S-MEM-44: wherever the agent lives; tool writes show up in scope sections."""
    store, facts = MemoryStore.in_memory(), InMemoryEntityMemory()
    facts.put("Acme", "a firm")
    model = ScriptedModel(
        [
            call("store_memory", '{"key": "drink", "value": "tea"}'),
            call("lookup_entity", '{"input": "Acme"}', number=1),
        ],
        "asked",
        "used",
    )
    by = agent(model, tools=[MemoryTool.of("notes", store), EntityMemoryTool(facts)])
    team = Ensemble(tasks=[task("ask", by), task("use", by, memory_scopes="notes")], memory_store=store)
    team.run(runtime=runtime)
    assert [message.content for message in model.calls[1].messages if message.role == "tool"] == [
        "Stored: drink",
        "a firm",
    ]
    assert "drink: tea" in prompt_of(model.calls[2])
    assert [entry.content for entry in store.retrieve("notes", "", 9)] == ["drink: tea", "used"]


def test_a_task_reads_only_what_it_declares() -> None:
    """S-MEM-76, S-MEM-77: of its scopes, in the same run; S-MEM-23: context still orders the tasks."""
    model = ScriptedModel(*[by_task(a="A's text", b="B's text", c="C's text")] * 3)
    by = agent(model)
    first = task("a", by, memory_scopes="research")
    Ensemble(
        tasks=[
            first,
            task("b", by, memory_scopes="drafts"),
            task("c", by, memory_scopes=["drafts", "research"], context=[first]),
        ],
        memory_store=MemoryStore.in_memory(),
    ).run(runtime="inline")
    prompts = seen(model)
    assert "A's text" not in prompts["b"]
    assert prompts["c"].index("## Memory: drafts") < prompts["c"].index("## Memory: research")
    assert prompts["c"].index("## Memory: research") < prompts["c"].index("## Context from Previous Tasks")


def test_parallel_tasks_see_what_was_recorded_when_their_prompt_was_built() -> None:
    """S-MEM-9, S-MEM-22, S-MEM-23, S-MEM-68: whole entries, in place of the context."""
    model = ScriptedModel(*[by_task(**{name: f"{name} is done" for name in "abcd"})] * 4)
    by, store = agent(model), MemoryStore.in_memory()
    leaves = [task(name, by, memory_scopes="notes") for name in "abc"]
    last = task("d", by, context=leaves)
    Ensemble(
        tasks=[*leaves, last], workflow="parallel", memory=EnsembleMemory(short_term=True), memory_store=store
    ).run(runtime="inline")
    prompt = seen(model)["d"]
    assert "## Context from Previous Tasks" not in prompt
    assert all(f"---\n### Writer: {name}\n{name} is done\n---" in prompt for name in "abc")
    assert sorted(entry.content for entry in store.retrieve("notes", "", 9)) == [f"{name} is done" for name in "abc"]


def test_workers_of_a_manager_remember_and_the_manager_does_not() -> None:
    """S-MEM-8, S-HIER-8: a delegated task records like any other."""
    manager = ScriptedModel(hand("Digger", "dig"), hand("Seller", "sell"), "All done")
    digger, seller = ScriptedModel("gold"), ScriptedModel("money")
    workers = [agent(digger, "Digger"), agent(seller, "Seller")]
    team = Ensemble(
        agents=workers,
        tasks=[task("get rich", workers[0])],
        workflow=Workflow.HIERARCHICAL,
        manager_llm=manager,
        memory=EnsembleMemory(short_term=True),
    )
    team.run(runtime="inline")
    assert "### Digger: dig\ngold" in prompt_of(seller.calls[0])
    assert all("Short-Term" not in prompt_of(asked) for asked in manager.calls)


# Runs that go on.


def _team(store: MemoryStore | Full) -> tuple[Ensemble, ScriptedModel]:
    model = ScriptedModel(*[by_task(a="A's text", b="B's text", c="C's text")] * 3)
    by = agent(model)
    tasks: list[Task] = [task(name, by, name=name, memory_scopes="notes") for name in "abc"]
    memory = EnsembleMemory(short_term=True, long_term=long_term())
    return Ensemble(tasks=tasks, memory_store=store, memory=memory), model  # type: ignore[arg-type]  by its shape


def _cut(home: Path, facts: list[Fact], run_id: str) -> None:
    """Write a record that ends earlier, as if the process had died there."""

    async def write() -> None:
        owned = await SqliteStore(home).begin(run_id)
        copies = [read_fact(run=run_id, kind=f.kind, name=f.name, at=f.at, data=f.data.to_data()) for f in facts]
        await owned.journal.append(copies)
        await owned.close(RunState.INTERRUPTED)

    run_blocking(write())


def test_a_run_that_goes_on_sees_the_same_and_stores_nothing_twice(tmp_path: Path) -> None:
    """S-MEM-111, S-MEM-112: wherever its process died; a store that lasts has each entry once."""
    runtime = InlineRuntime(home=tmp_path)
    first, asked = _team(MemoryStore.in_memory())
    first.run(runtime=runtime, run_id="whole")
    wanted = seen(asked)["c"]
    facts = list(run_blocking(SqliteStore(tmp_path).facts("whole")))
    for cut in range(2, len(facts) - 1):
        done, run_id = facts[:cut], f"cut-{cut}"
        _cut(tmp_path, done, run_id)
        stored = [fact.name.partition("#")[0] for fact in done if fact.kind == "memory_stored"]
        store = MemoryStore.in_memory()
        for name in stored:  # what an earlier process stored, under the id that it gave
            text = f"{name.upper()}'s text"
            store.store("notes", MemoryEntry(content=text, entry_id=f"{run_id}/{name}#0/0/memory"))
        again, model = _team(store)
        output = resume(run_id, again, runtime=runtime)
        assert [each.raw for each in output.task_outputs] == ["A's text", "B's text", "C's text"]
        assert [entry.content for entry in store.retrieve("notes", "", 9)] == ["A's text", "B's text", "C's text"]
        notes = wanted.partition("## Short-Term")[2].partition("## ")[0]
        if "c" in seen(model):
            assert seen(model)["c"].partition("## Short-Term")[2].partition("## ")[0] == notes, f"cut after {cut}"


def test_a_fork_sees_what_the_run_that_it_was_forked_from_noted(tmp_path: Path) -> None:
    """S-MEM-112: notes of the tasks that it keeps; it stores those of the tasks that it does again."""
    runtime = InlineRuntime(home=tmp_path)
    _team(MemoryStore.in_memory())[0].run(runtime=runtime, run_id="whole")
    store = MemoryStore.in_memory()
    team, model = _team(store)
    fork("whole", "c", team, runtime=runtime)
    assert list(seen(model)) == ["c"]
    assert "### Writer: a\nA's text" in seen(model)["c"]
    assert "### Writer: b\nB's text" in seen(model)["c"]
    assert [entry.content for entry in store.retrieve("notes", "", 9)] == ["C's text"]


def test_a_replay_reads_what_is_recorded(tmp_path: Path) -> None:
    """S-MEM-111: no store is asked, whatever it holds by now."""
    runtime = InlineRuntime(home=tmp_path)
    team, _ = _team(MemoryStore.in_memory())
    team.run(runtime=runtime, run_id="whole")
    found = replay("whole", _team(Full())[0], home=tmp_path)
    assert found.is_same, str(found)


def test_a_replay_says_where_memory_was_not_read(tmp_path: Path) -> None:
    """S-MEM-111: a run of before memory."""
    runtime = InlineRuntime(home=tmp_path)
    team, _ = _team(MemoryStore.in_memory())
    team.replace(memory=None, memory_store=None).run(runtime=runtime, run_id="bare")
    found = replay("bare", team, home=tmp_path)
    assert found.difference is not None
    assert found.difference.what == "memory that was read and is not recorded"


def _size(home: Path) -> int:
    """How much a run's facts and long texts are; the file around them is as large as its log grew."""
    (path,) = home.rglob("record.sqlite")
    with closing(sqlite3.connect(path)) as record:
        ((facts,),) = record.execute("SELECT sum(length(data)) FROM facts")
        ((texts,),) = record.execute("SELECT sum(length(body)) FROM bodies")
    return int(facts + texts)


def test_records_of_many_notes_stay_small_and_whole(tmp_path: Path) -> None:
    """S-MEM-150: twice as many tasks take about twice the room, not four times; what each was shown is still recorded."""
    sizes: list[int] = []
    for count in (60, 120):
        home = tmp_path / f"{count}"
        writer = agent(ScriptedModel(*[f"{number} " + "word " * 150 for number in range(count)]))
        team = Ensemble(
            tasks=[task(f"step {number}", writer) for number in range(count)], memory=EnsembleMemory(short_term=True)
        )
        team.run(runtime=InlineRuntime(home=home), run_id="long")
        sizes.append(_size(home))
        assert replay("long", team, home=home).is_same
    assert sizes[1] < 2.4 * sizes[0]


def test_a_gate_that_fails_behind_a_task_leaves_what_was_stored(inline_runtime: Runtime) -> None:
    """S-MEM-75, S-MEM-110: it is stored before the gate; the task fails by what the handler raised."""

    def broken(_request: ReviewRequest) -> ReviewDecision:
        raise OSError("nobody at the desk")

    store = MemoryStore.in_memory()
    draft = task("draft", handler=lambda _: "the draft", memory_scopes="notes", review=Review.required())
    with pytest.raises(TaskExecutionError) as failed:
        Ensemble(tasks=[draft], memory_store=store, review_handler=broken).run(runtime=inline_runtime)
    assert "nobody at the desk" in str(failed.value.__cause__)
    assert [entry.content for entry in store.retrieve("notes", None, 5)] == ["the draft"]
