"""What the team of a recorded run is called, and its tags: kept when the run goes on, is forked or is answered from its record."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from msgspec.structs import replace
from ray._private.workers import default_worker

from ensemble_ray import (
    Agent,
    Ensemble,
    InlineRuntime,
    MapReduceEnsemble,
    RunOptions,
    RunState,
    Task,
    afork,
    aresume,
)
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.record.head import RunHead, read_head
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import ScriptedModel


def team(*answers: str, **fields: object) -> Ensemble:
    """Two tasks, one after the other."""
    writer = Agent(role="Writer", goal="Write", llm=ScriptedModel(*answers))
    tasks = [
        Task(name=name, description=f"Write {name}", expected_output="Prose", agent=writer) for name in ("one", "two")
    ]
    return Ensemble(tasks=tasks, **fields)  # type: ignore[arg-type]


def mapped(**fields: object) -> MapReduceEnsemble:
    """A map-reduce whose tasks are made while it runs."""
    return MapReduceEnsemble(
        items=[1, 2],
        map_task=lambda item: Task(description=f"{item}", expected_output="x", handler=lambda _: "one"),
        reduce_task=lambda group: Task(description="sum", expected_output="x", handler=lambda _: "two", context=group),
        mode="pipelined",
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture
def runtime(tmp_path: Path) -> InlineRuntime:
    """Runs are recorded below a directory of the test's own."""
    return InlineRuntime(home=tmp_path)


async def test_a_run_has_the_name_and_the_tags_of_its_team(runtime: InlineRuntime, tmp_path: Path) -> None:
    """S-DOM-85, S-DOM-86, S-TRC-67: in its record and in its trace; of one name the run's own value counts."""
    given = {"name": "News desk", "tags": {"team": "news", "for": "all"}}
    options = RunOptions(tags={"for": "docs"})
    for run_id, made in (("plain", team("a", "b", **given)), ("mapped", mapped(**given))):
        output = await made.arun(runtime=runtime, run_id=run_id, options=options)
        head = await read_head(SqliteStore(tmp_path), run_id)
        assert (head.name, head.tags) == ("News desk", {"team": "news", "for": "docs"})
        assert output.trace.ensemble_name == "News desk"
        again = await made.replace(name="Other").arun(runtime=runtime, run_id=run_id, options=options)
        assert again.trace.ensemble_name == "News desk"


async def test_a_run_that_goes_on_keeps_the_name_of_its_team(runtime: InlineRuntime, tmp_path: Path) -> None:
    """S-DOM-85, S-DOM-86: whatever the team that it goes on with is called now; tags that are chosen take the place of the run's own."""
    store = SqliteStore(tmp_path)
    await team("a", "b", name="News desk", tags={"team": "news"}).arun(runtime=runtime, run_id="whole")
    facts = [replace(each, run="torn") for each in await store.facts("whole")]
    last = next(place for place, each in enumerate(facts) if (each.kind, each.name) == ("output", "one#0"))
    owned = await store.begin("torn")
    await owned.journal.append(facts[: last + 1])
    await owned.close(RunState.INTERRUPTED)
    options = RunOptions(tags={"of": "ann"})
    output = await aresume("torn", team("b", name="Renamed"), runtime=runtime, options=options)
    head = await read_head(store, "torn")
    assert (head.name, head.tags) == ("News desk", {"team": "news", "of": "ann"})
    assert output.trace.ensemble_name == "News desk"


async def test_a_fork_keeps_the_name_of_its_team(runtime: InlineRuntime, tmp_path: Path) -> None:
    """S-DOM-85, S-DOM-86: and its team's tags, beside its own."""
    named = {"name": "News desk", "tags": {"team": "news"}}
    await team("a", "b", **named).arun(runtime=runtime, run_id="first", options=RunOptions(tags={"a": "b"}))
    output = await afork("first", "two", team("c", name="Other"), runtime=runtime, new_run_id="fork", tags={"c": "d"})
    head = await read_head(SqliteStore(tmp_path), "fork")
    assert (head.name, head.tags) == ("News desk", {"team": "news", "c": "d"})
    assert output.trace.ensemble_name == "News desk"


async def test_a_team_of_a_program_is_called_as_its_file(
    runtime: InlineRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-DOM-84: where there is one; a package's own program, such as that of a test, is none; nor is Ray's, which runs its tasks."""
    await team("a", "b").arun(runtime=runtime, run_id="nameless")
    program = ModuleType("__main__")
    program.__file__ = "/data/support.py"
    monkeypatch.setitem(sys.modules, "__main__", program)
    await team("a", "b").arun(runtime=runtime, run_id="of-program")
    program.__file__ = str(default_worker.__file__)
    await team("a", "b").arun(runtime=runtime, run_id="in-ray-task")
    await team("a", "b").with_origin("shop:desk").arun(runtime=runtime, run_id="loaded")
    names = [
        (await read_head(SqliteStore(tmp_path), each)).name
        for each in ("nameless", "of-program", "in-ray-task", "loaded")
    ]
    assert names == ["", "support", "", "desk"]


def test_records_of_earlier_versions_have_the_name_of_where_their_team_came_from() -> None:
    """S-DOM-85: they hold none."""
    head = RunHead()
    assert (head.name, head.tags) == ("", {})
    data = {"plan": {}, "origin": "/data/news.yaml", "options": {"tags": {"a": "b"}}, "tags": {"c": 1, "d": "e"}}
    head.header = PlanRecorded.from_data(data, 0.0)
    assert head.name == "news"
