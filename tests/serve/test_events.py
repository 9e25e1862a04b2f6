"""`/runs/{run_id}/events`: what happens in a run, for who comes early, late, again, or never had anything."""

from __future__ import annotations

import asyncio
import json

import pytest
from httpx import Response

from ensemble_ray import Ensemble
from ensemble_ray.serve.schemas import NewRun, Refusal, RunEvent
from ensemble_ray.testing import ScriptedModel
from tests.serve.conftest import Connect
from tests.serve.driving import driven
from tests.serve.gates import Gate
from tests.serve.teams import INPUTS, pair

Event = tuple[str, str, dict[str, object]]

TYPES = [
    "ensemble_started",
    "task_started",
    "llm_iteration_completed",
    "task_completed",
    "task_started",
    "llm_iteration_completed",
    "task_completed",
    "ensemble_completed",
]


def parse(response: Response) -> list[Event]:
    """Id, type and data of each event of a stream; an id alone is no event."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found: list[Event] = []
    for block in response.text.replace("\r\n", "\n").split("\n\n"):
        lines = [line.partition(": ")[::2] for line in block.splitlines() if line and not line.startswith(":")]
        fields = dict(lines)
        if "event" in fields:
            found.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
    return found


async def test_a_run_is_followed_to_its_end(connect: Connect) -> None:
    """S-SRV-30, S-WEB-33: types and fields of file 27, in the order in which they happened."""
    gate = Gate("a draft")
    async with connect(pair(ScriptedModel(gate, "a line"))) as client:
        await client.post("/runs", json={"inputs": INPUTS, "run_id": "live"})
        following = asyncio.create_task(client.get("/runs/live/events"))
        await gate.is_asked.wait()
        gate.open()
        events = parse(await following)
        assert (await client.get("/runs/live")).json()["status"] == "completed"
    assert [kind for _, kind, _ in events] == TYPES
    assert len({cursor for cursor, _, _ in events}) == len(events)
    first, started, *_, last = (data for _, _, data in events)
    assert (first["ensemble_id"], first["total_tasks"], first["workflow"]) == ("live", 2, "sequential")
    assert (started["task_index"], started["agent_role"]) == (1, "Writer")
    assert started["task_description"] == "Write about Ray"
    assert (last["exit_reason"], last["ensemble_id"]) == ("completed", "live")


async def test_a_reader_that_comes_back_has_the_rest_once(connect: Connect) -> None:
    """S-SRV-32, S-SRV-34: behind every event, as header or query; who had all need not come back."""
    async with connect(pair(ScriptedModel(otherwise="fine"))) as client:
        await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "over"})
        events = parse(await client.get("/runs/over/events"))
        assert [kind for _, kind, _ in events] == TYPES
        for position, (cursor, _, _) in enumerate(events[:-1]):
            rest = parse(await client.get("/runs/over/events", headers={"last-event-id": cursor}))
            assert rest == events[position + 1 :]
        assert parse(await client.get(f"/runs/over/events?after={events[2][0]}")) == events[3:]
        assert (await client.get("/runs/over/events", headers={"last-event-id": events[-1][0]})).status_code == 204
        wrong = await client.get("/runs/over/events", headers={"last-event-id": "x"})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "INVALID_CURSOR")


@pytest.mark.parametrize(
    ("answers", "reason", "last"),
    [(["a draft", ValueError("boom")], "error", "task_failed"), ([ValueError("boom")], "error", "task_failed")],
)
async def test_a_failed_run_ends_like_any_other(
    connect: Connect, answers: list[str | BaseException], reason: str, last: str
) -> None:
    """S-SRV-33, S-WEB-33."""
    async with connect(pair(ScriptedModel(*answers))) as client:
        assert (await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "failed"})).status_code == 502
        events = parse(await client.get("/runs/failed/events"))
    assert [kind for _, kind, _ in events][-2:] == [last, "ensemble_completed"]
    assert events[-1][2]["exit_reason"] == reason
    assert "boom" in str(events[-2][2]["reason"])


async def test_a_run_without_a_record_has_its_end_at_least(connect: Connect) -> None:
    """S-SRV-35: durability `off`."""
    team: Ensemble = pair(ScriptedModel(otherwise="fine")).replace(durability="off")
    async with connect(team) as client:
        await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "off"})
        (event,) = parse(await client.get("/runs/off/events"))
    assert event[:2] == ("", "ensemble_completed")
    assert event[2]["exit_reason"] == "completed"


async def test_tokens_are_shown_to_who_follows_and_kept_for_nobody() -> None:
    """S-SRV-31: they have no cursor."""
    gate = Gate("one two three")
    team = pair(ScriptedModel(gate, otherwise="fine")).replace(stream=True)
    async with driven(team) as runs:
        await runs.start(NewRun.model_validate({"inputs": INPUTS, "run_id": "said"}))
        await gate.is_asked.wait()
        events: list[RunEvent] = []
        async for each in runs.events("said"):
            events.append(each)
            gate.open()
        again = [each async for each in runs.events("said")]
    tokens = [each for each in events if each.type == "token"]
    assert "".join(str(each.data["token"]) for each in tokens if each.data["agent_role"] == "Writer") == "one two three"
    assert all(each.cursor is None for each in tokens)
    assert [each for each in events if each.type != "token"] == again


async def test_a_cancelled_run_ends_with_that() -> None:
    """S-SRV-33: and nobody follows a run that there is not."""
    gate = Gate("never")
    async with driven(pair(ScriptedModel(gate))) as runs:
        await runs.start(NewRun.model_validate({"inputs": INPUTS, "run_id": "stopped"}))
        await gate.is_asked.wait()
        await runs.cancel("stopped")
        events = [each async for each in runs.events("stopped")]
        assert (events[-1].type, events[-1].data["exit_reason"]) == ("ensemble_completed", "cancelled")
        with pytest.raises(Refusal, match="no run 'none'"):
            _ = [each async for each in runs.events("none")]


def blocks(response: Response) -> list[str]:
    """The parts of a stream, also those without an event."""
    return [each for each in response.text.replace("\r\n", "\n").split("\n\n") if each and not each.startswith(":")]


async def test_only_some_types_are_sent_when_a_reader_asks_for_them(connect: Connect) -> None:
    """S-REQ-40, S-REQ-41: the last event always; the cursors of the others move the position."""
    async with connect(pair(ScriptedModel(otherwise="fine"))) as client:
        await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "over"})
        whole = parse(await client.get("/runs/over/events"))
        wanted = [each for each in whole if each[1] in {"task_completed", "ensemble_completed"}]
        assert parse(await client.get("/runs/over/events?events=task_completed,token")) == wanted
        assert parse(await client.get("/runs/over/events?events=token&events=task_completed")) == wanted
        assert parse(await client.get("/runs/over/events?events=token"))[-1] == whole[-1]
        for position, (cursor, _, _) in enumerate(whole[:-1]):
            rest = await client.get("/runs/over/events?events=task_completed", headers={"last-event-id": cursor})
            assert parse(rest) == [each for each in whole[position + 1 :] if each in wanted]
        last = {"last-event-id": whole[-1][0]}
        assert (await client.get("/runs/over/events?events=token", headers=last)).status_code == 204


async def test_the_cursor_moves_when_events_are_left_out(connect: Connect) -> None:
    """S-REQ-41: an id alone, behind which a reader continues with any types."""
    gate = Gate("a draft")
    async with connect(pair(ScriptedModel(gate, "a line"))) as client:
        await client.post("/runs", json={"inputs": INPUTS, "run_id": "live"})
        following = asyncio.create_task(client.get("/runs/live/events?events=task_failed"))
        await gate.is_asked.wait()
        gate.open()
        skipped, *_, last = blocks(await following)
        whole = parse(await client.get("/runs/live/events"))
        cursor = skipped.removeprefix("id: ")
        assert skipped == f"id: {cursor}"
        place = [each[0] for each in whole].index(cursor)
        assert parse(await client.get(f"/runs/live/events?after={cursor}")) == whole[place + 1 :]
    assert "event: ensemble_completed" in last


@pytest.mark.parametrize("names", ["task_complete", "token,", "", "task_input", "skipped", "*"])
async def test_types_are_refused_when_no_event_has_them(connect: Connect, names: str) -> None:
    """S-REQ-40: with the known ones."""
    async with connect(pair(ScriptedModel(otherwise="fine"))) as client:
        await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "over"})
        refused = await client.get(f"/runs/over/events?events={names}")
    assert (refused.status_code, refused.json()["code"]) == (422, "INVALID_REQUEST")
    assert "Known: [batch_progress, delegation_completed," in refused.json()["message"]


async def test_a_follower_reads_some_types_when_it_is_asked_to() -> None:
    """S-REQ-40, S-REQ-41: tokens among them; a message without data has the cursor of the others."""
    gate = Gate("one two three")
    team = pair(ScriptedModel(gate, otherwise="fine")).replace(stream=True)
    async with driven(team) as runs:
        await runs.start(NewRun.model_validate({"inputs": INPUTS, "run_id": "said"}))
        await gate.is_asked.wait()
        events: list[RunEvent] = []
        async for each in runs.events("said", types=frozenset({"token"})):
            events.append(each)
            gate.open()
    assert {each.type for each in events} == {"token", "skipped", "ensemble_completed"}
    assert all((each.data, each.cursor is None) == ({}, False) for each in events if each.type == "skipped")
