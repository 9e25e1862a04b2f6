"""Priorities of an endpoint's runs: who is next, what clients see of it, and what a restart leaves of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from httpx import AsyncClient
from openai import OpenAI

from ensemble_ray import Ensemble
from ensemble_ray.serve.driving.requests import EndpointLimits
from ensemble_ray.serve.schemas import NewRun, RunFilter, RunPriority, RunRequestMessage, RunStatus
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import task
from tests.serve.conftest import Connect
from tests.serve.driving import driven
from tests.serve.gates import Gate
from tests.serve.http_server import served
from tests.serve.runs_double import RunsDouble, as_service, detail

ONE = EndpointLimits(max_running=1)
ORDER = ["low", "normal", "high", "later"]
PRIORITIES = {"low": RunPriority.LOW, "normal": None, "high": RunPriority.HIGH, "later": RunPriority.NORMAL}


class Team:
    """A team of one task, whose first run waits for a gate; says which runs asked the model in which order."""

    def __init__(self) -> None:
        self.gate = Gate("done")
        self.asked: list[str] = []

    def ensemble(self) -> Ensemble:
        return Ensemble(tasks=[task("About {topic}", llm=ScriptedModel(otherwise=self._answer))])

    async def _answer(self, call: ScriptedCall) -> object:
        topic = next(each for each in ["first", *ORDER] if f"About {each}" in call.text)
        self.asked.append(topic)
        return await self.gate(call) if topic == "first" else "done"


async def post(client: AsyncClient, run_id: str) -> dict[str, object]:
    body = {"run_id": run_id, "inputs": {"topic": run_id}}
    if (priority := PRIORITIES.get(run_id)) is not None:
        body["priority"] = priority
    answer = await client.post("/runs", json=body)
    assert answer.status_code == 202, answer.text
    found: dict[str, object] = answer.json()
    return found


async def test_runs_of_a_high_priority_are_next_and_clients_see_their_place(connect: Connect) -> None:
    """S-HOK-30, S-HOK-32, S-HOK-33: in the answer, in the run and in the list, until the run begins."""
    team = Team()
    async with connect(team.ensemble(), limits=ONE) as client:
        first = await post(client, "first")
        await team.gate.is_asked.wait()
        places = {run_id: (await post(client, run_id))["queue"] for run_id in ORDER}
        shown = {run_id: (await client.get(f"/runs/{run_id}")).json().get("queue") for run_id in ["first", *ORDER]}
        listed = {each["run_id"]: each.get("queue") for each in (await client.get("/runs")).json()["runs"]}
        waited = await client.post(
            "/runs?wait=0", json={"run_id": "low", "inputs": {"topic": "low"}, "priority": "low"}
        )
        repeated = await post(client, "later")
        team.gate.open()
        for run_id in ORDER:
            ended = await client.get(f"/runs/{run_id}/events")
            assert '"exit_reason":"completed"' in ended.text
        done = (await client.get("/runs/high")).json()
    assert "queue" not in first
    assert "queue" not in done
    assert places == {
        "low": {"priority": "low", "position": 1, "estimated_start_s": None},
        "normal": {"priority": "normal", "position": 1, "estimated_start_s": None},
        "high": {"priority": "high", "position": 1, "estimated_start_s": None},
        "later": {"priority": "normal", "position": 3, "estimated_start_s": None},
    }
    assert shown["first"] is None
    assert {run_id: place["position"] for run_id, place in shown.items() if place} == {
        "high": 1, "normal": 2, "later": 3, "low": 4,
    }  # fmt: skip
    assert listed == shown
    assert waited.json()["queue"]["position"] == 4
    assert repeated["queue"] == shown["later"]
    assert team.asked == ["first", "high", "normal", "later", "low"]


async def test_a_run_that_waits_for_long_overtakes_a_higher_priority(connect: Connect) -> None:
    """S-HOK-31: a step that is worth no waiting time makes all runs equal."""
    team = Team()
    limits = EndpointLimits(max_running=1, priority_step_s=0)
    async with connect(team.ensemble(), limits=limits) as client:
        for run_id in ("first", *ORDER):
            await post(client, run_id)
        await team.gate.is_asked.wait()
        team.gate.open()
        for run_id in ORDER:
            await client.get(f"/runs/{run_id}/events")
    assert team.asked == ["first", *ORDER]


async def test_an_estimate_is_there_when_a_run_of_the_team_has_ended(connect: Connect) -> None:
    """S-HOK-33: in seconds."""
    team = Team()
    async with connect(team.ensemble(), limits=ONE) as client:
        await post(client, "high")
        await client.get("/runs/high/events")
        await post(client, "first")
        await team.gate.is_asked.wait()
        place = (await post(client, "low"))["queue"]
        team.gate.open()
        await client.get("/runs/low/events")
    assert isinstance(place, dict)
    assert place["estimated_start_s"] >= 0


async def test_priorities_that_do_not_exist_are_refused(connect: Connect) -> None:
    """S-HOK-30: with the known ones; another priority is another request."""
    team = Team()
    async with connect(team.ensemble(), limits=ONE) as client:
        wrong = await client.post("/runs", json={"inputs": {"topic": "low"}, "priority": "urgent"})
        answers = [
            await client.post("/runs", json={"run_id": "low", "inputs": {"topic": "low"}, "priority": each})
            for each in ("low", "low", "high")
        ]
    assert (wrong.status_code, "'low', 'normal' or 'high'" in wrong.json()["message"]) == (422, True)
    assert [each.status_code for each in answers] == [202, 202, 409]


async def test_the_order_is_the_same_when_the_endpoint_starts_again(tmp_path: Path) -> None:
    """S-HOK-32: the run that had begun is first; the others by priority and the time of their acceptance."""
    ledger, team = tmp_path / "ledger.sqlite", Team()
    async with driven(team.ensemble(), ledger=ledger, limits=ONE) as runs:
        for run_id in ("first", *ORDER):
            asked = NewRun(run_id=run_id, inputs={"topic": run_id}, priority=PRIORITIES.get(run_id))
            await runs.start(asked)
        await team.gate.is_asked.wait()
    again = Team()
    async with driven(again.ensemble(), ledger=ledger, limits=ONE) as runs:
        listed = await runs.list(RunFilter(status=RunStatus.ACCEPTED))
        team.gate.open()  # its run continues in this process, and has its place
        ended = await asyncio.gather(*(runs.wait(run_id, 60) for run_id in ("first", *ORDER)))
    assert {each.status for each in ended} == {RunStatus.COMPLETED}
    places = {each.run_id: each.queue.position for each in listed.runs if each.queue is not None}
    assert places == {"high": 1, "normal": 2, "later": 3, "low": 4}
    assert again.asked == ["high", "normal", "later", "low"]


@pytest.mark.parametrize(("tier", "priority"), [("priority", "high"), ("flex", "low"), ("auto", None), (None, None)])
def test_service_tiers_of_the_openai_api_are_priorities(tier: Any, priority: RunPriority | None) -> None:
    """S-HOK-30: of both of its routes."""
    double = RunsDouble(end=detail(RunStatus.COMPLETED, "fine"))
    with served(as_service(double)) as url, OpenAI(base_url=url, api_key="any") as client:
        client.chat.completions.create(model="team", messages=[{"role": "user", "content": "Hi"}], service_tier=tier)
        client.responses.create(model="team", input="Hi", service_tier=tier)
    assert [each.priority for each in double.started] == [priority, priority]


def test_a_message_that_starts_a_run_has_the_fields_of_a_request() -> None:
    """S-HOK-1, S-HOK-30: on a WebSocket."""
    message = {"type": "run_request", "priority": "high", "webhook": {"url": "https://example.org/"}}
    asked = RunRequestMessage.model_validate(message).new_run
    assert asked.priority is RunPriority.HIGH
    assert asked.webhook is not None
    assert asked.webhook.events == ["run.ended", "review.requested"]
