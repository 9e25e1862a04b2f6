"""Tags of recorded runs: what a run keeps when it goes on, and what a fork begins with."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import Agent, Ensemble, InlineRuntime, RunOptions, RunState, Task, ValidationError, afork, aresume
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.record.head import RunHead, read_head
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import ScriptedModel


def team(*answers: str) -> Ensemble:
    """Two tasks, one after the other."""
    writer = Agent(role="Writer", goal="Write", llm=ScriptedModel(*answers))
    return Ensemble(
        tasks=[
            Task(name="draft", description="Draft it", expected_output="A draft", agent=writer),
            Task(name="polish", description="Polish it", expected_output="A text", agent=writer),
        ]
    )


async def interrupted(home: Path, run_id: str, tags: dict[str, str]) -> SqliteStore:
    """A run with these tags that was interrupted behind its first task."""
    await team("a", "b").arun(runtime=InlineRuntime(home=home), run_id="whole", options=RunOptions(tags=tags))
    store = SqliteStore(home)
    facts = await store.facts("whole")
    last = next(place for place, fact in enumerate(facts) if (fact.kind, fact.name) == ("output", "draft#0"))
    owned = await store.begin(run_id)
    header = {**facts[0].data.to_data(), "ensemble_id": run_id}
    copies = [_copy(fact, run_id, fact.data.to_data()) for fact in facts[1 : last + 1]]
    await owned.journal.append([_copy(facts[0], run_id, header), *copies])
    await owned.close(RunState.INTERRUPTED)
    return store


def _copy(fact: Fact, run_id: str, data: dict[str, object]) -> Fact:
    return read_fact(run=run_id, kind=fact.kind, name=fact.name, at=fact.at, data=data)


async def test_a_run_that_goes_on_keeps_its_tags(tmp_path: Path) -> None:
    """S-DUR-141: whatever else is chosen anew; tags that are chosen take their place."""
    store = await interrupted(tmp_path, "torn", {"for": "docs"})
    assert (await read_head(store, "torn")).tags == {"for": "docs"}
    runtime = InlineRuntime(home=tmp_path)
    again = await aresume("torn", team("never", "b"), runtime=runtime, options=RunOptions(max_tokens=10_000))
    assert again.is_complete
    assert (await read_head(store, "torn")).tags == {"for": "docs"}
    store = await interrupted(tmp_path / "other", "torn", {"for": "docs"})
    options = RunOptions(tags={"of": "ann"})
    await aresume("torn", team("never", "b"), runtime=InlineRuntime(home=tmp_path / "other"), options=options)
    assert (await read_head(store, "torn")).tags == {"of": "ann"}


async def test_a_fork_begins_with_tags_of_its_own(tmp_path: Path) -> None:
    """S-DUR-142: those of the run that it is of are not taken over; its other options are."""
    options = RunOptions(tags={"for": "docs"}, max_tokens=9_999)
    runtime = InlineRuntime(home=tmp_path)
    await team("a", "b").arun(runtime=runtime, run_id="first", options=options)
    store = SqliteStore(tmp_path)
    for run_id, own in (("plain", None), ("named", {"try": "2"})):
        await afork("first", "polish", team("c"), runtime=runtime, new_run_id=run_id, tags=own)
        head = await read_head(store, run_id)
        assert head.tags == (own or {})
        assert (head.header.options or {})["max_tokens"] == 9_999
    with pytest.raises(ValidationError, match="tags"):
        await afork("first", "polish", team("c"), runtime=runtime, new_run_id="wrong", tags={"": "x"})
    assert await store.summary("wrong") is None


async def test_a_run_without_tags_has_none(tmp_path: Path) -> None:
    """S-DUR-141: as the records of earlier versions."""
    await team("a", "b").arun(runtime=InlineRuntime(home=tmp_path), run_id="plain")
    assert (await read_head(SqliteStore(tmp_path), "plain")).tags == RunHead().tags == {}
