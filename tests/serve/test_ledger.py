"""What an endpoint accepted outlives its process, and belongs to one process at a time."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from ensemble_ray import RunExistsError
from ensemble_ray.serve.driving import ledger as module
from ensemble_ray.serve.driving.ledger import Ledger, LedgerEntry
from ensemble_ray.serve.schemas import NewRun, RunDetail, RunFilter, RunStatus

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def entry(run_id: str) -> LedgerEntry:
    """A run that is accepted."""
    return LedgerEntry(
        run_id=run_id,
        key=None,
        digest="d",
        ensemble="team",
        request=NewRun(inputs={"topic": run_id}),
        tags={"n": run_id},
        tasks=1,
        workflow="sequential",
        status=RunStatus.ACCEPTED,
        created_at=NOW,
    )


def ended(run_id: str) -> RunDetail:
    """How it ended."""
    return RunDetail(run_id=run_id, status=RunStatus.COMPLETED, ensemble="team", tags={}, created_at=NOW, ended_at=NOW)


def test_what_was_accepted_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    """S-SRV-44: readable by its owner alone; a request is gone when its run ended."""
    path = tmp_path / "endpoint" / "team.sqlite"
    first = Ledger(path)
    assert path.stat().st_mode & 0o777 == 0o600
    for run_id in ("a", "b", "c"):
        first.add(entry(run_id))
    first.note("b", RunStatus.RUNNING)
    first.end("a", ended("a"), kept=10)
    first.close()
    again = Ledger(path)
    assert [(each.run_id, each.status) for each in again.list_unfinished()] == [("b", "running"), ("c", "accepted")]
    found = again.find("a")
    assert found is not None
    assert (found.request, found.outcome) == (None, ended("a"))
    again.close()


def test_two_processes_do_not_drive_the_same_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SRV-44: the second one says who has it."""
    monkeypatch.setattr(module, "_TRIES", 1)
    path = tmp_path / "team.sqlite"
    first = Ledger(path)
    with pytest.raises(RunExistsError, match="Another endpoint of that name"):
        Ledger(path)
    first.close()
    Ledger(path).close()


def test_runs_that_ended_are_kept_up_to_a_number() -> None:
    """S-SRV-44: the newest ones; what has not ended is kept in any case."""
    ledger = Ledger(None)
    for number in range(5):
        ledger.add(entry(str(number)))
    for number in (0, 1, 2, 4):
        ledger.end(str(number), ended(str(number)), kept=2)
    assert [each.run_id for each in ledger.page(RunFilter(), before=None, size=10)] == ["4", "3", "2"]
    assert ledger.page(RunFilter(tags={"n": "1"}), before=None, size=10) == []
    ledger.close()
