"""The user of a run at an endpoint, and the deps of its teams."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import Ensemble, TaskHandlerContext, provide
from ensemble_ray.access.admission import KeyPolicy, Right
from ensemble_ray.serve.callers import ANYBODY, Caller
from ensemble_ray.serve.schemas import NewRun, Refusal
from tests.builders import task
from tests.serve.conftest import Connect
from tests.serve.keys import guarded, make_key


def say(context: TaskHandlerContext[str]) -> str:
    """For whom the run is, and the deps of the team."""
    return f"{context.user or 'nobody'} {context.deps}"


def opened() -> str:
    """The deps of the team."""
    return "opened"


TEAM = Ensemble(tasks=[task("say", handler=say)], deps=provide(opened), deps_type=str)


async def test_the_user_is_the_callers_key(home: str) -> None:
    """S-CTX-71, S-CTX-60: lists find it as a tag; a tag of the client does not replace it."""
    async with guarded(Path(home), TEAM, KeyPolicy.REQUIRED) as endpoint:
        ann = make_key(endpoint.file, "ann", rights=[Right.RUN, Right.READ])
        body = {"run_id": "first", "tags": {"user": "bob", "for": "x"}}
        ended = (await endpoint.client.post("/runs?wait=60", json=body, headers=ann)).json()
        assert ended["result"]["raw"] == "ann opened"
        assert ended["tags"] == {"user": "ann", "for": "x"}
        listed = (await endpoint.client.get("/runs?tag=user:ann", headers=ann)).json()
        assert [each["run_id"] for each in listed["runs"]] == ["first"]
        again = await endpoint.client.post("/runs?wait=60", json=body, headers=make_key(endpoint.file, "ben"))
        assert again.json()["result"]["raw"] == "ann opened"  # the run of this id


async def test_only_an_admin_chooses_the_user(home: str) -> None:
    """S-CTX-71."""
    async with guarded(Path(home), TEAM, KeyPolicy.REQUIRED) as endpoint:
        ann = make_key(endpoint.file, "ann", rights=[Right.RUN])
        refused = await endpoint.client.post("/runs", json={"user": "bob"}, headers=ann)
        assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN")
        assert (await endpoint.client.post("/runs", json={"user": "ann"}, headers=ann)).status_code == 202
        admin = make_key(endpoint.file, "gateway", rights=[Right.RUN, Right.ADMIN])
        ended = (await endpoint.client.post("/runs?wait=60", json={"user": "bob"}, headers=admin)).json()
        assert ended["result"]["raw"] == "bob opened"


async def test_without_keys_the_client_may_name_a_user(connect: Connect) -> None:
    """S-CTX-71."""
    async with connect(TEAM) as client:
        for body, said in (({"user": "eve"}, "eve opened"), ({}, "nobody opened")):
            ended = (await client.post("/runs?wait=60", json=body)).json()
            assert ended["result"]["raw"] == said
        too_long = await client.post("/runs", json={"user": "x" * 257})
        assert too_long.status_code == 422


def test_each_protocol_signs_its_requests() -> None:
    """S-CTX-71: with the name of the key."""
    assert ANYBODY.sign(NewRun()).user is None
    assert Caller(name="ann").sign(NewRun()).user == "ann"
    with pytest.raises(Refusal):
        Caller(name="ann", rights=frozenset({Right.RUN})).sign(NewRun(user="bob"))
