"""Going on with recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from ensemble_ray import (
    Agent,
    ChatMessage,
    Ensemble,
    InlineRuntime,
    RunState,
    SynthesisContext,
    Task,
    ValidationError,
    aresume,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.process.concurrency import call_user
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import ScriptedModel, replay


def _team(model: ScriptedModel, *, description: str = "Write it") -> Ensemble:
    agent = Agent(role="Writer", goal="Write", llm=model)
    return Ensemble(tasks=[Task(name="text", description=description, expected_output="Prose", agent=agent)])


async def _interrupted(store: SqliteStore, run_id: str, facts: Sequence[Fact]) -> None:
    """A run whose process died behind these facts."""
    owned = await store.begin(run_id)
    await owned.journal.append([replace(fact, run=run_id) for fact in facts])
    await owned.close(RunState.INTERRUPTED)


async def test_recorded_output_is_given_when_the_run_is_completed(tmp_path: Path) -> None:
    """S-DUR-35, S-DUR-36: of another definition only where that is allowed; the error says how."""
    home = InlineRuntime(home=tmp_path)
    await _team(ScriptedModel("prose")).arun(runtime=home, run_id="run")
    assert (await aresume("run", _team(ScriptedModel()), runtime=home)).raw == "prose"
    changed = _team(ScriptedModel(), description="Write it anew")
    with pytest.raises(ValidationError, match=r"plan\.nodes\.0\.description: .*allow_changes=True"):
        await aresume("run", changed, runtime=home)
    assert (await aresume("run", changed, runtime=home, allow_changes=True)).raw == "prose"


async def test_nobody_is_asked_when_the_agents_of_a_completed_run_were_made_by_a_model(tmp_path: Path) -> None:
    """S-DUR-37, S-SET-39, S-SET-46: each recorded answer is given to the call that it was given to, also of several for one agent."""
    home, store = InlineRuntime(home=tmp_path), SqliteStore(tmp_path)

    async def make(_: Task, context: SynthesisContext) -> Agent:
        role, goal = [await call_user(context.model.chat, [ChatMessage("user", what)]) for what in ("role", "goal")]
        return Agent(role=str(role.text), goal=str(goal.text), llm=context.model)

    def team(*answers: str) -> Ensemble:
        task = Task(name="text", description="Write it", expected_output="Prose")
        return Ensemble(tasks=[task], llm=ScriptedModel(*answers), agent_synthesizer=make)

    await team("Writer", "Write", "prose").arun(runtime=home, run_id="run")
    assert (await aresume("run", team(), runtime=home)).raw == "prose"
    assert (await team().arun(runtime=home, run_id="run")).raw == "prose"
    facts = await store.facts("run")
    assert [fact.name for fact in facts[1:3]] == ["text#0/0/synthesis"] * 2
    await _interrupted(store, "torn", facts[:3])
    output = await aresume("torn", team("prose"), runtime=home)
    assert (output.raw, output.task_outputs[0].agent_role) == ("prose", "Writer")
    assert len([fact for fact in await store.facts("torn") if fact.name.endswith("/synthesis")]) == 2
    assert replay("run", team(), home=tmp_path).is_same
