"""Connections of streamed answers: reused when read to their end, closed when left early. Counted, never timed."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Self

import openai
import pytest
from aiohttp import web

from ensemble_ray import ChatMessage, ChatResponse, OpenAIChatModel
from ensemble_ray.testing import ModelServer, Reply
from ensemble_ray.testing.model_server.script import completion_bytes, sse_chunks

from .web_server import handling

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
    """Closes the connection after a stream without saying so: when its next request comes, or before the stream's end.

    Args:
        keeps_open: Whether it keeps a stream's body open after the end mark.
    """

    def __init__(self, *, keeps_open: bool = False) -> None:
        self._keeps_open = keeps_open
        #: connections that are cut when a request comes on them: the worst moment
        self.closing: set[object] = set()
        self.requests = self.opened = 0

    def _connected(self) -> None:
        self.opened += 1

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.protocol in self.closing:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        self.requests += 1
        self.newest = request.protocol
        if b'"stream":true' not in await request.read():
            return web.Response(body=completion_bytes(ANSWER, model="m", number=0), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for chunk in sse_chunks(ANSWER, model="m", number=0, with_usage=True):
            await response.write(chunk)
        if self._keeps_open:
            await asyncio.Event().wait()
        self.closing.add(request.protocol)
        return response

    async def __aenter__(self) -> Self:
        self._serving = handling(self._handle, opened=self._connected)
        self.base_url = await self._serving.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._serving.__aexit__(None, None, None)


async def test_a_request_is_sent_again_once_when_the_server_closed_after_a_stream() -> None:
    """S-STR-12: the server is known from then on: its streams end their connection, and no further request is lost."""
    async with _ClosingServer() as server:
        model = _model(server.base_url, {})
        for _ in range(3):
            assert await _whole(model) == ANSWER.text
            assert (await model.chat(HELLO)).text == ANSWER.text
        # The first stream's; the one on which the lost request was sent again; two more for the other streams.
        assert (server.requests, server.opened) == (6, 4)


async def test_a_lost_request_is_an_error_when_no_stream_went_before() -> None:
    """S-STR-12: what is lost on any other connection is the retry policy's matter."""
    async with _ClosingServer() as server:
        model = _model(server.base_url, {})
        assert (await model.chat(HELLO)).text == ANSWER.text
        server.closing.add(server.newest)
        with pytest.raises(openai.APIConnectionError):
            await model.chat(HELLO)


async def test_the_answer_does_not_wait_when_the_server_keeps_its_stream_open() -> None:
    """S-STR-11: after the end mark nothing is waited for but for a moment; the connection is closed then."""
    async with _ClosingServer(keeps_open=True) as server:
        model = _model(server.base_url, {})
        assert await asyncio.wait_for(_whole(model), 30) == ANSWER.text
        assert (await model.chat(HELLO)).text == ANSWER.text
        assert (server.requests, server.opened) == (2, 2)
