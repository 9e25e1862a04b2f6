"""Tasks without an agent: one is made for the run, with the right model, tools and limits."""

from __future__ import annotations

import logging

import pytest

from ensemble_ray import (
    Agent,
    AgentExecutionError,
    AgentSynthesizer,
    Ensemble,
    RateLimit,
    Runtime,
    SynthesisContext,
    Task,
    TaskExecutionError,
    tool,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import Watcher, prompt_of


@tool
def look() -> str:
    """Look."""
    return "seen"


def test_agent_is_made_for_a_task_that_names_none(runtime: Runtime) -> None:
    """S-DET-20, S-DET-22, S-DET-23, S-ENG-1: the user's task is unchanged, its output is found, context is remapped."""
    model = ScriptedModel("facts", "text")
    research = Task.of("Research {topic}")
    write = Task.of("Write it").replace(context=[research])
    output = Ensemble(tasks=[research, write], llm=model).run({"topic": "bees"}, runtime=runtime)
    assert [each.agent_role for each in output.task_outputs] == ["Researcher", "Writer"]
    assert (research.agent, research.description) == (None, "Research {topic}")
    found = output.get_output(research)
    assert found is not None
    assert found.raw == "facts"
    assert "### Researcher: Research bees\nfacts" in prompt_of(model.calls[1])
    assert (model.calls[0].messages[0].content or "").startswith("You are Researcher.")


def test_model_of_the_task_comes_first(inline_runtime: Runtime) -> None:
    """S-DET-20: task, then ensemble."""
    own, shared = ScriptedModel("own"), ScriptedModel("shared")
    tasks = [Task.of("Write a"), Task.of("Write b").replace(llm=own)]
    output = Ensemble(tasks=tasks, llm=shared).run(runtime=inline_runtime)
    assert [each.raw for each in output.task_outputs] == ["shared", "own"]


def test_tools_and_limit_of_the_task_are_the_agents(inline_runtime: Runtime) -> None:
    """S-DET-21."""
    model = ScriptedModel(call("look", number=1), call("look", number=2), "done")
    made = Task.of("Write").replace(tools=[look], max_iterations=1)
    output = Ensemble(tasks=[made], llm=model).run(runtime=inline_runtime)
    assert output.raw == "done"
    results = [message.content for message in model.calls[-1].messages if message.role == "tool"]
    assert results[0] == "seen"
    assert (results[1] or "").startswith("STOP: Maximum tool iterations (1)")


def test_tools_of_a_task_have_no_effect_beside_an_agent(inline_runtime: Runtime) -> None:
    """S-DET-21."""
    model = ScriptedModel("done")
    Ensemble(tasks=[task("go", agent(model), tools=[look], max_iterations=1)]).run(runtime=inline_runtime)
    assert model.calls[0].tools == ()


def test_agent_made_by_a_model(runtime: Runtime) -> None:
    """S-DET-24: one call per agentless task, before scheduling."""
    made = '{"role": "Bee Keeper", "goal": "keep bees", "backstory": "old"}'
    model, watcher = ScriptedModel(made, "buzz"), Watcher()
    output = Ensemble(
        tasks=[Task.of("Write")], llm=model, agent_synthesizer=AgentSynthesizer.llm_based(), listeners=[watcher]
    ).run(runtime=runtime)
    assert (output.raw, output.task_outputs[0].agent_role) == ("buzz", "Bee Keeper")
    system = model.calls[1].messages[0].content or ""
    assert system.startswith("You are Bee Keeper.\nold")
    assert "keep bees" in system
    assert output.task_outputs[0].metrics.llm_call_count == 1


@pytest.mark.parametrize("bad", ["no JSON", '{"role": " ", "goal": "x"}', '{"role": "x"}'])
def test_template_is_used_when_the_model_gives_no_agent(
    inline_runtime: Runtime, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    """S-DET-24: WARN."""
    model = ScriptedModel(bad, "text")
    output = Ensemble(tasks=[Task.of("Write it")], llm=model, agent_synthesizer=AgentSynthesizer.llm_based()).run(
        runtime=inline_runtime
    )
    assert output.task_outputs[0].agent_role == "Writer"
    assert any(
        "no usable JSON" in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    )


def test_model_error_while_making_an_agent_ends_the_run(inline_runtime: Runtime) -> None:
    """S-DET-24, S-ENG-1, S-ENG-4: a failure in a step leaves later steps untouched."""
    watcher = Watcher()
    ensemble = Ensemble(
        tasks=[Task.of("Write")],
        llm=ScriptedModel(ValueError("no quota")),
        agent_synthesizer=AgentSynthesizer.llm_based(),
        listeners=[watcher],
    )
    with pytest.raises(AgentExecutionError) as caught:
        ensemble.run(runtime=inline_runtime)
    assert "no quota" in str(caught.value)
    assert watcher.heard == []


def test_own_synthesizer_is_asked(runtime: Runtime) -> None:
    """S-DET-25, S-SET-12: with the resolved task, its model and a locale."""
    asked: list[tuple[str, str]] = []
    model = ScriptedModel("text")

    class Own:
        def synthesize(self, wanted: Task, context: SynthesisContext) -> Agent:
            asked.append((wanted.description, context.locale))
            return Agent(role="Own", goal="g", llm=context.model)

    output = Ensemble(tasks=[Task.of("Write {x}")], llm=model, agent_synthesizer=Own()).run({"x": "y"}, runtime=runtime)
    assert output.task_outputs[0].agent_role == "Own"
    assert asked == [("Write y", "en")]
    assert len(model.calls) == 1


@pytest.mark.parametrize("error", [ZeroDivisionError("zero"), SystemExit(3), KeyboardInterrupt()])
def test_failing_synthesizer_ends_its_run_only(inline_runtime: Runtime, error: BaseException) -> None:
    """S-ENG-1, S-ERR-37: an EnsembleError with its cause; the next run works."""

    def fail(_task: Task, _context: SynthesisContext) -> Agent:
        raise error

    ensemble = Ensemble(tasks=[Task.of("Write")], llm=ScriptedModel("text"), agent_synthesizer=fail)
    with pytest.raises(AgentExecutionError) as caught:
        ensemble.run(runtime=inline_runtime)
    assert caught.value.__cause__ is error
    assert Ensemble(tasks=[Task.of("Write")], llm=ScriptedModel("fine")).run(runtime=inline_runtime).raw == "fine"


def test_limit_of_the_ensemble_is_one_per_run(runtime: Runtime) -> None:
    """S-RATE-33, S-RATE-11, S-RATE-32: shared by all made agents; fresh with each run; explicit agents unaffected."""
    model = ScriptedModel(otherwise="x")
    tasks = [Task.of("Write a"), task("own", agent(model)), task("own too", agent(model))]
    ensemble = Ensemble(tasks=tasks, llm=model, rate_limit=RateLimit.of(1, 3600))
    for _ in range(2):  # a second run finds a fresh bucket
        assert len(ensemble.run(runtime=runtime).task_outputs) == 3


def test_made_agents_live_by_the_hundred(runtime: Runtime) -> None:
    """S-DET-20: a hundred agents need no hundred processes."""
    output = Ensemble(
        tasks=[Task.of(f"Write {n}") for n in range(100)], llm=ScriptedModel(otherwise="x"), workflow="parallel"
    ).run(runtime=runtime)
    assert len(output.task_outputs) == 100


def test_handler_only_ensemble_needs_no_model(inline_runtime: Runtime) -> None:
    """S-DET-32."""
    assert Ensemble(tasks=[task("go", handler=lambda _: "x")]).run(runtime=inline_runtime).raw == "x"


def test_failure_names_the_made_agent(inline_runtime: Runtime) -> None:
    """S-ENG-13."""
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[Task.of("Write it")], llm=ScriptedModel(ValueError("no"))).run(runtime=inline_runtime)
    assert caught.value.agent_role == "Writer"
