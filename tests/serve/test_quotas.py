"""Quotas of keys at an endpoint: what counts, who is refused, what is shown to whom, and what a killed driver leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from ensemble_ray import (
    Agent,
    ChatResponse,
    CostConfiguration,
    Ensemble,
    EnsembleError,
    InlineRuntime,
    Task,
    TokenUsage,
    ToolCall,
    tool,
)
from ensemble_ray.access.admission import Right
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.access.quotas import CHARGE, USAGE, Account, parse_quotas
from ensemble_ray.process.concurrency import bridge
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.callers import CallerCache
from ensemble_ray.serve.catalog import served_team
from ensemble_ray.serve.driving import driven_runs, run_driver
from ensemble_ray.serve.driving.driven_runs import DrivenRuns
from ensemble_ray.serve.driving.ledger import Document, RunLedger, open_ledger
from ensemble_ray.serve.driving.requests import EndpointLimits
from ensemble_ray.serve.schemas import NewRun, Refusal
from ensemble_ray.testing import ScriptedModel
from tests.serve.driving import driven
from tests.serve.gates import Gate
from tests.serve.http_server import served_app
from tests.serve.keys import Guarded, guarded, make_key
from tests.serve.teams import INPUTS, pair

FIVE = ChatResponse("fine", usage=TokenUsage(input_tokens=3, output_tokens=2))
RATES = CostConfiguration(input_token_rate=Decimal("0.1"), output_token_rate=Decimal("0.2"))


def team(*answers: Any, otherwise: Any = FIVE) -> Ensemble:
    """Two tasks; each answer of the model has five tokens and costs 0.7."""
    return pair(ScriptedModel(*answers, otherwise=otherwise)).replace(cost_configuration=RATES)


def broken(_call: object) -> str:
    """What a model does that fails."""
    raise OSError("no model")


async def start(endpoint: Guarded, headers: dict[str, str], run_id: str, **fields: Any) -> httpx.Response:
    """Begin a run and wait for its end."""
    body = {"inputs": INPUTS, "run_id": run_id, **fields}
    return await endpoint.client.post("/runs?wait=60", json=body, headers=headers)


async def usage(endpoint: Guarded, headers: dict[str, str], key: str = "ann") -> dict[str, str]:
    """What a key has used, by quantity."""
    keys = (await endpoint.client.get("/quota", headers=headers)).json()["keys"]
    (found,) = [each for each in keys if each["key"] == key]
    return {each["quantity"]: each["used"] for each in found["quotas"]}


async def test_a_run_is_refused_when_the_quota_of_its_key_is_used_up(home: str) -> None:
    """S-QUO-11, S-QUO-12: 429 with the delay; a repeated request is answered; other keys go on; a larger quota applies at once."""
    async with guarded(Path(home), team()) as endpoint:
        ann, ben = make_key(endpoint.file, quotas=["runs=2/day"]), make_key(endpoint.file, "ben")
        for run_id in ("a", "b", "b", "a"):
            assert (await start(endpoint, ann, run_id)).status_code == 200
        refused = await start(endpoint, ann, "c")
        assert (refused.status_code, refused.json()["code"]) == (429, "QUOTA_EXCEEDED")
        assert "Key 'ann' has used up its quota of runs: 2 of 2 per day" in refused.json()["message"]
        assert 0 < int(refused.headers["retry-after"]) <= 86400
        assert refused.headers["retry-after"] == str(refused.json()["retry_after_ms"] // 1000)
        assert refused.headers["x-quota-remaining-runs"] == "0"
        assert (await endpoint.client.get("/runs/c", headers=ann)).status_code == 404
        assert (await start(endpoint, ann, "a")).status_code == 200
        assert (await start(endpoint, ben, "d")).status_code == 200
        endpoint.file.change("ann", lambda key: _with_quotas(key, "runs=3/day"))
        assert (await start(endpoint, ann, "c")).status_code == 200


def _with_quotas(key: Any, *texts: str) -> Any:
    return replace(key, quotas=parse_quotas(texts))


async def test_tokens_and_money_of_ended_runs_count(home: str) -> None:
    """S-QUO-20, S-QUO-31: also of a key without quotas, which then applies to the whole day (S-QUO-23)."""
    async with guarded(Path(home), team()) as endpoint:
        ann = make_key(endpoint.file)
        await start(endpoint, ann, "a")
        assert await usage(endpoint, ann) == {"runs": "1", "tokens": "10", "cost": "1.4"}
        endpoint.file.change("ann", lambda key: _with_quotas(key, "cost=1/day"))
        refused = await start(endpoint, ann, "b")
        assert (refused.status_code, "quota of cost: 1.4 of 1 per day" in refused.json()["message"]) == (429, True)


async def test_a_failed_run_is_charged_the_answers_of_its_unfinished_task(home: str) -> None:
    """S-QUO-20: the record has them, the answer of the endpoint does not."""

    @tool
    def look(topic: str) -> str:
        """Look it up."""
        return topic

    call = ChatResponse(
        "", tool_calls=(ToolCall("1", "look", '{"topic": "x"}'),), usage=TokenUsage(input_tokens=30, output_tokens=20)
    )
    agent = Agent(role="Writer", goal="Write", llm=ScriptedModel(call, otherwise=broken), tools=[look])
    draft = Task(description="Write about {topic}", expected_output="A text", agent=agent)
    unfinished = Ensemble(tasks=[draft], cost_configuration=RATES)
    async with guarded(Path(home), unfinished) as endpoint:
        ann = make_key(endpoint.file)
        failed = await endpoint.client.post("/runs?wait=60", json={"inputs": {"topic": "x"}}, headers=ann)
        assert failed.status_code == 502
        assert failed.json()["tasks"] == []
        assert await usage(endpoint, ann) == {"runs": "1", "tokens": "50", "cost": "7"}


async def test_a_cancelled_run_is_charged_what_it_used(home: str) -> None:
    """S-QUO-20, S-QUO-13: until its end it reserves its budget."""
    gate = Gate(FIVE)
    async with guarded(Path(home), team(FIVE, gate)) as endpoint:
        ann = make_key(endpoint.file, quotas=["tokens=1000/day"])
        body = {"inputs": INPUTS, "run_id": "a", "options": {"max_tokens": 900}}
        assert (await endpoint.client.post("/runs", json=body, headers=ann)).status_code == 202
        await gate.is_asked.wait()
        (key,) = (await endpoint.client.get("/quota", headers=ann)).json()["keys"]
        tokens = next(each for each in key["quotas"] if each["quantity"] == "tokens")
        assert tokens == {"quantity": "tokens", "limit": "1000", "used": "0", "reserved": "900", "remaining": "100"}
        await endpoint.client.post("/runs/a/cancel", headers=ann)
        gate.open()
        await endpoint.client.post("/runs?wait=60", json=body, headers=ann)
        assert int((await usage(endpoint, ann))["tokens"]) in {5, 10}
        (key,) = (await endpoint.client.get("/quota", headers=ann)).json()["keys"]
        assert {each["reserved"] for each in key["quotas"]} == {"0"}


async def test_runs_at_the_same_time_cannot_exceed_a_quota(home: str) -> None:
    """S-QUO-13, S-QUO-14: each one has a part of the rest as its budget; the next one is refused for the moment."""
    gates = [Gate(FIVE) for _ in range(2)]
    async with guarded(Path(home), team(*gates)) as endpoint:
        ann = make_key(endpoint.file, quotas=["tokens=4k/day"])
        for number, gate in enumerate(gates):
            body = {"inputs": INPUTS, "run_id": str(number), "options": {"max_tokens": 3000}}
            assert (await endpoint.client.post("/runs", json=body, headers=ann)).status_code == 202
            await gate.is_asked.wait()
        refused = await start(endpoint, ann, "2")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
        assert "open runs reserve 4000" in refused.json()["message"]
        for gate in gates:
            gate.open()
        for number in range(2):
            ended = await start(endpoint, ann, str(number), options={"max_tokens": 3000})
            assert ended.status_code == 200
        assert (await usage(endpoint, ann))["tokens"] == "20"


async def test_a_run_ends_when_it_has_used_the_rest_of_a_quota(home: str) -> None:
    """S-QUO-14: as at any budget, with the results so far."""
    large = ChatResponse("fine", usage=TokenUsage(input_tokens=3000, output_tokens=20))
    async with guarded(Path(home), team(otherwise=large)) as endpoint:
        ann = make_key(endpoint.file, quotas=["tokens=3000/day"])
        ended = (await start(endpoint, ann, "a", options={"max_tokens": 100_000})).json()
        assert (ended["status"], len(ended["result"]["tasks"])) == ("budget_exhausted", 1)
        assert (await usage(endpoint, ann))["tokens"] == "3020"


async def test_no_budget_of_money_is_set_when_a_team_has_no_prices(home: str) -> None:
    """S-QUO-15."""
    async with guarded(Path(home), pair(ScriptedModel(otherwise=FIVE))) as endpoint:
        ann = make_key(endpoint.file, quotas=["cost=1/day"])
        assert (await start(endpoint, ann, "a")).status_code == 200
        assert (await usage(endpoint, ann))["cost"] == "0"


async def test_an_agent_of_a2a_is_refused_when_the_quota_is_used_up(home: str) -> None:
    """S-QUO-16: with the endpoint's own refusal, as for a full queue."""
    pytest.importorskip("a2a")
    async with guarded(Path(home), team()) as endpoint:
        ann = make_key(endpoint.file, quotas=["runs=1/day"])
        await start(endpoint, ann, "a")
        message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"data": INPUTS}]}
        body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
        refused = await endpoint.client.post("/a2a/team", json=body, headers={**ann, "a2a-version": "1.0"})
        assert (refused.status_code, refused.json()["code"]) == (429, "QUOTA_EXCEEDED")
        assert "quota of runs: 1 of 1 per day" in refused.json()["message"]


def _question() -> Ensemble:
    agent = Agent(role="Answerer", goal="Answer", llm=ScriptedModel(otherwise=FIVE))
    return Ensemble(tasks=[Task(description="Q:{question}", expected_output="A line", agent=agent)])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "team", "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"model": "team", "input": "x"}),
    ],
)
async def test_a_client_of_openai_is_refused_when_the_quota_is_used_up(home: str, path: str, body: object) -> None:
    """S-QUO-16: 429 with the code, so that its own retries apply."""
    async with guarded(Path(home), _question()) as endpoint:
        ann = make_key(endpoint.file, quotas=["runs=1/day"])
        assert (await endpoint.client.post(path, json=body, headers=ann)).status_code == 200
        refused = await endpoint.client.post(path, json=body, headers=ann)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        assert "retry-after" in refused.headers
        assert refused.headers["x-quota-remaining-runs"] == "0"


async def test_a_tool_of_mcp_fails_when_the_quota_is_used_up(home: str) -> None:
    """S-QUO-16."""
    pytest.importorskip("mcp")
    from tests.serve.test_mcp import client

    file = KeyFile(Path(home))
    ann = make_key(file, quotas=["runs=1/day"])
    with served_app(build_api(driven(team()), callers=CallerCache(file))) as url:
        async with client(url, ann) as asking:
            assert not (await asking.call_tool("team", INPUTS)).is_error
            refused = await asking.call_tool("team", INPUTS)
    assert refused.is_error
    assert "quota of runs" in refused.content[0].text


async def test_every_answer_tells_what_is_left(home: str) -> None:
    """S-QUO-30: also errors and streams, for pages of allowed origins; none without quotas."""
    page = "https://team.example.org"
    async with guarded(Path(home), team(), allowed_origins=[page]) as endpoint:
        ann, ben = make_key(endpoint.file, quotas=["runs=5/day", "tokens=1k/day"]), make_key(endpoint.file, "ben")
        await start(endpoint, ann, "a")
        for path in ("/ensembles", "/runs/never", "/runs/a/events", "/metrics"):
            answer = await endpoint.client.get(path, headers={**ann, "origin": page})
            found = {name: answer.headers[name] for name in answer.headers if name.startswith("x-quota")}
            reset = int(found.pop("x-quota-reset"))
            assert 0 < reset <= 86400
            assert found == {
                "x-quota-limit-runs": "5",
                "x-quota-remaining-runs": "4",
                "x-quota-limit-tokens": "1000",
                "x-quota-remaining-tokens": "990",
            }, path
            exposed = answer.headers["access-control-expose-headers"]
            assert {"x-quota-reset", *found} <= set(exposed.split(", "))
        assert not [name for name in (await endpoint.client.get("/runs", headers=ben)).headers if "quota" in name]


async def test_an_endpoint_without_keys_counts_nothing(home: str) -> None:
    """S-QUO-31."""
    async with guarded(Path(home), team()) as endpoint:
        answer = await start(endpoint, {}, "a")
        assert not [name for name in answer.headers if "quota" in name]
        assert (await endpoint.client.get("/quota")).json() == {"keys": []}
        assert "key_usage" not in (await endpoint.client.get("/metrics")).text


async def test_usage_of_other_keys_is_for_administrators_of_their_teams(home: str) -> None:
    """S-QUO-31, S-QUO-32: `/quota` and `/metrics` name no other key."""
    async with guarded(Path(home), {"letters": team(), "orders": team()}) as endpoint:
        keys = {
            name: make_key(endpoint.file, name, teams=teams, rights=rights)
            for name, teams, rights in (
                ("ann", ["letters"], [Right.RUN, Right.READ]),
                ("orders-only", ["orders"], [Right.RUN, Right.READ]),
                ("lead", ["letters"], Right),
                ("reader", "*", [Right.RUN, Right.READ]),
                ("root", "*", Right),
            )
        }
        for name, ensemble in (("ann", "letters"), ("orders-only", "orders"), ("reader", "orders")):
            await start(endpoint, keys[name], name, ensemble=ensemble)
        seen: dict[str, tuple[list[str], list[str]]] = {}
        for name, headers in keys.items():
            shown = [each["key"] for each in (await endpoint.client.get("/quota", headers=headers)).json()["keys"]]
            metrics = (await endpoint.client.get("/metrics", headers=headers)).text
            seen[name] = (
                shown,
                sorted({line.split('"')[1] for line in metrics.splitlines() if "key_usage_total{" in line}),
            )
        assert seen == {
            "ann": (["ann"], ["ann"]),
            "orders-only": (["orders-only"], ["orders-only"]),
            "lead": (["ann", "lead"], []),
            "reader": (["reader"], ["reader"]),
            "root": (["ann", "lead", "orders-only", "reader", "root"], ["ann", "orders-only", "reader"]),
        }
        only = make_key(endpoint.file, "reviewer", rights=[Right.REVIEW])
        assert (await endpoint.client.get("/quota", headers=only)).status_code == 403


class DyingLedger:
    """A ledger whose process dies at a chosen write: before it is stored, or after it, with the answer lost."""

    def __init__(self, ledger: RunLedger, dies: str) -> None:
        self._ledger, self._dies = ledger, dies
        self.died = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def end(self, run_id: str, outcome: Any, *documents: Document, kept: int) -> None:
        if self._dies == "after":
            self._ledger.end(run_id, outcome, *documents, kept=kept)
        self._loop.call_soon_threadsafe(self.died.set)
        raise EnsembleError("The process is gone")


@pytest.fixture(params=["file", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], RunLedger]]:
    """Opens the ledger of an endpoint again."""
    url = "" if request.param == "file" else request.getfixturevalue("postgres").empty_database()
    ledgers: list[RunLedger] = []

    def make() -> RunLedger:
        for each in ledgers:
            each.close()
        ledgers[:] = [open_ledger(StoreAddress(home=str(tmp_path), url=url), "shop")]
        return ledgers[0]

    yield make
    for each in ledgers:
        each.close()


@asynccontextmanager
async def driving(ledger: Any, ensemble: Ensemble | None = None) -> AsyncGenerator[DrivenRuns]:
    """The driver of one process. It does not close its ledger."""
    async with InlineRuntime() as entered:
        runs = DrivenRuns({"team": served_team("team", ensemble or team())}, entered, ledger)
        await runs.recover()
        yield runs
        await _stop(runs)


async def _stop(runs: DrivenRuns) -> None:
    async def stop() -> None:
        tasks = [active.task for active in runs._active.values() if active.task is not None]
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    await bridge(stop())


ANN = Account(name="ann", quotas=parse_quotas(["tokens=10k/day"]))


@pytest.mark.parametrize("dies", ["before", "after"])
async def test_a_run_is_charged_once_when_the_driver_dies_at_its_end(
    opened: Callable[[], RunLedger], dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-QUO-21: in a file and in a database; the next process charges it, or finds it charged, and reserves nothing more."""
    monkeypatch.setattr(driven_runs, "_STORING_S", 0.0)
    monkeypatch.setattr(run_driver, "_PAUSES_S", (60.0,))
    ledger = DyingLedger(opened(), dies)
    asked = NewRun.model_validate({"inputs": INPUTS, "run_id": "a"})
    async with driving(ledger) as runs:
        await runs.start(asked, account=ANN)
        await ledger.died.wait()
    again = opened()
    stored = json.loads(again.documents(USAGE)[f"ann/{_day(again)}"])
    assert (stored["runs"], stored["tokens"]) == (1, 10 if dies == "after" else 0)
    assert list(again.documents(CHARGE)) == ([] if dies == "after" else ["a"])
    monkeypatch.setattr(driven_runs, "_STORING_S", 20.0)  # the next process reports an end when it is stored
    async with driving(again) as runs:
        assert (await runs.wait("a", 60)).status == "completed"
        standing = runs.standing(ANN)
        assert (standing.used.runs, standing.used.tokens, standing.reserved.tokens) == (1, 10, 0)
        assert (await runs.start(asked, account=ANN)).run_id == "a"
    assert again.documents(CHARGE) == {}
    async with driving(opened()) as runs:
        assert runs.standing(ANN).used == standing.used


def _day(ledger: RunLedger) -> str:
    (name,) = ledger.documents(USAGE)
    return name.partition("/")[2]


async def test_an_open_run_keeps_its_key_and_its_budget_after_a_restart(opened: Callable[[], RunLedger]) -> None:
    """S-QUO-14, S-QUO-21: it had not begun; a run that begins afterwards has what is left."""
    gate = Gate(FIVE)
    ledger = opened()
    async with driving(ledger, team(gate)) as runs:
        for run_id in ("a", "b"):
            await runs.start(NewRun.model_validate({"inputs": INPUTS, "run_id": run_id}), account=ANN)
        await gate.is_asked.wait()
        assert runs.standing(ANN).reserved.tokens == 7500
        await _stop(runs)
        gate.open()
    async with driving(opened()) as runs:
        for run_id in ("a", "b"):
            assert (await runs.wait(run_id, 60)).status == "completed"
        used = runs.standing(ANN)
        assert (used.used.runs, used.reserved.tokens) == (2, 0)
        assert used.used.tokens in {15, 20}  # one answer may have been on its way


async def test_the_driver_does_not_start_when_its_usage_is_damaged(opened: Callable[[], RunLedger]) -> None:
    """S-QUO-22: nobody gets more than a quota since it cannot be read."""
    ledger = opened()
    ledger.put(Document(kind=USAGE, name="ann/2026-11-30", text="{"))
    with pytest.raises(EnsembleError, match="usage of the keys"):
        async with driving(ledger):
            pass


async def test_a_run_does_not_count_when_the_ledger_refuses_it(opened: Callable[[], RunLedger]) -> None:
    """S-QUO-12."""

    class Full(DyingLedger):
        def add(self, *_: object) -> None:
            raise EnsembleError("The disk is full")

    async with driving(Full(opened(), "before")) as runs:
        with pytest.raises(EnsembleError, match="full"):
            await runs.start(NewRun.model_validate({"inputs": INPUTS}), account=ANN)
        standing = runs.standing(ANN)
        assert (standing.used.runs, standing.reserved.tokens) == (0, 0)


async def test_days_begin_at_midnight_of_the_zone_of_the_endpoint(home: str) -> None:
    """S-QUO-10: an unknown zone is refused."""
    with pytest.raises(ValueError, match="unknown time zone 'Mars'"):
        EndpointLimits(quota_zone="Mars")
    async with guarded(Path(home), team(), limits=EndpointLimits(quota_zone="Asia/Kolkata")) as endpoint:
        ann = make_key(endpoint.file, quotas=["runs=1/day"])
        (key,) = (await endpoint.client.get("/quota", headers=ann)).json()["keys"]
        assert key["resets_at"].endswith("T18:30:00Z")


async def test_a_refused_run_is_a_refusal_with_its_delay(opened: Callable[[], RunLedger]) -> None:
    """S-QUO-11: the team's queue is asked first; nothing is stored."""
    none = Account(name="ann", quotas=parse_quotas(["runs=1/day"]))
    async with driving(opened()) as runs:
        await runs.start(NewRun.model_validate({"inputs": INPUTS, "run_id": "a"}), account=none)
        with pytest.raises(Refusal) as refused:
            await runs.start(NewRun.model_validate({"inputs": INPUTS, "run_id": "b"}), account=none)
        assert refused.value.code == "QUOTA_EXCEEDED"
        assert refused.value.retry_after_s
        assert (await runs.wait("a", 60)).status == "completed"


async def test_a_run_that_ended_without_its_charge_is_charged_at_the_next_start(
    opened: Callable[[], RunLedger],
) -> None:
    """S-QUO-21: as an earlier release ends runs; what its record names counts, and nothing stays reserved."""
    async with driving(opened()) as runs:
        await runs.start(NewRun.model_validate({"inputs": INPUTS, "run_id": "a"}), account=ANN)
        assert (await runs.wait("a", 60)).status == "completed"
    ledger = opened()
    ((name, text),) = ledger.documents(USAGE).items()
    open_charge = {"key": "ann", "day": name.partition("/")[2], "tokens": 5000, "cost": None}
    ledger.put(
        Document(kind=USAGE, name=name, text=text.replace('"tokens":10', '"tokens":0')),
        Document(kind=CHARGE, name="a", text=json.dumps(open_charge)),
        Document(kind=CHARGE, name="never", text=json.dumps(open_charge)),
    )
    async with driving(ledger) as runs:
        standing = runs.standing(ANN)
        assert (standing.used.tokens, standing.reserved.tokens) == (10, 0)
    assert ledger.documents(CHARGE) == {}


async def test_a_run_of_a_team_that_is_served_no_more_is_charged(
    opened: Callable[[], RunLedger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-QUO-20, S-QUO-21: its end is found in its record."""
    monkeypatch.setattr(driven_runs, "_STORING_S", 0.0)
    monkeypatch.setattr(run_driver, "_PAUSES_S", (60.0,))
    ledger = DyingLedger(opened(), "before")
    async with driving(ledger) as runs:
        await runs.start(NewRun.model_validate({"inputs": INPUTS, "run_id": "a"}), account=ANN)
        await ledger.died.wait()
    again = opened()
    async with InlineRuntime() as entered:
        runs = DrivenRuns({}, entered, again)
        assert await runs.recover() == 0
        standing = runs.standing(ANN)
        assert (standing.used.runs, standing.used.tokens, standing.reserved.tokens) == (1, 10, 0)
    assert again.documents(CHARGE) == {}
