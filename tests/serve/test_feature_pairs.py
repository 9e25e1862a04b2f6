"""Features of an endpoint together: schedules, versions, drains, webhooks, priorities, quotas, roles and options of requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import Ensemble, Schedule, TaskHandlerContext
from ensemble_ray.access.admission import Right
from ensemble_ray.process.concurrency import threads
from ensemble_ray.serve.driving.driven_runs import DrivenRuns
from ensemble_ray.serve.driving.requests import EndpointLimits
from ensemble_ray.serve.driving.versions import choose_version
from ensemble_ray.serve.schemas import NewDrain, NewRun, NewShare, NewVersion, RunFilter, RunPriority, RunStatus
from ensemble_ray.testing import ModelServer, ScriptedModel, ServedRequest
from tests.builders import task
from tests.serve.conftest import Connect
from tests.serve.driving import driven
from tests.serve.gates import Gate
from tests.serve.keys import guarded, make_key
from tests.serve.scheduling import NOON, Desk, SetClock
from tests.serve.teams import INPUTS, KEY, KEY_VARIABLE, pair
from tests.serve.test_roles import asking
from tests.serve.versioned import greet, loaded, write
from tests.serve.webhook_receiver import Receiver, rules

HOUR = 3600
HOURLY = "schedules: {hourly: {every: 1h, inputs: {who: Ann}}, old: {cron: '0 3 * * *', inputs: {who: Ben}}}"
CHANGED = "schedules: {hourly: {every: 1h, inputs: {who: Cem}}, new: {cron: '0 4 * * *', inputs: {who: Ben}}}"


class Model:
    """Answers with the greeting of the version, when it is let."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.is_open = threading.Event()
        self.is_open.set()
        self.is_asked = threading.Event()

    def __call__(self, request: ServedRequest) -> str:
        self.texts.append(request.text)
        self.is_asked.set()
        assert self.is_open.wait(60)
        return greet(request)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def models(model: Model) -> Iterator[ModelServer]:
    """The models' endpoint."""
    with ModelServer(model, api_key=KEY) as server:
        yield server


@pytest.fixture
def file(tmp_path: Path, models: ModelServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A team file that says Hello, with schedules."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return write(tmp_path, models.base_url, "Hello", more=HOURLY)


async def run_ids(runs: DrivenRuns, **tags: str) -> list[str]:
    """Ids of the runs with these tags, newest first."""
    return [each.run_id for each in (await runs.list(RunFilter(tags=tags))).runs]


async def names_of(runs: DrivenRuns) -> list[str]:
    return [each.name for each in await runs.schedules()]


async def ended_at_hour(runs: DrivenRuns, clock: SetClock, name: str) -> Any:
    """The run of the next hour, when it has ended."""
    await clock.move(HOUR)
    (run_id, *_) = await run_ids(runs, schedule=name)
    return await runs.wait(run_id, 60)


# Schedules and drains.


async def test_a_time_starts_its_run_after_the_drain_when_it_comes_during_it() -> None:
    """S-SCH-25, S-VER-1, S-VER-3: it delays no drain, and a later time is skipped meanwhile; a run on request is refused."""
    desk, clock = Desk(), SetClock()
    async with driven(desk.team(hourly=Schedule(every="1h")), clock=clock) as runs:
        await runs.drain(NewDrain())
        await clock.move(HOUR)
        await clock.move(HOUR)
        (info,) = await runs.schedules()
        drain = await runs.drain_info()
        assert await run_ids(runs) == []
        await runs.end_drain()
        await clock.move(5)
        await desk.next()
        history = (await runs.schedule("team", "hourly")).history
    assert (drain.state, info.waiting) == ("drained", 1)
    assert "draining" in str(info.problem)
    assert [(each.at - NOON, each.reason) for each in history] == [
        (timedelta(hours=1), ""),
        (timedelta(hours=2), "An earlier time still waited for its run"),
    ]


async def test_a_time_starts_its_run_in_the_next_deployment_when_the_drain_ends_in_a_stop(tmp_path: Path) -> None:
    """S-SCH-25, S-VER-6."""
    desk, clock, ledger = Desk(), SetClock(), tmp_path / "ledger"
    team = desk.team(nightly=Schedule(cron="0 13 * * *", missed="skip"))
    async with driven(team, clock=clock, ledger=ledger, deployed_at=1.0) as runs:
        await runs.drain(NewDrain())
        await clock.move(HOUR)
    clock = SetClock(NOON + timedelta(hours=2))
    async with driven(team, clock=clock, ledger=ledger, deployed_at=2.0) as runs:
        await desk.next()
        (run_id,) = await run_ids(runs, schedule="nightly")
        assert (await runs.wait(run_id, 60)).status is RunStatus.COMPLETED
    assert run_id.startswith("nightly-20260101T130000Z-")


async def test_a_file_waits_in_its_folder_while_the_endpoint_drains(tmp_path: Path) -> None:
    """S-SCH-42."""
    desk, clock = Desk(), SetClock()
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    async with driven(desk.team(inbox=Schedule(folder=tmp_path, input="text")), clock=clock) as runs:
        await runs.drain(NewDrain())
        await clock.move(10)
        await clock.move(10)
        (info,) = await runs.schedules()
        assert "draining" in str(info.problem)
        assert desk.is_idle
        await runs.end_drain()
        await clock.move(10)
        assert (await desk.next()).description == f"Read {tmp_path}/a.txt"


# Schedules and versions.


async def test_a_team_has_the_schedules_of_its_new_version_when_it_is_loaded_again(
    file: Path, models: ModelServer, model: Model, tmp_path: Path
) -> None:
    """S-SCH-30, S-VER-21: changed, removed and added ones; those of the operator stay."""
    operators = {"greeting": {"weekly": Schedule(cron="0 8 * * MON", inputs={"who": "Dora"})}}
    clock, ledger = SetClock(), tmp_path / "ledger"
    async with driven(loaded(file), clock=clock, schedules=operators, ledger=ledger, deployed_at=1.0) as runs:
        assert await names_of(runs) == ["hourly", "old", "weekly"]
        first = await ended_at_hour(runs, clock, "hourly")
        write(file.parent, models.base_url, "Servus", more=CHANGED)
        (new, old) = (await runs.load_version("greeting", NewVersion())).versions
        assert await names_of(runs) == ["hourly", "new", "weekly"]
        second = await ended_at_hour(runs, clock, "hourly")
        await runs.share_version("greeting", old.version, NewShare(share=1.0))
        assert await names_of(runs) == ["hourly", "old", "weekly"]
        third = await ended_at_hour(runs, clock, "hourly")
        history = (await runs.schedule("greeting", "hourly")).history
    async with driven(loaded(file), clock=SetClock(), schedules=operators, ledger=ledger, deployed_at=1.0) as runs:
        assert await names_of(runs) == ["hourly", "old", "weekly"]  # of the version with the share, not of the file
    assert [each.version for each in (first, second, third)] == [old.version, new.version, old.version]
    assert [each.result.raw for each in (first, second, third)] == ["Hello", "Servus", "Hello"]
    said = [next(line for line in text.splitlines() if "Say" in line) for text in model.texts]
    assert [each.rpartition(" to ")[2] for each in said] == ["Ann", "Cem", "Ann"]
    assert [each.run_id for each in history] == [each.run_id for each in (third, second, first)]


async def test_no_time_is_missed_while_the_team_has_no_such_schedule(file: Path, models: ModelServer) -> None:
    """S-SCH-30: a version without it is rolled back after its time."""
    clock = SetClock(NOON + timedelta(hours=14))
    async with driven(loaded(file), clock=clock) as runs:
        write(file.parent, models.base_url, "Servus", more=CHANGED)
        old = (await runs.load_version("greeting", NewVersion())).versions[1]
        await clock.move(2 * HOUR)
        await runs.share_version("greeting", old.version, NewShare(share=1.0))
        await clock.move(HOUR)
        found = await runs.schedule("greeting", "old")
        assert await run_ids(runs, schedule="old") == []
    assert (found.history, found.next_at) == ([], NOON + timedelta(days=1, hours=15))


async def test_the_share_of_a_version_decides_about_scheduled_runs_too(file: Path, models: ModelServer) -> None:
    """S-VER-31, S-SCH-30: by the id of the run; the schedules are those of the version with the larger share."""
    clock = SetClock()
    async with driven(loaded(file), clock=clock) as runs:
        write(file.parent, models.base_url, "Servus", more=CHANGED)
        listed = await runs.load_version("greeting", NewVersion(share=0.4))
        shares = {each.version: each.share for each in listed.versions}
        assert await names_of(runs) == ["hourly", "old"]
        ended = [await ended_at_hour(runs, clock, "hourly") for _ in range(10)]
    assert [each.version for each in ended] == [choose_version(shares, each.run_id) for each in ended]
    assert {each.version for each in ended} == shares.keys()
    assert all(each.tags == {"version": each.version, "schedule": "hourly"} for each in ended)


# Schedules and keys.


def _who(context: TaskHandlerContext[None]) -> str:
    return context.user or "nobody"


async def test_a_run_of_a_schedule_counts_for_the_key_that_asks_for_it(records: Path) -> None:
    """S-SCH-28, S-QUO-11, S-CTX-71: it has the user of the key, and is refused when the quota is used up; also in Studio."""
    team = Ensemble(tasks=[task("who", handler=_who)], schedules={"daily": Schedule(cron="0 3 * * *")})
    async with guarded(records, team, has_studio=True) as endpoint:
        path = "/schedules/team/daily"
        for name, own in (("ann", f"{path}/run"), ("ben", f"/studio/api/studio{path}/run")):
            key = make_key(endpoint.file, name, quotas=["runs=1/day"])
            accepted = await endpoint.client.post(own, headers=key, json={})
            assert accepted.status_code in {200, 202}, accepted.text
            run_id = accepted.json()["run_id"]
            body = {"ensemble": "team", "run_id": run_id, "tags": {"schedule": "daily"}}
            ended = (await endpoint.client.post("/runs?wait=60", headers=key, json=body)).json()
            assert (ended["result"]["raw"], ended["tags"]) == (name, {"schedule": "daily", "user": name})
            refused = await endpoint.client.post(own, headers=key, json={})
            assert (refused.status_code, refused.json()["code"]) == (429, "QUOTA_EXCEEDED")
            used = (await endpoint.client.get("/quota", headers=key)).json()["keys"]
            assert {each["key"]: each["quotas"][0]["used"] for each in used}[name] == "1"
        reader = make_key(endpoint.file, "reader", rights=[Right.READ])
        history = (await endpoint.client.get(path, headers=reader)).json()["history"]
    assert [each["trigger"] for each in history] == ["manual", "manual"]


# Webhooks.


async def test_the_run_of_a_schedule_is_reported_when_the_operator_names_a_webhook() -> None:
    """S-HOK-7, S-SCH-20."""
    desk, clock = Desk(), SetClock()
    with Receiver() as receiver:
        team = desk.team(hourly=Schedule(every="1h", tags={"kind": "report"}))
        async with driven(team, clock=clock, webhooks=rules(team=receiver.origin)) as runs:
            await clock.move(HOUR)
            await desk.next()
            (received,) = await threads.run(receiver.wait, 1)
            (run_id,) = await run_ids(runs, schedule="hourly")
    data = received.content["data"]
    assert (received.content["type"], data["run_id"], data["status"]) == ("run.ended", run_id, "completed")
    assert data["tags"] == {"schedule": "hourly", "kind": "report"}


async def test_a_run_that_a_drain_lets_finish_is_reported(connect: Connect) -> None:
    """S-VER-2, S-HOK-3: the drain refuses new runs, and sends what accepted ones report."""
    gate = Gate("a draft")
    with Receiver() as receiver:
        async with connect(pair(ScriptedModel(gate, otherwise="fine")), webhooks=rules()) as client:
            body = {"inputs": INPUTS, "run_id": "a", "webhook": {"url": receiver.origin}}
            await client.post("/runs", json=body)
            await gate.is_asked.wait()
            assert (await client.post("/drain")).json()["state"] == "draining"
            gate.open()
            (received,) = await threads.run(receiver.wait, 1)
            assert (await client.get("/drain")).json()["state"] == "drained"
    assert (received.content["data"]["run_id"], received.content["data"]["status"]) == ("a", "completed")


async def test_a_webhook_has_the_version_that_its_request_names(file: Path, models: ModelServer) -> None:
    """S-VER-24, S-HOK-1: of a version without a share."""
    with Receiver() as receiver:
        async with driven(loaded(file), webhooks=rules(), clock=SetClock()) as runs:
            write(file.parent, models.base_url, "Servus", more=HOURLY)
            new, old = (await runs.load_version("greeting", NewVersion(share=0.0))).versions
            for version in (new.version, None):
                body = {"inputs": {"who": "Ann"}, "version": version, "webhook": {"url": receiver.origin}}
                await runs.start(NewRun.model_validate(body))
                await threads.run(receiver.wait, 1 if version else 2)
    found = [each.content["data"] for each in receiver.received]
    assert [(each["version"], each["result"]["raw"]) for each in found] == [
        (new.version, "Servus"),
        (old.version, "Hello"),
    ]
    assert [each["tags"]["version"] for each in found] == [new.version, old.version]


async def test_a_webhook_names_the_role_that_a_review_requires(records: Path) -> None:
    """S-HOK-2, S-QUO-51: the receiver can send the review to people who have it."""
    with Receiver() as receiver:
        async with guarded(records, asking("legal"), webhooks=rules()) as endpoint:
            owner = make_key(endpoint.file, "owner", roles=["lead"])
            legal = make_key(endpoint.file, "legal", roles=["legal"])
            body = {"run_id": "r", "webhook": {"url": receiver.origin}}
            await endpoint.client.post("/runs", json=body, headers=owner)
            (received,) = await threads.run(receiver.wait, 1)
            gate = received.content["data"]
            path = f"/reviews/r/{gate['gate_id']}"
            refused = await endpoint.client.post(path, json={"decision": "approve"}, headers=owner)
            assert (refused.status_code, refused.json()["code"]) == (403, "ROLE_REQUIRED")
            decided = await endpoint.client.post(path, json={"decision": "approve"}, headers=legal)
            assert decided.status_code == 200
            await threads.run(receiver.wait, 2)
    assert (receiver.types, gate["required_role"]) == (["review.requested", "run.ended"], "legal")


# Restarts, refusals and repetitions.


@asynccontextmanager
async def held(model: Model) -> AsyncGenerator[None]:
    """Keep the model from answering."""
    model.is_open.clear()
    try:
        yield
    finally:
        model.is_open.set()


async def test_runs_keep_version_order_and_options_when_the_endpoint_starts_again(
    file: Path, models: ModelServer, model: Model, tmp_path: Path
) -> None:
    """S-VER-25, S-HOK-32, S-REQ-2: queued runs of two versions; a third one is in the file."""
    ledger, limits = tmp_path / "ledger", EndpointLimits(max_running=1)
    texts = {"low": "For sailors", "high": "For kings"}
    clock = SetClock()

    async def start(runs: DrivenRuns, run_id: str, priority: RunPriority | None = None) -> None:
        context = texts.get(run_id)
        asked = NewRun(inputs={"who": run_id}, run_id=run_id, priority=priority, additional_context=context)
        await runs.start(asked)

    async with held(model):
        async with driven(loaded(file), ledger=ledger, limits=limits, deployed_at=1.0, clock=clock) as runs:
            await start(runs, "first")
            await asyncio.to_thread(model.is_asked.wait, 60)
            await start(runs, "low", RunPriority.LOW)
            write(file.parent, models.base_url, "Servus", more=HOURLY)
            new, old = (await runs.load_version("greeting", NewVersion())).versions
            await start(runs, "normal")
            await start(runs, "high", RunPriority.HIGH)
        write(file.parent, models.base_url, "Moin", more=HOURLY)
        async with driven(loaded(file), ledger=ledger, limits=limits, deployed_at=2.0, clock=SetClock()) as runs:
            await start(runs, "last")
            model.is_open.set()
            names = ("first", "high", "normal", "last", "low")
            ended = {name: await runs.wait(name, 60) for name in names}
            (moin, *_) = (await runs.versions("greeting")).versions
    found = {name: (each.version, each.result and each.result.raw) for name, each in ended.items()}
    assert found == {
        "first": (old.version, "Hello"),
        "low": (old.version, "Hello"),
        "normal": (new.version, "Servus"),
        "high": (new.version, "Servus"),
        "last": (moin.version, "Moin"),
    }
    queued = [each for each in model.texts if " to first" not in each]
    order = [name for text in queued for name in ("high", "normal", "last", "low") if f" to {name}" in text]
    assert order == ["high", "normal", "last", "low"]
    assert ["For kings" in each for each in queued] == [True, False, False, False]
    assert ["For sailors" in each for each in queued] == [False, False, False, True]


async def test_a_repeated_request_is_answered_when_quota_drain_and_version_refuse_new_ones(
    file: Path, models: ModelServer, records: Path
) -> None:
    """S-QUO-12, S-VER-3, S-VER-32: under its id and under its key, whatever refuses a new run."""
    async with guarded(records, loaded(file)) as endpoint:
        ann = make_key(endpoint.file, quotas=["runs=1/day"])
        body = {"inputs": {"who": "Ann"}}
        first = await endpoint.client.post("/runs?wait=60", json=body, headers={**ann, "idempotency-key": "k"})
        run_id = first.json()["run_id"]
        changed = write(file.parent, models.base_url, "Servus", more=HOURLY.replace("who", "whom"))
        changed.write_text(changed.read_text(encoding="utf-8").replace("{who}", "{whom}"), encoding="utf-8")
        assert (await endpoint.client.post("/ensembles/greeting/versions", headers=ann)).status_code == 200
        await endpoint.client.post("/drain", headers=ann)
        again = await endpoint.client.post("/runs?wait=60", json=body, headers={**ann, "idempotency-key": "k"})
        named = await endpoint.client.post("/runs?wait=60", json={**body, "run_id": run_id}, headers=ann)
        other = {"inputs": {"whom": "Ann"}}
        draining = await endpoint.client.post("/runs", json=other, headers=ann)
        await endpoint.client.post("/drain/end", headers=ann)
        exceeded = await endpoint.client.post("/runs", json=other, headers=ann)
    assert [each.json()["result"]["raw"] for each in (first, again, named)] == ["Hello"] * 3
    assert [(each.status_code, each.json()["code"]) for each in (draining, exceeded)] == [
        (503, "DRAINING"),
        (429, "QUOTA_EXCEEDED"),
    ]
