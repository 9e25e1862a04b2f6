"""What clients say to runs that go on: directives, and decisions at gates."""

from __future__ import annotations

from typing import Any

import pytest

from ensemble_ray import Ensemble, Review, TaskHandlerContext
from ensemble_ray.serve.driving import run_driver as carrying_out
from ensemble_ray.testing import ScriptedModel
from tests.builders import task
from tests.serve.conftest import Connect
from tests.serve.gates import Gate
from tests.serve.teams import INPUTS, pair
from tests.serve.test_waiting import asked, ended_run

EVERYBODY = {"text": "Write in French"}


async def test_a_directive_reaches_the_task_that_starts_next(connect: Connect) -> None:
    """S-SRV-200: it is on record when it is answered, with who gave it."""
    gate, prompts = Gate("a draft"), []

    def edit(call: Any) -> str:
        prompts.append(call.text)
        return "a line"

    async with connect(pair(ScriptedModel(gate, edit))) as client:
        await client.post("/runs", json={"inputs": INPUTS, "run_id": "first"})
        await gate.is_asked.wait()
        told = await client.post("/runs/first/inject", json={"text": "Write in French", "ttl_s": 600})
        assert (told.status_code, told.json()["status"]) == (200, "running")
        gate.open()
        ended, _ = await ended_run(client, "first")
        late = await client.post("/runs/first/inject", json=EVERYBODY)
        unknown = await client.post("/runs/other/inject", json=EVERYBODY)
    assert ended["status"] == "completed"
    assert "## Active Directives\n- Write in French\n" in prompts[0]
    assert (late.status_code, late.json()["code"]) == (409, "RUN_OVER")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "RUN_NOT_FOUND")


async def test_a_run_that_waits_for_people_takes_none(connect: Connect) -> None:
    """S-SRV-201."""
    async with connect(asked()) as client:
        await client.post("/runs?wait=60", json={"run_id": "first"})
        refused = await client.post("/runs/first/inject", json=EVERYBODY)
        await client.post("/runs/first/cancel")
        await ended_run(client, "first")
    assert (refused.status_code, refused.json()["code"]) == (409, "RUN_NOT_RUNNING")


@pytest.mark.parametrize("body", [{}, {"text": " \n"}, {"text": "a" * 10_001}, {"text": "a", "ttl_s": 0}])
async def test_what_is_no_directive_is_refused(connect: Connect, body: dict[str, Any]) -> None:
    """S-SRV-200."""
    async with connect(pair(ScriptedModel("fine"))) as client:
        assert (await client.post("/runs/first/inject", json=body)).status_code == 422


async def test_a_gate_is_decided_once_and_its_run_goes_on(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SRV-27, S-SRV-202, S-SRV-203: the decision wakes the run, whose record is not looked at; the second is told the first one."""
    monkeypatch.setattr(carrying_out, "_LOOK_S", 600.0)
    async with connect(asked()) as client:
        await client.post("/runs?wait=60", json={"run_id": "first"})
        (gate,) = (await client.get("/reviews")).json()["reviews"]
        assert (gate["run_id"], gate["ensemble"], gate["task_output"]) == ("first", "team", "40 EUR")
        place = f"/reviews/first/{gate['gate_id']}"
        decided = await client.post(place, json={"decision": "edit", "text": "38 EUR", "comment": "Rebate"})
        assert (decided.status_code, decided.json()["decision"]) == (200, "edit")
        second = await client.post(place, json={"decision": "exit"})
        ended, _ = await ended_run(client, "first")
        assert (await client.get("/reviews")).json() == {"reviews": []}
        late = await client.post(place, json={"decision": "approve"})
    for conflict in (second, late):
        assert (conflict.status_code, conflict.json()["code"]) == (409, "REVIEW_DECIDED")
        first = conflict.json()["first"]
        assert (first["decision"], first["by"], first["comment"]) == ("edit", "a client of the endpoint", "Rebate")
    assert ended["result"]["raw"] == "Dear: 38 EUR"


def count(_: TaskHandlerContext) -> str:
    """How many there are."""
    return "4"


async def test_an_edit_that_does_not_fit_is_refused_before_it_is_recorded(connect: Connect) -> None:
    """S-SRV-231: with the reason; the gate stays as it is."""
    counting = task("count", handler=count, output_type=int, review=Review(timeout=0), name="count")
    async with connect(Ensemble(tasks=[counting], review_wait="detach")) as client:
        await client.post("/runs?wait=60", json={"run_id": "first"})
        (gate,) = (await client.get("/reviews")).json()["reviews"]
        place = f"/reviews/first/{gate['gate_id']}"
        refused = await client.post(place, json={"decision": "edit", "text": "many"})
        assert (refused.status_code, refused.json()["code"]) == (422, "EDIT_INVALID")
        assert refused.json()["message"].startswith("The edit was refused, since it must fit int: ")
        assert (await client.get("/reviews")).json()["reviews"] == [gate]
        assert (await client.post(place, json={"decision": "edit", "text": "5"})).status_code == 200
        ended, _ = await ended_run(client, "first")
    assert (ended["status"], ended["result"]["raw"]) == ("completed", "5")


async def test_a_gate_that_is_not_there_is_not_found(connect: Connect) -> None:
    """S-SRV-204: neither is the beginning of a gate's id; a decision without its text is none."""
    async with connect(asked()) as client:
        await client.post("/runs?wait=60", json={"run_id": "first"})
        (gate,) = (await client.get("/reviews")).json()["reviews"]
        for gate_id in ("other", gate["gate_id"][:8]):
            missing = await client.post(f"/reviews/first/{gate_id}", json={"decision": "approve"})
            assert (missing.status_code, missing.json()["code"]) == (404, "REVIEW_NOT_FOUND")
        for body in ({"decision": "edit"}, {"decision": "approve", "text": "a"}, {"decision": "perhaps"}):
            assert (await client.post(f"/reviews/first/{gate['gate_id']}", json=body)).status_code == 422
        await client.post("/runs/first/cancel")
        await ended_run(client, "first")


async def test_a_task_that_starts_next_asks_the_model_that_was_chosen(connect: Connect) -> None:
    """S-SRV-209, S-SRV-210: on record when it is answered, with who chose it; the team's own models win over the operator's."""
    gate, large = Gate("a draft"), ScriptedModel(otherwise="said by the large one")
    team = pair(ScriptedModel(gate, otherwise="own")).replace(models={"large": large})
    async with connect(team, models={"large": ScriptedModel(), "small": ScriptedModel()}) as client:
        listed = (await client.get("/capabilities")).json()["models"]
        await client.post("/runs", json={"inputs": INPUTS, "run_id": "first"})
        await gate.is_asked.wait()
        place = "/runs/first/model"
        unknown = await client.post(place, json={"model": "huge"})
        nobody = await client.post(place, json={"model": "large", "agent": "Reader"})
        chosen = await client.post(place, json={"model": "large", "agent": "Editor"})
        gate.open()
        ended, _ = await ended_run(client, "first")
        late = await client.post(place, json={"model": "large"})
    assert listed == [{"ensemble": "team", "name": "large"}, {"ensemble": "team", "name": "small"}]
    assert (unknown.status_code, unknown.json()["code"]) == (400, "MODEL_NOT_FOUND")
    assert "There are: [large, small]" in unknown.json()["message"]
    assert (nobody.status_code, nobody.json()["code"]) == (400, "AGENT_NOT_FOUND")
    assert (chosen.status_code, chosen.json()["status"]) == (200, "running")
    assert ended["result"]["raw"] == "said by the large one"
    assert (late.status_code, late.json()["code"]) == (409, "RUN_OVER")


async def test_a_run_that_waits_for_people_takes_no_model(connect: Connect) -> None:
    """S-SRV-210."""
    async with connect(asked(), models={"small": ScriptedModel()}) as client:
        await client.post("/runs?wait=60", json={"run_id": "first"})
        refused = await client.post("/runs/first/model", json={"model": "small"})
        await client.post("/runs/first/cancel")
        await ended_run(client, "first")
    assert (refused.status_code, refused.json()["code"]) == (409, "RUN_NOT_RUNNING")


@pytest.mark.parametrize("body", [{}, {"model": ""}, {"model": "a" * 257}, {"model": "a", "agents": ["b"]}])
async def test_what_names_no_model_is_refused(connect: Connect, body: dict[str, Any]) -> None:
    """S-SRV-209."""
    async with connect(pair(ScriptedModel("fine"))) as client:
        assert (await client.post("/runs/first/model", json=body)).status_code == 422
