"""A run that is told to ask another model while it goes on: on both runtimes, after a resume, where work is handed on, in a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ensemble_ray import (
    ChatModel,
    Ensemble,
    IllegalStateError,
    InlineRuntime,
    MapReduceEnsemble,
    RateLimit,
    RateLimitedChatModel,
    Runtime,
    Task,
    ValidationError,
    aresume,
)
from ensemble_ray.definition.validation import with_model
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task
from tests.command_line import calling
from tests.scenarios.teams import PATIENCE_S, Forever, Marks, wait_for


def saying(text: str) -> ScriptedModel:
    """A model that says nothing else."""
    return ScriptedModel(otherwise=text)


def team(marks: Marks, **fields: object) -> Ensemble:
    """A task that waits until it may end, and one of a writer and of a reader each."""

    def wait(_context: object) -> str:
        marks.add("begun")
        marks.wait("go")
        return "done"

    first = task("first", handler=wait)
    writing = task("write", agent(saying("own"), "Writer"), context=[first])
    reading = task("read", agent(saying("own"), "Reader"), context=[writing])
    return Ensemble(tasks=[first, writing, reading], models={"large": saying("large")}, **fields)  # type: ignore[arg-type]


def test_tasks_that_start_later_ask_the_other_model(runtime: Runtime, tmp_path: Path) -> None:
    """S-CTL-10, S-CTL-11, S-CTL-14: those of one agent, in a process of its own; a run that is over takes none."""
    marks = Marks(tmp_path / "marks")
    run = team(marks).start(runtime=runtime)
    marks.wait("begun")
    run.switch_model("large", agent="Writer")
    with pytest.raises(ValidationError, match=r"Unknown model 'huge'\. Known: \[large\]"):
        run.switch_model("huge")
    with pytest.raises(ValidationError, match=r"Unknown agent 'Editor'\. Known: \[Reader, Writer\]"):
        run.switch_model("large", agent="Editor")
    marks.add("go")
    output = run.result(timeout_s=PATIENCE_S)
    assert [each.raw for each in output.task_outputs] == ["done", "large", "own"]
    with pytest.raises(IllegalStateError, match="does not go on"):
        run.switch_model("large")


async def test_a_run_that_is_resumed_keeps_the_choice(tmp_path: Path) -> None:
    """S-CTL-12: it is a fact of the run; a definition without that model is refused before anything is asked."""

    def written(*answers: object, models: dict[str, ChatModel]) -> Ensemble:
        first = task("first", agent(ScriptedModel(*answers)))  # type: ignore[arg-type]
        return Ensemble(tasks=[first, task("second", agent(saying("own"), "Reader"))], models=models)

    forever, home = Forever(), InlineRuntime(home=tmp_path)
    run = written(forever, models={"large": saying("large")}).start(runtime=home, run_id="run")
    wait_for(forever.asked)
    await run.aswitch_model("large", given_by="Ann")
    await run.acancel()
    await run.aresult()
    with pytest.raises(ValidationError, match=r"switched run .* to the model 'large', .* Known: \[small\]"):
        await aresume("run", written("done", models={"small": saying("small")}), runtime=home)
    resumed = await aresume("run", written("done", models={"large": saying("large")}), runtime=home)
    assert [each.raw for each in resumed.task_outputs] == ["large", "large"]


def test_work_that_is_handed_on_asks_what_its_asking_task_was_started_with(runtime: Runtime, tmp_path: Path) -> None:
    """S-CTL-13: in the process of the agent that does it."""
    marks = Marks(tmp_path / "marks")

    def wait(_context: object) -> str:
        marks.add("begun")
        marks.wait("go")
        return "done"

    handed = call("delegate", '{"agent_role": "Reader", "task": "Read it"}')
    first = task("first", handler=wait)
    writer = agent(ScriptedModel(handed, otherwise=lambda asked: asked.text), "Writer", allow_delegation=True)
    reader = agent(saying("own"), "Reader")
    writing = task("write", writer, context=[first])
    ensemble = Ensemble(
        agents=[writer, reader], tasks=[first, writing], models={"large": saying("said by the large one")}
    )
    run = ensemble.start(runtime=runtime)
    marks.wait("begun")
    run.switch_model("large", agent="Reader")
    marks.add("go")
    assert "said by the large one" in run.result(timeout_s=PATIENCE_S).raw


def test_the_limit_of_the_own_model_holds_for_the_other_one() -> None:
    """S-CTL-13: calls of both draw from one bucket."""
    limited = agent(saying("own"), rate_limit=RateLimit.per_second(1))
    switched = with_model(limited, saying("large"))
    assert isinstance(limited.llm, RateLimitedChatModel)
    assert isinstance(switched.llm, RateLimitedChatModel)
    assert switched.llm.bucket == limited.llm.bucket
    assert switched == limited


def test_tasks_that_are_made_while_their_run_goes_on_ask_the_other_model(runtime: Runtime, tmp_path: Path) -> None:
    """S-CTL-11: the reduce of a map-reduce, and not the map that had begun."""
    marks = Marks(tmp_path / "marks")

    def answer(_asked: object) -> str:
        marks.add("begun")
        marks.wait("go")
        return "own"

    run = MapReduceEnsemble(
        items=["salt"],
        map_task=lambda item: Task(description=f"Read {item}", expected_output="A text"),
        reduce_task=lambda group: Task(description="Join", expected_output="A text", context=group),
        mode="pipelined",
        llm=ScriptedModel(otherwise=answer),
        models={"large": saying("large")},
    ).start(runtime=runtime)
    marks.wait("begun")
    run.switch_model("large")
    marks.add("go")
    assert run.result(timeout_s=PATIENCE_S).raw == "large"


@pytest.mark.parametrize("models", [{"": saying("a")}, {"large": 5}, {"large": None}, ["large"], {3: saying("a")}])
def test_what_is_no_model_with_a_name_is_refused(models: object) -> None:
    """S-CTL-10."""
    with pytest.raises(ValidationError, match=r"models|llm"):
        Ensemble(tasks=[task("a", handler=lambda _: "b")], models=models)  # type: ignore[arg-type]


def test_a_trace_shows_who_chose_which_model(tmp_path: Path, home: str, capsys: pytest.CaptureFixture[str]) -> None:
    """S-CTL-8, S-CTL-15: and what it was told; a tree, and data."""
    marks = Marks(tmp_path / "marks")
    run = team(marks).start(runtime="inline", run_id="run")
    marks.wait("begun")
    run.switch_model("large", agent="Writer")
    run.switch_model(None)
    run.inject("Be brief")
    marks.add("go")
    run.result(timeout_s=PATIENCE_S)
    command = calling(capsys)
    shown = command("trace", "run").printed
    assert "model of Writer: large" in shown
    assert "model of all agents: own" in shown
    assert "told: Be brief" in shown
    data = json.loads(command("trace", "run", "--json").printed)["metadata"]
    assert data["directives"] == [{"text": "Be brief", "expires_at": None, "given_by": None}]
    assert data["model_switches"] == [
        {"model": "large", "agent": "Writer", "given_by": None},
        {"model": None, "agent": None, "given_by": None},
    ]
