"""Views of runs that are kept, and those that are let go; what a row tells of forks and of a series."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import Ensemble, InlineRuntime, MapEnsemble, MapReduceEnsemble, Task, TaskExecutionError, afork
from ensemble_ray.cli.map_team import map_team
from ensemble_ray.errors import EnsembleError, RecordError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.stores import RecordedRun
from ensemble_ray.studio.reading import RunListing, RunViews, StudioReader
from ensemble_ray.studio.schemas import ItemRetry
from ensemble_ray.studio.views.run_view import RunView
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.ensemble_ray.record.facts_of_runs import begun, completed, fact, node, output

from .stored_runs import Anybody, numbered


class CountingStore(SqliteStore):
    """A store that counts the records that are read from their beginning."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.begun: list[str] = []

    async def read(self, run_id: str, *, after: int = 0, **options: Any) -> AsyncGenerator[Sequence[Fact]]:
        """Return the facts behind a position."""
        if not after:
            self.begun.append(run_id)
        async for page in super().read(run_id, after=after, **options):
            yield page


async def leave_runs(home: Path, *names: str) -> None:
    """Record runs of a small team."""
    for name in names:
        work = Task(name="a", description="a", expected_output="x", handler=lambda _: "done")
        await Ensemble(tasks=[work]).arun(runtime=InlineRuntime(home=home), run_id=name)


@pytest.mark.heavy
async def test_views_that_are_followed_are_kept(tmp_path: Path) -> None:
    """S-STU-30: many pages that follow many runs at once fold no record twice; views that nobody follows are let go."""
    names = [f"run-{number}" for number in range(20)]
    await leave_runs(tmp_path, *names)
    store, now = CountingStore(tmp_path), 0.0
    views = RunViews(store, clock=lambda: now)
    for _ in range(3):
        for name in names:
            assert (await views.see(name)).view.cursor
    assert sorted(store.begun) == sorted(names)
    now = 60.0
    await views.see(names[-1])
    store.begun.clear()
    for name in names:
        await views.see(name)
    assert 4 <= len(store.begun) < 20


async def test_a_record_is_read_once_for_all_who_ask_meanwhile(tmp_path: Path) -> None:
    """S-STU-4: several that ask at the same time for the row of a run that has ended."""
    await leave_runs(tmp_path, "one")
    store = CountingStore(tmp_path)
    listing = RunListing(store)
    (summary,) = await listing.summaries()
    rows = await asyncio.gather(*(listing.row(summary) for _ in range(5)))
    assert len({row.model_dump_json() for row in rows}) == 1
    assert store.begun == ["one"]


class SomeOnly(Anybody):
    """A visitor who sees some runs."""

    def may_see(self, run: object) -> bool:
        """Whether it is one of them."""
        return isinstance(run, RecordedRun) and not run.run_id.startswith("hidden")


async def test_forks_that_somebody_may_not_see_are_not_named(tmp_path: Path) -> None:
    """S-STU-7, S-STU-72: neither their ids nor how many there are."""
    await leave_runs(tmp_path, "whole")
    work = Task(name="a", description="a", expected_output="x", handler=lambda _: "done")
    for name in ("seen", "hidden"):
        await afork("whole", "a", Ensemble(tasks=[work]), runtime=InlineRuntime(home=tmp_path), new_run_id=name)
    reader = StudioReader(SqliteStore(tmp_path), can_decide=False)
    for visitor, forks in ((Anybody(), {"seen", "hidden"}), (SomeOnly(), {"seen"})):
        for name in ("seen", "hidden"):
            await reader._listing.row(await reader._views.summary(name))
        assert set((await reader.run("whole", visitor)).forks) == forks


def test_a_view_goes_on_behind_a_damaged_fact() -> None:
    """S-STU-6: what is left of a record is shown, with what is wrong."""
    facts = numbered(
        [
            *begun(node("a", "Read Ray")),
            fact("delegation", "a#0/0/call-0", 101, request={"no": "request"}, worker="b", started_at=101.0),
            *completed("a", output("Read Ray", "x"), 105),
        ]
    )
    damaged = next(place for place, each in enumerate(facts) if each.kind == "delegation")
    view = RunView("run-1")
    with pytest.raises(RecordError, match="damaged"):
        view.apply(facts)
    assert view.cursor == facts[damaged].seq
    view.apply(facts[damaged + 1 :])
    assert view.steps.history.executions["a#0"].status == "completed"


def moody(call: ScriptedCall) -> str:
    """Fail for every item with a 3."""
    if "item 3" in call.text:
        raise TimeoutError("too slow")
    return "Read."


_MODEL = ScriptedModel(otherwise=moody)


def read(item: str) -> Task:
    return Task.of(f"Read {item}")


async def retry_after(home: Path, team: MapEnsemble | MapReduceEnsemble) -> ItemRetry | None:
    """Run a team with an item that fails; give how to repeat that item."""
    with contextlib.suppress(EnsembleError):
        await team.arun(runtime=InlineRuntime(home=home), run_id="items")
    store = SqliteStore(home)
    summary = await store.summary("items")
    assert summary is not None
    view = RunView("items")
    view.apply(await store.facts("items"))
    return view.detail(summary, at=0.0, can_decide=False).item_retry


async def test_items_that_were_left_out_are_repeated_by_a_new_run(tmp_path: Path) -> None:
    """S-STU-245: the run is completed, so that neither a resume nor a fork repeats them."""
    items = [f"item {number}" for number in range(5)]
    team = MapEnsemble(items=items, map_task=read, llm=_MODEL, retry=None)
    found = await retry_after(tmp_path, team.replace(on_item_error="collect"))
    assert found is not None
    assert (found.action, found.is_shell) == ("run", False)
    assert "ensemble.replace(items=items" in found.command
    again: dict[str, Any] = {"ensemble": team.replace(llm=ScriptedModel(otherwise="Late.")), "items": items}
    code = (
        found.command.replace("INDICES", "[3]")
        .replace("ensemble.", "output = ensemble.")
        .replace(".run()", ".run(runtime='inline')")
    )
    await asyncio.to_thread(exec, code, again)
    assert [output.text for output in again["output"].task_outputs] == ["Late."]
    assert await retry_after(tmp_path / "fine", team.replace(llm=ScriptedModel(otherwise="Read."))) is None


async def test_an_item_that_ended_its_run_is_repeated_by_a_resume(tmp_path: Path) -> None:
    """S-STU-245, S-MR-163."""
    team = MapEnsemble(items=["item 1", "item 3"], map_task=read, llm=_MODEL, retry=None, on_item_error="fail")
    found = await retry_after(tmp_path, team)
    assert found is not None
    assert (found.action, found.is_shell) == ("resume", False)
    assert found.command.startswith("ensemble_ray.resume('items', ensemble)")


async def test_items_with_a_plan_are_repeated_by_a_fork(tmp_path: Path) -> None:
    """S-STU-245: from the first failed one; a fork repeats all tasks without an output."""
    team = MapReduceEnsemble(
        items=["item 1", "item 3"],
        map_task=read,
        reduce_task=lambda group: Task(description="Join", expected_output="x", context=group),
        llm=_MODEL,
        retry=None,
        parallel_error_strategy="continue_on_error",
    )
    found = await retry_after(tmp_path, team)
    assert found is not None
    assert (found.action, found.step, found.command) == (
        "fork",
        "task-2",
        "ensemble_ray.fork('items', 'task-2', ensemble)",
    )


async def test_items_of_a_command_are_repeated_by_a_command(tmp_path: Path) -> None:
    """S-STU-245: with the recorded options and the dead letters; rows go to a new file."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "item {number}"}}\n' for number in (1, 3)))
    options: dict[str, object] = {
        "items": str(rows),
        "prompt": "Read {text}",
        "output": str(tmp_path / "out.jsonl"),
        "columns": "raw",
    }
    with_letters = {**options, "dead_letters": str(tmp_path / "dead.jsonl")}

    async def retry_of(name: str, chosen: dict[str, object]) -> ItemRetry | None:
        made = map_team(chosen)
        team = made.replace(map_task=lambda row: read(row["text"]), llm=_MODEL, retry=None)
        return await retry_after(tmp_path / name, team.with_source(made.source))

    found = await retry_of("a", with_letters)
    assert found is not None
    assert found.is_shell
    assert found.command == (
        f"ensemble-ray map --retry-dead {tmp_path}/dead.jsonl --prompt 'Read {{text}}' --columns raw "
        f"--output {tmp_path}/out-retried.jsonl"
    )
    (tmp_path / "out.jsonl").unlink()
    assert await retry_of("b", options) is None


async def test_a_run_offers_what_would_not_be_refused(tmp_path: Path) -> None:
    """S-STU-213, S-STU-214: a failed planned run is forked, not resumed; a run of a program is neither."""

    def fail(_: object) -> str:
        raise ValueError("no")

    bad = Task(name="bad", description="b", expected_output="x", handler=fail)
    good = Task(name="good", description="g", expected_output="x", handler=lambda _: "done")
    inline = InlineRuntime(home=tmp_path)
    for run_id, team, place in (
        ("completed", Ensemble(tasks=[good]), "team.yaml"),
        ("failed", Ensemble(tasks=[good, bad]), "team.yaml"),
        ("program", Ensemble(tasks=[bad]), ""),
    ):
        with contextlib.suppress(TaskExecutionError):
            await (team.with_origin(place, {}) if place else team).arun(runtime=inline, run_id=run_id)
    reader = StudioReader(SqliteStore(tmp_path), can_decide=False)
    found = {name: await reader.run(name, Anybody()) for name in ("completed", "failed", "program")}
    assert {name: each.offers for name, each in found.items()} == {
        "completed": ["fork"],
        "failed": ["fork"],
        "program": [],
    }
    steps = {
        name: each.next_step and str((each.next_step.text, each.next_step.command)) for name, each in found.items()
    }
    assert steps["completed"] is None
    assert "ensemble-ray fork failed --from bad" in (steps["failed"] or "")
    assert "no finished task can be reused" in (steps["program"] or "")


async def test_trends_are_of_visible_runs(tmp_path: Path) -> None:
    """S-STU-263: runs that a visitor may not see are in no number."""
    await leave_runs(tmp_path, "seen", "hidden-1", "hidden-2")
    reader = StudioReader(SqliteStore(tmp_path), can_decide=False)
    for visitor, count in ((Anybody(), 3), (SomeOnly(), 1)):
        trends = await reader.trends(visitor, days=7, offset_min=0, ensemble="")
        assert (trends.runs, trends.counted, trends.is_complete) == (count, count, True)
        assert [each.total.runs for each in trends.teams] == [count]


async def test_trends_count_more_runs_with_each_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-STU-263: the newest first, each record once; every answer has the number of the counted runs."""
    monkeypatch.setattr("ensemble_ray.studio.reading._READ_A_PAGE", 2)
    names = [f"run-{number}" for number in range(5)]
    await leave_runs(tmp_path, *names)
    store = CountingStore(tmp_path)
    reader = StudioReader(store, can_decide=False)
    answers = [await reader.trends(Anybody(), days=7, offset_min=0, ensemble="") for _ in range(4)]
    assert [(each.runs, each.counted, each.is_complete) for each in answers] == [
        (5, 2, False),
        (5, 4, False),
        (5, 5, True),
        (5, 5, True),
    ]
    assert sorted(store.begun) == names
    assert set(store.begun[:2]) == {"run-3", "run-4"}
