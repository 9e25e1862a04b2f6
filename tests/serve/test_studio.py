"""The page over an endpoint's runs, behind its keys."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from ensemble_ray import Agent, Ensemble, Image, Review, Schedule, Task
from ensemble_ray.access.admission import KeyPolicy, Right
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.serve.schemas import RunFilter, RunPage, RunStatus, RunSummary
from ensemble_ray.serve.studio import _AcceptedRuns
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.values.metrics import ClusterDescription
from tests.ensemble_ray.studio.test_actors_view import cluster, process
from tests.media import PNG

from .keys import guarded, make_key
from .scheduling import Desk
from .teams import KEY, KEY_VARIABLE
from .versioned import loaded, write

API = "/studio/api/studio"


def team() -> Ensemble:
    """One task."""
    agent = Agent(role="Speaker", goal="Speak", llm=ScriptedModel("yes"))
    return Ensemble(tasks=[Task(name="say", description="Say it", expected_output="x", agent=agent)])


def asking_team() -> Ensemble:
    """A task that is written without a model, with a gate behind it."""

    def write(context: object) -> str:
        return "a draft"

    task = Task(name="draft", description="d", expected_output="x", handler=write, review=Review.required("Ok?"))
    return Ensemble(tasks=[task], review_wait="detach")


class HeldWork:
    """A task that goes on when the test lets it."""

    def __init__(self) -> None:
        self.has_begun, self.goes_on = threading.Event(), threading.Event()

    def team(self) -> Ensemble:
        """A team of that task."""

        def work(_: object) -> str:
            self.has_begun.set()
            self.goes_on.wait(60)
            return "done"

        return Ensemble(tasks=[Task(name="wait", description="d", expected_output="x", handler=work)])


@pytest.fixture
def held() -> Iterator[HeldWork]:
    """Work that goes on at the end, whatever became of the test."""
    made = HeldWork()
    yield made
    made.goes_on.set()


def names(actors: dict[str, Any]) -> list[str]:
    """The names of all processes."""
    return [each["name"] for node in actors["nodes"] for each in node["processes"]]


async def test_pages_need_no_key_and_data_does(records: Path) -> None:
    """S-STU-80, S-STU-82: files are open, and there is nothing of a run in them; each route asks for its right."""
    async with guarded(records, team(), KeyPolicy.REQUIRED, has_studio=True) as served:
        client = served.client
        reading, none = (
            make_key(served.file, "reads", rights=[Right.READ]),
            make_key(served.file, "r", rights=[Right.RUN]),
        )
        for path in (f"{API}/info", f"{API}/runs", f"{API}/reviews", f"{API}/nowhere", "/studio/api/x"):
            assert (await client.get(path)).status_code == 401, path
        assert (await client.get(f"{API}/info", headers=reading)).json()["actions"] == ["cancel", "decide"]
        assert (await client.get(f"{API}/runs", headers=none)).status_code == 403
        for path in ("/studio/nothing.js", "/studio/../x"):
            assert (await client.get(path)).status_code in {401, 404}
        assert (await client.post(f"{API}/runs/x/cancel", headers=reading)).status_code == 403
        assert (await client.delete(f"{API}/runs/x", headers=reading)).status_code == 403
        assert (await client.post(f"{API}/reviews/x/y", headers=reading, json={"decision": "exit"})).status_code == 403


async def test_callers_see_the_runs_of_their_teams(records: Path) -> None:
    """S-STU-81, S-STU-263: a run of another team is not there, in lists, trends and by its id."""
    async with guarded(records, {"a": team(), "b": team()}, KeyPolicy.REQUIRED, has_studio=True) as served:
        client = served.client
        everyone = make_key(served.file, "all")
        only_a = make_key(served.file, "ann", teams=["a"])
        for name in ("a", "b"):
            body = {"ensemble": name, "run_id": f"of-{name}"}
            await client.post("/runs", json=body, headers={**everyone, "prefer": "wait=30"})
        found = (await client.get(f"{API}/runs", headers=only_a)).json()["runs"]
        assert [run["run_id"] for run in found] == ["of-a"]
        assert (await client.get(f"{API}/trends", headers=only_a)).json()["runs"] == 1
        assert (await client.get(f"{API}/runs/of-a/steps", headers=only_a)).status_code == 200
        for path in (
            "runs/of-b",
            "runs/of-b/steps",
            "runs/of-b/steps/say%230",
            "runs/of-b/live",
            "compare?a=of-a&b=of-b",
        ):
            assert (await client.get(f"{API}/{path}", headers=only_a)).status_code == 404, path
        assert (await client.post(f"{API}/runs/of-b/cancel", headers=only_a)).status_code == 404
        assert (await client.delete(f"{API}/runs/of-b", headers=only_a)).status_code == 404
        assert {r["run_id"] for r in (await client.get(f"{API}/runs", headers=everyone)).json()["runs"]} == {
            "of-a",
            "of-b",
        }


async def test_attachments_need_the_rights_of_their_runs(records: Path) -> None:
    """S-ATT-72: at an endpoint as in other data of a run: no key, no right, another team."""
    viewer = Agent(role="Viewer", goal="Look", llm=ScriptedModel("a dot", reads=["image"]))
    look = Task(name="look", description="Look", agent=viewer, attachments=Image(PNG))
    teams = {"a": team(), "b": Ensemble(tasks=[look])}
    async with guarded(records, teams, KeyPolicy.REQUIRED, has_studio=True) as served:
        client = served.client
        everyone = make_key(served.file, "all")
        body = {"ensemble": "b", "run_id": "of-b"}
        await client.post("/runs", json=body, headers={**everyone, "prefer": "wait=30"})
        path = f"{API}/runs/of-b/attachments/{Image(PNG).sha256}"
        answer = await client.get(path, headers=everyone)
        assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, PNG, "image/png")
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers=make_key(served.file, "r", rights=[Right.RUN]))).status_code == 403
        assert (await client.get(path, headers=make_key(served.file, "ann", teams=["a"]))).status_code == 404


class ListedRuns:
    """An endpoint's list of runs, newest first, two a page; each page is given when the test lets it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[str | None] = []
        self.is_asked, self.goes_on = asyncio.Event(), asyncio.Event()
        self.goes_on.set()

    async def list(self, wanted: RunFilter, *, cursor: str | None, size: int) -> RunPage:
        """Return a page."""
        self.asked.append(cursor)
        self.is_asked.set()
        await self.goes_on.wait()
        first = self.count if cursor is None else int(cursor)
        named = [number for number in (first, first - 1) if number > 0]
        at = datetime(2026, 1, 1, tzinfo=UTC)
        runs = [
            RunSummary(
                run_id=f"run-{number}", status=RunStatus.COMPLETED, ensemble="a", tags={}, created_at=at, ended_at=at
            )
            for number in named
        ]
        return RunPage(runs=runs, next_cursor=str(first - 2) if first > 2 else None)


async def test_the_runs_of_a_key_are_listed_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-STU-81: at the same time one list; later only what is newer; whole again after a while, so that what was forgotten goes."""
    listed = ListedRuns(7)
    accepted = _AcceptedRuns(lambda: cast("RunService", listed), frozenset("a"))
    listed.goes_on.clear()
    asking = [asyncio.create_task(accepted.run_ids()) for _ in range(5)]
    await asyncio.wait_for(listed.is_asked.wait(), 30)
    asking[0].cancel()  # who leaves takes nothing from the others
    listed.goes_on.set()
    everything = {f"run-{number}" for number in range(1, 8)}
    assert all(found == everything for found in await asyncio.gather(*asking[1:]))
    assert await accepted.run_ids() == everything
    assert listed.asked == [None, "5", "3", "1"]

    monkeypatch.setattr("ensemble_ray.serve.studio._LASTING_S", -1.0)
    listed.asked.clear()
    listed.count = 9
    assert await accepted.run_ids() == everything | {"run-8", "run-9"}
    assert listed.asked == [None, "7"]
    monkeypatch.setattr("ensemble_ray.serve.studio._WHOLE_S", -1.0)
    listed.count = 2
    assert await accepted.run_ids() == {"run-1", "run-2"}


async def test_reviews_are_decided_by_the_endpoint(records: Path) -> None:
    """S-STU-82, S-STU-83: under the key's name; a second decision is 409; nothing is resumed or forked here."""
    async with guarded(records, asking_team(), KeyPolicy.REQUIRED, has_studio=True) as served:
        client, key = served.client, make_key(served.file, "ann")
        await client.post("/runs", json={"run_id": "asks"}, headers={**key, "prefer": "wait=30"})
        (review,) = (await client.get(f"{API}/reviews", headers=key)).json()["reviews"]
        path = f"{API}/reviews/asks/{review['gate_id']}"
        taken = await client.post(path, json={"decision": "approve"}, headers=key)
        assert (taken.status_code, taken.json()["decision"], taken.json()["decided_by"]) == (200, "approve", "ann")
        assert (await client.post(path, json={"decision": "exit"}, headers=key)).status_code == 409
        assert (await client.post(f"{API}/runs/asks/resume", headers=key)).json()["code"] == "NOT_HERE"
        assert (await client.delete(f"{API}/runs/asks", headers=key)).json()["code"] == "NOT_HERE"
        assert (await client.get(f"{API}/runs/asks/fork-preview?from=draft", headers=key)).json()["blocked"]


async def test_another_sites_page_changes_nothing(records: Path) -> None:
    """S-STU-81: where nobody needs a key, a page of another site is refused; programs send no origin."""
    async with guarded(records, team(), has_studio=True) as served:
        client = served.client
        await client.post("/runs", json={"run_id": "one"}, headers={"prefer": "wait=30"})
        assert len((await client.get(f"{API}/runs")).json()["runs"]) == 1
        for origin in ("http://evil.example", "null"):
            answer = await client.post(f"{API}/runs/one/cancel", headers={"origin": origin})
            assert (answer.status_code, answer.json()["code"]) == (403, "ORIGIN_NOT_ALLOWED")
        for headers in ({}, {"origin": "http://localhost"}):
            assert (await client.post(f"{API}/runs/one/cancel", headers=headers)).status_code == 409


async def test_processes_are_those_of_the_callers_runs(
    records: Path, monkeypatch: pytest.MonkeyPatch, held: HeldWork
) -> None:
    """S-STU-36, S-STU-37: a key learns of no others' but with the right `admin`, and of a run that is not its own nothing."""
    described = cluster(process("one", "of-a"), process("two", "of-b"))

    async def describe() -> ClusterDescription:
        return described

    monkeypatch.setattr("ensemble_ray.actors.driver.cluster.describe_cluster", describe)
    async with guarded(records, {"a": team(), "b": held.team()}, KeyPolicy.REQUIRED, has_studio=True) as served:
        client = served.client
        everyone, reads = make_key(served.file, "all"), make_key(served.file, "r", rights=[Right.READ], teams=["a"])
        await client.post("/runs", json={"ensemble": "a", "run_id": "of-a"}, headers={**everyone, "prefer": "wait=30"})
        await client.post("/runs", json={"ensemble": "b", "run_id": "of-b"}, headers=everyone)
        assert await asyncio.to_thread(held.has_begun.wait, 30)
        assert (await client.get(f"{API}/info", headers=reads)).json()["has_actors"]
        told = (await client.get(f"{API}/actors", headers=reads)).json()
        assert told["note"].endswith("Shown are the processes that work for runs of this key's teams.")
        assert names(told) == ["scheduler", "one"]
        assert (told["limiters"], told["breakers"], told["clusters"]) == ([], [], [])
        assert "of-b" not in json.dumps(told)
        whole = (await client.get(f"{API}/actors", headers=everyone)).json()
        assert {"scheduler", "one", "two", "rate_limiter"} < set(names(whole))
        assert whole["nodes"][-1]["processes"][0]["runs"][0]["run_id"] == "of-b"  # the endpoint, which owns it
        assert [each["name"] for each in whole["limiters"]] == ["busy", "calm"]
        assert (whole["clusters"], whole["note"]) == (["alpha:6379"], None)
        of_run = (await client.get(f"{API}/runs/of-b/actors", headers=everyone)).json()
        assert ("two" in names(of_run), "one" in names(of_run)) == (True, False)
        assert (await client.get(f"{API}/runs/of-b/actors", headers=reads)).status_code == 404
        held.goes_on.set()


async def test_versions_are_those_of_the_callers_teams(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-VER-9, S-VER-41: open runs are counted for keys of all teams; a page beside no endpoint has no teams."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    teams = {**loaded(write(tmp_path, "http://127.0.0.1:9/v1", "Hello")), "other": team()}
    async with guarded(records, teams, KeyPolicy.REQUIRED, has_studio=True) as served:
        everyone, one = make_key(served.file, "all"), make_key(served.file, "one", teams=["greeting"])
        await served.client.post("/drain", headers=everyone)
        found = [
            (await served.client.get(f"{API}/endpoint?versions=true", headers=key)).json() for key in (everyone, one)
        ]
        short = (await served.client.get(f"{API}/endpoint", headers=one)).json()
        assert (await served.client.get(f"{API}/info", headers=one)).json()["has_teams"] is True
        weak = make_key(served.file, "weak", rights=[Right.RUN])
        assert (await served.client.get(f"{API}/endpoint", headers=weak)).status_code == 403
    assert [[each["ensemble"] for each in state["teams"]] for state in found] == [["greeting", "other"], ["greeting"]]
    assert [(state["drain"], state["open_runs"]) for state in (*found, short)] == [
        ("drained", 0),
        ("drained", None),
        ("drained", None),
    ]
    assert ([each["share"] for each in found[0]["teams"][0]["versions"]], found[0]["teams"][1]["versions"]) == (
        [1.0],
        [],
    )
    assert short["teams"] == []


async def test_callers_control_the_schedules_of_their_teams(records: Path) -> None:
    """S-SCH-52: other schedules are not there; a schedule that waits for files cannot run now."""
    inbox = Schedule(folder=records, input="text")
    teams = {name: Desk().team(daily=Schedule(cron="0 3 * * *"), inbox=inbox) for name in ("a", "b")}
    async with guarded(records, teams, KeyPolicy.REQUIRED, has_studio=True) as served:
        client = served.client
        ann = make_key(served.file, "ann", teams=["a"], rights=[Right.READ, Right.RUN])
        reads = make_key(served.file, "reads", rights=[Right.READ])
        assert (await client.get(f"{API}/info", headers=ann)).json()["has_schedules"] is True
        found = (await client.get(f"{API}/schedules", headers=ann)).json()["schedules"]
        assert [(each["ensemble"], each["name"]) for each in found] == [("a", "daily"), ("a", "inbox")]
        assert len((await client.get(f"{API}/schedules", headers=reads)).json()["schedules"]) == 4
        assert (await client.post(f"{API}/schedules/a/daily/pause", headers=reads)).status_code == 403
        assert (await client.post(f"{API}/schedules/b/daily/pause", headers=ann)).status_code == 404
        assert (await client.post(f"{API}/schedules/a/daily/pause", headers=ann)).json() == {"run_id": None}
        assert (await client.get("/schedules/a/daily", headers=ann)).json()["is_paused"] is True
        refused = await client.post(f"{API}/schedules/a/inbox/run", headers=ann)
        assert (refused.status_code, refused.json()["code"]) == (409, "SCHEDULE_NEEDS_FILE")
        run_id = (await client.post(f"{API}/schedules/a/daily/run", headers=ann)).json()["run_id"]
        assert (await client.get(f"/runs/{run_id}", headers=ann)).json()["tags"] == {"schedule": "daily", "user": "ann"}
