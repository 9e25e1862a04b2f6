"""A ledger that is away for a while, and one that another process has taken over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ensemble_ray import EnsembleError, InlineRuntime
from ensemble_ray.process.concurrency import bridge, threads
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.serve.catalog import served_team
from ensemble_ray.serve.driving import driven_runs
from ensemble_ray.serve.driving import run_driver as kept_ends
from ensemble_ray.serve.driving.driven_runs import DrivenRuns
from ensemble_ray.serve.driving.driver import driver_name
from ensemble_ray.serve.driving.ledger import Ledger, LedgerLostError, open_ledger, part_of_name
from ensemble_ray.serve.schemas import NewRun, Refusal, RunDetail, RunFilter, RunStatus
from ensemble_ray.testing import ScriptedModel
from tests.serve.gates import Gate
from tests.serve.teams import INPUTS, pair


class AwayLedger(Ledger):
    """A ledger that keeps no end of a run until it is back, and says how many threads asked it at a time."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path)
        self.back = threading.Event()
        self.asked = threading.Event()
        self.most_at_a_time = self._asking = 0

    def end(self, run_id: str, outcome: RunDetail, *, kept: int) -> None:
        self._asking += 1
        self.most_at_a_time = max(self.most_at_a_time, self._asking)
        self.asked.set()
        try:
            if not self.back.is_set():
                raise EnsembleError("Cannot use the database")
            super().end(run_id, outcome, kept=kept)
        finally:
            self._asking -= 1


@asynccontextmanager
async def driven_by(ledger: Ledger, model: ScriptedModel, lost: list[BaseException]) -> AsyncGenerator[DrivenRuns]:
    """Runs of one team in this process."""
    async with InlineRuntime() as entered:
        runs = DrivenRuns({"team": served_team("team", pair(model))}, entered, ledger, on_lost=lost.append)
        await runs.recover()
        yield runs
        await runs.close()


def asked(run_id: str) -> NewRun:
    """A request."""
    return NewRun.model_validate({"inputs": INPUTS, "run_id": run_id})


async def over(*tasks: asyncio.Task[None] | None) -> None:
    """Wait for the work on runs to be over; on the library's loop."""
    await asyncio.gather(*(each for each in tasks if each is not None), return_exceptions=True)


async def test_ends_are_told_and_kept_when_the_ledger_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SRV-48: who waits is told; lists have the run as it ended; it is kept when the ledger is back, one end at a time."""
    monkeypatch.setattr(driven_runs, "_STORING_S", 0.0)
    monkeypatch.setattr(kept_ends, "_PAUSES_S", (0.01,))
    ledger = AwayLedger()
    async with driven_by(ledger, ScriptedModel(otherwise="fine"), []) as runs:
        for run_id in ("a", "b"):
            await runs.start(asked(run_id))
            assert (await runs.wait(run_id, 60)).status == "completed"
        await threads.run(ledger.asked.wait, 60)
        assert {each.status for each in ledger.page(RunFilter(), before=None, size=9)} == {RunStatus.RUNNING}
        listed = await runs.list(RunFilter(status=RunStatus.COMPLETED))
        assert [(each.run_id, each.status) for each in listed.runs] == [("b", "completed"), ("a", "completed")]
        assert listed.runs[0].ended_at is not None
        assert (await runs.list(RunFilter(status=RunStatus.RUNNING))).runs == []
        assert {each.status for each in (await runs.list(RunFilter())).runs} == {"completed"}
        with pytest.raises(Refusal, match="is over: completed"):
            await runs.cancel("a")
        ledger.back.set()
        await bridge(over(*(active.task for active in runs._active.values())))
        assert runs._active == {}
        assert [each.status for each in ledger.page(RunFilter(), before=None, size=9)] == ["completed", "completed"]
    assert ledger.most_at_a_time == 1


async def test_an_end_that_was_not_kept_is_found_in_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """S-SRV-48: by the next process, also where it serves the team no more; nothing is done again."""
    monkeypatch.setattr(driven_runs, "_STORING_S", 0.0)
    monkeypatch.setattr(kept_ends, "_PAUSES_S", (60.0,))
    first = AwayLedger(tmp_path / "ledger.sqlite")
    async with driven_by(first, ScriptedModel("a draft", "a line"), []) as runs:
        await runs.start(asked("a"))
        assert (await runs.wait("a", 60)).status == "completed"
    again = Ledger(tmp_path / "ledger.sqlite")
    async with InlineRuntime() as entered:
        runs = DrivenRuns({}, entered, again)
        assert await runs.recover() == 0
        assert [(each.run_id, each.status) for each in (await runs.list(RunFilter())).runs] == [("a", "completed")]
        kept = await runs.get("a")
        await runs.close()
    assert kept.result is not None
    assert kept.result.raw == "a line"


async def test_a_run_is_not_told_as_failed_when_another_process_has_the_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S-SRV-47: the other one drives it; this one is told that it drives nothing any more."""

    def refuse(*_: object) -> None:
        raise LedgerLostError("Another endpoint has it")

    lost: list[BaseException] = []
    gate, ledger = Gate("a draft"), Ledger(None)
    async with driven_by(ledger, ScriptedModel(gate, "a line"), lost) as runs:
        monkeypatch.setattr(ledger, "note", refuse)
        await runs.start(asked("a"))
        await bridge(over(runs._active["a"].task))
        assert [type(each) for each in lost] == [LedgerLostError]
        assert (await runs.get("a")).ended_at is None
        monkeypatch.setattr(ledger, "find", refuse)
        with pytest.raises(LedgerLostError):
            await runs.get("unknown")


def test_no_two_endpoints_have_one_ledger(tmp_path: Path) -> None:
    """S-SRV-213: whatever their names and namespaces are; names without `/` and `%` stay as they are."""
    names = [("b", "a"), ("a/b", ""), ("a%2Fb", ""), ("endpoint-b", "a"), ("a/endpoint-b", "")]
    for name, namespace in names:
        open_ledger(StoreAddress(home=str(tmp_path)), name, namespace).close()
    files = {str(each.relative_to(tmp_path / "endpoint")) for each in tmp_path.rglob("*.sqlite")}
    assert files == {
        "a/b.sqlite", "a%2Fb.sqlite", "a%252Fb.sqlite", "a/endpoint-b.sqlite", "a%2Fendpoint-b.sqlite",
    }  # fmt: skip
    assert len({driver_name(name, namespace) for name, namespace in names}) == len(names)
    assert part_of_name("shop.eu-1") == "shop.eu-1"
