"""Options by request: texts, limits, tools and forms of answers of one run, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from httpx import AsyncClient

from ensemble_ray import Agent, Ensemble, Loop, Review, Task, tool
from ensemble_ray.access.admission import Right
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.callers import Caller
from ensemble_ray.serve.catalog import DatasetCatalog, ToolCatalog, served_team
from ensemble_ray.serve.driving.requests import EndpointLimits, change_team, checked_entry
from ensemble_ray.serve.schemas import NewDecision, NewRun, Refusal, Verdict
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from ensemble_ray.tools.tool import DynamicToolProvider
from tests.serve.conftest import Connect
from tests.serve.driving import driven
from tests.serve.keys import transport_of
from tests.serve.teams import INPUTS, mapped, pair

SCHEMA: dict[str, Any] = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 2}}}
RAN = {"inputs": INPUTS}


@tool
def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()


@tool
def search(text: str) -> str:
    """Look for it."""
    return text


class Office:
    """Tools of one object."""

    @tool
    def call(self, name: str) -> str:
        """Call somebody."""
        return name

    @tool
    def write(self, name: str) -> str:
        """Write to somebody."""
        return name


class Server(DynamicToolProvider):
    """Tools that are known only when a task starts."""

    def resolve(self) -> Sequence[object]:
        return [search]


def echo() -> ScriptedModel:
    """Answers with the tools that it is offered, and its prompt."""

    def answer(call: ScriptedCall) -> str:
        return f"{[each.name for each in call.tools]} {call.text}"

    return ScriptedModel(otherwise=answer)


def equipped(*tools: object, llm: ScriptedModel | None = None) -> Ensemble:
    """A team of one task, whose agent has tools."""
    writer = Agent(role="Writer", goal="Write", llm=llm or echo(), tools=tools)
    return Ensemble(tasks=[Task(name="draft", description="Write", expected_output="A text", agent=writer)])


OFFERED: Mapping[str, Any] = {"tools": ToolCatalog([shout, Office()])}


def changed(team: Ensemble, **asked: Any) -> Ensemble:
    """What a request makes of a team."""
    found = change_team(team, NewRun.model_validate(asked), ToolCatalog([shout, Office()]).entries)
    assert isinstance(found, Ensemble)
    return found


async def test_a_text_and_a_limit_reach_every_task_when_a_request_has_them(connect: Connect) -> None:
    """S-REQ-1, S-REQ-5, S-REQ-10: braces are text; a later run has none."""
    asked = {**RAN, "additional_context": "For {children}", "options": {"max_iterations": 3}, "run_id": "first"}
    async with connect(pair(echo())) as client:
        found = (await client.post("/runs?wait=60", json=asked)).json()
        after = (await client.post("/runs?wait=60", json=RAN)).json()
    texts = [each["text"] for each in found["result"]["tasks"]]
    assert all("## Additional Context" in text and "For {children}\n\n## Task" in text for text in texts)
    assert "## Additional Context" not in after["result"]["raw"]


async def test_a_text_is_refused_when_the_operator_forbids_it_or_it_is_too_long(connect: Connect) -> None:
    """S-REQ-11."""
    for most, said in ((0, "accepts no additional_context"), (5, "may be 5 at most, got: 8")):
        async with connect(pair(ScriptedModel()), limits=EndpointLimits(max_additional_context=most)) as client:
            refused = await client.post("/runs", json={**RAN, "additional_context": "Be brief"})
            kept = (await client.get("/runs")).json()["runs"]
        assert (refused.status_code, refused.json()["code"], kept) == (400, "LIMIT_EXCEEDED", [])
        assert said in refused.json()["message"]


async def test_callers_without_the_right_admin_change_no_schema_when_they_may_run(tmp_path: Path) -> None:
    """S-REQ-10, S-REQ-12: they may add a text and lower limits."""
    caller = Caller(name="Ann", rights=frozenset({Right.RUN}))
    api = build_api(driven(pair(ScriptedModel(otherwise="fine"))))
    async with (
        api.router.lifespan_context(api),
        AsyncClient(transport=transport_of(api, caller), base_url="http://team") as client,
    ):
        allowed = await client.post(
            "/runs", json={**RAN, "additional_context": "Be brief", "options": {"max_iterations": 1}}
        )
        refused = [
            await client.post("/runs", json={**RAN, **changes})
            for changes in (
                {"output_schema": SCHEMA},
                {"task_overrides": {"draft": {"tools": {"remove": ["x"]}}}},
                {"task_overrides": {"draft": {"max_iterations": 90}}},
            )
        ]
    assert allowed.status_code == 202
    assert [each.status_code for each in refused] == [403, 403, 403]


async def test_an_answer_has_a_form_when_a_request_names_one(connect: Connect) -> None:
    """S-REQ-30, S-REQ-31, S-REQ-20: of the last task, or of any by name; with a correction."""
    model = ScriptedModel("a draft", '{"n": 1}', 'It is {"n": 3}', '{"n": 2}', "a line")
    async with connect(pair(model)) as client:
        last = (await client.post("/runs?wait=60", json={**RAN, "output_schema": SCHEMA})).json()
        named = {"task_overrides": {"draft": {"output_schema": SCHEMA}}}
        first = (await client.post("/runs?wait=60", json={**RAN, **named})).json()
    assert [each["structured"] for each in last["result"]["tasks"]] == [None, {"n": 3}]
    assert [each["structured"] for each in first["result"]["tasks"]] == [{"n": 2}, None]
    assert '"minimum": 2' in model.calls[1].text


async def test_a_run_fails_when_no_answer_fits_its_schema(connect: Connect) -> None:
    """S-REQ-30: as with a declared type."""
    async with connect(equipped(llm=ScriptedModel(otherwise='{"n": 1}'))) as client:
        failed = await client.post("/runs?wait=60", json={"output_schema": SCHEMA})
    assert (failed.status_code, failed.json()["code"]) == (502, "OUTPUT_PARSING_ERROR")
    assert "'n': 1 is less than the minimum of 2" in failed.json()["message"]


async def test_new_tasks_have_the_options_when_a_request_lists_them(connect: Connect) -> None:
    """S-REQ-20, S-REQ-21: tools are added to those of the named agent."""
    new = {
        "description": "Say {topic}",
        "agent": "Writer",
        "tools": {"add": ["shout"], "remove": ["search"]},
        "additional_context": "Be {brief}",
        "max_iterations": 2,
    }
    async with connect(equipped(search, Office().call), tools=ToolCatalog(shout)) as client:
        found = (await client.post("/runs?wait=60", json={"inputs": {"topic": "tides"}, "tasks": [new]})).json()
    assert found["result"]["raw"].startswith("['call', 'shout'] ")
    assert "Be {brief}\n\n## Task\nSay tides" in found["result"]["raw"]


def test_tools_are_added_and_removed_when_an_override_says_so() -> None:
    """S-REQ-21: of an object one by one, also of tasks without an agent; the agent of the team stays as it is."""
    team = equipped(search, Office())
    (one,) = changed(team, task_overrides={"draft": {"tools": {"add": ["shout"], "remove": ["write"]}}}).tasks
    assert one.agent is not None
    assert len(one.agent.tools) == 3
    (own,) = team.tasks
    assert own.agent is not None
    assert len(own.agent.tools) == 2
    alone = Ensemble(tasks=[Task("Write", "A text", name="draft", tools=[search])], llm=ScriptedModel())
    (two,) = changed(alone, task_overrides={"draft": {"tools": {"add": ["call"], "remove": ["search"]}}}).tasks
    assert [getattr(each, "__name__", "") for each in two.tools] == ["call"]


def test_limits_and_texts_are_those_of_the_request_when_a_task_is_overridden() -> None:
    """S-REQ-20: `max_iterations` of the agent, or of a task without one; it may be higher."""
    (one,) = changed(equipped(), task_overrides={"draft": {"max_iterations": 90, "additional_context": "a {b}"}}).tasks
    assert one.agent is not None
    assert (one.agent.max_iterations, one.additional_context) == (90, "a {b}")
    alone = Ensemble(tasks=[Task("Write", "A text", name="draft")], llm=ScriptedModel())
    (two,) = changed(alone, task_overrides={"draft": {"max_iterations": 7}}).tasks
    assert (two.agent, two.max_iterations) == (None, 7)


HANDLED = Ensemble(tasks=[Task("Do", "It", name="draft", handler=lambda _context: "done")])
LOOPED = Ensemble(loops=[Loop(name="l", body=[Task("Do", "It", name="draft")], max_iterations=1)], llm=ScriptedModel())
BOTH = Ensemble(tasks=[Task("A", "It", name="a"), Task("B", "It", name="b")], workflow="parallel", llm=ScriptedModel())
LED = Ensemble(
    tasks=[Task("Do", "It", name="draft", agent=Agent(role="Writer", goal="Write", llm=ScriptedModel()))],
    workflow="hierarchical",
)


@pytest.mark.parametrize(
    ("team", "asked", "code", "said"),
    [
        (equipped(search), {"task_overrides": {"draft": {"tools": {"add": ["x"]}}}}, "TOOL_NOT_FOUND", "[call, shout"),
        (
            equipped(search),
            {"task_overrides": {"draft": {"tools": {"remove": ["x"]}}}},
            "TOOL_NOT_FOUND",
            "no tool 'x' to remove. There are: [search]",
        ),
        (
            equipped(Server()),
            {"task_overrides": {"draft": {"tools": {"remove": ["search"]}}}},
            "TOOL_NOT_FOUND",
            "known only when the task starts",
        ),
        (equipped(shout), {"task_overrides": {"draft": {"tools": {"add": ["shout"]}}}}, "TASKS_INVALID", "already"),
        (HANDLED, {"task_overrides": {"draft": {"max_iterations": 2}}}, "TASKS_INVALID", "handler"),
        (HANDLED, {"task_overrides": {"draft": {"additional_context": "a"}}}, "TASKS_INVALID", "handler"),
        (LED, {"task_overrides": {"draft": {"additional_context": "a"}}}, "TASKS_INVALID", "manager"),
        (LED, {"output_schema": SCHEMA}, "TASKS_INVALID", "manager"),
        (LOOPED, {"output_schema": SCHEMA}, "TASKS_INVALID", "Name the task in task_overrides"),
        (BOTH, {"output_schema": SCHEMA}, "TASKS_INVALID", "several tasks end this run: [a, b]"),
        (
            equipped(),
            {"output_schema": SCHEMA, "task_overrides": {"draft": {"output_schema": SCHEMA}}},
            "TASKS_INVALID",
            "one of its own",
        ),
        (equipped(), {"output_schema": {"type": "x"}}, "OUTPUT_SCHEMA_INVALID", "output_schema.type"),
        (equipped(), {"output_schema": {"$ref": "http://x"}}, "OUTPUT_SCHEMA_INVALID", "'#/$defs/'"),
        (mapped(ScriptedModel()), {"output_schema": SCHEMA}, "TASKS_NOT_TAKEN", "items"),
    ],
)
def test_a_change_is_refused_when_it_cannot_be_made(team: Any, asked: dict[str, Any], code: str, said: str) -> None:
    """S-REQ-20, S-REQ-21, S-REQ-31, S-REQ-32: with the known names."""
    with pytest.raises(Refusal) as refused:
        changed(team, **asked)
    assert (refused.value.status, refused.value.code) == (400, code)
    assert said in str(refused.value)


def test_a_request_is_the_same_as_before_when_it_has_no_new_field() -> None:
    """S-REQ-13: the digest of an earlier release; another value is another request."""

    def digest(**asked: Any) -> str:
        run = NewRun.model_validate({"inputs": INPUTS, **asked})
        team = served_team("team", pair(ScriptedModel()))
        entry, _ = checked_entry(run, team, EndpointLimits(), None, tools={}, datasets=DatasetCatalog())
        return entry.digest[:16]

    assert digest() == "0d2b315ab6c9cab3"
    assert digest(task_overrides={"draft": {"description": "Praise {topic}"}}) == "db986329414814b6"
    assert digest(tasks=["draft", {"description": "Sum up", "agent": "Editor"}]) == "ba3f3eb23832ae30"
    new = ({"additional_context": "a"}, {"output_schema": SCHEMA}, {"options": {"max_iterations": 2}})
    assert len({digest(), *(digest(**each) for each in new)}) == 4


def asking(llm: ScriptedModel) -> Ensemble:
    """The pair, with a gate behind its first task, at which runs wait in their records."""
    draft, final = pair(llm).tasks
    reviewed = draft.replace(review=Review.required())
    return Ensemble(tasks=[reviewed, final.replace(context=[reviewed])], review_wait="detach")


async def test_a_restarted_endpoint_applies_the_options_again_when_it_resumes_a_run(tmp_path: Path) -> None:
    """S-REQ-2, S-REQ-30, S-CTL-25: from the ledger and the record."""
    ledger = tmp_path / "ledger"
    body = {**RAN, "run_id": "first", "additional_context": "For {children}", "output_schema": SCHEMA}
    async with driven(asking(ScriptedModel("a draft")), ledger=ledger) as runs:
        await runs.start(NewRun.model_validate(body))
        assert (await runs.wait("first", 60)).status == "waiting"
    model = ScriptedModel('{"n": 1}', '{"n": 4}')
    async with driven(asking(model), ledger=ledger) as runs:
        (gate,) = await runs.reviews()
        await runs.decide("first", gate.gate_id, NewDecision(decision=Verdict.APPROVE))
        events = [each async for each in runs.events("first")]
        ended = await runs.get("first")
        repeated = await runs.start(NewRun.model_validate(body))
    assert events[-1].data["exit_reason"] == "completed"
    assert ended.result is not None
    assert [each.structured for each in ended.result.tasks] == [None, {"n": 4}]
    assert "For {children}\n\n## Task" in model.calls[0].text
    assert repeated.status == "completed"


async def test_bodies_with_misspelt_options_are_refused_when_they_arrive(connect: Connect) -> None:
    """S-REQ-50: at every level."""
    wrong = (
        {"aditional_context": "a"},
        {"options": {"max_iteration": 2}},
        {"task_overrides": {"draft": {"tools": {"added": []}}}},
        {"task_overrides": {"draft": {"schema": {}}}},
        {"tasks": [{"description": "a", "schema": {}}]},
        {"additional_context": " "},
        {"additional_context": "a" * 20_001},
        {"options": {"max_iterations": 0}},
    )
    async with connect(pair(ScriptedModel())) as client:
        answers = [await client.post("/runs", json={**RAN, **each}) for each in wrong]
    assert [each.status_code for each in answers] == [422] * len(wrong)
    assert {json.loads(each.text)["code"] for each in answers} == {"INVALID_REQUEST"}
