"""Budgets over a run's whole life in one process: crashes, forks, replays, options that last."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from msgspec.structs import replace

from ensemble_ray import (
    Agent,
    ChatResponse,
    Ensemble,
    ExitReason,
    InlineRuntime,
    RunOptions,
    RunState,
    Task,
    TokenUsage,
    afork,
    aresume,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.runs import prune
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import ScriptedCall, ScriptedModel, replay
from ensemble_ray.values.value import utc_now
from tests.ensemble_ray.record.facts_of_runs import altered


def _counted(asked: ScriptedCall) -> ChatResponse:
    return ChatResponse(text=f"text {asked.number}", usage=TokenUsage(50, 50))


def _team(model: ScriptedModel, count: int = 4, **fields: object) -> Ensemble:
    writer = Agent(role="Writer", goal="Write", llm=model)
    tasks = [Task(name=f"t{n}", description=f"Write {n}", expected_output="Prose", agent=writer) for n in range(count)]
    return Ensemble(tasks=tasks, **fields)  # type: ignore[arg-type]  fields of an ensemble


async def _interrupted(store: SqliteStore, run_id: str, facts: Sequence[Fact]) -> None:
    """A run whose process died behind these facts."""
    owned = await store.begin(run_id)
    await owned.journal.append([replace(fact, run=run_id) for fact in facts])
    await owned.close(RunState.INTERRUPTED)


async def test_recorded_answers_count_when_a_run_goes_on_after_a_crash(tmp_path: Path) -> None:
    """S-BUD-7: what was in flight does not; the budget that it was begun with still holds."""
    home, model = InlineRuntime(home=tmp_path), ScriptedModel(otherwise=_counted)
    team = _team(model)
    await team.arun(runtime=home, run_id="whole", options=RunOptions(max_tokens=5000))
    facts = await SqliteStore(tmp_path).facts("whole")
    header = altered(facts[0], options={"max_tokens": 460}, budget={"max_tokens": 460, "max_cost": None})
    second = next(place for place, fact in enumerate(facts) if fact.kind == "output" and fact.name == "t1#0")
    await _interrupted(SqliteStore(tmp_path), "torn", [header, *facts[1:second]])
    output = await aresume("torn", team, runtime=home)
    assert (output.exit_reason, len(output.task_outputs)) == (ExitReason.BUDGET_EXHAUSTED, 2)
    assert len(model.calls) == 4


async def test_larger_budget_lasts_when_the_run_is_interrupted_again(tmp_path: Path) -> None:
    """S-BUD-6: who resumed it need not say it twice."""
    home, model = InlineRuntime(home=tmp_path), ScriptedModel(otherwise=_counted)
    team = _team(model)
    await team.arun(runtime=home, run_id="whole", options=RunOptions(max_tokens=420))
    await aresume("whole", team, runtime=home, options=RunOptions(max_tokens=5000))
    facts = await SqliteStore(tmp_path).facts("whole")
    resumed = next(place for place, fact in enumerate(facts) if fact.kind == "resume")
    await _interrupted(SqliteStore(tmp_path), "torn", facts[: resumed + 1])
    output = await aresume("torn", team, runtime=home)
    assert (output.exit_reason, len(output.task_outputs)) == (ExitReason.COMPLETED, 4)


async def test_fork_has_a_budget_of_its_own(tmp_path: Path) -> None:
    """S-BUD-9: what the other run paid for is not counted, neither when it begins nor when it goes on."""
    home, model = InlineRuntime(home=tmp_path), ScriptedModel(otherwise=_counted)
    team = _team(model, 6, max_tokens=650)
    assert (await team.arun(runtime=home, run_id="first")).is_complete
    assert len(model.calls) == 6
    forked = await afork("first", "t5", team, runtime=home, new_run_id="second")
    assert (forked.exit_reason, len(forked.task_outputs), len(model.calls)) == (ExitReason.COMPLETED, 6, 7)
    dear = await afork("first", "t1", team.replace(max_tokens=360), runtime=home, new_run_id="third")
    assert (dear.exit_reason, len(dear.task_outputs)) == (ExitReason.BUDGET_EXHAUSTED, 4)
    again = await aresume("third", team.replace(max_tokens=700), runtime=home)
    assert (again.exit_reason, len(again.task_outputs)) == (ExitReason.COMPLETED, 6)


async def test_replay_needs_no_budget(tmp_path: Path) -> None:
    """S-BUD-9: its answers are recorded ones; also of a run that spent its budget."""
    home = InlineRuntime(home=tmp_path)
    team = _team(ScriptedModel(otherwise=_counted), max_tokens=420)
    await team.arun(runtime=home, run_id="spent")
    assert replay("spent", _team(ScriptedModel(), max_tokens=1), home=tmp_path).is_same


async def test_run_that_spent_its_budget_is_an_ended_one(tmp_path: Path) -> None:
    """S-BUD-4: a final state, so that its record goes when it is old."""
    home, store = InlineRuntime(home=tmp_path), SqliteStore(tmp_path)
    await _team(ScriptedModel(otherwise=_counted), max_tokens=420).arun(runtime=home, run_id="spent")
    gone = await prune(store, timedelta(0), now=utc_now() + timedelta(days=1))
    assert [run.run_id for run in gone] == ["spent"]


async def test_run_without_a_budget_records_nothing_of_one(tmp_path: Path) -> None:
    """S-BUD-1: its record is what it was."""
    home = InlineRuntime(home=tmp_path)
    await _team(ScriptedModel(otherwise=_counted), 1).arun(runtime=home, run_id="free")
    facts = await SqliteStore(tmp_path).facts("free")
    assert "budget" not in facts[0].data.to_data()
    assert not [fact for fact in facts if "estimated_tokens" in fact.data.to_data()]
