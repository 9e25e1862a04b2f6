"""Defects of an endpoint as a client of A2A sees them, and its operator."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from ensemble_ray.serve.driving.driven_runs import DrivenRuns
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.serve.conftest import Connect
from tests.serve.test_a2a import question

TOLD = "ZeroDivisionError in the endpoint. Its log says more"
MESSAGES: dict[str, dict[str, Any]] = {
    "1.0": {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "kelp"}]},
    "0.3": {"messageId": "m", "role": "user", "kind": "message", "parts": [{"kind": "text", "text": "kelp"}]},
}


async def fail(_runs: DrivenRuns, run_id: str, *_: object) -> Any:
    """Take the place of a method that has a defect."""
    raise ZeroDivisionError(f"secret of {run_id}")


async def fail_in_between(_runs: DrivenRuns, run_id: str, *_: object) -> AsyncGenerator[Any]:
    """Take the place of events that break."""
    raise ZeroDivisionError(f"secret of {run_id}")
    yield


@pytest.mark.parametrize(
    ("method", "replaced"),
    [
        ("SendMessage", "get"),
        ("SendStreamingMessage", "get"),
        ("SendStreamingMessage", "events"),
        ("message/send", "get"),
        ("message/stream", "events"),
    ],
)
async def test_a_defect_is_told_by_its_kind_and_logged(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str, replaced: str
) -> None:
    """S-INT-70: as on every other route, its text is for the operator alone."""
    monkeypatch.setattr(DrivenRuns, replaced, fail if replaced == "get" else fail_in_between)
    version = "0.3" if "/" in method else "1.0"
    asked = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"message": MESSAGES[version]}}
    is_answered = threading.Event()

    async def answer_later(_: ScriptedCall) -> str:
        await asyncio.to_thread(is_answered.wait, 60)  # a run that is over has no events to follow
        return "late"

    async with connect(question(llm=ScriptedModel(otherwise=answer_later))) as client:
        try:
            answer = await client.post("/a2a/team", json=asked, headers={"a2a-version": version})
        finally:
            is_answered.set()
    assert answer.status_code == 200
    assert TOLD in answer.text
    assert "secret" not in answer.text
    logged = [each for each in caplog.records if each.name == "ensemble_ray.serve.a2a"]
    assert [(each.levelno, each.exc_info is not None) for each in logged] == [(logging.ERROR, True)]
    assert "secret of" in caplog.text


@pytest.mark.parametrize("name", ["SendMessage", "message/send", "Nothing"])
async def test_wrong_requests_of_clients_are_not_logged(
    connect: Connect, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """S-INT-70: each would be a page of somebody else's."""
    async with connect(question()) as client:
        asked = {"jsonrpc": "2.0", "id": 1, "method": name, "params": {"message": 5}}
        answer = await client.post("/a2a/team", json=asked, headers={"a2a-version": "1.0"})
    assert "error" in answer.json()
    assert not [each for each in caplog.records if each.name.startswith("a2a")]


@pytest.mark.parametrize("name", ["a2a.server.routes.jsonrpc_dispatcher", "a2a.compat.v0_3.jsonrpc_adapter"])
def test_defects_of_the_sdk_are_logged(caplog: pytest.LogCaptureFixture, name: str) -> None:
    """S-INT-70."""
    import ensemble_ray.serve.a2a  # noqa: F401  which sets what is logged

    logging.getLogger(name).error("Unhandled exception")
    logging.getLogger(name).error("Request Error")
    assert [each.message for each in caplog.records] == ["Unhandled exception"]


@pytest.mark.parametrize(("version", "name"), [("1.0", "SendMessage"), ("0.3", "message/send")])
async def test_halves_of_surrogate_pairs_are_replaced_in_ids_and_texts(
    connect: Connect, version: str, name: str
) -> None:
    """S-INT-99: as in `POST /runs`."""
    message = {**MESSAGES[version], "messageId": "m\ud800", "contextId": "c\ud800"}
    message["parts"] = [{**message["parts"][0], "text": "k\ud800"}]
    asked = {"jsonrpc": "2.0", "id": "i\ud800", "method": name, "params": {"message": message}}
    headers = {"a2a-version": version, "content-type": "application/json"}
    async with connect(question()) as client:
        answer = await client.post("/a2a/team", content=json.dumps(asked), headers=headers)
        task = answer.json()["result"]
        get = "GetTask" if version == "1.0" else "tasks/get"
        asked = {**asked, "method": get, "params": {"id": "t\udfff"}}
        unknown = await client.post("/a2a/team", content=json.dumps(asked), headers=headers)
    assert answer.json()["id"] == "i\ufffd"
    assert task.get("task", task)["contextId"] == "c\ufffd"
    assert "t\ufffd" in unknown.json()["error"]["message"]


@pytest.mark.parametrize(("depth", "kinds"), [(30, ["text", "data"]), (60, ["text"])])
async def test_data_that_the_protocol_cannot_hold_is_left_out_of_an_answer(
    connect: Connect, depth: int, kinds: list[str]
) -> None:
    """S-INT-97: it is nested too deeply, and the text beside it is whole."""
    text = "[" * depth + "]" * depth
    team = question(llm=ScriptedModel(otherwise=text), output_type=list)
    asked = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": MESSAGES["1.0"]}}
    async with connect(team) as client:
        answer = await client.post("/a2a/team", json=asked, headers={"a2a-version": "1.0"})
    (artifact,) = answer.json()["result"]["task"]["artifacts"]
    assert [next(iter(part)) for part in artifact["parts"]] == kinds
    assert artifact["parts"][0]["text"] == text


@pytest.mark.parametrize("depth", [60, 500, 20_000])
async def test_a_request_that_is_nested_too_deeply_is_the_clients_error(connect: Connect, depth: int) -> None:
    """S-INT-97: it is refused, and nothing of it is unknown."""
    message = {**MESSAGES["1.0"], "parts": [{"data": {"question": "DATA"}}]}
    asked = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
    body = json.dumps(asked).replace('"DATA"', "[" * depth + "]" * depth)
    headers = {"a2a-version": "1.0", "content-type": "application/json"}
    async with connect(question()) as client:
        answer = await client.post("/a2a/team", content=body, headers=headers)
    assert answer.json()["error"]["code"] in {-32602, -32700}
