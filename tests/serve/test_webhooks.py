"""Webhooks of an endpoint's runs: signed, repeated until they are received, and visible."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from httpx import AsyncClient
from standardwebhooks import Webhook
from standardwebhooks.webhooks import WebhookVerificationError

from ensemble_ray import Ensemble, Review, ValidationError
from ensemble_ray.access.admission import Right
from ensemble_ray.process.concurrency import threads
from ensemble_ray.serve.driving import webhooks
from ensemble_ray.serve.driving.ledger import Document, Ledger
from ensemble_ray.serve.driving.requests import EndpointLimits
from ensemble_ray.serve.driving.webhooks import (
    CONTENT_KIND,
    RETRY_FOR_S,
    STATE_KIND,
    StoredDelivery,
    WebhookRules,
    check_secrets,
    check_team_webhooks,
    content_of,
    driver_rules,
    parse_secrets,
    parse_webhooks,
    problem_of,
    retry_pause_s,
)
from ensemble_ray.serve.schemas import NewRun, NewWebhook, RunDetail, RunStatus, WebhookEvent
from ensemble_ray.testing import ScriptedModel
from tests.builders import task
from tests.serve.conftest import Connect
from tests.serve.driving import driven
from tests.serve.gates import Gate
from tests.serve.keys import guarded, make_key
from tests.serve.runs_double import detail
from tests.serve.teams import INPUTS, pair
from tests.serve.test_waiting import asked as asking_team
from tests.serve.webhook_receiver import OTHER_SECRET, SECRET, Receiver, rules

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def fine() -> Ensemble:
    return pair(ScriptedModel(otherwise="fine"))


def request(run_id: str, url: str, *events: str, **more: Any) -> dict[str, Any]:
    webhook = {"url": url, **({"events": list(events)} if events else {})}
    return {"run_id": run_id, "inputs": INPUTS, "webhook": webhook, **more}


async def until_ended(client: AsyncClient, run_id: str, state: str, count: int = 1) -> list[dict[str, Any]]:
    """The deliveries of a run when that many are in a state."""
    async with asyncio.timeout(60):
        while True:
            found = (await client.get(f"/runs/{run_id}/deliveries")).json()["deliveries"]
            if [each["state"] for each in found].count(state) >= count:
                return found
            await asyncio.sleep(0.02)


@pytest.fixture
def is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let retries follow without a pause."""
    monkeypatch.setattr(webhooks, "_FIRST_PAUSE_S", 0.0)


async def test_the_end_of_a_run_is_delivered_when_its_request_names_a_webhook(connect: Connect) -> None:
    """S-HOK-1, S-HOK-3, S-HOK-4: signed; its data is the run as GET /runs/{id} answers."""
    with Receiver() as receiver:
        async with connect(fine(), webhooks=rules()) as client:
            sent = await client.post("/runs", json=request("a", f"{receiver.origin}/hook?key=k"))
            assert sent.status_code == 202
            (received,) = await threads.run(receiver.wait, 1)
            run = (await client.get("/runs/a")).json()
            (shown,) = await until_ended(client, "a", "delivered")
    assert received.path == "/hook?key=k"
    assert received.content == {"type": "run.ended", "timestamp": run["ended_at"].replace("Z", "+00:00"), "data": run}
    assert run["status"] == "completed"
    assert abs(received.timestamp - time.time()) < 300
    assert (shown["delivery_id"], shown["event"], shown["receiver"]) == (
        received.delivery_id,
        "run.ended",
        receiver.origin,
    )
    (attempt,) = shown["attempts"]
    assert (shown["attempt_count"], attempt["status"], attempt["error"]) == (1, 204, None)
    assert (shown["next_attempt_at"], shown["gate_id"]) == (None, None)
    assert shown["ended_at"] is not None


@pytest.mark.usefixtures("is_quick")
async def test_a_delivery_is_repeated_under_its_id_when_the_receiver_fails(connect: Connect) -> None:
    """S-HOK-5, S-HOK-6, S-HOK-26: with the same content; redirects are failures, and are not followed."""
    with Receiver() as receiver:
        receiver.statuses.extend([500, 302, 429, 200])
        receiver.headers["location"] = "/elsewhere"
        async with connect(fine(), webhooks=rules()) as client:
            await client.post("/runs", json=request("a", receiver.origin))
            (shown,) = await until_ended(client, "a", "delivered")
            metrics = (await client.get("/metrics")).text.splitlines()
    assert len({(each.delivery_id, each.body, each.path) for each in receiver.received}) == 1
    assert [each["status"] for each in shown["attempts"]] == [500, 302, 429, 200]
    assert [each["error"] for each in shown["attempts"]] == ["HTTP 500", "HTTP 302", "HTTP 429", None]
    counted = 'ensemble_ray_webhook_attempts_total{ensemble="team",outcome='
    assert [f'{counted}"{name}"}} {count}' in metrics for name, count in (("retried", 3), ("delivered", 1))] == [
        True,
        True,
    ]


async def test_a_delivery_fails_when_the_receiver_is_gone(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """S-HOK-6, S-HOK-24: 410 ends it. A redelivery sends the same again; the log has no part of the URL that may be secret."""
    with Receiver() as receiver:
        receiver.statuses.append(410)
        async with connect(fine(), webhooks=rules()) as client:
            await client.post("/runs", json=request("a", f"{receiver.origin}/T0secret?key=k-secret"))
            (failed,) = await until_ended(client, "a", "failed")
            again = await client.post(f"/runs/a/deliveries/{failed['delivery_id']}/redeliver")
            assert (again.status_code, again.json()["state"]) == (202, "pending")
            (shown,) = await until_ended(client, "a", "delivered")
            unknown = await client.post("/runs/a/deliveries/msg_other/redeliver")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "DELIVERY_NOT_FOUND")
    assert (shown["attempt_count"], shown["delivery_id"]) == (2, failed["delivery_id"])
    assert receiver.received[0].body == receiver.received[1].body
    (line,) = [each.getMessage() for each in caplog.records if "failed for the last time" in each.getMessage()]
    assert receiver.origin in line
    assert "secret" not in caplog.text
    assert "secret" not in json.dumps(shown)


async def test_a_gate_is_reported_when_a_run_waits_for_people(connect: Connect) -> None:
    """S-HOK-2, S-HOK-4: once, with its prompt and ids; the end follows."""
    with Receiver() as receiver:
        async with connect(asking_team(), webhooks=rules()) as client:
            body = {"run_id": "a", "webhook": {"url": receiver.origin}}
            await client.post("/runs?wait=60", json=body)
            (first,) = await threads.run(receiver.wait, 1)
            gate = first.content["data"]
            assert (gate["run_id"], gate["ensemble"], gate["prompt"]) == ("a", "team", "Is it right?")
            await client.post(f"/reviews/a/{gate['gate_id']}", json={"decision": "approve"})
            await threads.run(receiver.wait, 2)
            shown = await until_ended(client, "a", "delivered", 2)
    assert receiver.types == ["review.requested", "run.ended"]
    assert [each["gate_id"] for each in shown] == [gate["gate_id"], None]


async def test_a_gate_is_reported_while_other_tasks_of_the_run_work(connect: Connect) -> None:
    """S-HOK-2: the run is not waiting yet; only events that were named are sent."""
    gate = Gate("done")
    slow = task("slow", llm=ScriptedModel(gate))
    offer = task("offer", handler=lambda _context: "40 EUR", review=Review(prompt="Right?", timeout=0))
    team = Ensemble(tasks=[slow, offer], review_wait="detach", workflow="parallel")
    with Receiver() as receiver:
        async with connect(team, webhooks=rules()) as client:
            await client.post("/runs", json=request("a", receiver.origin, "review.requested", inputs={}))
            await threads.run(receiver.wait, 1)
            run = (await client.get("/runs/a")).json()
            assert (run["status"], len(run["reviews"])) == ("running", 1)
            gate.open()
            await client.post(f"/reviews/a/{run['reviews'][0]['gate_id']}", json={"decision": "exit"})
            await client.get("/runs/a/events")
            assert len((await client.get("/runs/a/deliveries")).json()["deliveries"]) == 1
    assert receiver.types == ["review.requested"]


async def test_all_runs_of_a_team_are_reported_when_the_operator_names_a_webhook(connect: Connect) -> None:
    """S-HOK-7, S-HOK-20: signed with the team's own secret; a receiver that a request also names gets the event once."""
    teams = {"letters": fine(), "orders": fine()}
    with Receiver(OTHER_SECRET) as own, Receiver() as common:
        known = rules(f"{SECRET} letters={OTHER_SECRET}", letters=own.origin, orders=common.origin)
        async with connect(teams, webhooks=known) as client:
            for team in teams:
                await client.post("/runs", json={"ensemble": team, "run_id": team, "inputs": INPUTS})
                await until_ended(client, team, "delivered")
            await client.post("/runs", json=request("twice", own.origin, ensemble="letters"))
            assert len(await until_ended(client, "twice", "delivered")) == 1
    assert [each.content["data"]["ensemble"] for each in own.received] == ["letters", "letters"]
    assert [each.content["data"]["ensemble"] for each in common.received] == ["orders"]


@pytest.mark.parametrize("status", [RunStatus.REJECTED, RunStatus.CANCELLED, RunStatus.FAILED])
async def test_every_kind_of_end_is_delivered(connect: Connect, status: RunStatus) -> None:
    """S-HOK-1: also of a run that failed, or was cancelled in the queue."""

    def broken(_call: object) -> str:
        raise OSError("no model")

    gate = Gate("a draft")
    first = gate if status is RunStatus.CANCELLED else broken
    team = pair(ScriptedModel(first, otherwise="fine"))
    with Receiver() as receiver:
        limits = EndpointLimits(max_running=1)
        async with connect(team, webhooks=rules(), limits=limits) as client:
            if status is RunStatus.CANCELLED:
                await client.post("/runs", json={"inputs": INPUTS})
                await gate.is_asked.wait()
            more: dict[str, Any] = {"items": None}
            await client.post("/runs", json=request("a", receiver.origin, **more))
            if status is RunStatus.CANCELLED:
                await client.post("/runs/a/cancel")
            (received,) = await threads.run(receiver.wait, 1)
            gate.open()
            assert received.content["data"] == (await client.get("/runs/a")).json()
    expected = RunStatus.CANCELLED if status is RunStatus.CANCELLED else RunStatus.FAILED
    assert received.content["data"]["status"] == expected


HOSTS: frozenset[str] = frozenset({"10.0.0.7", "hooks.intern"})
REFUSED = {
    "http://example.org/hook": "it must begin with https://",
    "ftp://example.org": "only http and https are supported",
    "example.org": "only http and https are supported",
    "https://": "the URL names no host",
    "https://example.org:0/": "there is no port 0",
    "https://example.org:99999/": "it is no URL",
    "https://user:pw@example.org/": "it contains a user or a password",
    "https://exa mple.org/": "it is no URL",
    "https://exa_mple,.org/": "the URL's host is malformed",
    "https://example.org/\n": None,
    "https://example.org/a\x01": "the URL holds a control character",
    "https://localhost/": "the host is not public",
    "https://api.localhost./": "the host is not public",
    "https://127.0.0.1/": "the host is not public",
    "https://2130706433/": "the host is not public",
    "https://10.0.0.8/": "the host is not public",
    "https://169.254.169.254/latest": "the host is not public",
    "https://[::1]/": "the host is not public",
    "https://[::ffff:127.0.0.1]/": "the host is not public",
    "http://10.0.0.7/hook": None,
    "http://HOOKS.intern:8080/": None,
    "https://example.org/hook?key=1": None,
}


@pytest.mark.parametrize("url", REFUSED)
def test_a_url_is_refused_unless_it_is_public_or_the_operator_allows_its_host(url: str) -> None:
    """S-HOK-21, S-HOK-22: before the run is accepted."""
    expected, found = REFUSED[url], problem_of(url, HOSTS)
    assert (found or "").startswith(expected or "")
    assert (found is None) is (expected is None)


async def test_a_request_is_refused_before_it_is_stored_when_its_webhook_is_wrong(connect: Connect) -> None:
    """S-HOK-10: a bad URL, an unknown event, and an endpoint without a secret."""
    async with connect(fine(), webhooks=rules()) as client:
        private = await client.post("/runs", json=request("a", "https://10.0.0.8/"))
        unknown = await client.post("/runs", json=request("a", "https://example.org/", "run.started"))
        none = await client.post("/runs", json={**request("a", ""), "webhook": {"url": "https://x.org", "events": []}})
        assert (await client.get("/runs/a")).status_code == 404
    assert [(each.status_code, each.json()["code"]) for each in (private, unknown, none)] == [
        (400, "WEBHOOK_INVALID"),
        (422, "INVALID_REQUEST"),
        (422, "INVALID_REQUEST"),
    ]
    assert "'run.ended' or 'review.requested'" in unknown.json()["message"]
    async with connect(fine()) as client:
        refused = await client.post("/runs", json=request("a", "https://example.org/"))
    assert (refused.status_code, refused.json()["code"]) == (400, "WEBHOOK_NOT_CONFIGURED")
    assert "ENSEMBLE_RAY_WEBHOOK_SECRET" in refused.json()["message"]


async def test_requests_are_the_same_only_with_the_same_webhook(connect: Connect) -> None:
    """S-HOK-11: a repeated request gets its run, and one with another receiver is another request."""
    with Receiver() as receiver:
        async with connect(fine(), webhooks=rules()) as client:
            answers = [
                await client.post("/runs", json=request("a", f"{receiver.origin}/{path}")) for path in ("1", "1", "2")
            ]
            await until_ended(client, "a", "delivered")
    assert [each.status_code for each in answers] == [202, 202, 409]
    assert len(receiver.received) == 1


async def test_a_delivery_continues_in_the_next_process_when_the_first_one_ends(tmp_path: Path) -> None:
    """S-HOK-8: under the same id; the end was stored with it."""
    path = tmp_path / "ledger.sqlite"
    with Receiver() as receiver:
        receiver.is_open.clear()
        async with driven(fine(), ledger=path, webhooks=rules()) as runs:
            await runs.start(NewRun.model_validate(request("a", receiver.origin)))
            await threads.run(receiver.wait, 1)
        receiver.is_open.set()
        async with driven({}, ledger=path, webhooks=rules()):
            first, second = await threads.run(receiver.wait, 2)
    assert (first.delivery_id, first.body) == (second.delivery_id, second.body)


async def test_the_end_of_a_run_and_its_delivery_are_stored_in_one_step(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    """S-HOK-8: so that no end is without its delivery, whenever the process dies; the result is in the content."""
    stored: list[tuple[str, str]] = []
    end = Ledger.end

    def spy(ledger: Ledger, run_id: str, outcome: RunDetail, *documents: Document, kept: int) -> None:
        stored.extend((each.kind, each.name.partition("/")[0]) for each in documents)
        end(ledger, run_id, outcome, *documents, kept=kept)

    monkeypatch.setattr(Ledger, "end", spy)
    with Receiver() as receiver:
        async with connect(fine(), webhooks=rules()) as client:
            await client.post("/runs?wait=60", json={"run_id": "plain", "inputs": INPUTS})
            await client.post("/runs?wait=60", json=request("a", receiver.origin))
            await until_ended(client, "a", "delivered")
    assert stored == [(STATE_KIND, "a"), (CONTENT_KIND, "a")]


@pytest.mark.usefixtures("is_quick")
async def test_a_slow_receiver_delays_neither_runs_nor_other_receivers(connect: Connect) -> None:
    """S-HOK-9: a receiver has a limited number of attempts at the same time."""
    with Receiver() as slow, Receiver() as quick:
        slow.is_open.clear()
        async with connect(fine(), webhooks=rules()) as client:
            for number in range(8):
                ended = await client.post("/runs?wait=60", json=request(f"slow-{number}", slow.origin))
                assert ended.json()["status"] == "completed"
            await threads.run(slow.wait, 4)
            await client.post("/runs", json=request("quick", quick.origin))
            await until_ended(client, "quick", "delivered")
            assert len(slow.received) == 4
            slow.is_open.set()
            await threads.run(slow.wait, 8)
            for number in range(8):
                await until_ended(client, f"slow-{number}", "delivered")


@pytest.mark.usefixtures("is_quick")
async def test_old_deliveries_are_removed_when_there_are_too_many(tmp_path: Path) -> None:
    """S-HOK-12: as many ended ones remain as ended runs."""
    limits = EndpointLimits(kept_runs=2)
    with Receiver() as receiver:
        async with driven(fine(), ledger=tmp_path / "l.sqlite", webhooks=rules(), limits=limits) as runs:
            for number in range(4):
                await runs.start(NewRun.model_validate(request(str(number), receiver.origin)))
                await threads.run(receiver.wait, number + 1)
            async with asyncio.timeout(60):
                while True:
                    if not [*await runs.deliveries("0"), *await runs.deliveries("1")]:
                        break
                    await asyncio.sleep(0.02)
    ledger = Ledger(tmp_path / "l.sqlite")
    left = {kind: {name.partition("/")[0] for name in ledger.documents(kind)} for kind in (STATE_KIND, CONTENT_KIND)}
    ledger.close()
    assert left == {STATE_KIND: {"2", "3"}, CONTENT_KIND: {"2", "3"}}


def stored(**fields: Any) -> StoredDelivery:
    return StoredDelivery(
        delivery_id="msg_1",
        run_id="a",
        ensemble="team",
        event=WebhookEvent.RUN_ENDED,
        url="https://example.org/",
        created_at_s=0.0,
        began_at_s=0.0,
        due_at_s=0.0,
        **fields,
    )


def test_retries_end_after_a_day() -> None:
    """S-HOK-5: pauses grow to an hour; the jitter changes them by a quarter; the last 10 attempts are shown."""
    assert [retry_pause_s(count, 0.5) for count in (1, 2, 3, 7, 100)] == [5.0, 15.0, 45.0, 3600.0, 3600.0]
    assert (retry_pause_s(1, 0.0), retry_pause_s(1, 0.999)) == (3.75, pytest.approx(6.25, abs=0.01))
    delivery, times = stored(), list[float]()
    while delivery.due_at_s is not None:
        times.append(delivery.due_at_s)
        attempt = webhooks._Attempt(at_s=delivery.due_at_s, duration_s=15.0, status=503, error="HTTP 503")
        delivery = delivery.after(attempt, 0.5)
    assert times[-1] <= RETRY_FOR_S < times[-1] + 3600 + 15
    assert (delivery.is_delivered, delivery.count, len(delivery.attempts)) == (False, len(times), 10)
    assert delivery.ended_at_s == times[-1] + 15
    again = delivery.again(100_000.0)
    assert (again.due_at_s, again.ended_at_s, again.count) == (100_000.0, None, delivery.count)


def test_members_of_a_long_content_are_left_out_with_a_mark() -> None:
    """S-HOK-4: first the tasks, then the result; the rest stays."""
    run = detail(RunStatus.COMPLETED, "x" * 5000)
    whole = json.loads(content_of(WebhookEvent.RUN_ENDED, NOW, run))
    assert (len(whole["data"]["result"]["raw"]), "omitted" in whole) == (5000, False)
    cut = json.loads(content_of(WebhookEvent.RUN_ENDED, NOW, run, most_bytes=2000))
    assert cut["omitted"] == ["result.raw"]
    assert cut["data"] == {**whole["data"], "result": {**whole["data"]["result"], "raw": ""}}
    assert whole["type"] == cut["type"] == "run.ended"
    assert whole["timestamp"] == "2026-01-01T00:00:00+00:00"


def test_every_secret_of_a_team_signs() -> None:
    """S-HOK-20: so that a secret can be replaced; a team with secrets of its own uses no other."""
    secrets = parse_secrets(f"{SECRET} letters={OTHER_SECRET} letters={SECRET}")
    content, now = b'{"a":1}', int(time.time())
    for team, accepted, refused in (("letters", [SECRET, OTHER_SECRET], []), ("orders", [SECRET], [OTHER_SECRET])):
        signature = secrets.sign(team, "msg_1", now, content)
        headers = {"webhook-id": "msg_1", "webhook-timestamp": str(now), "webhook-signature": signature}
        for secret in accepted:
            assert Webhook(secret).verify(content, headers) == {"a": 1}
        for secret in refused:
            with pytest.raises(WebhookVerificationError):
                Webhook(secret).verify(content, headers)
    assert parse_secrets("").has_key("letters") is False


SHORT = f"whsec_{base64.b64encode(b'short').decode()}"


@pytest.mark.parametrize("text", ["s3cr3t", SHORT, "whsec_***", f"letters{SECRET}", f"={SECRET}", f"{SECRET} x"])
def test_an_invalid_secret_is_refused_and_not_shown(text: str) -> None:
    """S-HOK-20: with its number and a command that makes one."""
    with pytest.raises(ValidationError, match=r"secret \d is invalid.*openssl rand") as caught:
        parse_secrets(text)
    assert "s3cr3t" not in str(caught.value)
    assert SECRET.removeprefix("whsec_") not in str(caught.value)


def test_webhooks_of_teams_are_checked_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-HOK-7: their teams, URLs and secrets; the command line writes TEAM=URL."""
    parsed = parse_webhooks(["letters=https://example.org/a?b=c,d", "*=https://example.com"])
    assert parsed == {"letters": {"url": "https://example.org/a?b=c,d"}, "*": {"url": "https://example.com"}}
    assert parse_webhooks({"letters": {"url": "u", "events": ["run.ended"]}, "orders": "v"}) == {
        "letters": {"url": "u", "events": ["run.ended"]},
        "orders": {"url": "v"},
    }
    with pytest.raises(ValueError, match="a webhook is TEAM=URL"):
        parse_webhooks("letters")
    teams = {"letters": NewWebhook(url="https://example.org/"), "*": NewWebhook(url="https://example.org/")}
    check_team_webhooks(teams, (), ["letters"])
    with pytest.raises(ValidationError, match=r"there is no team 'letters'. There are: \[orders\]"):
        check_team_webhooks(teams, (), ["orders"])
    with pytest.raises(ValidationError, match="webhooks: team 'letters': the host is not public"):
        check_team_webhooks({"letters": NewWebhook(url="http://10.0.0.1/")}, ["10.0.0.2"], ["letters"])
    monkeypatch.delenv("ENSEMBLE_RAY_WEBHOOK_SECRET", raising=False)
    check_secrets([])
    with pytest.raises(ValidationError, match=r"Webhooks of \[\*, letters\] need a secret"):
        check_secrets(teams)
    monkeypatch.setenv("ENSEMBLE_RAY_WEBHOOK_SECRET", SECRET)
    check_secrets(teams)


def test_a_run_driver_without_a_valid_secret_signs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-HOK-20: it starts, and its log names the reason without the secret."""
    monkeypatch.setenv("ENSEMBLE_RAY_WEBHOOK_SECRET", "s3cr3t")
    with caplog.at_level(logging.ERROR):
        found = driver_rules({"letters": NewWebhook(url="https://example.org/")}, ["Hooks.Intern"])
    assert not found.secrets.has_key("letters")
    assert found.hosts == {"hooks.intern"}
    assert "secret 1 is invalid" in caplog.text
    assert "Webhooks of the teams [letters] are not sent" in caplog.text
    assert "s3cr3t" not in caplog.text
    assert "whsec" not in repr(WebhookRules(secrets=parse_secrets(SECRET)))


async def test_studio_shows_the_webhooks_of_a_run_to_callers_of_its_team(records: Path) -> None:
    """S-HOK-13: with the right to read; the page of another team's run is 404."""
    teams = {"letters": fine(), "orders": fine()}
    with Receiver() as receiver:
        receiver.statuses.append(410)
        known = rules(letters=f"{receiver.origin}/s3cret")
        async with guarded(records, teams, has_studio=True, webhooks=known) as endpoint:
            client = endpoint.client
            body = {"ensemble": "letters", "run_id": "a", "inputs": INPUTS}
            await client.post("/runs?wait=60", json=body)
            await until_ended(client, "a", "failed")
            mine, other = (make_key(endpoint.file, each, teams=[each]) for each in teams)
            path = "/studio/api/studio/runs/a/deliveries"
            shown = (await client.get(path, headers=mine)).json()["deliveries"]
            refused = await client.get(path, headers=other)
            info = (await client.get("/studio/api/studio/info", headers=mine)).json()
    assert shown == [
        {
            "event": "run.ended",
            "receiver": receiver.origin,
            "state": "failed",
            "attempt_count": 1,
            "error": "HTTP 410",
            "next_attempt_at": None,
        }
    ]
    assert (refused.status_code, info["has_deliveries"]) == (404, True)


async def test_a_key_needs_the_right_to_read_when_it_names_a_webhook(records: Path) -> None:
    """S-HOK-1: the receiver gets what this right shows."""
    async with guarded(records, fine(), webhooks=rules()) as endpoint:
        headers = make_key(endpoint.file, rights=[Right.RUN])
        refused = await endpoint.client.post("/runs", json=request("a", "https://example.org/"), headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN")
    assert "'read'" in refused.json()["message"]


def test_an_endpoint_with_a_wrong_webhook_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-HOK-7: neither with a wrong team or URL, nor without a secret on a cluster of its own."""
    from ensemble_ray.serve import app

    def fail(*_: object) -> None:
        raise AssertionError("it started a cluster")

    monkeypatch.setattr(app, "join_or_start", fail)
    monkeypatch.delenv("ENSEMBLE_RAY_WEBHOOK_SECRET", raising=False)
    place = app.EndpointPlace(host="127.0.0.1", port=0)
    for given, expected in (
        ({"letters": "https://example.org/"}, "there is no team 'letters'"),
        ({"team": "http://example.org/"}, "it must begin with https://"),
        (["team"], "webhooks: Value error, a webhook is TEAM=URL"),
        (["team=https://example.org/"], "need a secret"),
    ):
        with pytest.raises(ValidationError, match=expected):
            app.serve_until_interrupted({"ensembles": ["t.yaml"], "webhooks": given}, place, name="e", teams=["team"])
