"""Agents without a model of their own use their team's: in every workflow, on both runtimes."""

from __future__ import annotations

import pytest

from ensemble_ray import (
    Agent,
    Ensemble,
    MapEnsemble,
    MapReduceEnsemble,
    RateLimit,
    RateLimitedChatModel,
    Runtime,
    SynthesisContext,
    Task,
    ValidationError,
    fork,
    resume,
)
from ensemble_ray.testing import ScriptedModel, replay
from tests.builders import task
from tests.scenarios.delegating import ask, hand
from tests.scenarios.mapping import answered, raws, reduce_task

WRITER = Agent(role="Writer", goal="Write")
PEER = Agent(role="Peer", goal="Help")
FAST = RateLimit.of(1000, 1)


def test_tasks_are_done_with_the_model_of_the_team(runtime: Runtime) -> None:
    """S-DOM-72: in sequential and parallel runs, under the ensemble's limit; a run goes on and is replayed with it."""
    model = ScriptedModel(otherwise="text")
    team = Ensemble(tasks=[task("a", WRITER), task("b", WRITER)], llm=model, rate_limit=FAST)
    for workflow in ("sequential", "parallel"):
        output = team.replace(workflow=workflow).run(runtime=runtime, run_id=f"team-{workflow}")
        assert raws(output) == ["text", "text"]
        again = resume(f"team-{workflow}", team.replace(workflow=workflow), runtime=runtime)
        assert raws(again) == ["text", "text"]
        assert replay(f"team-{workflow}", team.replace(workflow=workflow)).is_same
    assert len(model.calls) == 4
    forked = fork("team-parallel", "task-2", team.replace(workflow="parallel"), runtime=runtime)
    assert raws(forked) == ["text", "text"]
    assert len(model.calls) == 5


def test_manager_workers_and_colleagues_have_it(runtime: Runtime) -> None:
    """S-DOM-72, S-HIER-2: whoever is asked in a delegation."""
    led = ScriptedModel(hand("Writer"), "written", "all")
    team = Ensemble(tasks=[task("a", WRITER)], llm=led, workflow="hierarchical", rate_limit=FAST)
    assert team.run(runtime=runtime).raw == "all"
    handing = ScriptedModel(ask("Peer"), "helped", "done")
    lead = Agent(role="Lead", goal="Lead", allow_delegation=True)
    output = Ensemble(tasks=[task("a", lead)], agents=[lead, PEER], llm=handing).run(runtime=runtime)
    assert (output.raw, len(handing.calls)) == ("done", 3)


def test_agents_of_factories_have_it(runtime: Runtime) -> None:
    """S-DOM-72: of maps, of reduces in both modes, with a limit of their own; a task's limit is alone (S-RATE-32)."""
    model = ScriptedModel(otherwise=answered)
    slow = Agent(role="Limited", goal="Write", rate_limit=FAST)

    def by(item: object) -> Task:
        return task(f"map {item}", slow if item == 1 else WRITER)

    mapped = MapEnsemble(items=range(3), map_task=by, llm=model, rate_limit=FAST).run(runtime=runtime)
    assert raws(mapped) == ["0", "1", "2"]
    for fields in ({"chunk_size": 2}, {"target_token_budget": 30}):
        made = MapReduceEnsemble(items=range(3), map_task=by, reduce_task=reduce_task, llm=model, **fields)
        assert "2" in made.run(runtime=runtime).raw


def test_agent_of_a_synthesizer_has_the_model_of_its_task(inline_runtime: Runtime) -> None:
    """S-DOM-72, S-DET-25: that which the synthesizer was offered."""
    own, shared = ScriptedModel("own"), ScriptedModel("shared")

    def made(task: Task, context: SynthesisContext) -> Agent:
        return Agent(role=task.description, goal="g")

    tasks = [Task.of("A").replace(llm=own), Task.of("B")]
    output = Ensemble(tasks=tasks, llm=shared, agent_synthesizer=made).run(runtime=inline_runtime)
    assert raws(output) == ["own", "shared"]


def test_team_without_a_model_asks_nobody(inline_runtime: Runtime) -> None:
    """S-DOM-73: in a run, a plan and a map."""
    own = ScriptedModel(otherwise="x")
    told = "Agent 'Writer' has no llm: give it one, or give the ensemble llm=..."
    team = Ensemble(tasks=[task("a", Agent(role="Own", goal="g", llm=own)), task("b", WRITER)])
    for attempt in (lambda: team.run(runtime=inline_runtime), team.plan):
        with pytest.raises(ValidationError) as caught:
            attempt()
        assert str(caught.value) == told
    mapped = MapEnsemble(items=[1], map_task=lambda item: task(str(item), WRITER), on_item_error="fail")
    with pytest.raises(ValidationError, match="Agent 'Writer' has no llm"):
        mapped.run(runtime=inline_runtime)
    assert own.calls == ()
    assert isinstance(Agent(role="r", goal="g", rate_limit=FAST).llm, RateLimitedChatModel)
