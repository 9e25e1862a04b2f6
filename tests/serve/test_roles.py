"""Roles of keys at the reviews of an endpoint: own API, A2A, MCP and Studio."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import Ensemble, Review, Task, pending_reviews
from ensemble_ray.access.admission import Right
from ensemble_ray.facts.runs import ReviewDecided
from ensemble_ray.process.concurrency import bridge
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.callers import CallerCache
from tests.serve.driving import driven
from tests.serve.http_server import served_app
from tests.serve.keys import Guarded, guarded, make_key

STUDIO = "/studio/api/studio/reviews"


def asking(role: str | None = "legal") -> Ensemble:
    """A task without a model, with a gate behind it."""
    review = Review(prompt="Ok?", timeout=0, required_role=role)
    task = Task(description="d", expected_output="x", handler=lambda _: "a draft", review=review)
    return Ensemble(tasks=[task], review_wait="detach")


@asynccontextmanager
async def waiting(home: Path, role: str | None = "legal") -> AsyncGenerator[tuple[Guarded, str]]:
    """An endpoint with a run `r` that waits at its gate, and the gate's id."""
    async with guarded(home, asking(role), has_studio=True) as endpoint:
        owner = make_key(endpoint.file, "owner")
        body = {"inputs": {}, "run_id": "r"}
        assert (await endpoint.client.post("/runs?wait=60", json=body, headers=owner)).json()["status"] == "waiting"
        (gate,) = (await endpoint.client.get("/reviews", headers=owner)).json()["reviews"]
        yield endpoint, gate["gate_id"]


async def decision_of(home: Path, run_id: str = "r") -> ReviewDecided:
    """The recorded decision of a run's only gate."""
    facts = await bridge(store_at(StoreAddress(home=str(home))).gates_of(run_id))
    (decided,) = [fact.data for fact in facts if isinstance(fact.data, ReviewDecided)]
    return decided


@pytest.mark.parametrize("path", ["/reviews/r/{gate}", STUDIO + "/r/{gate}"])
async def test_a_review_is_refused_when_the_key_lacks_its_role(records: Path, path: str) -> None:
    """S-QUO-51, S-QUO-53: 403 with both; no right replaces a role; the gate stays open for one who has it."""
    async with waiting(records) as (endpoint, gate):
        place, body = path.replace("{gate}", gate), {"decision": "approve"}
        for number, roles in enumerate(([], ["lead", "LEGAL"], ["legal team"])):
            headers = make_key(endpoint.file, f"no-{number}", roles=roles)
            for sent in (body, body | ({"role": "legal"} if path.startswith("/studio") else {})):
                refused = await endpoint.client.post(place, json=sent, headers=headers)
                assert refused.status_code == 403
                assert refused.json()["code"] == "ROLE_REQUIRED"
                assert "requires the role 'legal'" in refused.json()["message"]
                assert (", ".join(sorted(roles)) or "has none") in refused.json()["message"]
        assert len(pending_reviews()) == 1
        no_right = make_key(endpoint.file, "reads", rights=[Right.READ, Right.RUN], roles=["legal"])
        assert (await endpoint.client.post(place, json=body, headers=no_right)).json()["code"] == "FORBIDDEN"
        ann = make_key(endpoint.file, roles=["legal", "lead"])
        assert (await endpoint.client.post(place, json=body, headers=ann)).status_code == 200
        decided = await decision_of(records)
        assert (decided.by, decided.role, decided.verdict) == ("ann", "legal", "approve")


async def test_no_role_is_recorded_when_the_gate_requires_none(records: Path) -> None:
    """S-QUO-50."""
    async with waiting(records, role=None) as (endpoint, gate):
        ann = make_key(endpoint.file, roles=["legal"])
        answer = await endpoint.client.post(f"/reviews/r/{gate}", json={"decision": "approve"}, headers=ann)
        assert answer.status_code == 200
        assert "role" not in (await decision_of(records)).to_data()


async def test_no_role_is_checked_when_there_is_no_key(records: Path) -> None:
    """S-QUO-55: Studio's reader states one, which is recorded; another one than that of the gate is refused."""
    async with guarded(records, asking(), has_studio=True) as endpoint:
        for run_id, path in (("a", "/reviews"), ("b", STUDIO)):
            await endpoint.client.post("/runs?wait=60", json={"inputs": {}, "run_id": run_id})
            (gate,) = (await endpoint.client.get("/reviews")).json()["reviews"]
            place, body = f"{path}/{run_id}/{gate['gate_id']}", {"decision": "approve"}
            if run_id == "b":
                refused = await endpoint.client.post(place, json={**body, "role": "lead"})
                assert (refused.status_code, refused.json()["code"]) == (403, "ROLE_REQUIRED")
                body["role"] = "legal"
            assert (await endpoint.client.post(place, json=body)).status_code == 200
            assert (await decision_of(records, run_id)).role == body.get("role")
        info = (await endpoint.client.get("/studio/api/studio/info")).json()
        assert (info["roles"], info["has_quotas"]) == (None, False)


async def test_studio_tells_the_roles_and_the_usage_of_its_reader(records: Path) -> None:
    """S-QUO-42, S-QUO-53: and of nobody else."""
    async with guarded(records, asking(), has_studio=True) as endpoint:
        ann = make_key(endpoint.file, roles=["legal"], quotas=["runs=4/day", "tokens=1k/day"])
        ben = make_key(endpoint.file, "ben")
        await endpoint.client.post("/runs?wait=60", json={"inputs": {}, "run_id": "r"}, headers=ann)
        info, usage = [
            (await endpoint.client.get(f"/studio/api/studio/{path}", headers=ann)).json() for path in ("info", "quota")
        ]
        assert (info["roles"], info["has_quotas"], usage["key"]) == (["legal"], True, "ann")
        runs, tokens = usage["quotas"]
        assert (runs["used"], runs["limit"], runs["used_share"]) == ("1", "4", 0.25)
        assert (tokens["reserved"], tokens["reserved_share"]) == ("500", 0.5)
        other = (await endpoint.client.get("/studio/api/studio/quota", headers=ben)).json()
        assert other == {"key": "", "quotas": [], "resets_at": None}


async def test_a_message_of_a2a_decides_only_with_the_role(records: Path) -> None:
    """S-QUO-52."""
    pytest.importorskip("a2a")
    async with waiting(records) as (endpoint, _gate):
        message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "approve"}], "taskId": "r"}
        body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}

        async def send(headers: dict[str, str]) -> Any:
            return await endpoint.client.post("/a2a/team", json=body, headers={**headers, "a2a-version": "1.0"})

        refused = await send(make_key(endpoint.file, "lead", roles=["lead"]))
        assert "requires the role 'legal'" in refused.text
        assert len(pending_reviews()) == 1
        assert "requires" not in (await send(make_key(endpoint.file, roles=["legal"]))).text
        assert (await decision_of(records)).role == "legal"


async def test_mcp_offers_a_gate_only_to_a_key_with_its_role(records: Path) -> None:
    """S-QUO-52: a form for one who has it, a text for one who has not, also when its answer is sent nevertheless."""
    pytest.importorskip("mcp")
    from tests.serve.test_mcp import client, user

    async with guarded(records, asking()) as unused:
        file = unused.file
    lead, ann = make_key(file, "lead", roles=["lead"]), make_key(file, roles=["legal"])
    shown: list[str] = []
    approve = ("accept", {"decision": "approve"})
    with served_app(build_api(driven(asking()), callers=CallerCache(file))) as url:
        async with client(url, lead, elicitation_callback=user(approve, shown=shown)) as session:
            waits = await session.call_tool("team", {})
            assert waits.is_error
            assert shown == []
        run_id = waits.meta["ensemble-ray/run-id"]
        assert len(pending_reviews()) == 1
        async with client(url, ann, elicitation_callback=user(approve, approve, shown=shown)) as session:
            assert not (await session.call_tool("team", {})).is_error
            assert len(shown) == 1
        (left,) = pending_reviews()
        assert left.run_id == run_id
