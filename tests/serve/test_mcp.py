"""Teams as tools at `/mcp`: real HTTP, asked by the official SDK's client in both of its protocols."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ensemble_ray import InlineRuntime, Review
from ensemble_ray.access.admission import Right
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.callers import CallerCache
from ensemble_ray.serve.catalog import served_team
from ensemble_ray.serve.driving.driven_runs import DrivenRuns
from ensemble_ray.serve.driving.ledger import Ledger
from ensemble_ray.serve.schemas import RunFilter, RunStatus
from ensemble_ray.testing import ScriptedModel
from tests.scenarios.teams import PATIENCE_S
from tests.serve.http_server import served_app
from tests.serve.keys import make_key
from tests.serve.teams import INPUTS, mapped, pair

mcp = pytest.importorskip("mcp")
httpx2 = pytest.importorskip("httpx2")

GATE = Review.required("Right?")


class Held:
    """A model that waits until it is let go."""

    def __init__(self) -> None:
        self.asked, self.free = threading.Event(), threading.Event()

    def __call__(self, _asked: object) -> str:
        self.asked.set()
        self.free.wait(PATIENCE_S)
        return "late"


@pytest.fixture
def held() -> Iterator[Held]:
    """One that is let go at the end."""
    found = Held()
    yield found
    found.free.set()


@pytest.fixture
def runs(home: str, held: Held) -> Iterator[DrivenRuns]:
    """Runs of four teams: a plain one, one with two gates, one that is held, one that maps."""
    model = ScriptedModel(otherwise="fine")
    teams = {
        "news-team": pair(model),
        "asking": pair(model, review=GATE, before_review=GATE).replace(review_wait="detach"),
        "slow": pair(ScriptedModel(otherwise=held)),
        "many": mapped(model),
    }
    served = {name: served_team(name, team) for name, team in teams.items()}
    driven = DrivenRuns(served, InlineRuntime(), Ledger(None))
    yield driven
    held.free.set()
    run_blocking(driven.close())


@asynccontextmanager
async def over(runs: DrivenRuns) -> AsyncGenerator[DrivenRuns]:
    """The runs, which outlive an interface over them."""
    yield runs


@pytest.fixture
def url(runs: DrivenRuns) -> Iterator[str]:
    """An endpoint over the runs, without keys."""
    with served_app(build_api(over(runs))) as address:
        yield address


@asynccontextmanager
async def client(url: str, headers: dict[str, str] | None = None, **options: Any) -> AsyncGenerator[mcp.Client]:
    """A client that sends these headers, such as a key."""
    from mcp.client.streamable_http import streamable_http_client

    async with httpx2.AsyncClient(headers=headers or {}, timeout=PATIENCE_S) as http:
        transport = streamable_http_client(f"{url}/mcp", http_client=http)
        async with asyncio.timeout(PATIENCE_S), mcp.Client(transport, **options) as opened:
            yield opened


def user(*answers: tuple[str, dict[str, Any] | None], shown: list[str] | None = None) -> Callable[..., Any]:
    """A client's user, who answers forms in that order."""
    left = list(answers)

    async def fill_in(_context: object, params: Any) -> Any:
        if shown is not None:
            shown.append(params.message)
        action, content = left.pop(0)
        return mcp.types.ElicitResult(action=action, content=content)

    return fill_in


async def ended(runs: DrivenRuns, status: RunStatus) -> None:
    """Wait until a run has that status."""
    async with asyncio.timeout(PATIENCE_S):
        while not (await runs.list(RunFilter(status=status))).runs:  # noqa: ASYNC110  another loop ends it
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_teams_are_tools_and_calls_are_runs(url: str, runs: DrivenRuns, mode: str) -> None:
    """S-INT-25, S-INT-26: inputs as schema, progress, the output's text; what is wrong with a call is told as its error."""
    told: list[tuple[float, float | None]] = []

    async def progress(done: float, total: float | None, _message: str | None) -> None:
        told.append((done, total))

    async with client(url, mode=mode) as asking:
        tools = {tool.name: tool.input_schema for tool in (await asking.list_tools()).tools}
        assert sorted(tools) == ["asking", "many", "news_team", "slow"]
        assert tools["news_team"]["required"] == ["topic", "reader"]
        assert tools["many"]["properties"]["items"]["type"] == "array"
        answer = await asking.call_tool("news_team", INPUTS, progress_callback=progress)
        assert [block.text for block in answer.content] == ["fine"]
        assert told == [(1, 2), (2, 2)]
        run_id = answer.meta["ensemble-ray/run-id"]
        assert (await runs.get(run_id)).ensemble == "news-team"
        over_items = await asking.call_tool("many", {"items": ["tides", "kelp"]})
        assert [block.text for block in over_items.content] == ["fine"]
        for arguments, said in (({"topic": "x"}, "reader"), ({"no": "x"}, "'no'")):
            wrong = await asking.call_tool("news_team", arguments)
            assert wrong.is_error
            assert said in wrong.content[0].text
        with pytest.raises(mcp.MCPError, match="Unknown tool 'other'"):
            await asking.call_tool("other", {})


@pytest.mark.parametrize("body", [b"no message", b"[" * 50_000, b'{"a": "\\ud800"}', b"\xff"])
async def test_what_is_no_message_is_answered_with_an_error(url: str, body: bytes) -> None:
    """S-INT-89."""
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as asking:
        answer = await asking.post(f"{url}/mcp", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, -32700)


async def test_a_missing_package_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-115: with the command that installs it."""
    monkeypatch.setitem(sys.modules, "mcp", None)
    async with httpx2.AsyncClient() as http:
        answer = await http.post(f"{url}/mcp", json={})
    assert (answer.status_code, answer.json()["code"]) == (501, "NOT_INSTALLED")
    assert "pip install 'ensemble-ray[mcp]'" in answer.json()["message"]


async def test_open_reviews_are_forms_for_the_clients_user(url: str, runs: DrivenRuns) -> None:
    """S-INT-27: gate after gate within one call; what is decided is recorded, and the run goes on by itself."""
    shown: list[str] = []
    fill_in = user(("accept", {"decision": "approve"}), ("accept", {"decision": "edit", "text": "better"}), shown=shown)
    async with client(url, elicitation_callback=fill_in) as asking:
        answer = await asking.call_tool("asking", INPUTS)
    assert [block.text for block in answer.content] == ["better"]
    assert ["Right?" in each for each in shown] == [True, True]
    assert [each.endswith("\nfine") for each in shown] == [False, True]


async def test_what_a_user_does_not_decide_stays_open(url: str, runs: DrivenRuns) -> None:
    """S-INT-27: a form that is closed decides nothing, one that is declined ends the run."""
    decided = (("cancel", None), ("decline", None), ("accept", {"decision": "edit"}))
    async with client(url, elicitation_callback=user(*decided)) as asking:
        closed = await asking.call_tool("asking", INPUTS)
        assert closed.is_error
        assert "waits for a person" in closed.content[0].text
        declined = await asking.call_tool("asking", INPUTS)
        assert "ended early (user_exit_early)" in declined.content[0].text
        without_text = await asking.call_tool("asking", INPUTS)
        assert "waits for a person" in without_text.content[0].text
    assert len(await runs.reviews()) == 2


@pytest.mark.parametrize("options", [{}, {"mode": "legacy", "elicitation_callback": user()}])
async def test_a_client_that_cannot_be_asked_is_told_what_to_do(
    url: str, runs: DrivenRuns, options: dict[str, Any]
) -> None:
    """S-INT-27: it offers no forms, or speaks the protocol in which they would need a session."""
    async with client(url, **options) as asking:
        answer = await asking.call_tool("asking", INPUTS)
    (gate,) = await runs.reviews()
    assert answer.is_error
    assert f"POST /reviews/{gate.run_id}/{gate.gate_id}" in answer.content[0].text
    assert answer.meta["ensemble-ray/run-id"] == gate.run_id


async def test_any_replica_takes_an_answer(runs: DrivenRuns) -> None:
    """S-INT-28: nothing of a run is in the one that asked; the state that travels is the run's id, and opens nothing else."""
    with served_app(build_api(over(runs))) as one, served_app(build_api(over(runs))) as other:
        async with client(one, elicitation_callback=user()) as first:
            asked = await first.session.call_tool("asking", INPUTS, allow_input_required=True)
        (gate_id,) = asked.input_requests
        answers = {gate_id: mcp.types.ElicitResult(action="accept", content={"decision": "exit"})}
        async with client(other, elicitation_callback=user()) as second:
            again = await second.call_tool("asking", INPUTS, input_responses=answers, request_state=asked.request_state)
            assert "ended early (user_exit_early)" in again.content[0].text
            for tool, state in (("asking", "nothing"), ("news_team", asked.request_state)):
                with pytest.raises(mcp.MCPError, match="There is no run"):
                    await second.call_tool(tool, INPUTS, input_responses=answers, request_state=state)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_call_that_is_cancelled_ends_its_run(url: str, runs: DrivenRuns, held: Held, mode: str) -> None:
    """S-INT-26: in the older protocol with the client's connection, since there is no session to which a notice belongs."""
    async with client(url, mode=mode) as asking:
        call = asyncio.ensure_future(asking.call_tool("slow", INPUTS))
        assert await asyncio.to_thread(held.asked.wait, PATIENCE_S)
        call.cancel()
        if mode == "auto":
            await ended(runs, RunStatus.CANCELLED)
    await ended(runs, RunStatus.CANCELLED)


async def test_a_call_with_a_key_is_one_run(url: str, runs: DrivenRuns, held: Held) -> None:
    """S-INT-26: sent again it gives the run that there is; its client may leave."""
    meta = {"ensemble-ray/idempotency-key": "mine"}
    async with client(url) as asking:
        call = asyncio.ensure_future(asking.call_tool("slow", INPUTS, meta=meta))
        assert await asyncio.to_thread(held.asked.wait, PATIENCE_S)
        call.cancel()
    held.free.set()
    async with client(url, headers={"idempotency-key": "mine"}) as asking:
        answer = await asking.call_tool("slow", INPUTS)
        assert [block.text for block in answer.content] == ["late"]
        other = await asking.call_tool("slow", {**INPUTS, "topic": "else"})
        assert "Idempotency-Key was used" in other.content[0].text
        with pytest.raises(mcp.MCPError, match="1 to 255 characters"):
            await asking.call_tool("slow", INPUTS, meta={"ensemble-ray/idempotency-key": ""})
    assert len((await runs.list(RunFilter())).runs) == 1


async def test_a_key_opens_its_teams_and_its_rights(home: str, runs: DrivenRuns) -> None:
    """S-INT-29, S-SRV-156: no key 401, no right 403, other teams are not there; forms are for those who may review."""
    file = KeyFile(Path(home))
    mine = make_key(file, "mine", rights=[Right.RUN], teams=["news-team", "asking"])
    reader = make_key(file, "reader", rights=set(Right) - {Right.RUN})
    theirs = make_key(file, "theirs", teams=["slow"])
    with served_app(build_api(over(runs), callers=CallerCache(file))) as url:
        async with client(url, mine, elicitation_callback=user()) as asking:
            assert [tool.name for tool in (await asking.list_tools()).tools] == ["asking", "news_team"]
            assert not (await asking.call_tool("news_team", INPUTS)).is_error
            waiting = await asking.call_tool("asking", INPUTS)
            assert "with the right 'review'" in waiting.content[0].text
            with pytest.raises(mcp.MCPError, match="Unknown tool 'slow'"):
                await asking.call_tool("slow", INPUTS)
        run_id = waiting.meta["ensemble-ray/run-id"]
        async with client(url, theirs, elicitation_callback=user()) as asking:
            with pytest.raises(mcp.MCPError, match="There is no run"):
                await asking.call_tool("slow", INPUTS, request_state=run_id)
        async with httpx.AsyncClient(base_url=url) as plain:
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            assert (await plain.post("/mcp", json=body)).status_code == 401
            refused = await plain.post("/mcp", json=body, headers=reader)
            assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN")
            assert "'run'" in refused.json()["message"]


async def test_what_is_no_request_of_a_client_is_refused_at_the_door(runs: DrivenRuns) -> None:
    """S-INT-29: other methods, pages of other origins, long bodies, foreign hosts, and what is no message."""
    api = build_api(over(runs), max_body_bytes=10_000, allowed_origins=["https://team.example"])
    with served_app(api) as url:
        async with httpx.AsyncClient(base_url=url, headers={"accept": "application/json, text/event-stream"}) as plain:
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            found = [
                (await plain.post("/mcp", json=body, headers={"origin": "https://team.example"})).status_code,
                (await plain.post("/mcp", json=body, headers={"origin": "http://localhost:3000"})).status_code,
                (await plain.post("/mcp", json=body, headers={"origin": "https://evil.example"})).status_code,
                (await plain.post("/mcp", json=body, headers={"host": "evil.example"})).status_code,
                (await plain.post("/mcp", json=body | {"method": "x" * 20_000})).status_code,
                (await plain.post("/mcp", content=b"[", headers={"content-type": "application/json"})).status_code,
                (await plain.post("/mcp", content=b"{}", headers={"content-type": "text/plain"})).status_code,
                (await plain.get("/mcp")).status_code,
                (await plain.delete("/mcp")).status_code,
            ]
    assert found == [200, 200, 403, 421, 413, 400, 400, 405, 405]
