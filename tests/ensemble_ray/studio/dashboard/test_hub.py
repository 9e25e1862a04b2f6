"""Messages on their way to pages: order, what a page starts with, pages that take nothing, values that cannot be sent."""

from __future__ import annotations

import asyncio
import json
import logging
import threading

import pytest

from ensemble_ray.events.messages import Message
from ensemble_ray.studio.dashboard import hub as hub_module
from ensemble_ray.studio.dashboard.hub import Connection, MessageHub, Snapshot, decode


def made() -> MessageHub:
    """Return a hub whose run has begun."""
    hub = MessageHub(Snapshot(most_runs=1, most_iterations=1))
    hub.publish("r", Message("ensemble_started", {"started_at": "now"}))
    return hub


def numbers(texts: list[str]) -> list[int]:
    """Return the numbers of messages, those in `hello` too."""
    found: list[int] = []
    for text in texts:
        message = json.loads(text)
        inside = message["snapshot_trace"] if message["type"] == "hello" else [message]
        found += [each["n"] for each in inside if "n" in each]
    return found


@pytest.mark.heavy
def test_pages_that_join_while_much_is_sent() -> None:
    """S-WEB-39, S-WEB-40, S-WEB-45: `hello` first; then what comes behind it, without gap or repetition, in order."""
    count, every, hub = 3000, 100, made()
    # A page joins while the next hundred messages are sent; the messages after these wait for it.
    due, joined = threading.Semaphore(0), threading.Semaphore(1)

    def send() -> None:
        for number in range(count):
            if number % every == 0:
                joined.acquire()
                due.release()
            hub.publish("r", Message("task_started", {"n": number}))

    async def join_and_read() -> list[list[str]]:
        sending = threading.Thread(target=send)
        sending.start()
        pages: list[Connection] = []
        for _ in range(count // every):
            due.acquire()
            pages.append(hub.join())
            joined.release()
        sending.join()
        return [await page.take() for page in (*pages, hub.join())]

    for page, texts in enumerate(asyncio.run(join_and_read())):
        assert json.loads(texts[0])["type"] == "hello"
        assert page * every <= len(numbers(texts[:1])) <= (page + 1) * every
        assert numbers(texts) == list(range(count))


def test_a_page_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-WEB-46: it is given up; others hear everything, and nobody waits for it."""
    monkeypatch.setattr(hub_module, "MOST_WAITING_CHARACTERS", 1000)

    async def body() -> None:
        hub = made()
        slow, quick = hub.join(), hub.join()
        heard: list[str] = []
        for number in range(100):
            hub.publish("r", Message("task_started", {"n": number}))
            heard += await quick.take()
        assert numbers(heard) == list(range(100))
        assert slow.is_overrun
        assert await slow.take() == []
        hub.detach(slow)
        assert hub.connected == 1

    asyncio.run(body())


def test_a_long_past_is_no_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-WEB-41: what late joiners are told may be as long as it is."""
    monkeypatch.setattr(hub_module, "MOST_WAITING_CHARACTERS", 1000)

    async def body() -> None:
        hub = made()
        for number in range(100):
            hub.publish("r", Message("task_started", {"n": number}))
        assert numbers(await hub.join().take()) == list(range(100))

    asyncio.run(body())


def test_a_message_that_cannot_be_sent(caplog: pytest.LogCaptureFixture) -> None:
    """S-WEB-16: it is logged, and the next one comes."""

    async def body() -> None:
        hub = made()
        page = hub.join()
        hub.publish("r", Message("task_started", {"n": object()}))
        hub.publish("r", Message("task_started", {"n": 2}))
        assert numbers(await page.take()) == [2]

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())
    assert "A message of type 'task_started' could not be sent to the dashboard" in caplog.text


def test_what_is_of_this_moment() -> None:
    """S-WEB-38, S-WEB-42: who is there hears it, who comes later does not."""

    async def body() -> None:
        hub = made()
        page = hub.join()
        hub.send_to_all(Message("heartbeat", {"server_time_ms": 1}))
        hub.publish("r", Message("token", {"token": "a"}))
        assert [json.loads(each)["type"] for each in await page.take()] == ["hello", "heartbeat", "token"]
        (first,) = await hub.join().take()
        assert [each["type"] for each in json.loads(first)["snapshot_trace"]] == ["ensemble_started"]

    asyncio.run(body())


def test_a_page_that_asked_for_less() -> None:
    """S-WEB-63: it is sent what its filter lets pass."""

    async def body() -> None:
        hub = made()
        page = hub.join()
        page.wants = lambda sent: sent.run_id == "mine"
        for run in ("other", "mine"):
            hub.publish(run, Message("task_started", {"n": 1}))
        assert [json.loads(each)["type"] for each in await page.take()] == ["hello", "task_started"]

    asyncio.run(body())


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '"ping"', "{}", '{"type": 1}', '{"type": null}', "[" * 100_000, "1" * 5000]
)
def test_texts_that_are_no_messages(text: str) -> None:
    """S-WEB-31."""
    with pytest.raises(ValueError, match=r".+"):
        decode(text)


def test_a_message_of_a_page() -> None:
    """S-WEB-31: keys that nobody knows are left where they are."""
    assert decode('{"type": "ping", "more": 1}') == ("ping", {"type": "ping", "more": 1})
