"""Callers without a key, with a wrong or a revoked one, and with one of another team: on every route that is served.

The routes are those of the OpenAPI document, so that one that is added is tried here too; one with a body is named in BODIES.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from httpx import AsyncClient, Response

from ensemble_ray import ValidationError
from ensemble_ray.access.admission import Right
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.middleware import OPEN_PATHS
from ensemble_ray.testing import ScriptedModel
from tests.serve.driving import driven
from tests.serve.keys import Guarded, guarded, make_key
from tests.serve.teams import INPUTS, pair

#: What is sent to routes that take a body; its team is the other one.
BODIES: dict[str, object] = {
    "POST /runs": {"ensemble": "secret", "inputs": INPUTS, "run_id": "taken"},
    "POST /runs/{run_id}/inject": {"text": "Stop"},
    "POST /runs/{run_id}/model": {"model": None},
    "POST /reviews/{run_id}/{gate_id}": {"decision": "approve"},
    "POST /tools/{name}/invoke": {"arguments": {}},
    "POST /drain": {},
    "POST /ensembles/{ensemble}/versions": {},
    "POST /ensembles/{ensemble}/versions/{version}": {"share": 1},
    "POST /v1/chat/completions": {"model": "secret", "messages": [{"role": "user", "content": "Ray"}]},
    "POST /v1/responses": {"model": "secret", "input": "Ray"},
    "POST /a2a/{ensemble}": {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "message/send",
        "params": {"message": {"messageId": "m", "role": "user", "parts": [{"kind": "data", "data": INPUTS}]}},
    },
}
#: The rights of which a route asks for one; the first is the one that it names.
RIGHTS: dict[str, tuple[Right, ...]] = {
    "GET /ensembles": (Right.READ,),
    "POST /runs": (Right.RUN,),
    "GET /runs": (Right.READ,),
    "GET /runs/{run_id}": (Right.READ,),
    "GET /runs/{run_id}/events": (Right.READ,),
    "POST /runs/{run_id}/cancel": (Right.RUN,),
    "GET /runs/{run_id}/deliveries": (Right.READ,),
    "POST /runs/{run_id}/deliveries/{delivery_id}/redeliver": (Right.RUN,),
    "POST /runs/{run_id}/inject": (Right.RUN,),
    "POST /runs/{run_id}/model": (Right.RUN,),
    "GET /reviews": (Right.READ, Right.REVIEW),
    "POST /reviews/{run_id}/{gate_id}": (Right.REVIEW,),
    "GET /capabilities": (Right.READ,),
    "POST /tools/{name}/invoke": (Right.ADMIN,),
    "GET /drain": (Right.ADMIN,),
    "POST /drain": (Right.ADMIN,),
    "POST /drain/end": (Right.ADMIN,),
    "GET /ensembles/{ensemble}/versions": (Right.READ,),
    "POST /ensembles/{ensemble}/versions": (Right.ADMIN,),
    "POST /ensembles/{ensemble}/versions/{version}": (Right.ADMIN,),
    "GET /schedules": (Right.READ,),
    "GET /schedules/{ensemble}/{name}": (Right.READ,),
    "POST /schedules/{ensemble}/{name}/pause": (Right.RUN,),
    "POST /schedules/{ensemble}/{name}/resume": (Right.RUN,),
    "POST /schedules/{ensemble}/{name}/run": (Right.RUN,),
    "GET /metrics": (Right.READ,),
    "GET /quota": (Right.READ, Right.RUN),
    "GET /v1/models": (Right.READ,),
    "GET /v1/models/{model}": (Right.READ,),
    "POST /v1/chat/completions": (Right.RUN,),
    "POST /v1/responses": (Right.RUN,),
    "GET /v1/responses/{response_id}": (Right.READ,),
    "GET /.well-known/agent-card.json": (Right.READ,),
    "GET /a2a/{ensemble}/.well-known/agent-card.json": (Right.READ,),
    "POST /a2a/{ensemble}": (Right.RUN,),
}
#: What stands in paths: the other team's run.
PARAMETERS = {
    "run_id": "theirs",
    "response_id": "resp_theirs",
    "gate_id": "gate",
    "delivery_id": "msg_1",
    "model": "secret",
    "name": "tool",
    "ensemble": "secret",
    "version": "0",
}
#: What a caller of another team must find nowhere.
SECRETS = ("secret", "hidden-tag", "swordfish")


@functools.cache
def _document() -> dict[str, Any]:
    return build_api(driven({})).openapi()


def _operations() -> list[str]:
    found = _document()["paths"]
    return sorted(
        f"{method.upper()} {path}" for path, methods in found.items() for method in methods if path not in OPEN_PATHS
    )


OPERATIONS = _operations()


@pytest_asyncio.fixture
async def endpoint(home: str) -> AsyncGenerator[Guarded]:
    """Two teams, and a run of the one that is nobody else's."""
    teams = {
        "public": pair(ScriptedModel(otherwise="fine")),
        "secret": pair(ScriptedModel(otherwise="swordfish")),
    }
    async with guarded(Path(home), teams) as opened:
        owner = make_key(opened.file, "owner", teams=["secret"])
        body = {"ensemble": "secret", "inputs": INPUTS, "run_id": "theirs", "tags": {"of": "hidden-tag"}}
        ended = await opened.client.post("/runs?wait=60", json=body, headers=owner)
        assert ended.json()["result"]["raw"] == "swordfish"
        yield opened


async def _ask(client: AsyncClient, operation: str, headers: dict[str, str]) -> Response:
    """Ask for a route as its document has it, about the other team's run."""
    method, _, path = operation.partition(" ")
    asked = path.format_map(PARAMETERS)
    takes_body = "requestBody" in _document()["paths"][path][method.lower()]
    assert not takes_body or operation in BODIES, f"{operation} takes a body: name one in BODIES"
    return await client.request(method, asked, json=BODIES.get(operation), headers=headers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def closed(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[tuple[Guarded, str, str]]:
    """An endpoint with one key, which nobody brings; the key, and what is kept of it."""
    async with guarded(tmp_path_factory.mktemp("closed"), pair(ScriptedModel())) as opened:
        key = make_key(opened.file)["authorization"].removeprefix("Bearer ")
        (kept,) = opened.file.read() or ()
        yield opened, key, kept.digest


def test_every_route_asks_for_a_right() -> None:
    """S-SRV-156: a new route belongs into RIGHTS; the document says that it needs a key."""
    assert sorted(RIGHTS) == OPERATIONS
    for operation in OPERATIONS:
        method, _, path = operation.partition(" ")
        assert _document()["paths"][path][method.lower()]["security"] == [{"key": []}], operation


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer erk_" + "a" * 43},
        {"authorization": "Bearer " + "x" * 100_000},
        {"authorization": "Basic YW5uOmFubg=="},
        {"authorization": "Bearer *"},
        {"cookie": "key={key}"},
        {"x-api-key": "{key}"},
        {"authorization": "Bearer {key}x"},
        {"authorization": "Bearer x{key}"},
        {"authorization": "{key}"},
        {"authorization": "Bearer {digest}"},
        {"authorization": "Bearer erk_{digest}"},
    ],
    ids=lambda sent: next((f"{k}: {v[:20]}" for k, v in sent.items()), "nothing"),
)
@pytest.mark.asyncio(loop_scope="module")
async def test_nobody_is_let_in_without_a_key(closed: tuple[Guarded, str, str], sent: dict[str, str]) -> None:
    """S-SRV-151, S-SRV-154, S-SRV-159: 401 with a challenge, before anything is looked up; what is kept of a key is none."""
    endpoint, key, digest = closed
    headers = {name: value.replace("{key}", key).replace("{digest}", digest) for name, value in sent.items()}
    for operation in (*OPERATIONS, "GET /openapi.json", "GET /nowhere", "PUT /runs", "GET //healthz"):
        method, _, path = operation.partition(" ")
        answer = await endpoint.client.request(method, path, headers=headers)
        assert answer.status_code == 401, operation
        body = answer.json()
        code = body["error"]["code"] if path.startswith("/v1/") else body["code"].lower()
        assert code == "unauthenticated", operation
        challenge = answer.headers["www-authenticate"]
        assert challenge.startswith("Bearer realm="), operation
        assert ("invalid_token" in challenge) == ("authorization" in headers), operation


async def test_a_revoked_key_opens_nothing(endpoint: Guarded) -> None:
    """S-SRV-154: from the next request on."""
    headers = make_key(endpoint.file)
    assert (await endpoint.client.get("/ensembles", headers=headers)).status_code == 200
    endpoint.file.revoke("ann")
    endpoint.file.revoke("owner")
    for operation in OPERATIONS:
        assert (await _ask(endpoint.client, operation, headers)).status_code == 401, operation


async def test_a_key_of_another_team_sees_nothing_of_it(endpoint: Guarded) -> None:
    """S-SRV-5, S-SRV-156: its runs are 404 as one that never was; lists leave them out; nothing changes."""
    headers = make_key(endpoint.file, teams=["public"])
    for operation in OPERATIONS:
        answer = await _ask(endpoint.client, operation, headers)
        sent = f"{BODIES.get(operation)} {operation.partition(' ')[2].format_map(PARAMETERS)}"
        assert not [each for each in SECRETS if each in answer.text and each not in sent], (operation, answer.text)
        if "{run_id}" in operation:
            assert (answer.status_code, answer.json()["code"]) == (404, "RUN_NOT_FOUND"), operation
            method, _, path = operation.partition(" ")
            never = await endpoint.client.request(
                method, path.format_map({**PARAMETERS, "run_id": "never"}), json=BODIES.get(operation), headers=headers
            )
            assert answer.json() | {"message": "", "run_id": ""} == never.json() | {"message": "", "run_id": ""}
        elif "/drain" in operation:  # of all teams
            assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN"), operation
        elif ("/v1/" in operation and operation != "GET /v1/models") or (
            operation in BODIES and "/tools/" not in operation and operation != "POST /drain"
        ):
            assert answer.status_code == 404, operation


async def test_a_key_without_the_right_is_told_which_it_lacks(endpoint: Guarded) -> None:
    """S-SRV-156: 403, also where the team is its own; every other right together is not enough."""
    for number, operation in enumerate(OPERATIONS):
        rights = set(Right) - set(RIGHTS[operation])
        headers = make_key(endpoint.file, f"key-{number}", rights=rights, teams=["secret"])
        answer = await _ask(endpoint.client, operation, headers)
        assert answer.status_code == 403, (operation, answer.text)
        assert f"'{RIGHTS[operation][0]}'" in answer.text
        assert "swordfish" not in answer.text


async def test_filters_and_ids_do_not_lead_to_another_team(endpoint: Guarded) -> None:
    """S-SRV-5: neither by name, by tag, by id, nor by another's idempotency key."""
    headers = make_key(endpoint.file, teams=["public"])
    for query in ("ensemble=secret", "tag=of:hidden-tag", "status=completed", "ensemble=secret&ensemble=public"):
        assert (await endpoint.client.get(f"/runs?{query}", headers=headers)).json()["runs"] == []
    mine = {"ensemble": "public", "inputs": INPUTS}
    owner = make_key(endpoint.file, "other")
    named = {"idempotency-key": "same"}
    theirs = await endpoint.client.post("/runs", json=mine, headers={**owner, **named})
    other = await endpoint.client.post("/runs", json=mine, headers={**headers, **named})
    assert theirs.json()["run_id"] != other.json()["run_id"]
    taken = await endpoint.client.post("/runs", json={**mine, "run_id": "theirs"}, headers=headers)
    assert (taken.status_code, taken.json()["code"]) == (409, "RUN_EXISTS")
    assert not [each for each in SECRETS if each in taken.text]


async def test_the_usage_of_another_key_is_found_nowhere(endpoint: Guarded) -> None:
    """S-QUO-22, S-QUO-31, S-QUO-32: names that begin alike are other keys; neither parameters nor headers lead to another's."""
    owner = make_key(endpoint.file, "ann-secret", teams=["secret"], quotas=["runs=3/day"])
    for number in range(2):
        body = {"ensemble": "secret", "inputs": INPUTS, "run_id": f"r{number}"}
        assert (await endpoint.client.post("/runs?wait=60", json=body, headers=owner)).status_code == 200
    for name in ("ann", "ann-", "ann-secre", "ANN-SECRET"):
        key = make_key(endpoint.file, name, teams=["public"], quotas=["runs=1/day"])
        for path in ("/quota", "/quota?key=ann-secret", "/quota?all=true", "/metrics", "/studio/api/studio/quota"):
            for more in ({}, {"x-key": "ann-secret"}, {"x-quota-limit-runs": "9"}):
                answer = await endpoint.client.get(path, headers={**key, **more})
                assert "ann-secret" not in answer.text
                assert answer.headers["x-quota-remaining-runs"] == "1"
        for wrong in (f"{name}/2026-11-30", f"{name}/", "../ann-secret"):
            with pytest.raises(ValidationError, match="A key's name"):
                make_key(endpoint.file, wrong)


async def test_a_request_cannot_choose_whose_quota_it_uses(endpoint: Guarded) -> None:
    """S-QUO-11: the key alone says so; fields, headers, tags and ids of a request do not."""
    make_key(endpoint.file, "ben", teams=["public"], quotas=["runs=9/day"])
    ann = make_key(endpoint.file, teams=["public"], quotas=["runs=1/day"])
    body = {"ensemble": "public", "inputs": INPUTS}
    assert (await endpoint.client.post("/runs?wait=60", json=body, headers=ann)).status_code == 200
    more: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"tags": {"key": "ben"}}, {}),
        ({"run_id": "ben"}, {}),
        ({}, {"idempotency-key": "ben:1"}),
        ({}, {"x-key": "ben"}),
        ({"options": {"max_tokens": 1}}, {}),
    ]
    for fields, headers in more:
        refused = await endpoint.client.post("/runs", json={**body, **fields}, headers={**ann, **headers})
        assert (refused.status_code, refused.json()["code"]) == (429, "QUOTA_EXCEEDED"), (fields, headers)
    for field in ("account", "key", "charged_to"):
        refused = await endpoint.client.post("/runs", json={**body, field: "ben"}, headers=ann)
        assert refused.status_code == 422


async def test_a_key_is_in_no_log_no_answer_and_nothing_behind_the_check(
    endpoint: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    """S-SRV-162: neither one that is known nor one that is not, nor its digest."""
    known = make_key(endpoint.file, rights=[Right.READ])
    wrong = {"authorization": known["authorization"][:-3] + "xyz"}
    answers: list[str] = []

    async def leak(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError(str(scope))

    endpoint.api.mount("/leak", leak)
    with caplog.at_level(logging.DEBUG):
        for headers in (known, wrong):
            for method, path in (("GET", "/ensembles"), ("POST", "/runs"), ("GET", "/runs/never"), ("GET", "/leak/it")):
                answer = await endpoint.client.request(method, path, headers=headers, json={})
                answers += [answer.text, str(answer.headers)]
    digests = [each.digest for each in endpoint.file.read() or ()]
    seen = caplog.text + "".join(answers)
    assert "Refused GET /ensembles: UNAUTHENTICATED" in caplog.text
    for secret in (*digests, *(each["authorization"].removeprefix("Bearer ") for each in (known, wrong))):
        assert secret not in seen
