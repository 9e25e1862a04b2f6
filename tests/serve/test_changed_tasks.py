"""Requests that change the tasks of a team for one run: other words, models and tools, or other tasks altogether."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient

from ensemble_ray import Agent, Ensemble, Loop, Task, tool
from ensemble_ray.access.admission import Right
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.callers import Caller
from ensemble_ray.serve.catalog import ToolCatalog
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.serve.conftest import Connect
from tests.serve.driving import driven
from tests.serve.keys import transport_of
from tests.serve.teams import INPUTS, mapped, pair


@tool
def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()


def echo(name: str) -> ScriptedModel:
    """Answers with its name, the tools that it is offered, and its whole prompt."""

    def answer(call: ScriptedCall) -> str:
        return f"{name} {[each.name for each in call.tools]} {call.text}"

    return ScriptedModel(otherwise=answer)


def offered() -> dict[str, Any]:
    """What the operator offers."""
    return {"tools": ToolCatalog(shout), "models": {"large": echo("large")}}


#: of a team whose texts name no reader
ONE_INPUT = {"topic": INPUTS["topic"]}


async def ran(client: AsyncClient, **asked: Any) -> Any:
    """What a request to run gave."""
    return (await client.post("/runs?wait=60", json={"inputs": INPUTS, **asked})).json()


async def test_a_task_has_other_words_a_model_and_tools_in_one_run(connect: Connect) -> None:
    """S-CTL-20, S-CTL-21: others and later runs are as the team says; texts are templates."""
    override = {"description": "Praise {topic}", "expected_output": "A poem", "model": "large", "tools": ["shout"]}
    async with connect(pair(echo("own")), **offered()) as client:
        changed = await ran(client, task_overrides={"draft": override})
        after = await ran(client)
    draft, final = changed["result"]["tasks"]
    assert draft["text"].startswith("large ['shout'] ")
    assert "Praise Ray" in draft["text"]
    assert "A poem" in draft["text"]
    assert final["text"].startswith("own [] ")
    assert draft["text"] in final["text"], "it is given the output of the changed task"
    assert after["result"]["tasks"][0]["text"].startswith("own [] ")
    assert "Write about Ray" in after["result"]["tasks"][0]["text"]


async def test_a_task_without_a_name_is_found_by_the_beginning_of_its_description(connect: Connect) -> None:
    """S-CTL-21: its first 50 characters, variables as they are written."""
    words = "Write {topic} down, and do it with all the care that is due, twice"
    team = Ensemble(tasks=[Task(description=words, expected_output="A text")], llm=echo("own"))
    async with connect(team, **offered()) as client:
        found = await ran(client, inputs=ONE_INPUT, task_overrides={words[:50]: {"model": "large"}})
    assert found["result"]["raw"].startswith("large ")


async def test_tasks_of_a_loop_can_be_changed(connect: Connect) -> None:
    """S-CTL-20: wherever a task stands."""
    body = Task(name="polish", description="Polish {topic}", expected_output="A text")
    team = Ensemble(loops=[Loop(name="refine", body=[body], max_iterations=1)], tasks=[], llm=echo("own"))
    async with connect(team, **offered()) as client:
        found = await ran(client, inputs=ONE_INPUT, task_overrides={"polish": {"description": "Shine {topic}"}})
    assert "Shine Ray" in found["result"]["raw"]


async def test_a_run_has_other_tasks_than_its_team(connect: Connect) -> None:
    """S-CTL-22: some of the team's, and new ones for its agents, or for one that is made."""
    team = pair(echo("own")).replace(llm=echo("made"))
    listed = [
        "draft",
        {"name": "review", "description": "Review {topic}", "agent": "Editor", "context": ["draft"]},
        {"description": "Sum up", "model": "large", "tools": ["shout"], "context": ["review", "draft"]},
        {"description": "Greet"},
    ]
    async with connect(team, **offered()) as client:
        taken = await client.post("/runs", json={"inputs": INPUTS, "tasks": listed, "run_id": "first"})
        found = await ran(client, tasks=listed, run_id="first")
    assert taken.json()["tasks"] == 4
    draft, review, summed, greeted = found["result"]["tasks"]
    assert [each["role"] for each in (draft, review)] == ["Writer", "Editor"]
    assert draft["text"] in review["text"]
    assert summed["text"].startswith("large ['shout'] ")
    assert review["text"] in summed["text"]
    assert greeted["text"].startswith("made [] ")


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        ({"task_overrides": {"other": {}}}, "TASK_NOT_FOUND", "There are: [draft, final]"),
        ({"task_overrides": {"draft": {"model": "huge"}}}, "MODEL_NOT_FOUND", "There are: [large]"),
        ({"task_overrides": {"draft": {"tools": ["whisper"]}}}, "TOOL_NOT_FOUND", "There are: [shout]"),
        ({"tasks": ["other"]}, "TASK_NOT_FOUND", "There are: [draft, final]"),
        ({"tasks": ["final"]}, "TASKS_INVALID", "do not precede it"),
        ({"tasks": ["draft", "draft"]}, "TASKS_INVALID", "twice"),
        ({"tasks": [{"description": "a", "agent": "Reader"}]}, "AGENT_NOT_FOUND", "There are: [Editor, Writer]"),
        ({"tasks": [{"description": "a", "context": ["b"]}]}, "TASKS_INVALID", "no task 'b' precedes it"),
        ({"tasks": [{"description": "a"}]}, "TASKS_INVALID", "llm"),
        ({"tasks": ["draft"], "task_overrides": {"draft": {}}}, "TASKS_INVALID", "not both"),
        ({"tasks": ["draft", {"name": "draft", "description": "a"}]}, "TASKS_INVALID", "two tasks are called 'draft'"),
    ],
)
async def test_what_is_not_there_is_refused_before_anything_runs(
    connect: Connect, asked: dict[str, Any], code: str, said: str
) -> None:
    """S-CTL-1, S-CTL-23: with the names there are; nothing is kept of it."""
    async with connect(pair(ScriptedModel()), **offered()) as client:
        refused = await client.post("/runs", json={"inputs": INPUTS, **asked})
        kept = (await client.get("/runs")).json()["runs"]
    assert (refused.status_code, refused.json()["code"], kept) == (400, code, [])
    assert said in refused.json()["message"]


async def test_inputs_that_changed_texts_name_are_asked_for(connect: Connect) -> None:
    """S-CTL-24, S-SRV-215: those of the texts that run, and of no others; those of the team's other texts may be given."""
    async with connect(pair(echo("own")), **offered()) as client:
        new = {"description": "Write for {paper}"}
        missing = await client.post("/runs", json={"inputs": INPUTS, "task_overrides": {"draft": new}})
        fewer = await client.post("/runs?wait=60", json={"inputs": {"topic": "Ray"}, "tasks": ["draft"]})
        more = await client.post(
            "/runs?wait=60", json={"inputs": {**INPUTS, "paper": "X"}, "task_overrides": {"draft": new}}
        )
        unknown = await client.post("/runs", json={"inputs": {**INPUTS, "page": "1"}, "tasks": ["draft"]})
    assert (missing.status_code, missing.json()["code"]) == (422, "INPUTS_MISSING")
    assert missing.json()["missing"] == ["paper"]
    assert fewer.json()["status"] == more.json()["status"] == "completed"
    assert (unknown.status_code, unknown.json()["code"]) == (422, "INPUTS_UNKNOWN")


async def test_a_task_with_a_handler_takes_no_model(connect: Connect) -> None:
    """S-CTL-23: other words it takes."""
    task = Task(name="add", description="Add", expected_output="A sum", handler=lambda _context: "3")
    async with connect(Ensemble(tasks=[task]), **offered()) as client:
        refused = await client.post("/runs", json={"task_overrides": {"add": {"model": "large"}}})
        taken = await client.post("/runs?wait=60", json={"task_overrides": {"add": {"description": "Add up"}}})
    assert (refused.status_code, refused.json()["code"]) == (400, "TASKS_INVALID")
    assert taken.json()["result"]["tasks"][0]["description"] == "Add up"


async def test_a_map_reduce_takes_no_other_tasks(connect: Connect) -> None:
    """S-CTL-23: its tasks are made of its items."""
    async with connect(mapped(ScriptedModel())) as client:
        refused = await client.post("/runs", json={"tasks": [{"description": "a"}]})
    assert (refused.status_code, refused.json()["code"]) == (400, "TASKS_NOT_TAKEN")


async def test_agents_that_a_team_lists_may_be_other_ones(connect: Connect) -> None:
    """S-CTL-20, S-DOM-90: a hierarchical team has its workers in a list of their own; a model of the task's own is replaced."""
    writer = Agent(role="Writer", goal="Write", llm=echo("own"))
    task = Task(name="draft", description="Write", expected_output="A text", agent=writer, llm=echo("task"))
    async with connect(Ensemble(agents=[writer], tasks=[task]), **offered()) as client:
        found = await ran(client, inputs={}, task_overrides={"draft": {"model": "large"}})
    assert found["result"]["raw"].startswith("large ")


async def test_the_same_request_is_the_same_run(connect: Connect) -> None:
    """S-CTL-25, S-SRV-14: the tasks are part of it."""
    async with connect(pair(echo("own")), **offered()) as client:
        first = await ran(client, run_id="first", tasks=["draft"])
        again = await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "first", "tasks": ["draft"]})
        other = await client.post("/runs", json={"inputs": INPUTS, "run_id": "first"})
    assert again.json()["result"] == first["result"]
    assert (other.status_code, other.json()["code"]) == (409, "RUN_EXISTS")


async def test_a_run_that_waited_when_its_process_died_has_its_tasks(tmp_path: Path) -> None:
    """S-CTL-25: they are kept with the request."""
    ledger = tmp_path / "endpoint.sqlite"
    asked = {"inputs": INPUTS, "run_id": "first", "tasks": ["draft"]}

    async def client_of(answers: ScriptedModel) -> dict[str, Any]:
        api = build_api(driven(pair(answers), ledger=ledger, **offered()))
        transport = ASGITransport(api, raise_app_exceptions=False)
        async with api.router.lifespan_context(api), AsyncClient(transport=transport, base_url="http://team") as client:
            found = await client.post("/runs", json=asked)
            if found.json()["status"] == "accepted":
                return dict(found.json())
            await client.get("/runs/first/events")
            return dict((await client.get("/runs/first")).json())

    await client_of(echo("own"))
    ended = await client_of(echo("own"))
    assert ended["status"] == "completed"
    assert len(ended["result"]["tasks"]) == 1


@pytest.mark.parametrize(("right", "status"), [(Right.RUN, 403), (Right.ADMIN, 202)])
async def test_other_tasks_need_the_right_to_administer(right: Right, status: int) -> None:
    """S-CTL-26: beside that to run."""
    api = build_api(driven(pair(echo("own"))))
    transport = transport_of(api, Caller(name="Ann", rights=frozenset({Right.RUN, right})))
    async with api.router.lifespan_context(api), AsyncClient(transport=transport, base_url="http://team") as client:
        for change in ({"tasks": ["draft"]}, {"task_overrides": {"draft": {"description": "a"}}}):
            found = await client.post("/runs", json={"inputs": INPUTS, **change})
            assert found.status_code == status
            if status == 202:
                await client.get(f"/runs/{found.json()['run_id']}/events")
