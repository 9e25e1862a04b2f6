"""Tasks that name a model beside an agent that has one: who is asked, in runs of all kinds, and what their records say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ensemble_ray import (
    Agent,
    ChatMessage,
    ChatResponse,
    Ensemble,
    InlineRuntime,
    InMemoryReflectionStore,
    Loop,
    MapEnsemble,
    RateLimit,
    RateLimitedChatModel,
    Runtime,
    Task,
    ToolSpec,
    ValidationError,
    fork,
    resume,
)
from ensemble_ray.definition.validation import with_task_model
from ensemble_ray.execute.memory import reflection_key
from ensemble_ray.testing import ScriptedModel, replay
from tests.builders import agent, task


class Named:
    """A script with a name, which traces show."""

    model_name = "task-model"

    def __init__(self, script: ScriptedModel) -> None:
        self.script = script

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Answer with the script."""
        return await self.script.chat(messages, tools)


def test_model_of_a_task_is_asked_in_place_of_its_agents(runtime: Runtime) -> None:
    """S-DOM-90: for that task alone, on both runtimes; the trace and the metrics name it."""
    own, other = ScriptedModel(otherwise="by the agent"), ScriptedModel(otherwise="by the task")
    writer = agent(own)
    first, second = task("first", writer, llm=Named(other)), task("second", writer)
    output = Ensemble(tasks=[first, second]).run(runtime=runtime)
    assert [each.raw for each in output.task_outputs] == ["by the task", "by the agent"]
    assert [each.llm_interactions[0].model for each in output.trace.task_traces] == ["task-model", None]
    assert (len(own.calls), len(other.calls)) == (1, 1)


def test_tasks_of_a_map_and_bodies_of_loops_may_name_one(runtime: Runtime) -> None:
    """S-DOM-90: in tasks that are made while a run goes on, too."""
    own, other = ScriptedModel(otherwise="by the agent"), ScriptedModel(otherwise="by the task")
    writer = agent(own)
    words = MapEnsemble(items=["tea"], map_task=lambda word: task(word, writer, llm=other))
    assert words.run(runtime=runtime).raw == "by the task"
    loop = Loop(name="refine", body=[task("draft", writer, llm=other)], max_iterations=2)
    assert Ensemble(loops=[loop]).run(runtime=runtime).raw == "by the task"
    assert (own.calls, len(other.calls)) == ((), 3)


def test_model_of_a_task_reflects_on_its_output(runtime: Runtime) -> None:
    """S-REFL-44: of an agent, and of an agent that a synthesizer gave another model."""
    refined = "REFINED_DESCRIPTION:\nby the task"
    own, store = ScriptedModel(otherwise="by the agent"), InMemoryReflectionStore()
    tasks = [
        task("agent", agent(own), llm=ScriptedModel("Text", refined), reflection_config=True),
        task("synthesized", llm=ScriptedModel(refined), reflection_config=True),
    ]
    ensemble = Ensemble(
        tasks=tasks, reflection_store=store, agent_synthesizer=lambda _task, _context: agent(own, "Chosen")
    )
    output = ensemble.run(runtime=runtime)
    assert [each.raw for each in output.task_outputs] == ["Text", "by the agent"]
    for each in tasks:
        found = store.retrieve(reflection_key(each.description))
        assert found is not None
        assert found.refined_description == "by the task"


def test_changed_model_of_a_task_is_a_changed_definition(tmp_path: Path) -> None:
    """S-DOM-90, S-DUR-36: a resume names it; a fork and a replay use it."""
    home = InlineRuntime(home=tmp_path)

    def team(name: str, *answers: object) -> Ensemble:
        model = f"openai:{name}" if not answers else ScriptedModel(*answers)
        first = task("first", agent(ScriptedModel()), llm=model, name="first")
        return Ensemble(tasks=[first])

    assert team("", "Text").run(runtime=home, run_id="run").raw == "Text"
    assert replay("run", team("", "Other"), home=tmp_path).is_same
    with pytest.raises(ValidationError, match=r"tasks\.first\.llm"):
        resume("run", team("gpt-4o"), runtime=home)
    forked = fork("run", "first", team("", "New"), runtime=home)
    assert forked.raw == "New"


def test_agent_without_a_model_may_have_that_of_its_task(runtime: Runtime) -> None:
    """S-DOM-91: each task that it does names one; else the run is refused."""
    writer = Agent(role="Writer", goal="Write")
    first, second = (
        Task(description=each, expected_output="e", agent=writer, llm=ScriptedModel(each)) for each in "ab"
    )
    assert [each.raw for each in Ensemble(tasks=[first, second]).run(runtime=runtime).task_outputs] == ["a", "b"]
    loop = Loop(name="refine", body=[task("draft", writer, llm=ScriptedModel("c"))], max_iterations=1)
    assert Ensemble(loops=[loop]).run(runtime=runtime).raw == "c"
    third = Task(description="c", expected_output="e", agent=writer)
    with pytest.raises(ValidationError, match="Agent 'Writer' has no llm"):
        Ensemble(tasks=[first, third]).run(runtime=runtime)


def test_limit_of_an_agent_holds_for_the_model_of_its_task() -> None:
    """S-DOM-90, S-RATE-30: and the limit of the ensemble does not (S-RATE-33)."""
    model = ScriptedModel()
    limited = agent(ScriptedModel(), rate_limit=RateLimit.per_minute(3))
    found = with_task_model(limited, model).llm
    assert isinstance(found, RateLimitedChatModel)
    assert (found.bucket, found.delegate) == (limited.llm.bucket, model)  # type: ignore[attr-defined]  it is limited
    shared = RateLimitedChatModel.of(ScriptedModel(), RateLimit.per_minute(3))
    assert with_task_model(agent(shared), model).llm is model
