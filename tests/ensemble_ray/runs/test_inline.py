"""Runs in this process: what becomes of their records when they cannot begin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from ensemble_ray import Agent, Ensemble, InlineRuntime, RecordError, RunState, Task, aresume
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.record.facts_of_runs import altered


def _team(*answers: str) -> Ensemble:
    agent = Agent(role="Writer", goal="Write", llm=ScriptedModel(*answers))
    tasks = [Task(name=name, description=f"Write {name}", expected_output="Prose", agent=agent) for name in ("a", "b")]
    return Ensemble(tasks=tasks)


async def _recorded(store: SqliteStore, run_id: str, facts: Sequence[Fact]) -> None:
    """A run that was interrupted behind these facts."""
    owned = await store.begin(run_id)
    await owned.journal.append([replace(fact, run=run_id) for fact in facts])
    await owned.close(RunState.INTERRUPTED)


async def test_run_has_no_owner_when_its_record_is_found_damaged(tmp_path: Path) -> None:
    """S-DUR-15, S-DUR-9: what cannot go on here is not kept from those who could repair it, or remove it."""
    runtime, store = InlineRuntime(home=tmp_path), SqliteStore(tmp_path)
    await _team("one", "two").arun(runtime=runtime, run_id="whole")
    facts = await store.facts("whole")
    damaged = [altered(fact, output={"raw": 3}) if fact.kind == "output" else fact for fact in facts[:-1]]
    await _recorded(store, "damaged", damaged)
    with pytest.raises(RecordError, match="The record is damaged: output of task"):
        await aresume("damaged", _team(), runtime=runtime)
    found = await store.summary("damaged")
    assert found is not None
    assert found.state is RunState.INTERRUPTED
    await store.delete("damaged")


async def test_run_has_no_owner_when_its_first_fact_cannot_be_written(tmp_path: Path) -> None:
    """S-DUR-8, S-DUR-15: when the fault is mended, the id is free."""
    runtime, store = InlineRuntime(home=tmp_path), SqliteStore(tmp_path)
    in_the_way = tmp_path / "runs" / "run" / "commit.lock"
    in_the_way.mkdir(parents=True)
    with pytest.raises(RecordError, match=r"commit\.lock: Is a directory"):
        await _team("one", "two").arun(runtime=runtime, run_id="run")
    in_the_way.rmdir()
    found = await store.summary("run")
    assert found is not None
    assert found.state is RunState.INTERRUPTED
    assert (await _team("one", "two").arun(runtime=runtime, run_id="run")).raw == "two"
