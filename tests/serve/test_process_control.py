"""The control API of one process: the same routes below `/api`, and the same calls as messages of a WebSocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import websockets
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from httpx import AsyncClient

from ensemble_ray import Ensemble, ProcessControl, Schedule, tool
from ensemble_ray.testing import ScriptedModel
from tests.serve.gates import Gate
from tests.serve.http_server import served_app
from tests.serve.teams import INPUTS, pair


@tool
def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()


class Page:
    """A connection as a page's server holds it."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self.wanted: tuple[frozenset[str] | None, str | None] = (None, None)

    async def send(self, message: Mapping[str, Any]) -> None:
        await self._socket.send_text(json.dumps(message))

    def subscribe(self, types: frozenset[str] | None, run_id: str | None) -> None:
        self.wanted = types, run_id


def mounted(control: ProcessControl, pages: list[Page]) -> FastAPI:
    """A page's server, with the control API below `/api` and its messages at `/ws`."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        async with control:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.websocket("/ws")
    async def talk(socket: WebSocket) -> None:
        await socket.accept()
        page = Page(socket)
        pages.append(page)
        try:
            while True:
                message = json.loads(await socket.receive_text())
                await control.sockets.handlers[message["type"]](page, message)
        except WebSocketDisconnect:
            control.sockets.drop(page)

    app.mount("/api", control.app)
    return app


@asynccontextmanager
async def controlled(
    template: Ensemble | None, pages: list[Page] | None = None, **options: Any
) -> AsyncGenerator[tuple[AsyncClient, ProcessControl]]:
    """A client of the control API of a process that runs inline."""
    control = ProcessControl(template, runtime="inline", **options)
    with served_app(mounted(control, [] if pages is None else pages), ws="websockets-sansio") as url:
        async with AsyncClient(base_url=f"{url}/api", timeout=60) as client:
            yield client, control


@asynccontextmanager
async def talking(client: AsyncClient) -> AsyncGenerator[Any]:
    """A WebSocket of the same server; gives what sends a message and returns the next one."""
    async with websockets.connect(str(client.base_url).replace("http", "ws").replace("/api/", "/ws")) as socket:

        async def ask(message: Mapping[str, Any] | None = None) -> dict[str, Any]:
            if message is not None:
                await socket.send(json.dumps(message))
            return dict(json.loads(await socket.recv()))

        yield ask


async def test_the_routes_of_the_endpoint_are_below_another_path() -> None:
    """S-CTL-30: a run is begun, followed, listed and found where its answer says."""
    async with controlled(pair(ScriptedModel("a draft", "a line")), tools=[shout]) as (client, _):
        taken = await client.post("/runs", json={"inputs": INPUTS, "run_id": "first", "tags": {"for": "Ann"}})
        events = (await client.get("/runs/first/events")).text
        found = (await client.get("/runs/first")).json()
        listed = (await client.get("/runs?status=completed&tag=for:Ann")).json()["runs"]
        capabilities = (await client.get("/capabilities")).json()
        called = (await client.post("/tools/shout/invoke", json={"arguments": {"text": "a"}})).json()
        missing = await client.get("/runs/other")
        elsewhere = await client.get("/metrics")
    assert (taken.status_code, taken.json()["status"]) == (202, "accepted")
    assert taken.headers["location"] == "/api/runs/first"
    assert events.rstrip().rpartition("event: ")[2].startswith("ensemble_completed")
    assert (found["status"], found["result"]["raw"]) == ("completed", "a line")
    assert [each["run_id"] for each in listed] == ["first"]
    assert [each["name"] for each in capabilities["tools"]] == ["shout"]
    assert called["output"] == "A"
    assert (missing.status_code, missing.json()["code"], elsewhere.status_code) == (404, "RUN_NOT_FOUND", 404)


async def test_without_an_ensemble_there_is_nothing_to_run() -> None:
    """S-CTL-1, S-CTL-31: one that comes later is served from then on."""
    async with controlled(None) as (client, control):
        refused = await client.post("/runs", json={"inputs": INPUTS})
        control.use_template(pair(ScriptedModel("a draft", "a line")))
        taken = await client.post("/runs?wait=60", json={"inputs": INPUTS})
    assert (refused.status_code, refused.json()["code"]) == (503, "NO_ENSEMBLE")
    assert taken.json()["status"] == "completed"


async def test_more_runs_than_there_may_be_are_refused() -> None:
    """S-CTL-1, S-CTL-32: with how long to wait; a run that ends makes room."""
    gate = Gate("a draft")
    async with controlled(pair(ScriptedModel(otherwise=gate))) as (client, _):
        begun = await asyncio.gather(*(client.post("/runs", json={"inputs": INPUTS}) for _ in range(7)))
        running = [each.json()["run_id"] for each in begun if each.status_code == 202]
        refused = [each for each in begun if each.status_code == 429]
        gate.open()
        for run_id in running:
            await client.get(f"/runs/{run_id}/events")
        after = await client.post("/runs?wait=60", json={"inputs": INPUTS})
    assert (len(running), len(refused)) == (5, 2)
    assert {each.json()["code"] for each in refused} == {"QUEUE_FULL"}
    assert all(each.json()["retry_after_ms"] == 1000 * int(each.headers["retry-after"]) for each in refused)
    assert after.json()["status"] == "completed"


async def test_features_of_an_endpoint_are_refused_where_there_is_none() -> None:
    """S-CTL-37: a webhook and a version; options and the user of a request have their effect, and schedules none."""
    model = ScriptedModel(otherwise="fine")
    team = pair(model).replace(schedules={"often": Schedule(every=1, inputs=INPUTS)})
    async with controlled(team) as (client, _):
        body: dict[str, Any] = {"inputs": INPUTS, "user": "ada", "additional_context": "Be brief", "priority": "high"}
        answers = [
            await client.post("/runs", json={**body, **more})
            for more in ({"webhook": {"url": "https://example.org"}}, {"version": "0"}, {"wait": 1})
        ]
        ended = (await client.post("/runs?wait=60", json={**body, "run_id": "first"})).json()
        listed = (await client.get("/runs")).json()["runs"]
        paths = [(await client.get(path)).status_code for path in ("/schedules", "/drain", "/quota")]
    assert [(each.status_code, each.json()["code"]) for each in answers] == [
        (400, "WEBHOOK_NOT_CONFIGURED"),
        (409, "VERSIONS_NOT_TAKEN"),
        (422, "INVALID_REQUEST"),
    ]
    assert (ended["status"], ended["tags"]) == ("completed", {"user": "ada"})
    assert all("Be brief" in call.text for call in model.calls)
    assert ([each["run_id"] for each in listed], paths) == (["first"], [404] * 3)


async def test_the_newest_runs_that_ended_are_kept() -> None:
    """S-CTL-1: 100 of them."""
    async with controlled(pair(ScriptedModel(otherwise="fine")).replace(durability="off")) as (client, _):
        for number in range(103):
            await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": f"run-{number}"})
        first = (await client.get("/runs?limit=200")).json()["runs"]
        gone = await client.get("/runs/run-2")
    assert [each["run_id"] for each in first] == [f"run-{number}" for number in range(102, 2, -1)]
    assert gone.status_code == 404


async def test_a_run_is_asked_for_over_a_socket() -> None:
    """S-CTL-2, S-CTL-3, S-CTL-33: it is acknowledged, and its result comes when it has ended."""
    async with controlled(pair(ScriptedModel("a draft", "a line"))) as (client, _), talking(client) as ask:
        asked = {"type": "run_request", "request_id": "mine", "inputs": INPUTS, "tags": {"for": "Ann"}}
        taken = await ask(asked)
        ended = await ask()
    assert {name: taken[name] for name in ("type", "request_id", "status", "tasks", "workflow")} == {
        "type": "run_ack",
        "request_id": "mine",
        "status": "accepted",
        "tasks": 2,
        "workflow": "sequential",
    }
    assert (ended["type"], ended["request_id"], ended["run_id"]) == ("run_result", "mine", taken["run_id"])
    assert (ended["status"], ended["result"]["raw"], ended["tags"]) == ("completed", "a line", {"for": "Ann"})


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({}, "INPUTS_MISSING"),
        ({"inputs": [1]}, "INVALID_REQUEST"),
        ({"inputs": INPUTS, "task_overrides": {"other": {}}}, "TASK_NOT_FOUND"),
        ({"inputs": INPUTS, "request_id": 5}, "INVALID_REQUEST"),
        ({"inputs": INPUTS, "task_overides": {}}, "INVALID_REQUEST"),
    ],
)
async def test_a_request_over_a_socket_that_cannot_be_run_is_rejected(asked: dict[str, Any], code: str) -> None:
    """S-CTL-2, S-CTL-33: with the failure that HTTP would answer; the connection stays."""
    async with controlled(pair(ScriptedModel())) as (client, _), talking(client) as ask:
        refused = await ask({"type": "run_request", "request_id": "mine", **asked})
        again = await ask({"type": "run_request", "request_id": "again"})
    assert (refused["type"], refused["status"], refused["error"]["code"]) == ("run_ack", "rejected", code)
    assert again["request_id"] == "again"


async def test_a_run_is_steered_over_a_socket() -> None:
    """S-CTL-3, S-CTL-34: told something, given another model, cancelled; each is answered with how the run stands."""
    first, second, prompts = Gate("a draft"), Gate("a line"), []

    async def large(call: Any) -> object:
        prompts.append(call.text)
        return await second(call)

    models = {"large": ScriptedModel(large)}
    async with controlled(pair(ScriptedModel(first)), models=models) as (client, _), talking(client) as ask:
        await ask({"type": "run_request", "inputs": INPUTS, "run_id": "first"})
        await first.is_asked.wait()
        steer = {"type": "run_control", "request_id": "mine", "run_id": "first"}
        told = await ask({**steer, "action": "inject", "text": "Write in French", "ttl_s": 600})
        chosen = await ask({**steer, "action": "switch_model", "model": "large"})
        unknown = await ask({**steer, "action": "switch_model", "model": "huge"})
        nothing = await ask({**steer, "action": "inject"})
        strange = await ask({**steer, "action": "pause"})
        nowhere = await ask({**steer, "run_id": "other", "action": "cancel"})
        first.open()
        await second.is_asked.wait()
        last = [await ask({**steer, "action": "cancel"}), await ask()]
    wanted = {"type": "run_control_ack", "request_id": "mine", "run_id": "first"}
    assert told == {**wanted, "action": "inject", "status": "running"}
    assert chosen == {**wanted, "action": "switch_model", "status": "running"}
    assert [each["error"]["code"] for each in (unknown, nothing, strange, nowhere)] == [
        "MODEL_NOT_FOUND",
        "INVALID_REQUEST",
        "INVALID_REQUEST",
        "RUN_NOT_FOUND",
    ]
    assert "- Write in French\n" in prompts[0]
    # The run may have ended before its cancellation is answered, which is told in either order.
    cancelled, ended = sorted(last, key=lambda each: str(each["type"]))
    assert (cancelled["type"], cancelled["action"]) == ("run_control_ack", "cancel")
    assert (ended["type"], ended["status"]) == ("run_result", "cancelled")


async def test_a_client_says_which_messages_it_wants() -> None:
    """S-CTL-3, S-CTL-35: by type and by run; an unknown type is refused, and changes nothing."""
    pages: list[Page] = []
    async with controlled(None, pages) as (client, _), talking(client) as ask:
        some = await ask(
            {"type": "subscribe", "request_id": "mine", "events": ["token", "run_result"], "run_id": "first"}
        )
        wanted = pages[0].wanted
        refused = await ask({"type": "subscribe", "events": ["tokens"]})
        still = pages[0].wanted
        everything = await ask({"type": "subscribe", "events": ["token", "*"]})
        both = pages[0].wanted
    assert some == {
        "type": "subscribe_ack",
        "request_id": "mine",
        "status": "accepted",
        "events": ["run_result", "token"],
        "run_id": "first",
    }
    assert wanted == still == (frozenset({"token", "run_result"}), "first")
    assert (refused["status"], refused["error"]["code"]) == ("rejected", "INVALID_REQUEST")
    assert (everything["events"], both) == (["*"], (None, None))


async def test_a_client_that_leaves_ends_no_run() -> None:
    """S-CTL-36."""
    gate = Gate("a draft")
    async with controlled(pair(ScriptedModel(gate, "a line"))) as (client, _):
        async with talking(client) as ask:
            await ask({"type": "run_request", "inputs": INPUTS, "run_id": "first"})
            await gate.is_asked.wait()
        gate.open()
        await client.get("/runs/first/events")
        assert (await client.get("/runs/first")).json()["status"] == "completed"
