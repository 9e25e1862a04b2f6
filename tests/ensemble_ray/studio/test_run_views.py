"""Views of runs that are kept, and those that are let go; what a row tells of forks and of a series."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import Ensemble, InlineRuntime, Task, afork
from ensemble_ray.errors import RecordError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.stores import RecordedRun
from ensemble_ray.studio.reading import RunListing, RunViews, StudioReader
from ensemble_ray.studio.views.run_view import RunView
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
