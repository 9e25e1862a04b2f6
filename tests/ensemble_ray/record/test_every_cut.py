"""A run that died after any of its facts goes on to the same end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pydantic
import pytest

from ensemble_ray import (
    Agent,
    ChatMessage,
    ChatResponse,
    Ensemble,
    EnsembleOutput,
    InlineRuntime,
    RunState,
    Task,
    TokenUsage,
    ToolCall,
    ToolSpec,
    aresume,
    tool,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.record.sqlite.store import SqliteStore

USAGE = TokenUsage(10, 5)


class Facts(pydantic.BaseModel):
    """What a task gives."""

    title: str


@dataclass
class Counted:
    """What was done, and the team that does it."""

    asked: list[str] = field(default_factory=list[str])
    called: list[str] = field(default_factory=list[str])

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """A tool, then something that is no JSON, then JSON; the same to the same conversation."""
        last, first = messages[-1].content or "", messages[1].content or ""
        self.asked.append(last)
        if tools and messages[-1].role == "user" and "Find" in first:
            calls = [ToolCall(str(n), "look_up", f'{{"word": "{word}"}}') for n, word in enumerate(("ebb", "flow"))]
            return ChatResponse(tool_calls=calls, usage=USAGE)
        if messages[-1].role == "tool":
            return ChatResponse(text="no JSON at all", usage=USAGE)
        return ChatResponse(text='{"title": "Tides"}', usage=USAGE)

    def team(self) -> Ensemble:
        """Tools, a correction, a handler, context; one task after the other."""

        @tool(effect="none")
        def look_up(word: str) -> str:
            """Look it up."""
            self.called.append(word)
            return f"{word}: a thing"

        def join_up(_: object) -> str:
            self.called.append("join")
            return "joined"

        reader = Agent(role="Reader", goal="Read", tools=[look_up], llm=self)
        facts = Task(name="facts", description="Find facts", expected_output="x", agent=reader, output_type=Facts)
        notes = Task(
            name="notes", description="Join", expected_output="x", handler=join_up, effect="none", context=[facts]
        )
        article = Task(name="article", description="Write", expected_output="x", agent=reader, context=[facts, notes])
        return Ensemble(tasks=[facts, notes, article])


async def _torn(store: SqliteStore, facts: Sequence[Fact], run_id: str) -> None:
    owned = await store.begin(run_id)
    first, *rest = facts
    header = read_fact(
        run=run_id, kind="plan", name="run", at=first.at, data={**first.data.to_data(), "ensemble_id": run_id}
    )
    copies = [
        read_fact(run=run_id, kind=fact.kind, name=fact.name, at=fact.at, data=fact.data.to_data()) for fact in rest
    ]
    await owned.journal.append([header, *copies])
    await owned.close(RunState.INTERRUPTED)


def _count(facts: Sequence[Fact]) -> tuple[int, int]:
    """Recorded answers and results."""
    kinds = [fact.kind for fact in facts]
    return kinds.count("model"), kinds.count("tool_result")


def _essence(output: EnsembleOutput) -> list[object]:
    """What does not depend on how long anything took."""
    assert output.trace is not None
    found: list[object] = [output.raw, output.total_tool_calls, output.exit_reason]
    found += [output.metrics.total_tokens, output.metrics.total_llm_call_count, output.trace.inputs]
    for each in output.task_outputs:
        assert each.trace is not None
        interactions = each.trace.llm_interactions
        found += [each.raw, each.parsed_output, each.output_type, each.metrics.total_tokens]
        found += [[(i.response_type, i.response_text, len(i.tool_calls)) for i in interactions], each.trace.prompts]
        found += [[(t.tool_name, t.arguments, t.result, t.outcome) for i in interactions for t in i.tool_calls]]
    return found


@pytest.mark.heavy
async def test_run_comes_to_the_same_end_wherever_it_was_cut(tmp_path: Path) -> None:
    """S-DUR-30, S-DUR-34, S-DUR-37, S-DUR-38, S-DUR-22: each request and each effect exactly once over both lives."""
    runtime, store, whole = InlineRuntime(home=tmp_path), SqliteStore(tmp_path), Counted()
    expected = await whole.team().arun(runtime=runtime, run_id="whole")
    facts = await store.facts("whole")
    models, results = _count(facts)
    assert (len(whole.asked), len(whole.called)) == (models, results) == (5, 5)
    assert facts[-1].kind == "end"

    async def go_on(cut: int) -> None:
        run_id, again = f"cut-{cut}", Counted()
        await _torn(store, facts[:cut], run_id)
        output = await aresume(run_id, again.team(), runtime=runtime)
        assert _essence(output) == _essence(expected), f"cut after {facts[cut - 1].kind} {facts[cut - 1].name}"
        kept = _count(facts[:cut])
        # What has an intent without a result, and only reads, is called again.
        assert (len(again.asked), len(again.called)) == (models - kept[0], results - kept[1])
        assert output.run_id == run_id
        assert output.trace is not None
        assert expected.trace is not None
        assert output.trace.started_at == expected.trace.started_at
        assert output.trace.task_traces[0].started_at <= output.trace.completed_at

    await asyncio.gather(*(go_on(cut) for cut in range(1, len(facts))))


@pytest.mark.heavy
async def test_run_that_was_cut_twice_comes_to_the_same_end(tmp_path: Path) -> None:
    """S-DUR-30, S-DUR-38: a resumed run that dies is resumed again; the same holds for what both recorded."""
    runtime, store, whole = InlineRuntime(home=tmp_path), SqliteStore(tmp_path), Counted()
    expected = await whole.team().arun(runtime=runtime, run_id="whole")
    facts = await store.facts("whole")
    middle = next(number for number, fact in enumerate(facts) if fact.kind == "tool_result")
    await _torn(store, facts[:middle], "second")
    await aresume("second", Counted().team(), runtime=runtime)
    longer = await store.facts("second")
    assert "resume" in [fact.kind for fact in longer]

    async def go_on(cut: int) -> None:
        run_id, again = f"cut-{cut}", Counted()
        await _torn(store, longer[:cut], run_id)
        output = await aresume(run_id, again.team(), runtime=runtime)
        assert _essence(output) == _essence(expected)
        assert len(again.asked) == _count(longer)[0] - _count(longer[:cut])[0]

    await asyncio.gather(*(go_on(cut) for cut in range(middle + 1, len(longer))))
