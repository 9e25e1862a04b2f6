"""Texts, limits, tools and schemas that one run has: on both runtimes, after a resume and in a fork."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import (
    Agent,
    Ensemble,
    InlineRuntime,
    MapReduceEnsemble,
    RunOptions,
    Runtime,
    Task,
    ValidationError,
    afork,
    aresume,
    build_user_prompt,
    tool,
)
from ensemble_ray.record.opening import store_at
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from ensemble_ray.values.output_schema import output_type_of
from tests.builders import agent, call, task
from tests.scenarios.teams import Forever, wait_for

TEXT = "The reader is {seven}.\n## Task"
SHOWN = (
    "## Additional Context\nThe request for this run contains this text. Consider it in your work.\n\n"
    "The reader is {seven}.\n## Task\n\n"
)
SCHEMA: dict[str, Any] = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 2}}}


def echo() -> ScriptedModel:
    """Answers with the prompt."""
    return ScriptedModel(otherwise=lambda call: call.text)


@tool
def look(what: str = "") -> str:
    """Look at something."""
    return f"saw {what}"


def test_every_prompt_has_the_text_when_a_run_adds_one(runtime: Runtime) -> None:
    """S-REQ-1, S-REQ-4, S-REQ-5, S-REQ-6: braces are text; the text of the task follows; other runs have no section."""
    first = task("Read {topic}", agent(echo()))
    second = Task("Write", "A text", agent=agent(echo()), additional_context="Be {brief}")
    team = Ensemble(tasks=[first, second])
    one, two = team.run({"topic": "tides"}, runtime=runtime, additional_context=TEXT).task_outputs
    assert f"{SHOWN}## Task\nRead tides" in one.raw
    assert f"{SHOWN}Be {{brief}}\n\n## Task\nWrite" in two.raw
    without = team.run({"topic": "tides"}, runtime=runtime).task_outputs
    assert "## Additional Context" not in without[0].raw
    assert without[0].raw == build_user_prompt(task("Read tides", agent(echo())))


def test_workers_and_managers_have_the_text_when_a_manager_leads(inline_runtime: InlineRuntime) -> None:
    """S-REQ-5, S-REQ-3: the manager may delegate as often as before."""
    worker = Agent(role="Writer", goal="Write", llm=echo())
    asks = call("delegate_task", '{"agent_role": "Writer", "task_description": "Write it"}')
    manager = ScriptedModel(asks, asks, lambda call: call.text)
    team = Ensemble(
        tasks=[Task("Write", "A text", agent=worker)], workflow="hierarchical", manager_llm=manager, agents=[worker]
    )
    output = team.run(runtime=inline_runtime, additional_context=TEXT, max_iterations=1)
    assert all(SHOWN in each.raw for each in output.task_outputs)
    assert SHOWN in output.raw
    assert len(output.task_outputs) == 3


def test_tasks_that_are_made_have_the_text_when_a_map_reduce_runs(runtime: Runtime) -> None:
    """S-REQ-5."""
    team = MapReduceEnsemble(
        items=["tides", "kelp"],
        map_task=lambda item: Task(f"Read {item}", "A text"),
        reduce_task=lambda group: Task("Join", "A text", context=group),
        mode="pipelined",
        llm=ScriptedModel(otherwise=lambda call: "yes" if SHOWN in call.text else "no"),
    )
    output = team.run(runtime=runtime, additional_context=TEXT)
    assert {each.raw for each in output.task_outputs} == {"yes"}


@pytest.mark.parametrize(("own", "asked"), [(5, 2), (2, 5)])
def test_agents_call_fewer_tools_when_a_run_lowers_their_limit(runtime: Runtime, own: int, asked: int) -> None:
    """S-REQ-3: it raises none."""

    def results(call: ScriptedCall) -> str:
        return "; ".join(str(message.content)[:40] for message in call.messages if message.role == "tool")

    requests = [call("look", f'{{"what": "{n}"}}', number=n) for n in range(3)]
    model = ScriptedModel(*requests, otherwise=results)
    team = Ensemble(tasks=[task("Find it", agent(model, tools=[look], max_iterations=own))])
    output = team.run(runtime=runtime, max_iterations=asked)
    assert output.raw == "saw 0; saw 1; STOP: Maximum tool iterations (2) reache"


async def test_a_resumed_run_keeps_its_options_when_it_was_stopped(tmp_path: Path) -> None:
    """S-REQ-2: another text is another definition."""

    def written(*answers: object) -> Ensemble:
        first = task("first", agent(ScriptedModel(*answers)))  # type: ignore[arg-type]  entries of a script
        return Ensemble(tasks=[first, task("second", agent(echo()))])

    forever, home = Forever(), InlineRuntime(home=tmp_path)
    run = written(forever).start(
        runtime=home, run_id="run", options=RunOptions(additional_context=TEXT, max_iterations=3)
    )
    wait_for(forever.asked)
    await run.acancel()
    await run.aresult()
    with pytest.raises(ValidationError, match="additional_context"):
        await aresume("run", written("done"), runtime=home, additional_context="Other")
    assert SHOWN in (await aresume("run", written("done"), runtime=home)).raw
    (first, *_) = await store_at(home.store_address).facts("run")
    assert first.data.to_data()["options"] == {"additional_context": TEXT, "max_iterations": 3}


async def test_a_fork_keeps_the_options_when_it_sets_no_other(tmp_path: Path) -> None:
    """S-REQ-2: and the new run resumes with them."""
    home = InlineRuntime(home=tmp_path)
    team = Ensemble(tasks=[Task("One", "A text", name="one"), Task("Two", "A text", name="two")], llm=echo())
    await team.arun(runtime=home, run_id="run", additional_context=TEXT)
    kept = await afork("run", "two", team, runtime=home, new_run_id="kept")
    other = await afork("run", "two", team, runtime=home, additional_context="Other")
    assert SHOWN in kept.raw
    assert "Other\n\n## Task\nTwo" in other.raw


def test_an_answer_is_parsed_by_its_schema_when_a_task_has_one(runtime: Runtime) -> None:
    """S-REQ-30: with a correction, as for a declared type."""
    asked = Task("Count", "A number", agent=agent(ScriptedModel('{"n": 1}', 'It is {"n": 3}.')))
    output = Ensemble(tasks=[asked.replace(output_type=output_type_of(SCHEMA))]).run(runtime=runtime)
    (done,) = output.task_outputs
    assert done.parsed == {"n": 3}
    assert done.metrics.llm_call_count == 2
    assert done.model_dump(mode="json")["parsed_output"] == {"n": 3}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_iterations": 0}, "RunOptions max_iterations must be > 0 when set, got: 0"),
        ({"additional_context": " "}, "RunOptions additional_context must not be blank when set"),
        ({"additional_context": "a" * 20_001}, "20,000 characters; this one has 20,001"),
    ],
)
def test_options_are_refused_before_a_model_call_when_they_are_wrong(options: dict[str, Any], said: str) -> None:
    """S-REQ-3, S-REQ-4."""
    with pytest.raises(ValidationError, match=said):
        Ensemble(tasks=[Task.of("Write")], llm=ScriptedModel()).run(runtime="inline", **options)


def test_a_handler_has_no_text_when_its_task_is_made() -> None:
    """S-REQ-6, S-DET-3."""
    with pytest.raises(ValidationError, match="Task cannot have both a handler and an additional_context"):
        Task("Write", "A text", handler=lambda _context: "done", additional_context="Be brief")


def test_a_context_budget_counts_the_text_when_it_is_checked(inline_runtime: InlineRuntime) -> None:
    """S-REQ-5, S-MEM-137: no budget cuts it."""
    team = Ensemble(tasks=[Task.of("Write")], llm=echo(), context_budget=1000)
    assert "Write" in team.run(runtime=inline_runtime).raw
    with pytest.raises(ValidationError, match="context_budget 1,000 is too small"):
        team.run(runtime=inline_runtime, additional_context="a" * 9_000)
