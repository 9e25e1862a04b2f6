"""Options of a run as arguments of their own, in each way to begin one; texts of outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ensemble_ray import (
    Agent,
    AgentOutput,
    Ensemble,
    EnsembleOutput,
    InlineRuntime,
    MapEnsemble,
    MapReduceEnsemble,
    RunOptions,
    RunState,
    Task,
    ValidationError,
    aresume,
    resume,
    run,
)
from ensemble_ray.definition.run_options import RunFields, merge_options
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.head import read_head
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, answer

MODEL = ScriptedModel(otherwise="done")
TAGS = {"for": "docs"}
TEAM = Ensemble(tasks=[Task.of("Write")], llm=MODEL)
MAPPED = MapEnsemble(items=["tea"], map_task=Task.of, llm=MODEL)
REDUCED = MapReduceEnsemble(
    items=["tea"],
    map_task=Task.of,
    reduce_task=lambda group: Task(description="Join", expected_output="e", context=group),
    llm=MODEL,
)


async def tags_of(home: Path) -> Mapping[str, str]:
    """The tags of the only run that is recorded there."""
    store = SqliteStore(home)
    (found,) = await store.runs()
    return (await read_head(store, found.run_id)).tags


@pytest.mark.parametrize(
    "begin",
    [
        lambda home: TEAM.run(tags=TAGS, runtime=home),
        lambda home: TEAM.start(tags=TAGS, runtime=home).result(),
        lambda home: MAPPED.run(tags=TAGS, runtime=home),
        lambda home: REDUCED.run(tags=TAGS, runtime=home),
        lambda home: MapReduceEnsemble.of(MODEL, ["tea"], "Read", "Join", tags=TAGS, runtime=home),
        lambda home: agent(MODEL).run("Hello", tags=TAGS, runtime=home),
        lambda home: list(agent(MODEL).stream("Hello", tags=TAGS, runtime=home)),
        lambda home: run(MODEL, Task.of("Write"), tags=TAGS, runtime=home),
        lambda home: TEAM.run(options=RunOptions(tags={"for": "else"}), tags=TAGS, runtime=home),
    ],
)
def test_options_are_arguments_of_each_way_to_run(begin: Callable[[InlineRuntime], object], tmp_path: Path) -> None:
    """S-DOM-94: a field that is given by name wins over the options."""
    begin(InlineRuntime(home=tmp_path))
    assert run_blocking(tags_of(tmp_path)) == TAGS


@pytest.mark.parametrize("kind", ["arun", "stream", "map", "map-reduce", "agent", "agent-stream"])
async def test_options_are_arguments_of_each_async_way(kind: str, tmp_path: Path) -> None:
    """S-DOM-94."""
    home = InlineRuntime(home=tmp_path)
    if kind == "arun":
        await TEAM.arun(tags=TAGS, runtime=home)
    elif kind == "agent":
        await agent(MODEL).arun("Hello", tags=TAGS, runtime=home)
    else:
        writer = agent(MODEL)
        streams = {"stream": TEAM.stream, "map": MAPPED.stream, "map-reduce": REDUCED.stream}
        asked = writer.astream("Hello", tags=TAGS, runtime=home) if kind not in streams else None
        async for _ in asked or streams[kind](tags=TAGS, runtime=home):
            pass
    assert await tags_of(tmp_path) == TAGS


def test_a_run_that_spent_its_budget_is_resumed_with_a_larger_one(tmp_path: Path) -> None:
    """S-DOM-94, S-BUD-6: `max_tokens` of `run` and of `resume`."""
    home = InlineRuntime(home=tmp_path)

    def team() -> Ensemble:
        model = ScriptedModel(*[answer("done", 100, 100) for _ in range(2)])
        return Ensemble(tasks=[Task.of("One"), Task.of("Two")], llm=model)

    for name in ("run", "arun"):
        spent = team().run(run_id=name, runtime=home, max_tokens=250)
        assert spent.state is RunState.BUDGET_EXHAUSTED
    assert resume("run", team(), runtime=home, max_tokens=5000).state is RunState.COMPLETED
    again = run_blocking(aresume("arun", team(), runtime=home, max_tokens=5000))
    assert again.state is RunState.COMPLETED


def test_merged_options() -> None:
    """S-DOM-94: what is not given stays; values are checked as those of `RunOptions`."""
    given = RunOptions(max_tokens=5, tags=TAGS)
    assert merge_options(given, {}) is given
    assert merge_options(None, {}) is None
    assert merge_options(given, {"max_tokens": 7}) == RunOptions(max_tokens=7, tags=TAGS)
    assert set(RunFields.__annotations__) == set(RunOptions.model_fields)
    with pytest.raises(ValidationError, match="RunOptions max_tokens must be > 0"):
        TEAM.run(runtime="inline", max_tokens=0)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_token", r"Did you mean 'max_tokens'\?"),
        ("runtme", r"Did you mean 'runtime'\?"),
        ("topic", r"Inputs are a mapping: run\(\{'topic': \.\.\.\}\)"),
    ],
)
def test_other_names_are_refused(name: str, advice: str) -> None:
    """S-DOM-94: with what to write."""
    with pytest.raises(TypeError, match=f"^unexpected keyword argument '{name}' of a run. {advice}$"):
        TEAM.run(**{name: 1})  # type: ignore[arg-type]


def test_every_output_has_its_text_under_both_names() -> None:
    """S-DOM-93."""
    asked: AgentOutput = Agent(role="Writer", goal="Write", llm=MODEL).run("Hello", runtime="inline")
    output: EnsembleOutput = TEAM.run(runtime="inline")
    for each in (asked, output, output.task_outputs[0]):
        assert (each.text, each.raw) == ("done", "done")
    assert EnsembleOutput().text == ""
    assert "text" not in output.model_dump()
