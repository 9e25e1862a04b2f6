"""Answers that are sent from a file or go on, to clients that are too slow for them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import IO

import pytest
from sse_starlette import ServerSentEvent
from starlette.types import Message, Receive, Scope, Send

from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio import app as spooled_answer
from ensemble_ray.studio.app import SpooledAnswer, Studio
from ensemble_ray.studio.http_server import EventAnswer, HttpServer
from ensemble_ray.studio.reading import StudioReader
from tests.ensemble_ray.virtual_time import run_in_virtual_time

#: Longest time to wait for what must come, s.
PATIENCE_S = 60.0
#: More than the buffers of a connection hold.
LONG_BYTES = 33_554_432
PIECE_BYTES = 65_536


def writes(length: int) -> Callable[[IO[bytes]], Awaitable[object]]:
    """Return what writes a body of a length."""

    async def write(file: IO[bytes]) -> None:
        file.write(b"x" * length)

    return write


@pytest.fixture
def studio() -> Studio:
    """One whose runs are not asked for."""
    return Studio(reader=StudioReader(store_at(StoreAddress.of()), can_decide=False), title="runs")


@pytest.mark.parametrize(
    ("wait_s", "passed_s", "is_whole"), [(59.0, 61.0, False), (10.0, 66.0, False), (0.5, 160.5, True)]
)
def test_a_client_that_takes_less_than_64_kib_a_second_is_let_go(
    studio: Studio, wait_s: float, passed_s: float, *, is_whole: bool
) -> None:
    """S-STU-175: on average, behind the first minute."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(wait_s)
            messages.append(message)

    async def nothing() -> Message:
        return await asyncio.Future()

    answer = SpooledAnswer(studio, writes(320 * PIECE_BYTES), media_type="text/plain")
    _, elapsed_s = run_in_virtual_time(answer({"type": "http"}, nothing, send))
    assert (messages[-1]["more_body"] is False, elapsed_s) == (is_whole, passed_s)


@pytest.mark.parametrize("kind", ["spooled", "live"])
def test_the_connection_of_a_client_that_reads_nothing_is_aborted(
    kind: str, studio: Studio, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-STU-175: though the server holds a piece for it; its slot is free, and nothing is logged."""
    monkeypatch.setattr(spooled_answer, "_STALLED_S", 0.01)
    monkeypatch.setattr("ensemble_ray.studio.http_server.SEND_TIMEOUT_S", 0.01)
    is_lost = threading.Event()

    async def events() -> AsyncGenerator[ServerSentEvent]:
        for _ in range(LONG_BYTES // PIECE_BYTES):
            yield ServerSentEvent(data="x" * PIECE_BYTES)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            spooled = SpooledAnswer(studio, writes(LONG_BYTES), media_type="text/plain")
            await (spooled if kind == "spooled" else EventAnswer(events()))(scope, receive, send)
            assert (await receive())["type"] == "http.disconnect"
            is_lost.set()

    server = HttpServer(app, host="127.0.0.1", port=0, name="test")
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert is_lost.wait(PATIENCE_S)
            assert not studio.documents.locked()
            with contextlib.suppress(ConnectionResetError):
                received = 0
                while part := client.recv(PIECE_BYTES):
                    received += len(part)
                assert received < LONG_BYTES
    finally:
        server.stop()
    assert [each.getMessage() for each in caplog.records] == []
