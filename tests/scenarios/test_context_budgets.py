"""Teams whose prompts are held to a budget, on both runtimes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from ensemble_ray import (
    ChatMessage,
    Ensemble,
    EnsembleOutput,
    InlineRuntime,
    Loop,
    MapReduceEnsemble,
    MemoryEntry,
    MemoryStore,
    RunOptions,
    RunState,
    Runtime,
    TaskInputEvent,
    ValidationError,
    build_system_prompt,
    build_user_prompt,
    resume,
    tool,
)
from ensemble_ray.execute.agent.context_window import estimated_input
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.trace import fold_trace
from ensemble_ray.record.view.tree import render_tree
from ensemble_ray.testing import ScriptedCall, ScriptedModel, replay
from tests.builders import agent, call, task
from tests.scenarios.delegating import ask
from tests.scenarios.mapping import map_task, reduce_task
from tests.scenarios.teams import by_task, task_of

BUDGET = 1200
LONG, LONGER = "facts " * 700, "notes " * 900


def sizes(model: ScriptedModel) -> list[int]:
    """Tokens of each request, as the library estimates them."""
    return [estimated_input(asked.messages, asked.tools) for asked in model.calls]


def team(model: ScriptedModel, **fields: object) -> Ensemble:
    """Two tasks with long answers, and one that is given both."""
    by = agent(model)
    read, note = task("read", by), task("note", by)
    return Ensemble(tasks=[read, note, task("write", by, context=[read, note], **fields)])


def answering(count: int = 1) -> ScriptedModel:
    """Answers the team's tasks."""
    return ScriptedModel(*[by_task(read=LONG, note=LONGER, write="Prose")] * 3 * count)


def cut_records(home: Path, facts: Sequence[Fact]) -> None:
    """Write a record for each place in which a process may have died: `cut-2` has two of the facts."""

    async def write(length: int) -> None:
        owned = await SqliteStore(home).begin(f"cut-{length}")
        copies = [
            read_fact(run=f"cut-{length}", kind=each.kind, name=each.name, at=each.at, data=each.data.to_data())
            for each in facts[:length]
        ]
        await owned.journal.append(copies)
        await owned.close(RunState.INTERRUPTED)

    for length in range(2, len(facts) - 1):
        run_blocking(write(length))


def cuts_of(output: EnsembleOutput) -> list[object]:
    """What the trace of the last task tells of its context."""
    return list(output.trace.task_traces[-1].metadata.get("context", ()))


def test_context_is_cut_to_the_budget_and_the_trace_tells_it(runtime: Runtime) -> None:
    """S-MEM-131, S-MEM-132, S-MEM-136: the task's budget wins; the event has the same as the trace."""
    model, heard = answering(2), list[TaskInputEvent]()
    made = team(model, context_budget=BUDGET).replace(context_budget=50_000, on_task_input=heard.append)
    output = made.run(runtime=runtime)
    assert max(sizes(model)[:3]) <= BUDGET
    prompt = output.trace.task_traces[-1].prompts
    assert prompt is not None
    assert "### Writer: read\nfacts" in prompt.user_prompt
    assert "tokens left out ...]" in prompt.user_prompt
    assert prompt.user_prompt.endswith("## Task\nwrite\n\n## Expected Output\na text")
    (told,) = cuts_of(output)
    assert isinstance(told, dict)
    assert (told["turn"], told["budget_tokens"], told["sections"], told["whole"]) == (0, BUDGET, 2, 0)
    assert [entry["tokens"] for entry in told["cut"]] == [len(LONG) // 4, len(LONGER) // 4]
    assert [len(event.context_cuts) for event in heard] == [0, 0, 2]
    assert heard[-1].context_cuts[0] == f"Writer cut by {told['cut'][0]['cut_tokens']:,} of 1,050 tokens"
    whole = team(model).replace(context_budget=50_000).run(runtime=runtime)
    assert cuts_of(whole) == []


def test_an_ensembles_budget_holds_for_its_tasks_and_options_win(inline_runtime: Runtime) -> None:
    """S-MEM-131: of delegated work, too."""
    model = answering()
    team(model).replace(context_budget=BUDGET * 10).run(
        runtime=inline_runtime, options=RunOptions(context_budget=BUDGET)
    )
    assert max(sizes(model)) <= BUDGET
    lead, helper = ScriptedModel(ask("Helper"), "done"), ScriptedModel("never")
    by = agent(lead, role="Lead", allow_delegation=True)
    made = Ensemble(
        tasks=[task("go", by)],
        agents=[by, agent(helper, role="Helper", background="word " * 1000)],
        context_budget=BUDGET,
    )
    output = made.run(runtime=inline_runtime)
    told = output.trace.task_traces[0].delegations[0].result
    assert f"context_budget {BUDGET:,} is too small" in told
    assert not helper.calls


def test_what_is_never_cut_must_fit_before_any_model_is_called(inline_runtime: Runtime) -> None:
    """S-MEM-137: the first task's model is not asked either; what is known only in the task ends it."""
    model = answering()
    with pytest.raises(ValidationError, match=r"Task 'task-3': context_budget 20 is too small: .* needs at least "):
        team(model, context_budget=20).run(runtime=inline_runtime)
    assert not model.calls

    @tool
    def look(where: str) -> str:
        """Look there."""
        return where

    by = agent(model, tools=[look])
    crowded = task("look", by)
    without_tools = (len(build_system_prompt(by)) + len(build_user_prompt(crowded))) // 4 + 1
    with pytest.raises(ValidationError, match=f"context_budget {without_tools} is too small"):
        Ensemble(tasks=[crowded], context_budget=without_tools).run(runtime=inline_runtime)
    assert not model.calls


def test_results_of_tools_give_way_in_a_long_loop(inline_runtime: Runtime) -> None:
    """S-MEM-132, S-MEM-133, S-MEM-136: the oldest first; each request fits, and the trace has what was sent."""

    @tool
    def search(query: str) -> str:
        """Find things."""
        return f"{query}: " + "hit " * 400

    model = ScriptedModel(*(call("search", f'{{"query": "q{number}"}}', number=number) for number in range(6)), "done")
    made = Ensemble(tasks=[task("look", agent(model, tools=[search]))], context_budget=BUDGET, capture_mode="standard")
    output = made.run(runtime=inline_runtime)
    assert max(sizes(model)) <= BUDGET
    results = [message.content or "" for message in model.calls[-1].messages if message.role == "tool"]
    assert (len(results), len(results[-1]) > len(results[0])) == (6, True)
    assert len(cuts_of(output)) > 1
    captured = output.trace.task_traces[0].llm_interactions[-1].messages
    assert [each.content for each in captured if each.role == "tool"] == results
    assert captured[-1].content == "done"


def test_a_conversation_gives_way_before_everything_else(inline_runtime: Runtime) -> None:
    """S-MEM-133: `Agent.run(history=...)` takes the budget by its options."""
    model = ScriptedModel("short")
    said = [
        message
        for number in range(14)
        for message in (
            ChatMessage(role="user", content=f"Question {number}?"),
            ChatMessage(role="assistant", content="word " * 200),
        )
    ]
    output = agent(model).run(
        "And now?", history=said, runtime=inline_runtime, options=RunOptions(context_budget=BUDGET)
    )
    sent = model.calls[0].messages
    assert sizes(model)[0] <= BUDGET
    assert len(sent) < len(said) + 2
    assert (sent[1].content or "").startswith("[... ")
    assert (sent[-2].content, "And now?" in (sent[-1].content or "")) == ("word " * 200, True)
    assert output.messages[: len(said)] == tuple(said)  # the conversation itself is whole


def test_notes_and_context_share_the_room(inline_runtime: Runtime) -> None:
    """S-MEM-134: neither takes all of it."""
    model, store = answering(), MemoryStore.in_memory()
    store.store("notes", MemoryEntry(content="old " * 2000))
    team(model, memory_scopes="notes").replace(context_budget=BUDGET, memory_store=store).run(runtime=inline_runtime)
    prompt = model.calls[-1].messages[1].content or ""
    assert "## Memory: notes" in prompt
    assert "old old" in prompt
    assert prompt.count("### Writer:") == 2


def test_a_run_that_goes_on_builds_the_same_prompts(tmp_path: Path) -> None:
    """S-MEM-138: wherever its process died; a replay compares them with the record, and its trace is that of the run."""
    runtime = InlineRuntime(home=tmp_path)
    model = answering()
    whole = team(model, context_budget=BUDGET).run(runtime=runtime, run_id="whole")
    wanted = model.calls[-1].messages
    facts = list(run_blocking(SqliteStore(tmp_path).facts("whole")))
    cut_records(tmp_path, facts)
    for length in range(2, len(facts) - 1):
        model = answering()
        output = resume(f"cut-{length}", team(model, context_budget=BUDGET), runtime=runtime)
        assert all(asked.messages == wanted for asked in model.calls if task_of(asked) == "write")
        assert cuts_of(output) == cuts_of(whole)
    assert replay("whole", team(answering(), context_budget=BUDGET), home=tmp_path).is_same
    with pytest.raises(ValidationError, match=r"tasks\.task-3\.context_budget"):
        resume("cut-2", team(answering(), context_budget=BUDGET + 1), runtime=runtime)


def test_the_tree_of_a_recorded_run_tells_what_was_cut(tmp_path: Path) -> None:
    """S-MEM-136."""
    team(answering(), context_budget=BUDGET).run(runtime=InlineRuntime(home=tmp_path), run_id="run")
    text = render_tree(fold_trace(run_blocking(SqliteStore(tmp_path).facts("run"))))
    (line,) = [line for line in text.splitlines() if "context: " in line]
    assert re.search(r"├─ context: 0 of 2 sections whole, Writer cut by [\d,]+ of 1,050 tokens, Writer cut by ", line)
    assert re.search(r"\[2,\d\d\d tokens, budget 1,200\]$", line)


def test_tasks_of_a_map_reduce_are_held_to_its_budget(inline_runtime: Runtime) -> None:
    """S-MEM-131: whatever came together in a group."""

    async def say(asked: ScriptedCall) -> str:
        return "word " * 600

    model = ScriptedModel(otherwise=say)
    MapReduceEnsemble(
        items=["a", "b", "c"],
        map_task=map_task,
        reduce_task=reduce_task,
        chunk_size=3,
        llm=model,
        context_budget=BUDGET,
    ).run(runtime=inline_runtime)
    assert (len(model.calls), max(sizes(model)) <= BUDGET) == (4, True)
    assert "tokens left out" in (model.calls[-1].messages[1].content or "")


def test_iterations_of_a_loop_are_held_to_the_budget(inline_runtime: Runtime) -> None:
    """S-MEM-131: feedback and the previous attempt are never cut."""
    model = ScriptedModel(*[by_task(read=LONG, write="Prose")] * 4)
    by = agent(model)
    read = task("read", by)
    made = Ensemble(
        loops=[Loop(name="refine", body=[read, task("write", by, context=[read])], max_iterations=2)],
        context_budget=600,
    )
    output = made.run(runtime=inline_runtime)
    assert max(sizes(model)) <= 600
    assert [bool(each.metadata.get("context")) for each in output.trace.task_traces] == [False, True] * 2
