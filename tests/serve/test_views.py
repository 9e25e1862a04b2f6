"""DrivenRunViews: runs that are accepted or end while somebody looks are told as they are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import cast

import pytest

from ensemble_ray.record.stores import RunStore
from ensemble_ray.serve.catalog import ServedTeam
from ensemble_ray.serve.driving.driven_runs import DrivenRunViews
from ensemble_ray.serve.driving.ledger import Ledger, LedgerEntry
from ensemble_ray.serve.driving.run_driver import ActiveRun, detail_of
from ensemble_ray.serve.schemas import NewRun, Refusal, RunDetail, RunFilter, RunStatus

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ENTRY = LedgerEntry(
    run_id="r",
    key=None,
    digest="d",
    ensemble="team",
    request=NewRun(),
    tags={},
    tasks=1,
    workflow="sequential",
    status=RunStatus.ACCEPTED,
    created_at=NOW,
)
COMPLETED: RunDetail = detail_of(ENTRY, RunStatus.COMPLETED).model_copy(update={"ended_at": NOW})


class Bench(Ledger):
    """A ledger in which the run ends, or is begun, just behind a look; and who is at work."""

    def __init__(self) -> None:
        super().__init__(None)
        self.active: dict[str, ActiveRun] = {}
        self.views = DrivenRunViews(self, self.active, lambda: cast("RunStore", None))
        self.ends_behind_a_look = False

    def begin(self) -> ActiveRun:
        """Be at work on the run."""
        self.active["r"] = ActiveRun(entry=ENTRY, team=cast("ServedTeam", None), asked=NewRun())
        return self.active["r"]

    def finish(self) -> None:
        """Let the run end."""
        if self.ends_behind_a_look:
            self.ends_behind_a_look = False
            self.end("r", COMPLETED, kept=10)
            self.active.pop("r").ended = COMPLETED

    def find(self, run_id: str) -> LedgerEntry | None:
        found = super().find(run_id)
        self.finish()
        return found

    def page(self, wanted: RunFilter, *, before: int | None, size: int) -> Sequence[LedgerEntry]:
        found = super().page(wanted, before=before, size=size)
        self.finish()
        return found


async def test_run_that_ends_behind_a_look_is_told_with_its_end() -> None:
    """S-SRV-20, S-SRV-3: and never as one that nobody works on."""
    bench = Bench()
    bench.add(ENTRY)
    bench.begin()
    bench.ends_behind_a_look = True
    assert (await bench.views.detail("r")).status is RunStatus.COMPLETED
    assert (await bench.views.detail("r")).status is RunStatus.COMPLETED


async def test_run_that_ends_behind_a_list_is_listed_with_its_end() -> None:
    """S-SRV-21: read once more, since it was at work before the list was read."""
    bench = Bench()
    bench.add(ENTRY)
    bench.begin()
    bench.ends_behind_a_look = True
    page = await bench.views.page(RunFilter(), None, 10)
    assert [each.status for each in page.runs] == [RunStatus.COMPLETED]


async def test_run_that_is_just_being_accepted_is_unknown_or_accepted() -> None:
    """S-SRV-10: it is at work from before it is kept, so that no look between the two finds it left."""
    bench = Bench()
    active = bench.begin()
    with pytest.raises(Refusal, match="There is no run"):
        await bench.views.detail("r")
    bench.add(ENTRY)
    assert (await bench.views.detail("r")).status is RunStatus.ACCEPTED
    active.is_kept = True
    assert (await bench.views.detail("r")).status is RunStatus.ACCEPTED


async def test_run_that_nobody_works_on_is_interrupted() -> None:
    """S-SRV-3: of a team that is served no more."""
    bench = Bench()
    bench.add(ENTRY)
    assert (await bench.views.detail("r")).status is RunStatus.INTERRUPTED
    assert [each.status for each in (await bench.views.page(RunFilter(), None, 10)).runs] == [RunStatus.INTERRUPTED]


async def test_who_waits_has_the_end_when_it_is_there() -> None:
    """S-SRV-11: without another look at the ledger."""
    bench = Bench()
    bench.add(ENTRY)
    active = bench.begin()
    active.ended = COMPLETED
    active.done.set()
    assert await bench.views.wait("r", 60.0) is COMPLETED
