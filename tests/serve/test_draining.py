"""An endpoint that drains: it refuses new runs, and its accepted ones continue."""

from __future__ import annotations

from pathlib import Path

import pytest
from httpx import AsyncClient

from ensemble_ray import Ensemble
from ensemble_ray.access.admission import Right
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.driving.draining import DrainSwitch
from ensemble_ray.serve.driving.ledger import Ledger
from ensemble_ray.serve.driving.requests import EndpointLimits
from ensemble_ray.serve.schemas import NewDrain, NewRun, OpenRuns, Refusal
from ensemble_ray.testing import ScriptedModel
from tests.serve.conftest import Connect
from tests.serve.driving import driven
from tests.serve.gates import Gate
from tests.serve.http_server import served_app
from tests.serve.keys import guarded, make_key
from tests.serve.teams import INPUTS, pair
from tests.serve.test_waiting import asked

MESSAGES = [{"role": "user", "content": "Ray"}]


def one_input(model: ScriptedModel) -> Ensemble:
    """A team that every protocol can call."""
    return pair(model).replace(inputs={"reader": "children"})


async def test_new_runs_are_refused_while_accepted_ones_continue(connect: Connect) -> None:
    """S-VER-1, S-VER-2, S-VER-3, S-VER-8: a running run and a queued one; repeated requests are answered; then it is drained."""
    gate = Gate("a draft")
    limits = EndpointLimits(max_running=1)
    async with connect(pair(ScriptedModel(gate, otherwise="fine")), limits=limits) as client:
        await client.post("/runs", json={"inputs": INPUTS, "run_id": "running"})
        await gate.is_asked.wait()
        await client.post("/runs", json={"inputs": INPUTS, "run_id": "queued"}, headers={"idempotency-key": "k"})
        before = (await client.get("/drain")).json()
        drain = (await client.post("/drain")).json()
        ready = await client.get("/readyz")
        refused = await client.post("/runs", json={"inputs": INPUTS, "run_id": "new"})
        again = await client.post("/runs", json={"inputs": INPUTS}, headers={"idempotency-key": "k"})
        gate.open()
        ended = await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "queued"})
        drained = (await client.get("/drain")).json()
        lines = (await client.get("/metrics")).text.splitlines()
        serving = (await client.post("/drain/end")).json()
        after = await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "new"})
        healthy = [(await client.get(path)).status_code for path in ("/healthz", "/readyz")]
    assert (before["state"], before["since"]) == ("serving", None)
    assert (drain["state"], drain["open"]) == ("draining", {"accepted": 1, "running": 1, "waiting": 0})
    for each in (ready, refused):
        assert (each.status_code, each.json()["code"], each.headers["retry-after"]) == (503, "DRAINING", "10")
    assert (again.status_code, again.json()["run_id"]) == (202, "queued")
    assert ended.json()["status"] == "completed"
    assert (drained["state"], drained["since"]) == ("drained", drain["since"])
    assert "ensemble_ray_draining 1" in lines
    assert 'ensemble_ray_requests_refused_total{code="DRAINING"} 1' not in lines, "the driver counts, not this process"
    assert (serving["state"], after.json()["status"], healthy) == ("serving", "completed", [200, 200])


async def test_every_protocol_refuses_new_runs(connect: Connect) -> None:
    """S-VER-3: in its own form of a refusal."""
    model = ScriptedModel(otherwise="fine")
    message = {"messageId": "1", "role": "ROLE_USER", "parts": [{"text": "Ray"}]}
    call = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
    async with connect(one_input(model)) as client:
        await client.post("/drain")
        openai = [
            await client.post("/v1/chat/completions", json={"model": "team", "messages": MESSAGES}),
            await client.post("/v1/chat/completions", json={"model": "team", "messages": MESSAGES, "stream": True}),
            await client.post("/v1/responses", json={"model": "team", "input": "Ray"}),
        ]
        agent = await client.post("/a2a/team", json=call, headers={"a2a-version": "1.0"})
    assert [(each.status_code, each.json()["error"]["code"]) for each in openai] == [(503, "draining")] * 3
    assert "draining" in agent.text
    assert not model.calls


async def test_a_tool_of_mcp_refuses_during_a_drain() -> None:
    """S-VER-3: as an error of the tool."""
    mcp = pytest.importorskip("mcp")
    with served_app(build_api(driven(one_input(ScriptedModel())))) as url:
        async with AsyncClient() as client:
            assert (await client.post(f"{url}/drain")).status_code == 200
        async with mcp.Client(f"{url}/mcp") as tools:
            answer = await tools.call_tool("team", {"topic": "Ray"})
    assert answer.is_error
    assert "draining" in str(answer.content)


async def test_a_run_that_waits_for_a_person_is_decided_during_a_drain(connect: Connect) -> None:
    """S-VER-2: it is open until it has ended."""
    async with connect(asked()) as client:
        await client.post("/runs?wait=60", json={"run_id": "first"})
        drain = (await client.post("/drain")).json()
        (review,) = (await client.get("/reviews")).json()["reviews"]
        path = f"/reviews/first/{review['gate_id']}"
        assert (await client.post(path, json={"decision": "approve"})).status_code == 200
        ended = (await client.post("/runs?wait=60", json={"run_id": "first"})).json()
        drained = (await client.get("/drain")).json()
    assert (drain["state"], drain["open"]["waiting"]) == ("draining", 1)
    assert (ended["status"], drained["state"]) == ("completed", "drained")


async def test_a_drain_survives_its_process_and_ends_with_a_newer_deployment(tmp_path: Path) -> None:
    """S-VER-6: the same deployment continues it."""
    ledger = tmp_path / "ledger.sqlite"
    team = pair(ScriptedModel(otherwise="fine"))
    async with driven(team, ledger=ledger, deployed_at=1.0) as runs:
        first = await runs.drain(NewDrain(timeout_s=1000), by="ann")
    async with driven(team, ledger=ledger, deployed_at=1.0) as runs:
        assert await runs.drain_info() == first
        with pytest.raises(Refusal, match="draining"):
            await runs.start(NewRun.model_validate({"inputs": INPUTS}))
    async with driven(team, ledger=ledger, deployed_at=2.0) as runs:
        assert (await runs.drain_info()).state == "serving"
    async with driven(team, ledger=ledger, deployed_at=1.0) as runs:
        assert (await runs.drain_info()).state == "serving"
    assert (first.by, first.state) == ("ann", "drained")


@pytest.mark.parametrize(("open_runs", "state"), [(1, "serving"), (0, "drained")])
async def test_a_drain_ends_by_itself_when_its_time_is_over(open_runs: int, state: str) -> None:
    """S-VER-5: with open runs; an endpoint that is drained by then stays drained."""
    ledger, told = Ledger(None), list[bool]()
    found = OpenRuns(accepted=0, running=open_runs, waiting=0)
    switch = DrainSwitch(ledger, lambda: found, deployed_at=1.0, on_change=told.append)
    await switch.begin(1000, "ann")
    first, longer = switch._timer, switch.info()
    await switch.begin(0.001, "bob")
    limited = switch.info()
    assert first is not None
    assert switch._timer is not None
    await switch._timer
    assert first.cancelled() or first.cancelling()
    assert (switch.info().state, len(ledger.documents("drain"))) == (state, 1 - open_runs)
    assert told == [True, True, False][: 2 + open_runs]
    assert (limited.since, limited.by) == (longer.since, "bob")
    ledger.close()


async def test_a_drain_needs_the_right_to_administer(home: str) -> None:
    """S-VER-4: of all teams, to begin, to look and to end it; its answer names the caller."""
    async with guarded(Path(home), pair(ScriptedModel())) as endpoint:
        weak = make_key(endpoint.file, "bob", rights=[Right.RUN, Right.READ, Right.REVIEW])
        strong = make_key(endpoint.file, "ann")
        some = make_key(endpoint.file, "eve", teams=["team"])
        calls = (("POST", "/drain"), ("GET", "/drain"), ("POST", "/drain/end"))
        found = [
            await endpoint.client.request(method, path, headers=key) for key in (weak, some) for method, path in calls
        ]
        drain = await endpoint.client.post("/drain", headers=strong)
        wrong = await endpoint.client.post("/drain", headers=strong, json={"timeout_s": 0})
    assert [each.json()["code"] for each in found] == ["FORBIDDEN"] * 6
    assert (drain.json()["by"], wrong.status_code) == ("ann", 422)
