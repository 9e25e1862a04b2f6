"""Names that nothing has: parameters of queries, fields of bodies and of messages."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from ensemble_ray import Ensemble
from ensemble_ray.serve import schemas
from ensemble_ray.serve.api import ROUTERS, build_api
from ensemble_ray.serve.middleware import OwnRoute
from ensemble_ray.testing import ScriptedModel
from tests.serve.conftest import Connect
from tests.serve.driving import driven
from tests.serve.teams import INPUTS, pair

#: Routes of other protocols, which ignore what they do not know.
FOREIGN = ("/v1/", "/a2a/", "/.well-known/")


def team() -> Ensemble:
    return pair(ScriptedModel(otherwise="fine"))


def operations() -> list[tuple[str, str, set[str]]]:
    """Method, path and query parameters of each operation of the document."""
    document = build_api(driven(team())).openapi()
    return [
        (method, path, {each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"})
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


async def test_a_parameter_is_refused_when_a_route_does_not_have_it(connect: Connect) -> None:
    """S-REQ-50, S-REQ-52: on every own route of the document, with the known ones, before anything else."""
    async with connect(team()) as client:
        for method, path, known in operations():
            name = path.replace("{", "").replace("}", "")
            found = await client.request(method, f"{name}?wiat=60", json={} if method == "post" else None)
            if path.startswith(FOREIGN):
                assert "wiat" not in found.text
                continue
            assert (found.status_code, found.json()["code"]) == (422, "INVALID_REQUEST"), path
            expected = f"query.wiat: unknown parameter. Known: [{', '.join(sorted(known))}]"
            assert found.json()["message"].startswith(expected), path
        kept = (await client.get("/runs")).json()["runs"]
    assert kept == []


def test_every_own_route_refuses_parameters_when_it_is_added() -> None:
    """S-REQ-50, S-REQ-52: also one that the document does not show."""
    for router in ROUTERS:
        for route in router.routes:
            path = getattr(route, "path", "")
            assert isinstance(route, OwnRoute) is not path.startswith(FOREIGN), path


async def test_known_parameters_are_accepted_when_they_repeat(connect: Connect) -> None:
    """S-REQ-50."""
    async with connect(team()) as client:
        await client.post("/runs?wait=60", json={"inputs": INPUTS, "tags": {"a": "b"}})
        found = await client.get("/runs?tag=a:b&tag=a:b&limit=5")
    assert len(found.json()["runs"]) == 1


def models_of(kind: type[BaseModel]) -> list[type[BaseModel]]:
    return [kind, *(inner for each in kind.__subclasses__() for inner in models_of(each))]


@pytest.mark.parametrize("kind", [each for each in models_of(BaseModel) if each.__module__ == schemas.__name__])
def test_a_body_refuses_fields_when_it_does_not_have_them(kind: Any) -> None:
    """S-REQ-50, S-REQ-51: each model of the endpoint's own API."""
    assert kind.model_config.get("extra") == "forbid"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (schemas.RunRequestMessage, {"type": "run_request", "request_id": "r", "inputs": {}, "task_overides": {}}),
        (schemas.RunRequestMessage, {"type": "run_request", "new_run": {}}),
        (schemas.RunControl, {"type": "run_control", "run_id": "r", "action": "cancel", "later": 1}),
        (schemas.Subscribe, {"type": "subscribe", "event": ["token"]}),
    ],
)
def test_a_message_refuses_fields_when_it_does_not_have_them(kind: type[BaseModel], message: dict[str, Any]) -> None:
    """S-REQ-51: with the name."""
    with pytest.raises(ValueError, match=f"{list(message)[-1]}\n  Extra inputs"):
        kind.model_validate(message)


def test_a_message_may_have_null_fields_when_they_are_known() -> None:
    """S-CTL-33."""
    found = schemas.RunRequestMessage.model_validate({"type": "run_request", "inputs": {"a": 1}, "options": None})
    assert found.new_run == schemas.NewRun(inputs={"a": 1})
