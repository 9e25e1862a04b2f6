"""What an endpoint accepted, in a file and in a real database: one contract; and what only a database can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ensemble_ray import RunExistsError, Schedule
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.serve.driving import ledger as postgres_ledger
from ensemble_ray.serve.driving.ledger import Document, LedgerEntry, RunLedger, open_ledger
from ensemble_ray.serve.schemas import NewRun, RunDetail, RunFilter, RunStatus
from tests.postgres_server import PostgresServer
from tests.serve.driving import driven
from tests.serve.scheduling import NOON as DAY
from tests.serve.scheduling import Desk, SetClock

NOW = datetime(2026, 1, 1, tzinfo=UTC)
Open = Callable[[str], RunLedger]


@pytest.fixture(params=["file", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens ledgers by the name of their endpoint, in one place for a test."""
    url = "" if request.param == "file" else request.getfixturevalue("postgres").empty_database()
    ledgers: list[RunLedger] = []

    def make(name: str) -> RunLedger:
        ledgers.append(open_ledger(StoreAddress(home=str(tmp_path), url=url), name))
        return ledgers[-1]

    yield make
    for each in ledgers:
        each.close()


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """An empty database."""
    return postgres.empty_database()


def entry(run_id: str, *, key: str | None = None, tags: dict[str, str] | None = None, at: float = 0.0) -> LedgerEntry:
    """A run that is accepted so many seconds later."""
    return LedgerEntry(
        run_id=run_id,
        key=key,
        digest="d",
        ensemble="team",
        request=NewRun(inputs={"topic": "\0 and é"}),
        tags=tags or {},
        tasks=1,
        workflow="sequential",
        status=RunStatus.ACCEPTED,
        created_at=NOW + timedelta(seconds=at),
    )


def ended(run_id: str) -> RunDetail:
    """How it ended."""
    return RunDetail(run_id=run_id, status=RunStatus.COMPLETED, ensemble="team", tags={}, created_at=NOW, ended_at=NOW)


def ids(ledger: RunLedger, size: int = 10, before: int | None = None, **wanted: object) -> list[str]:
    """Ids of a page."""
    return [each.run_id for each in ledger.page(RunFilter.model_validate(wanted), before=before, size=size)]


def test_what_was_accepted_is_there_when_it_is_opened_again(opened: Open) -> None:
    """S-SRV-44, S-SRV-45: as it was accepted; a request is gone when its run ended."""
    first = opened("shop")
    for run_id in ("a", "b", "c"):
        first.add(entry(run_id, key=f"key-{run_id}", tags={"n": run_id}))
    first.note("b", RunStatus.RUNNING)
    first.end("a", ended("a"), kept=10)
    first.close()
    again = opened("shop")
    assert [(each.run_id, each.status) for each in again.list_unfinished()] == [("b", "running"), ("c", "accepted")]
    kept, over = again.find_key("key-c"), again.find("a")
    assert kept is not None
    assert over is not None
    assert (kept.request, kept.tags, kept.created_at) == (entry("c").request, {"n": "c"}, NOW)
    assert (over.request, over.outcome, over.ended_at) == (None, ended("a"), NOW)
    assert again.find("d") is again.find_key("a") is None


def test_lists_are_filtered_and_come_in_pages(opened: Open) -> None:
    """S-SRV-21, S-SRV-22."""
    ledger = opened("shop")
    for number in range(5):
        ledger.add(entry(str(number), tags={"odd": str(number % 2), "a": "\0"}, at=number))
    ledger.note("4", RunStatus.RUNNING)
    assert ids(ledger, size=2) == ["4", "3"]
    (last,) = ledger.page(RunFilter(), before=None, size=2)[1:]
    assert ids(ledger, before=last.seq) == ["2", "1", "0"]
    assert ids(ledger, tags={"odd": "1", "a": "\0"}) == ["3", "1"]
    assert ids(ledger, status="running") == ["4"]
    assert ids(ledger, since=NOW + timedelta(seconds=3)) == ["4", "3"]
    assert ids(ledger, ensembles=["team", "\0"], size=1) == ["4"]
    assert ids(ledger, ensembles=[]) == []


def test_runs_that_ended_are_kept_up_to_a_number(opened: Open) -> None:
    """S-SRV-44: the newest ones, with their tags; what has not ended is kept in any case."""
    ledger = opened("shop")
    for number in range(5):
        ledger.add(entry(str(number), tags={"n": str(number)}))
    for number in (0, 1, 2, 4):
        ledger.end(str(number), ended(str(number)), kept=2)
    assert ids(ledger) == ["4", "3", "2"]
    assert ids(ledger, tags={"n": "1"}) == []


def test_names_that_a_database_cannot_hold_are_unknown_ones(opened: Open) -> None:
    """S-SRV-23: as ids in paths may be."""
    ledger = opened("shop")
    assert ledger.find("\0") is ledger.find_key("\0") is None


def test_endpoints_of_other_names_have_ledgers_of_their_own(opened: Open) -> None:
    """S-SRV-45."""
    shop, office = opened("shop"), opened("office")
    shop.add(entry("a", key="k"))
    office.add(entry("a", key="k"))
    shop.end("a", ended("a"), kept=1)
    assert [len(each.list_unfinished()) for each in (shop, office)] == [0, 1]


def test_another_process_has_it_only_when_it_was_let_go(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SRV-44, S-SRV-46: the second one is told who has it."""
    first = opened("shop")
    with monkeypatch.context() as patch:
        patch.setattr(postgres_ledger, "_SERVER_TRIES", 1)
        patch.setattr("ensemble_ray.serve.driving.ledger._TRIES", 1)
        with pytest.raises(RunExistsError, match=r"Another endpoint of .* \(process \d+ on"):
            opened("shop")
    first.close()  # a server lets go of the lock when it notices, which may be behind the next look
    opened("shop").add(entry("a"))


def test_a_run_is_kept_once_when_its_answer_was_lost(opened: Open) -> None:
    """S-SRV-46: the server had done it before its connection broke."""
    ledger = opened("shop")
    ledger.add(entry("a", tags={"n": "1"}))
    ledger.add(entry("a", tags={"n": "1"}))
    assert ids(ledger) == ids(ledger, tags={"n": "1"}) == ["a"]


def test_documents_are_stored_with_runs_and_by_themselves(opened: Open) -> None:
    """S-SRV-49: of this endpoint only, also after it was opened again."""
    ledger = opened("shop")
    ledger.add(entry("a"), Document(kind="hook", name="a", text="1"))
    ledger.put(Document(kind="day", name="b/2", text="2"), Document(kind="day", name="b/1", text="1"))
    ledger.put(Document(kind="day", name="b/2", text="3"), Document(kind="day", name="c", text="4"))
    ledger.end(
        "a", ended("a"), Document(kind="hook", name="a", text=None), Document(kind="hook", name="z", text="5"), kept=1
    )
    other = opened("office")
    other.put(Document(kind="day", name="d", text="6"))
    ledger.close()
    again = opened("shop")
    assert list(again.documents("day").items()) == [("b/1", "1"), ("b/2", "3"), ("c", "4")]
    assert again.documents("day", prefix="b/") == {"b/1": "1", "b/2": "3"}
    assert again.documents("hook") == {"z": "5"}
    assert other.documents("day") == {"d": "6"}


def test_documents_are_stored_in_a_database_of_an_earlier_version(url: str, postgres: PostgresServer) -> None:
    """S-SRV-49: it had no table for them."""
    open_ledger(StoreAddress(home="", url=url), "shop").close()
    with postgres.connection(url) as connection:
        connection.execute("DROP TABLE ensemble_ray_endpoint.documents")
    ledger = open_ledger(StoreAddress(home="", url=url), "shop")
    ledger.put(Document(kind="day", name="a", text="1"))
    assert ledger.documents("day") == {"a": "1"}
    ledger.close()


def test_it_goes_on_when_its_connection_is_lost(url: str, postgres: PostgresServer) -> None:
    """S-SRV-46: by a restart of the server; nothing is kept twice, nothing is lost."""
    ledger = open_ledger(StoreAddress(home="", url=url), "shop")
    ledger.add(entry("a"))
    postgres.end_backends(url)
    ledger.add(entry("b"))
    postgres.end_backends(url)
    ledger.end("a", ended("a"), kept=1)
    assert [each.run_id for each in ledger.list_unfinished()] == ["b"]
    ledger.close()


def test_one_that_was_cut_off_changes_nothing_when_it_comes_back(url: str, postgres: PostgresServer) -> None:
    """S-SRV-46: its successor has the ledger, and later another one; the lock alone would let it write."""
    old = open_ledger(StoreAddress(home="", url=url), "shop")
    old.add(entry("a"))
    postgres.end_backends(url)
    new = open_ledger(StoreAddress(home="", url=url), "shop")
    with pytest.raises(RunExistsError, match="Another endpoint"):
        old.end("a", ended("a"), kept=1)
    new.close()
    with pytest.raises(RunExistsError, match="Another endpoint"):
        old.end("a", ended("a"), kept=1)
    old.close()
    last = open_ledger(StoreAddress(home="", url=url), "shop")
    assert [each.run_id for each in last.list_unfinished()] == ["a"]
    last.close()


async def test_a_schedule_continues_with_what_the_ledger_stores(opened: Open, tmp_path: Path, home: str) -> None:
    """S-SCH-21, S-SCH-41: runs, history and processed files of an earlier process, also of odd names."""
    del home
    folder = tmp_path / "inbox"
    folder.mkdir()
    (folder / "a/b %_é 'x'.txt".replace("/", ":")).write_text("a", encoding="utf-8")
    desk = Desk()
    team = desk.team(hourly=Schedule(every="1h"), inbox=Schedule(folder=folder, input="text"))
    ids: list[str] = []
    for restart in range(2):
        clock = SetClock(DAY + timedelta(hours=restart))
        async with driven(team, ledger=opened("shop"), clock=clock) as runs:
            await clock.move(60)
            await clock.move(3500)
            await clock.move(40)
            for _ in range(1 + (restart == 0)):
                await desk.next()
            ids = [each.run_id for each in (await runs.list(RunFilter())).runs]
            for each in ids:
                await runs.wait(each, 60)
            history = (await runs.schedule("team", "hourly")).history
            assert len(history) == restart + 1
    assert len(ids) == 3
    assert desk.is_idle
