"""What an endpoint can do: its tools, called by name, and the tasks of its teams; who may."""

from __future__ import annotations

import asyncio

import pytest
from httpx import AsyncClient

from ensemble_ray import FileWriteTool, TryAgain, ValidationError, tool
from ensemble_ray.access.admission import Right
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.app import EndpointOptions
from ensemble_ray.serve.callers import Caller
from ensemble_ray.serve.catalog import ToolCatalog, load_catalog, load_models, named_models
from ensemble_ray.serve.driving.driver import driver_name
from ensemble_ray.testing import ScriptedModel
from tests.serve.conftest import Connect
from tests.serve.driving import driven
from tests.serve.keys import transport_of
from tests.serve.teams import pair


@tool
def shout(text: str) -> str:
    """Say it louder."""
    if not text:
        raise TryAgain("Say something")
    return text.upper()


@tool
async def sleep() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return "never"


OFFERED = [shout, sleep]


def catalog() -> ToolCatalog:
    """Both tools; calls may take a moment alone."""
    return ToolCatalog(OFFERED, time_limit_s=0.05)


async def test_tools_and_tasks_are_listed(connect: Connect) -> None:
    """S-SRV-205: with the schema of a tool's arguments."""
    async with connect(pair(ScriptedModel()), tools=catalog()) as client:
        found = (await client.get("/capabilities")).json()
    assert [(each["name"], each["description"]) for each in found["tools"]] == [
        ("shout", "Say it louder."),
        ("sleep", "Never answer."),
    ]
    assert list(found["tools"][0]["parameters"]["properties"]) == ["text"]
    assert found["tasks"] == [
        {"ensemble": "team", "name": "draft", "agent_role": "Writer"},
        {"ensemble": "team", "name": "final", "agent_role": "Editor"},
    ]


async def test_a_tool_is_called_once(connect: Connect) -> None:
    """S-SRV-206: what it says of a failure is an answer, too."""
    async with connect(pair(ScriptedModel()), tools=ToolCatalog(OFFERED)) as client:
        place = "/tools/shout/invoke"
        said = (await client.post(place, json={"arguments": {"text": "Ray"}})).json()
        again = (await client.post(place, json={"arguments": {"text": ""}})).json()
        wrong = (await client.post(place, json={"arguments": {"loud": True}})).json()
    assert (said["outcome"], said["output"]) == ("success", "RAY")
    assert (again["outcome"], again["output"]) == ("failure", "Say something")
    assert wrong["outcome"] == "error"


async def test_a_tool_that_is_not_there_or_takes_too_long_is_refused(connect: Connect) -> None:
    """S-SRV-206, S-CTL-1: with the names there are."""
    async with connect(pair(ScriptedModel()), tools=catalog()) as client:
        unknown = await client.post("/tools/other/invoke", json={})
        slow = await client.post("/tools/sleep/invoke", json={})
    assert (unknown.status_code, unknown.json()["code"]) == (400, "TOOL_NOT_FOUND")
    assert "[shout, sleep]" in unknown.json()["message"]
    assert (slow.status_code, slow.json()["code"]) == (504, "TOOL_TIMEOUT")


def test_a_catalog_is_loaded_by_name() -> None:
    """S-SRV-207: a tool or a list of them; none that asks a person first."""
    assert [each.name for each in load_catalog([f"{__name__}:OFFERED"]).infos] == ["shout", "sleep"]
    with pytest.raises(ValidationError, match="missing"):
        load_catalog([f"{__name__}:missing"])
    with pytest.raises(ValidationError, match="ask a person"):
        load_catalog([f"{__name__}:ASKING"])


ASKING = FileWriteTool(".", require_approval=True)


@pytest.mark.parametrize(
    ("right", "allowed"),
    [
        (Right.READ, {"GET /capabilities", "GET /reviews"}),
        (Right.REVIEW, {"GET /reviews", "POST /reviews/first/gate"}),
        (Right.RUN, {"POST /runs/first/inject", "POST /runs/first/model"}),
        (Right.ADMIN, {"POST /tools/shout/invoke"}),
    ],
)
async def test_each_call_needs_its_right(right: Right, allowed: set[str]) -> None:
    """S-SRV-208."""
    bodies = {
        "GET /capabilities": None,
        "GET /reviews": None,
        "POST /reviews/first/gate": {"decision": "approve"},
        "POST /runs/first/inject": {"text": "a"},
        "POST /runs/first/model": {"model": "a"},
        "POST /tools/shout/invoke": {"arguments": {"text": "a"}},
    }
    api = build_api(driven(pair(ScriptedModel()), tools=catalog()))
    transport = transport_of(api, Caller(name="Ann", rights=frozenset({right})))
    found = set()
    async with api.router.lifespan_context(api), AsyncClient(transport=transport, base_url="http://team") as client:
        for label, body in bodies.items():
            method, _, path = label.partition(" ")
            if (await client.request(method, path, json=body)).status_code != 403:
                found.add(label)
    assert found == allowed


SMALL = ScriptedModel("small")


def test_models_are_loaded_by_name() -> None:
    """S-SRV-211: one that cannot be is said with its name."""
    assert load_models({"small": f"{__name__}:SMALL"})["small"] is SMALL
    with pytest.raises(ValidationError, match=r"Model 'huge': .*missing"):
        load_models({"huge": f"{__name__}:missing"})


def test_models_have_names() -> None:
    """S-SRV-211: that of a module's attribute where none is said; also as one text, as Serve's command line has it."""
    assert named_models(["large=openai:gpt-4o", " office:SMALL ", ""]) == {
        "large": "openai:gpt-4o",
        "SMALL": "office:SMALL",
    }
    options = EndpointOptions.model_validate({"team": "a", "models": "large=openai:gpt-4o, office:SMALL"})
    assert options.models == {"large": "openai:gpt-4o", "SMALL": "office:SMALL"}
    assert EndpointOptions.model_validate({"models": {"a": {"model": "m"}}}).models == {"a": {"model": "m"}}
    with pytest.raises(ValidationError, match="Two models are called 'a'"):
        named_models(["a=openai:b", "a=openai:c"])
    with pytest.raises(ValidationError, match="write NAME=MODEL"):
        named_models(["=openai:b"])


def test_an_endpoint_is_of_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SRV-213: that of its arguments, else of the environment; its driver and its ledger have names of their own."""
    monkeypatch.setenv("ENSEMBLE_RAY_NAMESPACE", "blue")
    assert EndpointOptions().chosen_namespace() == "blue"
    assert EndpointOptions(namespace="").chosen_namespace() == ""
    with pytest.raises(ValidationError, match="A namespace has"):
        EndpointOptions(namespace="a b").chosen_namespace()
    assert {driver_name("a"), driver_name("a", "blue"), driver_name("a", "green")} == {
        "endpoint-a",
        "blue/endpoint-a",
        "green/endpoint-a",
    }
