"""Runs that wait for people: they hold no place, say at which gates, and go on when these are decided."""

from __future__ import annotations

from typing import Any

from httpx import AsyncClient

from ensemble_ray import Ensemble, Review, ReviewDecision, adecide
from ensemble_ray.serve.driving.requests import EndpointLimits
from tests.builders import task
from tests.serve.conftest import Connect


def asked() -> Ensemble:
    """An offer that somebody has to approve, and a letter behind it."""
    offer = task("offer", handler=lambda _context: "40 EUR", review=Review(prompt="Is it right?", timeout=0))
    letter = task("letter", handler=lambda context: f"Dear: {context.context_outputs[0].raw}", context=[offer])
    return Ensemble(tasks=[offer, letter], review_wait="detach")


async def ended_run(client: AsyncClient, run_id: str) -> tuple[dict[str, Any], str]:
    """The run when it has ended, and its events."""
    events = (await client.get(f"/runs/{run_id}/events")).text
    return (await client.get(f"/runs/{run_id}")).json(), events


async def test_a_run_waits_without_a_place_and_goes_on_when_it_is_decided(connect: Connect) -> None:
    """S-SRV-11, S-SRV-26, S-SRV-27: a wait for its end is answered when it waits; others run meanwhile."""
    async with connect(asked(), limits=EndpointLimits(max_running=1)) as client:
        first = await client.post("/runs?wait=60", json={"run_id": "first"})
        assert (first.status_code, first.json()["status"]) == (202, "waiting")
        (gate,) = (await client.get("/runs/first")).json()["reviews"]
        assert (gate["prompt"], gate["task_output"], gate["timing"]) == ("Is it right?", "40 EUR", "after_execution")
        assert [each["run_id"] for each in (await client.get("/runs?status=waiting")).json()["runs"]] == ["first"]
        second = await client.post("/runs?wait=60", json={"run_id": "second"})
        assert second.json()["status"] == "waiting"
        await adecide("first", gate["gate_id"], ReviewDecision.edit("38 EUR"), by="Ann")
        ended, text = await ended_run(client, "first")
    assert (ended["status"], ended["result"]["raw"], ended["reviews"]) == ("completed", "Dear: 38 EUR", [])
    assert text.count("event: ensemble_completed") == 1
    assert text.count("event: review_requested") == text.count("event: review_decided") == 1


async def test_a_run_that_waits_can_be_cancelled(connect: Connect) -> None:
    """S-SRV-24: what was done is its result."""
    async with connect(asked()) as client:
        await client.post("/runs?wait=60", json={"run_id": "first"})
        assert (await client.post("/runs/first/cancel")).status_code == 202
        ended, text = await ended_run(client, "first")
    assert (ended["status"], ended["reviews"]) == ("cancelled", [])
    assert '"exit_reason":"cancelled"' in text
