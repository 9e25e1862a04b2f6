"""Schedules of an endpoint: their runs, their state in the ledger, and their routes."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import File, Schedule, ValidationError
from ensemble_ray.access.admission import Right
from ensemble_ray.errors import EnsembleError
from ensemble_ray.serve.app import EndpointOptions, EndpointPlace, app, serve_until_interrupted
from ensemble_ray.serve.catalog import served_team
from ensemble_ray.serve.driving import schedules
from ensemble_ray.serve.driving.driven_runs import DrivenRuns
from ensemble_ray.serve.driving.ledger import Document, Ledger, LedgerEntry
from ensemble_ray.serve.driving.requests import EndpointLimits
from ensemble_ray.serve.driving.schedule_rules import SeenFile
from ensemble_ray.serve.schemas import NewRun, RunFilter, ScheduleDetail
from tests.serve.conftest import Connect
from tests.serve.driving import driven
from tests.serve.keys import guarded, make_key
from tests.serve.scheduling import NOON, Desk, SetClock

MINUTE = 60


async def history(runs: DrivenRuns, name: str) -> list[tuple[str | None, str, int]]:
    """Status or reason of the entries of a schedule, newest first, and how many times they stand for."""
    found = await runs.schedule("team", name)
    return [(each.status, each.reason, each.times) for each in found.history]


async def listed(runs: DrivenRuns, **tags: str) -> list[str]:
    """Ids of the runs with these tags, newest first."""
    return [each.run_id for each in (await runs.list(RunFilter(tags=tags))).runs]


async def test_each_time_starts_a_run_with_the_name_of_its_schedule() -> None:
    """S-SCH-20: the id is made of name and time; an input receives the time."""
    desk, clock = Desk(), SetClock()
    nightly = Schedule(cron="5 13 * * *", timezone="Europe/Berlin", input="text", tags={"kind": "report"})
    async with driven(desk.team(nightly=nightly), clock=clock) as runs:
        (before,) = await runs.schedules()
        assert (before.next_at, before.last, before.is_paused) == (NOON + timedelta(minutes=5), None, False)
        await clock.move(5 * MINUTE)
        assert (await desk.next()).description == "Read 2026-01-01T13:05:00+01:00"
        (run_id,) = await listed(runs, schedule="nightly", kind="report")
        assert run_id.startswith("nightly-20260101T120500Z-")
        assert (await runs.wait(run_id, 60)).status == "completed"
        (after,) = await runs.schedules()
        assert after.next_at == NOON + timedelta(days=1, minutes=5)
        assert after.last is not None
        assert (after.last.run_id, after.last.status, after.last.trigger) == (run_id, "completed", "time")
        await clock.move(24 * 60 * MINUTE)
        assert len(await listed(runs)) == 2


async def test_a_restart_neither_repeats_nor_loses_a_run(tmp_path: Path) -> None:
    """S-SCH-21, S-SCH-23: the state of a schedule is in the ledger; times in between are missed."""
    desk, ledger = Desk(), tmp_path / "ledger"
    team = desk.team(hourly=Schedule(every="1h", overlap="queue", missed="all"))
    clock = SetClock()
    async with driven(team, ledger=ledger, clock=clock) as runs:
        await clock.move(60 * MINUTE)
        await desk.next()
        (first,) = await listed(runs)
        await runs.wait(first, 60)
    async with driven(team, ledger=ledger, clock=SetClock(NOON + timedelta(minutes=61))) as runs:
        assert await listed(runs) == [first]
    later = SetClock(NOON + timedelta(hours=3, minutes=30))
    async with driven(team, ledger=ledger, clock=later) as runs:
        for _ in range(2):
            await desk.next()
        second = await runs.schedule("team", "hourly")
        ids = [str(each.run_id) for each in second.history]
        for each in ids:
            await runs.wait(each, 60)
        assert [each.split("-")[1] for each in ids] == ["20260101T150000Z", "20260101T140000Z", "20260101T130000Z"]
        assert ids == await listed(runs)


class LossyLedger(Ledger):
    """Stores what it should, and says that it failed, once."""

    is_lost = False

    def add(self, entry: LedgerEntry, *documents: Document) -> None:
        super().add(entry, *documents)
        if not self.is_lost:
            self.is_lost = True
            raise EnsembleError("the answer was lost")


async def test_a_lost_answer_of_the_ledger_starts_no_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SCH-21, S-SCH-31: the same run is asked for again, and found."""
    monkeypatch.setattr("tests.serve.driving.Ledger", LossyLedger)
    desk, clock = Desk(), SetClock()
    async with driven(desk.team(hourly=Schedule(every="1h")), clock=clock) as runs:
        await clock.move(60 * MINUTE)
        (info,) = await runs.schedules()
        assert info.problem == "the answer was lost (EnsembleError)"
        await clock.move(5)
        (info,) = await runs.schedules()
        assert info.problem is None
        assert len(await listed(runs)) == 1
        assert len((await runs.schedule("team", "hourly")).history) == 1


async def test_a_time_is_skipped_when_a_run_is_open_and_a_later_one_is_not() -> None:
    """S-SCH-24, S-SCH-29: the history says why."""
    desk, clock = Desk(is_held=True), SetClock()
    async with driven(desk.team(hourly=Schedule(every="1h")), clock=clock) as runs:
        for _ in range(3):
            await clock.move(60 * MINUTE)
        await desk.next()
        (first,) = await listed(runs)
        assert await history(runs, "hourly") == [(None, f"Run {first} was still open", 2), ("running", "", 1)]
        desk.let_go()
        await runs.wait(first, 60)
        await clock.move(60 * MINUTE)
        await desk.next()
        desk.let_go()


async def test_a_time_that_waits_starts_when_the_earlier_run_ends() -> None:
    """S-SCH-24: without another look at the clock."""
    desk, clock = Desk(is_held=True), SetClock()
    async with driven(desk.team(hourly=Schedule(every="1h", overlap="queue")), clock=clock) as runs:
        await clock.move(60 * MINUTE)
        await clock.move(60 * MINUTE)
        await desk.next()
        assert (await runs.schedules())[0].waiting == 1
        assert desk.is_idle
        desk.let_go()
        await desk.next()
        desk.let_go()
        assert len(await listed(runs)) == 2


async def test_a_later_time_cancels_the_open_run() -> None:
    """S-SCH-24."""
    desk, clock = Desk(is_held=True), SetClock()
    async with driven(desk.team(hourly=Schedule(every="1h", overlap="replace")), clock=clock) as runs:
        await clock.move(60 * MINUTE)
        await desk.next()
        (first,) = await listed(runs)
        await clock.move(60 * MINUTE)
        desk.let_go()
        assert (await runs.wait(first, 60)).status == "cancelled"
        await desk.next()
        desk.let_go()
        assert len(await listed(runs)) == 2


async def test_a_time_is_not_lost_when_the_queue_of_the_team_is_full() -> None:
    """S-SCH-25: it is tried again after 5 s; the list says what is wrong."""
    desk, clock = Desk(is_held=True), SetClock()
    limits = EndpointLimits(max_running=1, max_queued=0)
    async with driven(desk.team(hourly=Schedule(every="1h")), clock=clock, limits=limits) as runs:
        other = await runs.start(NewRun(inputs={}))
        await desk.next()
        await clock.move(60 * MINUTE)
        (info,) = await runs.schedules()
        assert "1 running and 0 queued runs" in str(info.problem)
        assert (info.waiting, info.last) == (1, None)
        desk.let_go()
        await runs.wait(other.run_id, 60)
        await clock.move(5)
        await desk.next()
        desk.let_go()
        assert (await runs.schedules())[0].problem is None


async def test_a_time_whose_run_is_refused_is_in_the_history() -> None:
    """S-SCH-26: it is not tried again."""
    desk, clock = Desk(), SetClock()
    schedule = Schedule(every="1h", inputs={"text": {"file": "https://example.org/a"}})
    async with driven(desk.team(hourly=schedule), clock=clock) as runs:
        await clock.move(60 * MINUTE)
        await clock.move(60 * MINUTE)
        reason = "inputs.text: the content of an attachment must be a data URL"
        assert await history(runs, "hourly") == [(None, reason, 2)]
        assert await listed(runs) == []


async def test_a_paused_schedule_starts_no_runs_until_it_is_resumed(tmp_path: Path) -> None:
    """S-SCH-27: also after a restart; the times of the pause are not made up for."""
    desk, clock, ledger = Desk(), SetClock(), tmp_path / "ledger"
    team = desk.team(hourly=Schedule(every="1h"))
    async with driven(team, clock=clock, ledger=ledger) as runs:
        paused = await runs.pause_schedule("team", "hourly", is_paused=True)
        assert (paused.is_paused, paused.next_at) == (True, None)
        await clock.move(90 * MINUTE)
        assert await listed(runs) == []
    clock = SetClock(NOON + timedelta(minutes=150))
    async with driven(team, clock=clock, ledger=ledger) as runs:
        resumed = await runs.pause_schedule("team", "hourly", is_paused=False)
        assert (resumed.is_paused, resumed.next_at) == (False, NOON + timedelta(hours=3))
        await clock.move(30 * MINUTE)
        await desk.next()
        assert len(await listed(runs)) == 1


async def test_a_run_starts_now_in_addition_to_the_times() -> None:
    """S-SCH-28: also during a pause; the repeated call of a replica starts no second one."""
    desk, clock = Desk(), SetClock()
    async with driven(desk.team(hourly=Schedule(every="1h", input="text")), clock=clock) as runs:
        await runs.pause_schedule("team", "hourly", is_paused=True)
        first = await runs.run_schedule("team", "hourly", run_id="now")
        await clock.move(10)
        assert (
            await runs.run_schedule("team", "hourly", run_id="now")
            == first.model_copy(update={"status": (await runs.get("now")).status})
            or first
        )
        assert (await desk.next()).description == "Read 2026-01-01T12:00:00+00:00"
        assert await listed(runs, schedule="hourly") == ["now"]
        (entry,) = (await runs.schedule("team", "hourly")).history
        assert (entry.run_id, entry.trigger) == ("now", "manual")


# Folders.


def put(folder: Path, name: str, text: str, *, at: int = 1_000_000) -> Path:
    """Write a file with that time."""
    file = folder / name
    file.write_text(text, encoding="utf-8")
    os.utime(file, (at, at))
    return file


async def test_each_new_file_starts_a_run_once(tmp_path: Path) -> None:
    """S-SCH-40, S-SCH-41: oldest first, after two equal looks; also after a restart."""
    desk, ledger, folder = Desk(), tmp_path / "ledger", tmp_path / "inbox"
    folder.mkdir()
    put(folder, "b.txt", "b", at=2_000_000)
    put(folder, "a.txt", "a", at=3_000_000)
    put(folder, ".hidden.txt", "-")
    put(folder, "a.pdf", "-")
    (folder / "link.txt").symlink_to(folder / "a.txt")
    (folder / "folder.txt").mkdir()
    team = desk.team(inbox=Schedule(folder=folder, pattern="*.txt", input="text"))
    clock = SetClock()
    limits = EndpointLimits(max_running=1)
    async with driven(team, clock=clock, ledger=ledger, limits=limits) as runs:
        await clock.move(0.5)
        assert desk.is_idle
        await clock.move(10)
        assert [(await desk.next()).description for _ in range(2)] == [f"Read {folder}/b.txt", f"Read {folder}/a.txt"]
        put(folder, "c.txt", "c")
        await clock.move(10)
        put(folder, "c.txt", "longer")
        await clock.move(10)
        assert desk.is_idle
        await clock.move(10)
        assert (await desk.next()).description == f"Read {folder}/c.txt"
        for each in await listed(runs):
            await runs.wait(each, 60)
        found = await runs.schedule("team", "inbox")
        assert [(each.file, each.trigger, each.status) for each in found.history] == [
            (name, "file", "completed") for name in ("c.txt", "a.txt", "b.txt")
        ]
    put(folder, "a.txt", "changed")
    clock = SetClock(NOON + timedelta(hours=1))
    async with driven(team, clock=clock, ledger=ledger) as runs:
        for _ in range(3):
            await clock.move(10)
        assert desk.is_idle
        assert len(await listed(runs)) == 3


async def test_a_changed_file_starts_another_run_when_the_schedule_says_so(tmp_path: Path) -> None:
    """S-SCH-41."""
    desk, clock = Desk(), SetClock()
    file = put(tmp_path, "a.txt", "a")
    schedule = Schedule(folder=tmp_path, pattern="*.txt", input="text", changed="run", every=5)
    async with driven(desk.team(inbox=schedule), clock=clock) as runs:
        for text in ("a", "bb", "cc"):
            put(tmp_path, "a.txt", text, at=len(text) * 1000 + ord(text[0]))
            await clock.move(5)
            await clock.move(5)
            assert (await desk.next()).description == f"Read {file}"
        assert len(await listed(runs)) == 3


async def test_no_file_is_lost_when_the_queue_of_the_team_is_full(tmp_path: Path) -> None:
    """S-SCH-42: files wait in the folder."""
    desk, clock = Desk(is_held=True), SetClock()
    for number in range(4):
        put(tmp_path, f"{number}.txt", "-", at=1000 + number)
    team = desk.team(inbox=Schedule(folder=tmp_path, pattern="*.txt", input="text"))
    async with driven(team, clock=clock, limits=EndpointLimits(max_running=1, max_queued=1)) as runs:
        await clock.move(10)
        for number in range(4):
            assert (await desk.next()).description == f"Read {tmp_path}/{number}.txt"
            accepted = (await listed(runs))[::-1]
            assert len(accepted) == min(4, number + 2)
            desk.let_go()
            await runs.wait(accepted[number], 60)
            await clock.move(10)
        assert (await runs.schedules())[0].problem is None


async def test_a_file_is_attached_when_the_schedule_says_so(tmp_path: Path) -> None:
    """S-SCH-43: its content is stored with the request; an empty file is skipped, with the reason."""
    desk, clock = Desk(), SetClock()
    put(tmp_path, "a.md", "High water at noon", at=1000)
    put(tmp_path, "b.md", "", at=2000)
    schedule = Schedule(folder=tmp_path, pattern="*.md", input="text", attach=True)
    async with driven(desk.team(inbox=schedule), clock=clock) as runs:
        await clock.move(10)
        read = await desk.next()
        assert read.description == "Read a.md"
        (attached,) = read.attachments
        assert (attached.name, attached.data) == ("a.md", b"High water at noon")
        await clock.move(10)
        empty, run = (await runs.schedule("team", "inbox")).history
        assert (empty.file, empty.run_id, empty.reason) == ("b.md", None, "File 'b.md' is empty")
        assert run.file == "a.md"


async def test_a_folder_that_is_away_is_reported_until_it_is_back(tmp_path: Path) -> None:
    """S-SCH-44: what was started is not started again."""
    desk, clock, folder = Desk(), SetClock(), tmp_path / "inbox"
    folder.mkdir()
    put(folder, "a.txt", "a")
    async with driven(desk.team(inbox=Schedule(folder=folder, input="text")), clock=clock) as runs:
        await clock.move(10)
        await desk.next()
        folder.rename(tmp_path / "away")
        await clock.move(10)
        (info,) = await runs.schedules()
        assert info.problem == f"Cannot list {folder}: No such file or directory"
        (tmp_path / "away").rename(folder)
        await clock.move(10)
        await clock.move(10)
        assert (await runs.schedules())[0].problem is None
        assert desk.is_idle


async def test_a_folder_that_does_not_answer_stops_no_other_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-SCH-44: a network disk may hang; it is asked once."""
    asked: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()

    def hang(_: Schedule) -> list[SeenFile]:
        held = threading.Event()
        asked.put(held)
        held.wait(60)
        return [SeenFile("a.txt", 1, 1)]

    monkeypatch.setattr(schedules, "list_files", hang)
    monkeypatch.setattr(schedules, "_LIST_S", 0.05)
    desk, clock = Desk(), SetClock()
    team = desk.team(hourly=Schedule(every="1h"), inbox=Schedule(folder=tmp_path, input="text"))
    async with driven(team, clock=clock) as runs:
        await clock.move(60 * MINUTE)
        await desk.next()
        await clock.move(10)
        inbox = (await runs.schedules())[1]
        assert inbox.problem == f"{tmp_path} does not answer"
        (await asyncio.to_thread(asked.get)).set()
        assert asked.empty()


async def test_many_files_are_started_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SCH-42: the other schedules have their turn between them."""
    monkeypatch.setattr(schedules, "_MOST_FILES", 2)
    desk, clock = Desk(), SetClock()
    for number in range(5):
        put(tmp_path, f"{number}.txt", "-", at=1000 + number)
    team = desk.team(inbox=Schedule(folder=tmp_path, pattern="*.txt", input="text"))
    async with driven(team, clock=clock, limits=EndpointLimits(max_running=1)) as runs:
        await clock.move(10)
        assert [(await desk.next()).description[-5:] for _ in range(5)] == [f"{number}.txt" for number in range(5)]
        for each in await listed(runs):
            await runs.wait(each, 60)


async def test_a_state_that_cannot_be_read_stops_no_endpoint(tmp_path: Path) -> None:
    """S-SCH-22: the schedule begins now, as a new one."""
    place = tmp_path / "ledger"
    ledger = Ledger(place)
    ledger.put(Document(kind=schedules.STATES, name="team/hourly", text='{"decided_until": 5}'))
    ledger.close()
    desk, clock = Desk(), SetClock()
    async with driven(desk.team(hourly=Schedule(every="1h")), clock=clock, ledger=place):
        await clock.move(60 * MINUTE)
        await desk.next()


# Before a process starts.


@pytest.mark.parametrize(
    ("schedule", "text", "problem"),
    [
        (Schedule(every=60, inputs={"txt": "a"}), "Read {text}", "unknown inputs [txt]. Known: [text]"),
        (Schedule(every=60), "Read {text} {day}", "schedule 'a': inputs are missing: [day]"),
        (Schedule(folder="/srv", input="file"), "Read {text}", "unknown inputs [file]"),
    ],
)
def test_inputs_that_do_not_fit_the_team_are_refused(schedule: Schedule, text: str, problem: str) -> None:
    """S-SCH-9: before anything is served."""
    with pytest.raises(ValidationError) as refused:
        served_team("letters", Desk(text=text).team(a=schedule))
    assert problem in str(refused.value)


def test_a_file_cannot_choose_the_path_of_an_attachment() -> None:
    """S-SCH-9: a template would read any path that the name of a file contains."""
    team = Desk().team(a=Schedule(folder="/srv", input="text"))
    task = team.tasks[0].replace(attachments=[File("{text}")])
    with pytest.raises(ValidationError, match=r"must not contain '\{text\}'"):
        served_team("letters", team.replace(tasks=[task]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A team file without schedules."""
    made = tmp_path / "letters.yaml"
    made.write_text("llm: openai:any\ntasks:\n  read: {description: 'Read {text}'}\n", encoding="utf-8")
    return made


@pytest.mark.parametrize(
    ("schedules", "problem"),
    [
        ({"orders": {"a": {"every": 60}}}, "schedules: there is no team 'orders'. There are: [letters]"),
        ({"letters": {"a": {"cron": "daily"}}}, "schedules.letters.a: Schedule cron 'daily' must have five fields"),
        ({"letters": {"a": {"evry": 60}}}, "schedules.letters.a: "),
        ({"letters": {"a": 60}}, "schedules.letters.a must be an object"),
        ({"letters": {"a": {"every": 60}}}, "Team 'letters': schedule 'a': inputs are missing: [text]"),
        ({"letters": {"a/b": {"every": 60, "input": "text"}}}, "a name must have 1 to 64"),
    ],
)
def test_schedules_of_the_operator_are_checked_before_anything_is_served(
    file: Path, schedules: Any, problem: str
) -> None:
    """S-SCH-8."""
    with pytest.raises(ValidationError) as refused:
        app(EndpointOptions(ensembles=(str(file),), schedules=schedules))
    assert problem in str(refused.value)


def test_a_folder_that_does_not_exist_is_refused_before_ray_starts(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-SCH-10: where the endpoint itself runs."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    inbox = {"folder": str(tmp_path / "none"), "input": "text"}
    options = {"ensembles": [str(file)], "schedules": {"letters": {"inbox": inbox}}}
    with pytest.raises(ValidationError, match=r"Team 'letters': schedule 'inbox': there is no folder '.*none'"):
        serve_until_interrupted(options, EndpointPlace(host="127.0.0.1", port=0), name="a", teams=[])


# Routes.


async def test_routes_list_pause_resume_and_run_schedules(connect: Connect) -> None:
    """S-SCH-50."""
    desk, clock = Desk(), SetClock()
    teams = {"letters": desk.team(hourly=Schedule(every="1h")), "orders": desk.team()}
    async with connect(teams, clock=clock) as client:
        (info,) = (await client.get("/schedules")).json()["schedules"]
        assert (info["ensemble"], info["name"], info["every_s"]) == ("letters", "hourly", 3600)
        assert info["next_at"] == "2026-01-01T13:00:00Z"
        for _ in range(2):
            paused = await client.post("/schedules/letters/hourly/pause")
            assert (paused.status_code, paused.json()["is_paused"]) == (200, True)
        assert (await client.post("/schedules/letters/hourly/resume")).json()["is_paused"] is False
        begun = await client.post("/schedules/letters/hourly/run")
        run_id = begun.json()["run_id"]
        assert (begun.status_code, begun.headers["location"]) == (202, f"/runs/{run_id}")
        await desk.next()
        shown = ScheduleDetail.model_validate((await client.get("/schedules/letters/hourly")).json())
        assert [each.run_id for each in shown.history] == [run_id]
        (run,) = (await client.get("/runs", params={"tag": "schedule:hourly"})).json()["runs"]
        assert run["run_id"] == run_id


async def test_routes_refuse_what_does_not_exist(connect: Connect, tmp_path: Path) -> None:
    """S-SCH-50: unknown teams and schedules, and a run of a folder without a file."""
    team = Desk().team(inbox=Schedule(folder=tmp_path, input="text"))
    async with connect(team, clock=SetClock()) as client:
        for path, code in (("team/none", "SCHEDULE_NOT_FOUND"), ("none/inbox", "ENSEMBLE_NOT_FOUND")):
            for answer in (
                await client.get(f"/schedules/{path}"),
                await client.post(f"/schedules/{path}/pause"),
                await client.post(f"/schedules/{path}/run"),
            ):
                assert (answer.status_code, answer.json()["code"]) == (404, code)
        needs_file = await client.post("/schedules/team/inbox/run")
        assert (needs_file.status_code, needs_file.json()["code"]) == (409, "SCHEDULE_NEEDS_FILE")


async def test_keys_see_the_schedules_of_their_teams_and_need_the_right_to_run(home: str) -> None:
    """S-SCH-50: reading needs `read`, all else `run`; schedules of other teams do not exist."""
    teams = {name: Desk().team(daily=Schedule(cron="0 3 * * *")) for name in ("letters", "orders")}
    async with guarded(Path(home), teams) as endpoint:
        reader = make_key(endpoint.file, name="reader", teams=["letters"], rights=[Right.READ])
        runner = make_key(endpoint.file, name="runner", teams=["letters"], rights=[Right.RUN])
        client = endpoint.client
        shown = (await client.get("/schedules", headers=reader)).json()["schedules"]
        assert [each["ensemble"] for each in shown] == ["letters"]
        assert (await client.get("/schedules", headers=runner)).status_code == 403
        for action in ("pause", "resume", "run"):
            path = f"/schedules/letters/daily/{action}"
            assert (await client.post(path, headers=reader)).status_code == 403
            assert (await client.post(path, headers=runner)).status_code in {200, 202}
            assert (await client.post(path.replace("letters", "orders"), headers=runner)).status_code == 404


async def test_replaced_schedules_continue_with_their_states() -> None:
    """S-SCH-30: a removed one starts no run, and is paused as before when it returns."""
    desk, clock = Desk(), SetClock()
    hourly, daily = Schedule(every="1h"), Schedule(every="1d")
    async with driven(desk.team(hourly=hourly, daily=daily), clock=clock) as runs:
        await runs.pause_schedule("team", "hourly", is_paused=True)
        await runs._schedules.declare("team", {"daily": Schedule(every="2h")})
        await clock.move(1)
        await clock.move(2 * 60 * MINUTE)
        await desk.next()
        (run_id,) = await listed(runs)
        assert run_id.startswith("daily-20260101T140000Z-")
        await runs._schedules.declare("team", {"hourly": hourly})
        (back,) = await runs.schedules()
        assert (back.name, back.is_paused) == ("hourly", True)
