"""`OpenAIChatModel` against a server on loopback: what it sends, how it fails, what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
from typing import cast

import openai
import pytest
from aiohttp import web

from ensemble_ray import ChatMessage, ChatResponse, OpenAIChatModel, TokenUsage
from ensemble_ray.process.context import use_effect_key
from ensemble_ray.testing import Fault, ModelServer, RawAnswer, Reply
from ensemble_ray.values.messages import incomplete_reason

from .web_server import closed_port, handling

KEY = "sk-very-secret"
HELLO = [ChatMessage("user", "hello")]
#: Both ways to the endpoint: the lean client, and the package's own.
WAYS = [None, {"max_retries": 0}]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key or endpoint of whoever runs the tests."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=WAYS, ids=["lean", "client"])
def way(request: pytest.FixtureRequest) -> dict[str, object] | None:
    """Client options of one of the ways."""
    return cast("dict[str, object] | None", request.param)


Way = dict[str, object] | None
Api = type[OpenAIChatModel]


async def test_key_and_options_are_sent_when_given(way: Way) -> None:
    """S-CONV-22, S-SET-10: request options go into each request, the key into its header."""
    with ModelServer("hi", api_key=KEY) as server:
        model = OpenAIChatModel(
            "m",
            base_url=f"{server.base_url}/",
            api_key=KEY,
            client_options=way,
            temperature=0,
            response_format={"type": "json_object"},
            extra_headers={"X-Team": "blue"},
            extra_body={"top_k": 3},
        )
        assert (await model.chat(HELLO)).text == "hi"
        request = server.requests[0]
    assert request.body == {
        "model": "m",
        "temperature": 0,
        "response_format": {"type": "json_object"},
        "top_k": 3,
        "messages": [{"role": "user", "content": "hello"}],
    }
    assert request.path == "/v1/chat/completions"
    assert request.headers["x-team"] == "blue"


async def test_the_environment_decides_when_the_call_is_made(
    api: Api, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-CONV-22: OPENAI_API_KEY and OPENAI_BASE_URL are read in the process that calls, at the call."""
    model = api("m", client_options=way)
    with ModelServer("hi", api_key=KEY) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        assert (await model.chat(HELLO)).text == "hi"
        monkeypatch.setenv("OPENAI_API_KEY", "another")
        with pytest.raises(openai.AuthenticationError):
            await model.chat(HELLO)


async def test_no_key_is_sent_when_there_is_none(api: Api) -> None:
    """S-CONV-22: an endpoint of one's own may need none."""
    with ModelServer("hi") as server:
        await api("m", base_url=server.base_url).chat(HELLO)
        assert "authorization" not in server.requests[0].headers


async def test_the_package_client_gets_its_options_when_there_are_some(api: Api) -> None:
    """S-SET-10: `client_options` are the package's own; what it can do is reached through them."""
    with ModelServer(["hi", "there"], api_key=KEY) as server:
        options = {"project": "p1", "api_key": KEY, "base_url": server.base_url}
        model = api("m", client_options=options)
        assert (await model.chat(HELLO)).text == "hi"
        assert (await model.chat(HELLO)).text == "there"
        assert server.requests[0].headers["openai-project"] == "p1"
        assert "AsyncOpenAI" in server.requests[0].headers["user-agent"]


async def test_the_error_tells_what_to_do_when_the_key_is_wrong(
    api: Api, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    """S-ERR-39, S-CONV-22: endpoint and remedy, and the key neither in the error nor in any log."""
    with caplog.at_level(logging.DEBUG), ModelServer("hi", api_key="right") as server:
        model = api("m", base_url=server.base_url, api_key=KEY, client_options=way)
        with pytest.raises(openai.AuthenticationError) as caught:
            await model.chat(HELLO)
        assert str(caught.value) == (
            f"Endpoint {server.base_url} refused the key (HTTP 401): Incorrect API key provided. A key was sent; set "
            "OPENAI_API_KEY, or pass `api_key`, to one that is valid there."
        )
    assert KEY not in caplog.text


async def test_the_error_names_the_endpoint_when_nobody_listens(api: Api, way: Way) -> None:
    """S-ERR-31: an unreachable endpoint is the package's connection error, with the place and what to check."""
    with closed_port() as port:
        gone = f"http://127.0.0.1:{port}/v1"
        model = api("m", base_url=gone, client_options=way)
        with pytest.raises(
            openai.APIConnectionError, match=f"Cannot reach endpoint {gone}: .*Check that it is running"
        ):
            await model.chat(HELLO)
        with pytest.raises(openai.APIConnectionError, match="Cannot reach endpoint"):
            async for _ in model.stream(HELLO):
                pass


async def test_a_failed_call_is_not_repeated_when_nothing_else_was_asked(api: Api, way: Way) -> None:
    """S-SET-43: `max_retries=None` means none: journal, budget and limits must see every request."""
    options: dict[str, object] | None = None if way is None else {}
    for fault in (Fault(status=500), Fault(status=429, retry_after_s=0), Fault(kind="drop")):
        with ModelServer(fault) as server:
            model = api("m", base_url=server.base_url, client_options=options)
            with pytest.raises(openai.APIError):
                await model.chat(HELLO)
            assert len(server.requests) == 1


async def test_a_failed_call_is_repeated_when_retries_were_asked_for(api: Api) -> None:
    """S-SET-10: `max_retries` counts attempts after the first; the requests are the same."""
    faults = [Fault(status=503, retry_after_s=0), Fault(status=429, retry_after_s=0)]
    with ModelServer([*faults, "hi", *faults, "hi", *faults]) as server:
        model = api("m", base_url=server.base_url, max_retries=2)
        assert (await model.chat(HELLO)).text == "hi"
        assert server.repeated == 2
        assert [part async for part in model.stream(HELLO)] == ["hi", ChatResponse("hi", (), TokenUsage(10, 5), "stop")]
        with pytest.raises(openai.RateLimitError):
            await api("m", base_url=server.base_url, max_retries=1).chat(HELLO)


async def test_the_package_client_repeats_when_retries_were_asked_for(api: Api) -> None:
    """S-SET-10: the count is handed on."""
    with ModelServer([Fault(status=503, retry_after_s=0.01), "hi"]) as server:
        model = api("m", base_url=server.base_url, max_retries=1, client_options={})
        assert (await model.chat(HELLO)).text == "hi"


async def test_a_refusal_is_not_repeated_when_it_would_be_refused_again(api: Api) -> None:
    """S-SET-10: a wrong request stays wrong."""
    with ModelServer(Fault(status=400, message="too long")) as server:
        with pytest.raises(openai.BadRequestError, match="too long"):
            await api("m", base_url=server.base_url, max_retries=5).chat(HELLO)
        assert len(server.requests) == 1


async def test_the_error_says_what_came_when_it_is_no_answer(api: Api, way: Way) -> None:
    """S-ERR-31: a proxy's page is told as such."""
    with ModelServer(Fault(kind="garbage")) as server:
        model = api("m", base_url=server.base_url, client_options=way)
        with pytest.raises(openai.APIResponseValidationError, match="this is not a chat completion"):
            await model.chat(HELLO)


async def test_the_call_ends_when_the_model_takes_too_long(api: Api, way: Way) -> None:
    """S-SET-10: `timeout` limits the wait for an answer, and for the next piece of a stream."""
    with ModelServer(Fault(kind="silence")) as server:
        model = api("m", base_url=server.base_url, timeout=0.1, client_options=way)
        with pytest.raises(openai.APITimeoutError, match=r"gave no answer within 0.1 s. Raise `timeout`"):
            await model.chat(HELLO)
        with pytest.raises(openai.APITimeoutError):
            await anext(model.stream(HELLO))


async def test_the_call_ends_when_no_connection_is_made_in_time(api: Api, way: Way) -> None:
    """S-SET-10: that is the same limit, told with the time that was given."""
    with contextlib.ExitStack() as opened:
        full = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # nobody accepts, and no more than one or two may wait for that
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)  # noqa: FBT003  the library's own signature
            waiting.connect_ex(full.getsockname())
        model = api(
            "m", base_url=f"http://127.0.0.1:{full.getsockname()[1]}/v1", api_key=KEY, timeout=0.1, client_options=way
        )
        with pytest.raises(openai.APITimeoutError, match=r"gave no answer within 0.1 s. Raise `timeout`"):
            await model.chat(HELLO)
        with pytest.raises(openai.APITimeoutError):
            await anext(model.stream(HELLO))


async def test_fragments_stay_delivered_when_the_stream_is_cut(api: Api, way: Way) -> None:
    """S-STR-5: what came before the failure came; the failure is an error."""
    with ModelServer(Reply(text="one two three", cut_after=2)) as server:
        model = api("m", base_url=server.base_url, client_options=way)
        heard: list[str | ChatResponse] = []

        async def listen() -> None:
            async for part in model.stream(HELLO):
                heard.append(part)  # noqa: PERF401  what came before the error is the point

        with pytest.raises(openai.APIConnectionError):
            await listen()
        assert heard == ["one ", "two "]


async def test_fragments_come_while_the_model_is_still_producing(way: Way) -> None:
    """S-STR-8: not in one batch at the end; here each is made when the one before it has come."""
    produced: asyncio.Queue[bytes] = asyncio.Queue()

    def produce(text: str) -> None:
        produced.put_nowait(b"data: %s\n\n" % json.dumps({"choices": [{"delta": {"content": text}}]}).encode())

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        while piece := await produced.get():
            await response.write(piece)
        return response

    async with handling(handle) as base_url:
        model = OpenAIChatModel("m", base_url=base_url, api_key=KEY, client_options=way)
        async with contextlib.aclosing(model.stream(HELLO)) as parts:
            for text in ("one ", "two ", "three"):
                produce(text)
                assert await anext(parts) == text
            produced.put_nowait(b"data: [DONE]\n\n")
            produced.put_nowait(b"")
            assert [part async for part in parts] == [ChatResponse("one two three")]


async def test_usage_is_asked_for_when_streaming(way: Way) -> None:
    """S-STR-3: metrics are as without streaming, so the stream is asked for its usage."""
    with ModelServer(Reply(text="hi", usage=TokenUsage(7, 2))) as server:
        model = OpenAIChatModel("m", base_url=server.base_url, client_options=way)
        assert [part async for part in model.stream(HELLO)] == ["hi", ChatResponse("hi", (), TokenUsage(7, 2), "stop")]
        assert server.requests[0].body["stream_options"] == {"include_usage": True}


async def test_usage_is_not_asked_for_again_when_the_server_refused_the_wish() -> None:
    """S-STR-10: an older server still streams; its usage stays unknown."""
    with ModelServer("hi", rejects_stream_options=True) as server:
        model = OpenAIChatModel("m", base_url=server.base_url)
        for _ in range(2):
            assert [part async for part in model.stream(HELLO)] == ["hi", ChatResponse("hi", finish_reason="stop")]
        assert ["stream_options" in request.body for request in server.requests] == [True, False, False]


COMPLETION = b'{"choices": [{"message": {"content": "hi"}}]}'
EVENTS = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\ndata: [DONE]'


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", COMPLETION),
        ("text/event-stream", COMPLETION),
        ("text/plain", b"\n \n" + COMPLETION),
        ("text/event-stream", b'data: {"choices": [{"delta": {"content": "hi"}, "finish_reason": "function_call"}]}'),
        ("text/event-stream; charset=utf-8", EVENTS),
        ("text/plain", EVENTS),
        ("application/json", b"\xef\xbb\xbf: OPENROUTER PROCESSING\n\n" + EVENTS + b" \r\n\r\n"),
        ("application/octet-stream", b"\n\nevent: ping\ndata: \n\n" + EVENTS),
        ("text/event-stream", EVENTS + b'\n\ndata: {"choices": [{"delta": {"content": "LATE"}}]}\n\n'),
        ("text/event-stream", EVENTS + b"\n\ndata: garbage\n\n"),
    ],
)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "plain"])
async def test_the_answer_is_whole_when_the_server_streams_in_its_own_way(
    way: Way, kind: str, body: bytes, *, stream: bool
) -> None:
    """S-STR-10, S-LLM-12: the body decides whether it is a stream; no end mark, or an end mark at the very end."""

    async def handle(request: web.BaseRequest) -> web.Response:
        await request.read()
        return web.Response(body=body, headers={"Content-Type": kind})

    async with handling(handle) as base_url:
        model = OpenAIChatModel("m", base_url=base_url, api_key=KEY, client_options=way)
        *fragments, whole = [part async for part in model.stream(HELLO)] if stream else ["hi", await model.chat(HELLO)]
        assert isinstance(whole, ChatResponse)
        assert (fragments, whole.text, incomplete_reason(whole)) == (["hi"], "hi", None)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'[{"error": {"code": 429, "message": "limited"}}]', openai.RateLimitError),
        (b"<html>Bad gateway</html>", openai.APIResponseValidationError),
        (b"dat", openai.APIResponseValidationError),
        (b"", openai.APIConnectionError),
        (b"\n \n", openai.APIConnectionError),
    ],
)
@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "plain"])
async def test_the_error_is_the_same_for_a_body_however_it_was_asked_for(
    api: Api, way: Way, body: bytes, kind: type[Exception], content_type: str, *, stream: bool
) -> None:
    """S-LLM-12, S-LLM-8: the body decides, whatever its content type says."""
    with ModelServer(RawAnswer(body=body, content_type=content_type)) as server:
        model = api("m", base_url=server.base_url, api_key=KEY, client_options=way)
        with pytest.raises(kind) as caught:
            _ = [part async for part in model.stream(HELLO)] if stream else await model.chat(HELLO)
    assert type(caught.value) is kind


async def test_the_request_is_dropped_when_the_caller_is_cancelled(api: Api, way: Way) -> None:
    """S-SET-27: cancelling a run drops its model calls in flight."""
    with ModelServer(Fault(kind="silence")) as server:
        model = api("m", base_url=server.base_url, client_options=way)
        task = asyncio.create_task(model.chat(HELLO))
        await asyncio.to_thread(server.wait_in_flight, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(server.wait_served, 1)
        assert server.abandoned == 1


async def test_no_pool_stands_in_the_way_when_many_call_at_once() -> None:
    """S-CONV-37: how many calls run at once is decided by the declared concurrency alone."""
    with ModelServer("hi") as server:
        server.pause()
        model = OpenAIChatModel("m", base_url=server.base_url)
        tasks = [asyncio.create_task(model.chat(HELLO)) for _ in range(250)]
        await asyncio.to_thread(server.wait_in_flight, 250)
        server.resume()
        assert {answer.text for answer in await asyncio.gather(*tasks)} == {"hi"}
        assert server.max_in_flight == 250


async def test_a_large_conversation_is_sent_when_it_has_megabytes(api: Api) -> None:
    """S-CONV-21: content is carried whole, whatever its size."""
    with ModelServer("hi") as server:
        await api("m", base_url=server.base_url).chat([ChatMessage("user", "x" * 3_000_000)])
        assert len(server.requests[0].text) == 3_000_000


async def test_this_machine_is_reached_directly_when_a_proxy_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CONV-22: a proxy of the environment is for the outside; what runs here never goes there."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with ModelServer("hi") as server:
        assert (await OpenAIChatModel("m", base_url=server.base_url).chat(HELLO)).text == "hi"


SCRIPT = """
import asyncio, sys, threading
from ensemble_ray.llm.openai import OpenAIChatModel
from ensemble_ray.values.messages import ChatMessage
assert not {"aiohttp", "openai", "ray"} & set(sys.modules), "loaded before the first call"
model = OpenAIChatModel("m", base_url=sys.argv[1])
async def call():
    answer = await model.chat([ChatMessage("user", "hello")])
    parts = [part async for part in model.stream([ChatMessage("user", "hello")])]
    assert answer.text == "hi" and parts[-1].text == "hi"
asyncio.run(call())
asyncio.run(call())
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
asyncio.run_coroutine_threadsafe(call(), loop).result()
assert "openai" not in sys.modules, "the lean path needs no SDK"
"""


def test_no_sdk_is_loaded_and_nothing_is_left_when_all_goes_well() -> None:
    """S-CONV-22: lazy in the process that uses it; several loops, also one that runs until the end, end in silence."""
    with ModelServer("hi") as server:
        done = subprocess.run(  # noqa: S603  our own interpreter
            [sys.executable, "-W", "default", "-c", SCRIPT, server.base_url],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")


async def test_the_effect_is_named_when_a_request_is_part_of_one(api: Api, way: Way) -> None:
    """S-DUR-27: the same header on every repetition, streamed or not; none outside an effect."""
    with ModelServer(["a", "b", "c", "d"]) as server:
        model = api("m", base_url=server.base_url, api_key=KEY, client_options=way)
        with use_effect_key("effect-1"):
            await model.chat(HELLO)
            await model.chat(HELLO)
        with use_effect_key("effect-2"):
            async with contextlib.aclosing(model.stream(HELLO)) as parts:
                assert [part async for part in parts]
        await model.chat(HELLO)
        sent = [request.headers.get("idempotency-key") for request in server.requests]
    assert sent == ["effect-1", "effect-1", "effect-2", None]


async def test_the_key_is_the_same_when_the_client_repeats_a_request(api: Api) -> None:
    """S-DUR-27: a retry is the same effect."""
    with ModelServer([Fault(status=503, retry_after_s=0), "hi"]) as server:
        model = api("m", base_url=server.base_url, api_key=KEY, max_retries=1)
        with use_effect_key("effect-1"):
            assert (await model.chat(HELLO)).text == "hi"
        assert [request.headers["idempotency-key"] for request in server.requests] == ["effect-1", "effect-1"]


async def test_a_users_own_key_is_sent_when_there_is_one(api: Api, way: Way) -> None:
    """S-DUR-27: what the user says of headers holds."""
    with ModelServer("hi") as server:
        model = api(
            "m",
            base_url=server.base_url,
            api_key=KEY,
            client_options=way,
            extra_headers={"Idempotency-Key": "mine"},
        )
        with use_effect_key("effect-1"):
            await model.chat(HELLO)
        assert server.requests[0].headers["idempotency-key"] == "mine"


async def test_use_of_the_cache_is_sent_as_the_model_says(way: dict[str, object] | None) -> None:
    """S-PRC-21, S-PRC-22: whole and streamed; nothing of it by default at an endpoint of one's own."""
    asked = [ChatMessage("system", "You are A."), ChatMessage("user", "hello")]
    marked = [{"type": "text", "text": "You are A.", "cache_control": {"type": "ephemeral"}}]
    with ModelServer(["1", "2", "3", "4"]) as server:
        for cache in (None, "breakpoints", "key"):
            model = OpenAIChatModel("m", base_url=server.base_url, api_key=KEY, client_options=way, prompt_cache=cache)  # type: ignore[arg-type]  one of them
            assert (await model.chat(asked)).text
        own = OpenAIChatModel(
            "m", base_url=server.base_url, api_key=KEY, client_options=way, prompt_cache="key", prompt_cache_key="mine"
        )
        assert [each async for each in own.stream(asked)]
    default, breakpoints, key, mine = (request.body for request in server.requests)
    assert [message["content"] for message in server.requests[0].messages] == ["You are A.", "hello"]
    assert [message["content"] for message in server.requests[1].messages] == [marked, "hello"]
    keys = [body.get("prompt_cache_key") for body in (default, breakpoints, key, mine)]
    assert keys[:2] == [None, None]
    assert str(keys[2]).startswith("ensemble-ray-")
    assert keys[3] == "mine"
