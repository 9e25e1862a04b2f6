"""Placeholders in all that an endpoint sends, and values for readers who may see them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from httpx import AsyncClient

from ensemble_ray import Agent, Ensemble, Redactor, Review, Schedule, Task, ToolCall, ToolContext, tool
from ensemble_ray.access.admission import Right
from ensemble_ray.process.concurrency import threads
from ensemble_ray.testing import ScriptedModel
from tests.scenarios.test_redaction import KEY, SECRETS, assert_clean, placeholder_in
from tests.serve.conftest import Connect
from tests.serve.keys import Guarded, guarded, make_key
from tests.serve.webhook_receiver import Receiver, rules

API = "/studio/api/studio"
WHO = SECRETS["input"]
#: A request with a value in each of its texts.
ASKED = {
    "run_id": "r",
    "inputs": {"who": WHO},
    "additional_context": f"Copy {SECRETS['directive']}",
    "tags": {"case": SECRETS["item"]},
}
VARIABLE = "ENSEMBLE_RAY_REDACTION_KEY"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.chdir(tmp_path)  # the runs write their traces there


SEEN: list[str] = []


@tool(effect="none")
def look_up(context: ToolContext[None], to: str) -> str:
    """Note what it received, and return more."""
    SEEN[:] = [to, context.inputs["who"]]
    return f"{to} {SECRETS['tool']}"


def team(*, reversible: bool = True, has_gate: bool = False, roles: str | tuple[str, ...] = ()) -> Ensemble:
    """A task with a tool, and answers with values, again for each run."""

    def answering(asked: Any) -> Any:
        if "look_up" in repr(asked.messages) or "Copy" not in asked.text:
            return f"done {SECRETS['answer']}"
        return ToolCall("1", "look_up", json.dumps({"to": placeholder_in(asked.text.partition("Write to")[2])}))

    model = ScriptedModel(otherwise=answering)
    worker = Agent("Worker", f"Help {SECRETS['goal']}", tools=[look_up], llm=model)
    review = Review.required(prompt=f"Send to {SECRETS['review']}?") if has_gate else None
    return Ensemble(
        tasks=[Task("Write to {who}", "A line", agent=worker, name="first", review=review)],
        review_wait="detach" if has_gate else "attached",
        capture_mode="full",
        redactor=Redactor(reversible=reversible, reveal_roles=roles),
    )


async def ended(client: AsyncClient, headers: Mapping[str, str] | None = None, **more: Any) -> dict[str, Any]:
    sent = await client.post("/runs?wait=60", json={**ASKED, **more}, headers=headers)
    assert sent.status_code == 200, sent.text
    found: dict[str, Any] = sent.json()
    return found


@asynccontextmanager
async def serving(home: Path, **options: Any) -> AsyncGenerator[tuple[Guarded, dict[str, str]]]:
    """An endpoint with a run that has ended, and the key of an administrator."""
    async with guarded(home, team(**options), has_studio=True) as served:
        admin = make_key(served.file, "boss")
        await ended(served.client, admin)
        yield served, admin


async def test_no_answer_of_the_endpoint_has_a_value_when_a_team_has_a_redactor(
    connect: Connect, caplog: pytest.LogCaptureFixture, records: Path
) -> None:
    """S-RED-20, S-RED-22, S-RED-53: own API, events, webhooks, both OpenAI APIs, metrics, and the ledger after the end."""
    caplog.set_level(logging.DEBUG, "ensemble_ray")
    ledger = records / "ledger.db"
    with Receiver() as receiver:
        async with connect(team(), webhooks=rules(), ledger=ledger) as client:
            run = await ended(client, webhook={"url": receiver.origin}, user=SECRETS["call"])
            (hook,) = await threads.run(receiver.wait, 1)
            assert SEEN[0] == WHO
            assert SEEN[1] == placeholder_in(SEEN[1])
            assert run["result"]["raw"].startswith("done [EMAIL_")
            shown = {"the answer": json.dumps(run), "a webhook": hook.body.decode()}
            for path in ("/runs", "/runs/r", "/runs/r/events", "/runs/r/deliveries", "/metrics", "/ensembles"):
                shown[path] = (await client.get(path)).text
            assert "[EMAIL_" in shown["/runs/r/events"]
            asked = {"model": "team", "messages": [{"role": "user", "content": f"to {WHO}"}]}
            for is_stream in (False, True):
                chat = await client.post("/v1/chat/completions", json={**asked, "stream": is_stream})
                answer = await client.post("/v1/responses", json={"model": "team", "input": WHO, "stream": is_stream})
                for one in (chat, answer):
                    assert one.status_code == 200, one.text
                    assert "[EMAIL_" in one.text
                    shown[f"{one.url} {is_stream}"] = one.text
    for what, text in shown.items():
        assert_clean(what, [text])
    assert_clean("a log line", [each.getMessage() + str(each.exc_text) for each in caplog.records])


async def test_studio_has_no_value_when_a_team_has_a_redactor(records: Path) -> None:
    """S-RED-20, S-RED-62: each answer of the page's data, and its exports."""
    async with serving(records) as (served, admin):
        paths = ["info", "runs", "runs?q=case", "runs?group=tag", "trends", "evaluations", "reviews", "actors", "quota"]
        paths += [f"runs/r{each}" for each in ("", "/steps", "/series", "/flow", "/flow?as=ran", "/live", "/actors")]
        paths += [f"runs/r/export?format={each}" for each in ("json", "html")]
        paths += ["runs/r/deliveries", "compare?a=r&b=r"]
        steps = (await served.client.get(f"{API}/runs/r/steps", headers=admin)).json()["steps"]
        paths += [f"runs/r/steps/{each['id'].replace('#', '%23')}" for each in steps]
        for path in paths:
            answer = await served.client.get(f"{API}/{path}", headers=admin)
            assert answer.status_code == 200, (path, answer.text)
            assert_clean(path, [answer.text])
        assert "[EMAIL_" in (await served.client.get(f"{API}/runs/r/export?format=json", headers=admin)).text


async def test_reviews_have_placeholders_when_a_team_has_a_redactor(connect: Connect) -> None:
    """S-RED-70: gates of the endpoint, their webhooks, and decisions with values."""
    with Receiver() as receiver:
        async with connect(team(has_gate=True), webhooks=rules()) as client:
            waiting = await client.post("/runs?wait=60", json={**ASKED, "webhook": {"url": receiver.origin}})
            (hook,) = await threads.run(receiver.wait, 1)
            (gate,) = (await client.get("/reviews")).json()["reviews"]
            decision = {"decision": "edit", "text": f"To {SECRETS['review']}", "comment": f"ask {SECRETS['handler']}"}
            decided = await client.post(f"/reviews/r/{gate['gate_id']}", json=decision)
            assert decided.status_code == 200
            received = await threads.run(receiver.wait, 2)
            run = (await client.get("/runs/r")).text
    assert_clean("a gate", [waiting.text, json.dumps(gate), decided.text, run])
    assert_clean("a webhook", [hook.body.decode(), *(each.body.decode() for each in received)])
    assert "To [EMAIL_" in run


async def test_schedules_have_placeholders_when_a_team_has_a_redactor(records: Path) -> None:
    """S-RED-22: inputs of a schedule are in its runs alone."""
    made = team().replace(schedules={"hourly": Schedule(every="1h", inputs={"who": WHO})})
    async with guarded(records, made, has_studio=True) as served:
        client = served.client
        begun = await client.post("/schedules/team/hourly/run")
        assert begun.status_code == 202, begun.text
        run_id = begun.json()["run_id"]
        assert (await client.get(f"/runs/{run_id}/events")).status_code == 200  # until its end
        paths = ["/schedules", "/schedules/team/hourly", f"/runs/{run_id}", "/runs", f"{API}/schedules"]
        for path in paths:
            answer = await client.get(path)
            assert answer.status_code == 200, answer.text
            assert_clean(path, [answer.text])
        assert "[EMAIL_" in (await client.get(f"/runs/{run_id}")).text


REVEALS = (("get", "/runs/r?reveal=true"), ("post", f"{API}/runs/r/reveal"))


@pytest.mark.parametrize(("method", "path"), REVEALS)
async def test_values_are_shown_when_the_key_may_see_them(
    records: Path, method: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """S-RED-62, S-RED-63, S-RED-64: `admin`, or a role of the redactor; each look is logged; answers are not stored."""
    async with serving(records, roles="privacy") as (served, admin):
        rights = [Right.READ, Right.RUN, Right.REVIEW]
        ann = make_key(served.file, rights=rights, roles=["privacy"])
        ben = make_key(served.file, "ben", rights=rights, roles=["legal"])
        other = make_key(served.file, "carl", teams=["other"])
        blind = make_key(served.file, "dora", rights=[Right.RUN, Right.ADMIN])
        for name, headers in (("boss", admin), ("ann", ann)):
            caplog.clear()
            answer = await served.client.request(method, path, headers=headers)
            assert answer.status_code == 200, answer.text
            assert SECRETS["answer"] in answer.text
            assert answer.headers["cache-control"] == "no-store"
            assert [each.getMessage() for each in caplog.records if "revealed" in each.getMessage()] == [
                f"The values of run 'r' were revealed to '{name}'"
            ]
        caplog.clear()
        for headers, status in ((ben, 403), (other, 404), (blind, 403)):
            refused = await served.client.request(method, path, headers=headers)
            assert refused.status_code == status
            assert_clean("a refusal", [refused.text])
        refused = await served.client.request(method, path, headers=ben)
        assert "needs the right 'admin', or one of the roles [privacy]" in refused.json()["message"]
        assert "revealed" not in caplog.text
        for headers, can in ((admin, True), (ann, True), (ben, False)):
            run = (await served.client.get(f"{API}/runs/r", headers=headers)).json()
            assert run["can_reveal"] is can
            assert_clean("the run", [json.dumps(run), (await served.client.get("/runs/r", headers=headers)).text])


@pytest.mark.parametrize(("method", "path"), REVEALS)
async def test_no_value_is_shown_when_the_key_is_not_that_of_the_run(
    records: Path, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    """S-RED-62, S-RED-64: the error says what to do."""
    async with serving(records) as (served, admin):
        for variable, message in (("", f"{VARIABLE}, which is not set here. Set it"), ("w" * 43, "is not the one")):
            monkeypatch.setenv(VARIABLE, variable)
            refused = await served.client.request(method, path, headers=admin)
            assert (refused.status_code, refused.json()["code"]) == (409, "NOT_REVEALABLE")
            assert message in refused.json()["message"]


@pytest.mark.parametrize(("method", "path"), REVEALS)
async def test_a_run_is_refused_when_it_has_no_values(records: Path, method: str, path: str) -> None:
    """S-RED-62, S-RED-64: its redactor is not reversible; the page offers nothing."""
    async with serving(records, reversible=False) as (served, admin):
        refused = await served.client.request(method, path, headers=admin)
        assert (refused.status_code, refused.json()["code"]) == (409, "NOT_REVEALABLE")
        assert "its redactor is not reversible" in refused.json()["message"]
        assert (await served.client.get(f"{API}/runs/r", headers=admin)).json()["can_reveal"] is False


@pytest.mark.parametrize(("method", "path"), REVEALS)
async def test_a_reader_is_sent_to_the_command_line_when_a_run_has_too_many_values(
    records: Path, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    """S-RED-63: an answer has 10,000 values at most."""
    monkeypatch.setattr("ensemble_ray.recovery.revealing._MOST_VALUES", 1)
    async with serving(records) as (served, admin):
        refused = await served.client.request(method, path, headers=admin)
        assert (refused.status_code, refused.json()["code"]) == (409, "NOT_REVEALABLE")
        assert "ensemble-ray trace r --reveal" in refused.json()["message"]
