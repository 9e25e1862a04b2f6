"""Webhooks that lead into the operator's network, and receivers that answer slowly, without an end, or with other places."""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ensemble_ray.process.concurrency import threads
from ensemble_ray.serve.driving import webhooks
from ensemble_ray.serve.driving.driven_runs import DrivenRuns
from ensemble_ray.serve.driving.webhooks import WebhookRules, parse_secrets
from ensemble_ray.serve.schemas import NewRun, WebhookDelivery
from ensemble_ray.testing import ScriptedModel
from tests.attack.raw_server import RawServer, Write
from tests.attack.test_pages import costs_at_most
from tests.serve.driving import driven
from tests.serve.teams import INPUTS, pair
from tests.serve.webhook_receiver import SECRET, Receiver, rules

PUBLIC_ONLY = WebhookRules(secrets=parse_secrets(SECRET))
#: What a receiver may cost, in memory and in processor time, s.
_MEMORY_BYTES, _LIMIT_S = 10_000_000, 5.0


@asynccontextmanager
async def served(known: WebhookRules) -> AsyncGenerator[DrivenRuns]:
    """Runs of a team that ends quickly."""
    async with driven(pair(ScriptedModel(otherwise="fine")), webhooks=known) as runs:
        yield runs


async def delivered(runs: DrivenRuns, run_id: str, url: str) -> WebhookDelivery:
    """The delivery of the end of a run behind its first attempt."""
    body = {"run_id": run_id, "inputs": INPUTS, "webhook": {"url": url}}
    await runs.start(NewRun.model_validate(body))
    assert (await runs.wait(run_id, 60)).status == "completed"
    async with asyncio.timeout(60):
        while True:
            found = await runs.deliveries(run_id)
            if found and found[0].attempt_count:
                return found[0]
            await asyncio.sleep(0.02)


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let each look-up of a name have the next of these addresses, and the last one ever after."""
    real, left = socket.getaddrinfo, list(addresses)

    def look_up(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host != "receiver.example":
            return real(host, port, *args, **options)
        return real(left.pop(0) if len(left) > 1 else left[0], port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fd00:ec2::254"])
async def test_a_name_that_leads_into_the_network_is_not_asked(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """S-HOK-22: names are checked when they are resolved; the client does not learn the address."""
    resolve_to(monkeypatch, address)
    with Receiver() as receiver:
        async with served(PUBLIC_ONLY) as runs:
            found = await delivered(runs, "a", f"https://receiver.example:{receiver.port}/")
        assert receiver.received == []
    (attempt,) = found.attempts
    assert attempt.error == "the host is not public, and the operator has not allowed it"
    assert found.state == "pending"
    assert address not in found.model_dump_json().replace(receiver.origin, "")


async def test_a_second_look_up_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-HOK-22: DNS rebinding: each connection uses an address that was checked."""
    resolve_to(monkeypatch, "192.0.2.1", "127.0.0.1")
    with Receiver() as receiver:
        async with served(PUBLIC_ONLY) as runs:
            found = await delivered(runs, "a", f"https://receiver.example:{receiver.port}/")
        assert receiver.received == []
    assert found.attempts[0].status is None


async def test_an_allowed_host_cannot_redirect_elsewhere() -> None:
    """S-HOK-23: not even to itself."""
    with Receiver() as elsewhere, Receiver() as receiver:
        receiver.statuses.append(307)
        receiver.headers["location"] = f"{elsewhere.origin}/latest/meta-data"
        async with served(rules()) as runs:
            found = await delivered(runs, "a", receiver.origin)
        assert (len(receiver.received), len(elsewhere.received)) == (1, 0)
    assert (found.attempts[0].status, found.attempts[0].error) == (307, "HTTP 307")


def _silent(write: Write, _number: int) -> None:
    while True:
        write(b"")  # raises when the server ends
        time.sleep(0.05)


def _trickling_head(write: Write, _number: int) -> None:
    write(b"HTTP/1.1 200 OK\r\n")
    while True:
        write(b"x-more: 1\r\n")
        time.sleep(0.05)


def _trickling_body(write: Write, _number: int) -> None:
    write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    while True:
        write(b"x")
        time.sleep(0.05)


@pytest.mark.parametrize("answer", [_silent, _trickling_head, _trickling_body])
async def test_a_receiver_that_answers_slowly_is_left(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[Write, int], None]
) -> None:
    """S-HOK-25: an attempt has an end, whatever arrives; the run has ended before."""
    monkeypatch.setattr(webhooks, "_ATTEMPT_S", 0.5)
    with RawServer(answer) as server:
        async with served(rules()) as runs:
            found = await delivered(runs, "a", server.origin)
    assert found.attempts[0].error == "timed out after 0.5 s"
    assert found.state == "pending"


def _endless_body(write: Write, _number: int) -> None:
    write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        write(b"x" * 65_536)


def _endless_head(write: Write, _number: int) -> None:
    write(b"HTTP/1.1 200 OK\r\n")
    while True:
        write(b"x-more: " + b"1" * 4000 + b"\r\n")


@functools.cache
def _packed_zeros() -> bytes:
    return gzip.compress(bytes(200_000_000))


def _bomb(write: Write, _number: int) -> None:
    body = _packed_zeros()
    write(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


@pytest.mark.parametrize(("answer", "is_received"), [(_endless_body, True), (_endless_head, False), (_bomb, True)])
async def test_an_answer_without_an_end_costs_little(
    answer: Callable[[Write, int], None], *, is_received: bool
) -> None:
    """S-HOK-25: of an answer, only the status counts; its body is read up to a limit."""
    with RawServer(answer) as server:
        async with served(rules()) as runs:
            await delivered(runs, "warm", server.origin)
            with costs_at_most(_LIMIT_S, memory_bytes=_MEMORY_BYTES):
                found = await delivered(runs, "a", server.origin)
    assert (found.state == "delivered") is is_received


async def test_slow_receivers_take_no_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-HOK-9: the runs of 40 requests end, and the receiver of the next one is asked immediately."""
    with RawServer(_silent) as slow, Receiver() as quick:
        async with served(rules()) as runs:
            for number in range(40):
                body = {"run_id": f"s{number}", "inputs": INPUTS, "webhook": {"url": f"{slow.origin}/{number}"}}
                await runs.start(NewRun.model_validate(body))
                assert (await runs.wait(f"s{number}", 60)).status == "completed"
            assert (await delivered(runs, "a", quick.origin)).state == "delivered"
            await threads.run(quick.wait, 1)
    assert len(slow.requests) <= 2 * webhooks._MOST_PER_RECEIVER


async def test_a_receiver_cannot_write_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """S-HOK-24: one bounded line, without the answer's text and the URL's secrets."""

    def answer(write: Write, _number: int) -> None:
        write(b"HTTP/1.1 500 forged\x1b[31m" + b"y" * 10_000 + b"\r\ncontent-length: 6\r\n\r\nforged")

    with RawServer(answer) as server:
        async with served(rules()) as runs:
            found = await delivered(runs, "a", f"{server.origin}/s3cret?key=s3cret#s3cret")
    lines = [each.getMessage() for each in caplog.records if "webhooks" in each.name]
    assert len(lines) == 1
    assert len(lines[0]) < 500
    assert "forged" not in caplog.text + found.model_dump_json()
    assert "s3cret" not in caplog.text + found.model_dump_json()


async def test_a_stored_webhook_is_checked_again_when_the_operator_has_changed_the_rules() -> None:
    """S-HOK-22: before each attempt."""
    with Receiver() as receiver:
        receiver.statuses.append(500)
        async with served(rules()) as runs:
            await delivered(runs, "a", receiver.origin)
            runs._webhooks._rules = PUBLIC_ONLY
            (before,) = await runs.deliveries("a")
            await runs.redeliver("a", before.delivery_id)
            async with asyncio.timeout(60):
                while True:
                    (after,) = await runs.deliveries("a")
                    if after.attempt_count > 1:
                        break
                    await asyncio.sleep(0.02)
        assert len(receiver.received) == 1
    assert (after.attempts[-1].error or "").startswith("the host is not public")
    assert json.loads(after.model_dump_json())["state"] == "pending"
