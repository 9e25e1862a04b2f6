"""Connections of streamed answers: reused when read to their end, closed when left early. Counted, never timed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Self

import openai
import pytest

from ensemble_ray.llm.openai import OpenAIChatModel
from ensemble_ray.testing import ModelServer, Reply
from ensemble_ray.testing.model_server.http import Connection, Exchange, serve_http
from ensemble_ray.testing.model_server.script import completion_bytes, sse_chunks
from ensemble_ray.values.messages import ChatMessage, ChatResponse

HELLO = [ChatMessage("user", "hello")]
ANSWER = Reply(text="one two three")
#: Both ways to the endpoint: the lean client, and the package's own; neither asks again by itself.
WAYS = [{}, {"client_options": {"max_retries": 0}}]


def _model(base_url: str, way: dict[str, object]) -> OpenAIChatModel:
    return OpenAIChatModel("m", base_url=base_url, api_key="k", **way)


async def _whole(model: OpenAIChatModel) -> str | None:
    *_, last = [part async for part in model.stream(HELLO)]
    assert isinstance(last, ChatResponse)
    return last.text


@pytest.mark.parametrize("way", WAYS, ids=["lean", "client"])
async def test_the_connection_is_reused_when_a_stream_was_read_to_its_end(way: dict[str, object]) -> None:
    """S-STR-11: four calls, streamed or not, are four requests on one connection, and none fails."""
    with ModelServer(ANSWER) as server:
        model = _model(server.base_url, way)
        for _ in range(2):
            assert await _whole(model) == ANSWER.text
            assert (await model.chat(HELLO)).text == ANSWER.text
        assert (len(server.requests), server.connections) == (4, 1)
        assert all(request.headers.get("connection") != "close" for request in server.requests)


@pytest.mark.parametrize("way", WAYS, ids=["lean", "client"])
async def test_the_connection_is_closed_when_a_stream_is_left_early(way: dict[str, object]) -> None:
    """S-STR-11: the server learns that nobody reads on, and the next call, on another connection, succeeds."""
    endless = Reply(text="one", fragments=["word "] * 10_000, fragment_delay_s=0.01)
    with ModelServer([endless, "fine"]) as server:
        model = _model(server.base_url, way)
        async with aclosing(model.stream(HELLO)) as parts:
            assert await anext(parts) == "word "
        assert (await model.chat(HELLO)).text == "fine"
        server.wait_served(2)
        assert (len(server.requests), server.connections, server.abandoned) == (2, 2, 1)


class _ClosingServer:
    """Closes the connection after a stream without saying so: how is up to `after`."""

    def __init__(self, after: Callable[[Exchange], object]) -> None:
        self._after = after
        self._connections: set[Connection] = set()
        self.requests = self.opened = 0

    def _connected(self) -> None:
        self.opened += 1

    def _take(self, exchange: Exchange) -> None:
        self.requests += 1
        if b'"stream":true' not in exchange.request.raw:
            exchange.reply(completion_bytes(ANSWER, model="m", number=0))
            return
        exchange.start(content_type="text/event-stream")
        for chunk in sse_chunks(ANSWER, model="m", number=0, with_usage=True):
            exchange.piece(chunk)
        self._after(exchange)

    async def __aenter__(self) -> Self:
        self._server = await serve_http(
            self._take, lambda _: None, connections=self._connections, opened=self._connected
        )
        port: int = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in tuple(self._connections):
            connection.cut()
        await asyncio.sleep(0)


def _close_at_the_next_request(exchange: Exchange) -> None:
    """End the stream as one that keeps the connection, and cut it when a request comes on it: the worst moment."""
    exchange.end()
    connection = exchange._connection
    connection.data_received = lambda data: connection.cut()  # type: ignore[method-assign]  # noqa: ARG005


async def test_a_request_is_sent_again_once_when_the_server_closed_after_a_stream() -> None:
    """S-STR-12: the server is known from then on: its streams end their connection, and no further request is lost."""
    async with _ClosingServer(_close_at_the_next_request) as server:
        model = _model(server.base_url, {})
        for _ in range(3):
            assert await _whole(model) == ANSWER.text
            assert (await model.chat(HELLO)).text == ANSWER.text
        # The first stream's; the one on which the lost request was sent again; two more for the other streams.
        assert (server.requests, server.opened) == (6, 4)


async def test_a_lost_request_is_an_error_when_no_stream_went_before() -> None:
    """S-STR-12: what is lost on any other connection is the retry policy's matter."""
    async with _ClosingServer(_close_at_the_next_request) as server:
        model = _model(server.base_url, {})
        assert (await model.chat(HELLO)).text == ANSWER.text
        for connection in tuple(server._connections):
            connection.data_received = lambda data, cut=connection.cut: cut()  # type: ignore[method-assign]  # noqa: ARG005
        with pytest.raises(openai.APIConnectionError):
            await model.chat(HELLO)


async def test_the_answer_does_not_wait_when_the_server_keeps_its_stream_open() -> None:
    """S-STR-11: after the end mark nothing is waited for but for a moment; the connection is closed then."""
    async with _ClosingServer(lambda exchange: None) as server:  # noqa: ARG005
        model = _model(server.base_url, {})
        assert await asyncio.wait_for(_whole(model), 30) == ANSWER.text
        assert (await model.chat(HELLO)).text == ANSWER.text
        assert (server.requests, server.opened) == (2, 2)
