"""`/runs`: begun, found, listed, cancelled; runs outlive whoever asked for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from httpx import AsyncClient
from msgspec.structs import replace

from ensemble_ray import Ensemble, InlineRuntime, RunExistsError, RunOptions, RunState, Task, TaskHandlerContext
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.serve.driving.ledger import Ledger
from ensemble_ray.serve.driving.requests import EndpointLimits
from ensemble_ray.serve.schemas import NewRun, RunStatus
from ensemble_ray.testing import ScriptedModel
from tests.serve.conftest import Connect
from tests.serve.driving import driven
from tests.serve.gates import Gate
from tests.serve.teams import INPUTS, mapped, pair, summaries
from tests.serve.test_ledger import entry


def fine() -> Ensemble:
    """A team that always answers."""
    return pair(ScriptedModel(otherwise="fine"))


async def test_a_run_is_accepted_at_once_and_found_under_its_location(connect: Connect) -> None:
    """S-SRV-10, S-SRV-20: 202 before any model is asked; its end is there for whoever waits."""
    gate = Gate("a draft")
    async with connect(pair(ScriptedModel(gate, "a line"))) as client:
        response = await client.post("/runs", json={"inputs": INPUTS, "run_id": "first", "tags": {"for": "test"}})
        assert (response.status_code, response.headers["location"]) == (202, "/runs/first")
        assert response.json() == {
            "run_id": "first",
            "status": "accepted",
            "ensemble": "team",
            "tasks": 2,
            "workflow": "sequential",
        }
        await gate.is_asked.wait()
        running = (await client.get(response.headers["location"])).json()
        assert (running["status"], running["result"], running["ended_at"]) == ("running", None, None)
        gate.open()
        ended = (
            await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "first", "tags": {"for": "test"}})
        ).json()
        assert ended == (await client.get("/runs/first")).json()
    assert (ended["status"], ended["result"]["raw"], ended["tags"]) == ("completed", "a line", {"for": "test"})


async def test_a_wait_that_is_too_short_is_answered_with_the_run(connect: Connect) -> None:
    """S-SRV-11: 202, and the run goes on."""
    gate = Gate("a draft")
    async with connect(pair(ScriptedModel(gate, "a line"))) as client:
        short = await client.post("/runs?wait=0", json={"inputs": INPUTS, "run_id": "slow"})
        assert (short.status_code, short.json()["run_id"]) == (202, "slow")
        gate.open()
        preferred = await client.post("/runs", json={"inputs": INPUTS, "run_id": "slow"}, headers={"prefer": "wait=60"})
    assert (preferred.status_code, preferred.headers["preference-applied"]) == (200, "wait=60")


async def test_a_key_stands_for_one_request(connect: Connect) -> None:
    """S-SRV-15: the same request gives the same run, another one is refused."""
    model = ScriptedModel(otherwise="fine")
    headers = {"idempotency-key": "once"}
    async with connect(pair(model)) as client:
        first, again = [
            (await client.post("/runs?wait=60", json={"inputs": INPUTS}, headers=headers)).json() for _ in range(2)
        ]
        other = await client.post("/runs", json={"inputs": {**INPUTS, "topic": "Rust"}}, headers=headers)
    assert first == again
    assert len(model.calls) == 2
    assert (other.status_code, other.json()["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")


async def test_requests_name_one_of_several_teams(connect: Connect) -> None:
    """S-SRV-2, S-SRV-13: the list says what each needs."""
    async with connect({"short": fine(), "many": summaries()}) as client:
        listed = (await client.get("/ensembles")).json()["ensembles"]
        missing = await client.post("/runs", json={"inputs": INPUTS})
        unknown = await client.post("/runs", json={"ensemble": "none", "inputs": INPUTS})
        ended = await client.post("/runs?wait=60", json={"ensemble": "short", "inputs": INPUTS})
    assert [(each["name"], each["inputs"], each["workflow"], each["tasks"]) for each in listed] == [
        ("many", ["topic"], "map_reduce_static", 6),
        ("short", ["topic", "reader"], "sequential", 2),
    ]
    assert (missing.status_code, missing.json()["code"]) == (400, "ENSEMBLE_REQUIRED")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "ENSEMBLE_NOT_FOUND")
    assert ended.json()["ensemble"] == "short"


async def listed(client: AsyncClient, query: str = "") -> list[str]:
    """Ids of a list."""
    return [each["run_id"] for each in (await client.get(f"/runs{query}")).json()["runs"]]


async def test_runs_are_listed_by_pages_and_filters(connect: Connect) -> None:
    """S-SRV-21, S-SRV-22, S-SRV-214: newest first."""
    async with connect({"a": fine(), "b": fine()}) as client:
        for number in range(5):
            body = {
                "ensemble": "ab"[number % 2],
                "inputs": INPUTS,
                "run_id": f"run-{number}",
                "tags": {"n": str(number)},
            }
            assert (await client.post("/runs?wait=60", json=body)).status_code == 200
        await client.post(
            "/runs?wait=60", json={"ensemble": "a", "inputs": INPUTS, "run_id": "run-2", "tags": {"n": "2"}}
        )
        assert await listed(client) == ["run-4", "run-3", "run-2", "run-1", "run-0"]
        first = (await client.get("/runs?limit=2")).json()
        second = (await client.get(f"/runs?limit=2&cursor={first['next_cursor']}")).json()
        last = (await client.get(f"/runs?limit=2&cursor={second['next_cursor']}")).json()
        pages = [[each["run_id"] for each in page["runs"]] for page in (first, second, last)]
        assert pages == [["run-4", "run-3"], ["run-2", "run-1"], ["run-0"]]
        assert last["next_cursor"] is None
        assert await listed(client, "?ensemble=b") == ["run-3", "run-1"]
        assert await listed(client, "?tag=n:3") == ["run-3"]
        assert await listed(client, "?status=failed") == []
        assert await listed(client, "?since=2100-01-01T00:00:00Z") == []
        assert len(await listed(client, "?since=0001-01-01T00:00:00Z")) == 5
        extreme = ("since=0001-01-01T00:00:00%2B14:00", "since=9999-12-31T23:59:59-14:00")
        queries = ("cursor=x", "tag=n", "status=done", "limit=0", *extreme)
        wrong = [await client.get(f"/runs?{query}") for query in queries]
        wrong.append(await client.post("/runs", json={"ensemble": "a", "inputs": INPUTS, "run_id": ""}))
        assert len(await listed(client)) == 5
    assert [(each.status_code, each.json()["code"]) for each in wrong] == [
        (400, "INVALID_CURSOR"),
        *[(422, "INVALID_REQUEST")] * 6,
    ]


async def test_an_unknown_run_is_not_found(connect: Connect) -> None:
    """S-SRV-23: on every route."""
    async with connect(fine()) as client:
        answers = [
            await client.get("/runs/none"),
            await client.post("/runs/none/cancel"),
            await client.get("/runs/none/events"),
        ]
    assert [(each.status_code, each.json()["code"]) for each in answers] == [(404, "RUN_NOT_FOUND")] * 3


async def test_a_cancelled_run_ends_and_one_that_is_over_cannot_be_cancelled(connect: Connect) -> None:
    """S-SRV-24, S-SRV-25: also one that waits for its turn; what was done is its result."""
    gate = Gate("late")
    limits = EndpointLimits(max_running=1)
    async with connect(pair(ScriptedModel("a draft", gate, otherwise="x")), limits=limits) as client:
        await client.post("/runs", json={"inputs": INPUTS, "run_id": "running"})
        await gate.is_asked.wait()
        await client.post("/runs", json={"inputs": INPUTS, "run_id": "queued"})
        assert (await client.post("/runs/queued/cancel")).status_code == 202
        assert (await client.post("/runs/running/cancel")).status_code == 202
        running = (await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "running"})).json()
        queued = (await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "queued"})).json()
        again = await client.post("/runs/running/cancel")
    assert (running["status"], [each["text"] for each in running["result"]["tasks"]]) == ("cancelled", ["a draft"])
    assert (queued["status"], queued["result"]) == ("cancelled", None)
    assert (again.status_code, again.json()["code"]) == (409, "RUN_OVER")


async def test_a_full_team_refuses_more(connect: Connect) -> None:
    """S-SRV-50: 429 with when to ask again; the others are run in their turn."""
    gate = Gate("a draft")
    limits = EndpointLimits(max_running=1, max_queued=1)
    async with connect(pair(ScriptedModel(gate, otherwise="fine")), limits=limits) as client:
        await client.post("/runs", json={"inputs": INPUTS, "run_id": "1"})
        await gate.is_asked.wait()
        second = await client.post("/runs", json={"inputs": INPUTS, "run_id": "2"})
        third = await client.post("/runs", json={"inputs": INPUTS, "run_id": "3"})
        assert (await client.get("/runs/2")).json()["status"] == "accepted"
        gate.open()
        ended = await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "2"})
    assert (second.status_code, third.status_code, third.json()["code"]) == (202, 429, "QUEUE_FULL")
    assert int(third.headers["retry-after"]) > 0
    assert ended.json()["status"] == "completed"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"options": {"max_tokens": 101}}, 400, "LIMIT_EXCEEDED"),
        ({"options": {"max_tokens": 0}}, 422, "INVALID_REQUEST"),
        ({"options": {"max_cost": 1}}, 400, "LIMIT_EXCEEDED"),
        ({"items": [1, 2]}, 400, "ITEMS_NOT_TAKEN"),
        ({"items": {"file": "a.jsonl"}}, 400, "ITEMS_FILE_NOT_FOUND"),
        ({"items": []}, 422, "INVALID_REQUEST"),
        ({"items": [1, 2, 3]}, 400, "LIMIT_EXCEEDED"),
    ],
)
async def test_what_a_request_may_ask_for_is_bounded(
    connect: Connect, body: dict[str, object], status: int, code: str
) -> None:
    """S-SRV-51, S-SRV-52: by the operator."""
    limits = EndpointLimits(max_tokens=100, max_items=2)
    async with connect(fine(), limits=limits) as client:
        response = await client.post("/runs", json={"inputs": INPUTS, **body})
    assert (response.status_code, response.json()["code"]) == (status, code)


async def test_the_operators_limit_holds_where_a_request_names_none(connect: Connect) -> None:
    """S-SRV-51: it is the run's budget."""
    async with connect(fine(), limits=EndpointLimits(max_tokens=1)) as client:
        response = await client.post("/runs?wait=60", json={"inputs": INPUTS})
    assert (response.status_code, response.json()["status"]) == (200, "budget_exhausted")


async def test_a_map_reduce_maps_the_items_of_a_request(connect: Connect, tmp_path: Path) -> None:
    """S-SRV-16, S-SRV-17: in the request, or in a file below the operator's directory, and in no other file."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "items.jsonl").write_text('"a"\n"b"\n"c"\n', encoding="utf-8")
    (tmp_path / "secret.jsonl").write_text('"x"\n', encoding="utf-8")
    model = ScriptedModel(otherwise=lambda call: "joined" if "Join" in call.text else "read")
    limits = EndpointLimits(items_directory=tmp_path / "shared")
    async with connect(mapped(model), limits=limits) as client:
        listed = await client.post("/runs?wait=60", json={"items": ["tides", {"name": "kelp"}]})
        filed = await client.post("/runs?wait=60", json={"items": {"file": "items.jsonl"}})
        outside = await client.post("/runs", json={"items": {"file": "../secret.jsonl"}})
    assert [each["text"] for each in listed.json()["result"]["tasks"]] == ["read", "read", "joined"]
    assert len(filed.json()["result"]["tasks"]) == 4
    assert outside.json()["code"] == "ITEMS_FILE_NOT_FOUND"


async def test_a_run_goes_on_when_its_client_has_gone(connect: Connect, records: Path) -> None:
    """S-SET-39, S-SRV-40: it is recorded, and its id finds the answer without another model call."""
    gate = Gate("a draft")
    model = ScriptedModel(gate, "a line")
    async with connect(pair(model)) as client:
        asking = asyncio.create_task(client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "left"}))
        await gate.is_asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        gate.open()
        found = await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "left"})
    assert [each["text"] for each in found.json()["result"]["tasks"]] == ["a draft", "a line"]
    assert len(model.calls) == 2
    assert (records / "runs" / "left").is_dir()


async def test_what_was_accepted_is_gone_on_with_after_a_restart(tmp_path: Path, records: Path) -> None:
    """S-SRV-41, S-SRV-42: what had begun goes on from its record, what waited begins; nothing recorded is asked again."""
    gate = Gate("never")
    limits, ledger = EndpointLimits(max_running=1), tmp_path / "ledger.sqlite"
    first = ScriptedModel("a draft", gate)
    async with driven(pair(first), limits=limits, ledger=ledger) as runs:
        for run_id in ("begun", "queued"):
            await runs.start(NewRun.model_validate({"inputs": INPUTS, "run_id": run_id}))
        await gate.is_asked.wait()
        begun = runs._active["begun"].run
        assert begun is not None
        await runs.close()  # as its process would
        await begun.acancel()
        await begun.ajoin()
    second = ScriptedModel(otherwise="fine")
    directory = RunDirectory(records, "begun")
    assert directory.state() is RunState.CANCELLED
    async with driven(pair(second), limits=limits, ledger=ledger) as runs:
        queued = await runs.wait("queued", 60)
        assert (await runs.get("begun")).status == "cancelled"
    assert queued.result is not None
    assert queued.status == "completed"
    assert len(second.calls) == 2


async def test_a_run_whose_handler_did_not_return_fails_after_a_restart(tmp_path: Path, records: Path) -> None:
    """S-DUR-25, S-DUR-145: nobody calls `resume`, so it is not refused; its client hears why, and nothing is done again."""
    called: list[str] = []

    def pay(context: TaskHandlerContext) -> str:
        called.append(context.description)
        return "paid"

    team = Ensemble(tasks=[Task(name="pay", description="Pay", expected_output="a receipt", handler=pay)])
    await team.arun(runtime=InlineRuntime(), run_id="whole")
    store = SqliteStore(records)
    facts = await store.facts("whole")
    begun = facts[: 1 + next(place for place, fact in enumerate(facts) if fact.kind == "tool_intent")]
    owned = await store.begin("torn")
    await owned.journal.append([replace(fact, run="torn", seq=0) for fact in begun])
    await owned.close(RunState.INTERRUPTED)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add(entry("torn"))
    ledger.note("torn", RunStatus.RUNNING)
    ledger.close()
    async with driven(team, ledger=tmp_path / "ledger.sqlite") as runs:
        ended = await runs.wait("torn", 60)
    assert (ended.status, called) == ("failed", ["Pay"])
    assert ended.error is not None
    assert (ended.error.error, ended.error.run_id) == ("TaskExecutionError", "torn")
    assert "did not return" in ended.error.message
    assert (await store.find("torn")).state is RunState.FAILED


async def test_the_end_of_a_run_is_told_when_the_ledger_cannot_keep_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-SRV-46, S-SRV-11: who waits for it, or reads its events, does not wait for ever; whoever has the ledger finds it in the record."""

    def refuse(*_: object, **__: object) -> None:
        raise RunExistsError("Another endpoint has it")

    monkeypatch.setattr(Ledger, "end", refuse)
    async with driven(fine()) as runs:
        await runs.start(NewRun.model_validate({"inputs": INPUTS, "run_id": "r"}))
        assert (await runs.wait("r", 30)).status == "completed"
        assert [each.type async for each in runs.events("r")][-1] == "ensemble_completed"
        assert (await runs.get("r")).status == "completed"
    assert "The end of run r cannot be kept" in caplog.text


async def test_failed_run_is_one_bounded_warning(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """S-SET-53: its id, its reason and the class of the error; what others wrote is cut and escaped."""
    async with connect(pair(ScriptedModel(ValueError("boom\x1b[2J\n" * 1000)))) as client:
        failed = await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "failed"})
        assert failed.status_code == 502
        (told,) = [each for each in caplog.records if each.name.startswith("ensemble_ray.serve")]
        assert told.levelname == "WARNING"
        assert told.getMessage().startswith("Run failed failed: Task '")
        assert "boom" in told.getMessage()
        assert len(told.getMessage()) < 1600
        assert told.getMessage().isprintable()
        found = (await client.get("/runs/failed")).json()
    assert (found["status"], found["error"]["error"], found["error"]["status"]) == ("failed", "TaskExecutionError", 502)


async def test_tags_are_recorded_with_the_run_and_change_nothing(connect: Connect, records: Path) -> None:
    """S-SRV-19: among its options, so that a run that goes on has them still."""
    async with connect(fine()) as client:
        await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "tagged", "tags": {"for": "x"}})
    header = RunDirectory(records, "tagged").facts()[0].data.to_data()
    assert header["options"] == {"tags": {"for": "x"}}
    team = fine()
    assert team.with_options(RunOptions(tags={"for": "x"})).model_fields_set == team.model_fields_set
