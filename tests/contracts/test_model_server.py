"""The protocol server for tests: what others lean on when they count, hold and break requests with it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException, RemoteDisconnected
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from ensemble_ray import ToolCall
from ensemble_ray.testing import Fault, ModelServer, RawAnswer, Reply, ServedRequest, tool_loop
from tests.template import ForkedProgram

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def ask(
    url: str, body: object = None, *, headers: Mapping[str, str] | None = None, path: str = "/chat/completions"
) -> tuple[int, Any]:
    """Status and JSON of one request."""
    place = urlsplit(url)
    connection = HTTPConnection(place.netloc, timeout=90)
    data = json.dumps(HELLO if body is None else body)
    connection.request("POST", place.path + path, body=data, headers=dict(headers or {}))
    response = connection.getresponse()
    return response.status, json.loads(response.read())


class Received(NamedTuple):
    """One whole answer."""

    status: int
    headers: Mapping[str, str]
    read: bytes


def send(url: str, body: object) -> Received:
    """One request, and its answer as it came."""
    place = urlsplit(url)
    connection = HTTPConnection(place.netloc, timeout=90)
    connection.request("POST", f"{place.path}/chat/completions", body=json.dumps(body))
    response = connection.getresponse()
    return Received(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def text_of(answer: tuple[int, Any]) -> object:
    """The text of an answer that succeeded."""
    assert answer[0] == 200
    return answer[1]["choices"][0]["message"]["content"]


def stats_of(url: str) -> dict[str, int]:
    """What a server in its own process counts."""
    place = urlsplit(url)
    connection = HTTPConnection(place.netloc, timeout=90)
    connection.request("GET", f"{place.path}/stats")
    found: dict[str, int] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def test_answers_come_in_order_when_scripted() -> None:
    """S-CONV-22: the double speaks the protocol that the adapter speaks."""
    with ModelServer(["one", ToolCall("c", "t", "{}")]) as server:
        assert text_of(ask(server.base_url)) == "one"
        message = ask(server.base_url)[1]["choices"][0]["message"]
        assert message["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "t", "arguments": "{}"}}]
        status, body = ask(server.base_url)
        assert (status, body["error"]["message"]) == (400, "the script of 2 answers is used up")


def test_the_last_message_comes_back_when_there_is_no_script() -> None:
    """Without a script the server echoes."""
    with ModelServer() as server:
        assert text_of(ask(server.base_url)) == "echo: hello"


def test_the_request_decides_when_the_script_is_a_callable() -> None:
    """S-CONV-25: scripts see what was sent, so that tests can look at it."""

    def answer(request: ServedRequest) -> str:
        return f"{request.number} {request.model} {request.text} {request.tools} {request.headers['x-a']}"

    with ModelServer(answer) as server:
        assert text_of(ask(server.base_url, headers={"X-A": "b"})) == "0 m hello () b"
        status, body = ask(server.base_url)
        assert (status, body["error"]["message"]) == (400, "the script failed: KeyError: 'x-a'")


def test_identical_requests_are_counted_when_sent_again() -> None:
    """Durable runs promise that an answered request is not sent again; this is what they are measured with."""
    with ModelServer("x") as server:
        for body in (HELLO, {**HELLO, "model": "n"}, HELLO):
            ask(server.base_url, body)
        assert sorted(server.counts.values()) == [1, 2]
        assert server.repeated == 1
        assert ask(server.base_url, path="/other")[0] == 404


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, HELLO, (401, "invalid_api_key")),
        ({"Authorization": "Bearer wrong"}, HELLO, (401, "invalid_api_key")),
        ({"Authorization": "Bearer k"}, {**HELLO, "model": "n"}, (404, "model_not_found")),
    ],
)
def test_a_request_is_refused_when_key_or_model_is_wrong(
    headers: Mapping[str, str], body: object, expected: tuple[int, str]
) -> None:
    """The server checks what it was told to check."""
    with ModelServer("x", api_key="k", models=["m"]) as server:
        status, answer = ask(server.base_url, body, headers=headers)
        assert (status, answer["error"]["code"]) == expected
        assert text_of(ask(server.base_url, headers={"Authorization": "Bearer k"})) == "x"


def test_a_fault_is_given_when_scripted() -> None:
    """Statuses with their wish for patience, and connections cut without a word."""
    with ModelServer([Fault(status=429, retry_after_s=1.5, message="slow down"), Fault(kind="drop")]) as server:
        place = urlsplit(server.base_url)
        connection = HTTPConnection(place.netloc, timeout=90)
        connection.request("POST", "/v1/chat/completions", body=json.dumps(HELLO))
        response = connection.getresponse()
        assert (response.status, response.headers["retry-after"]) == (429, "1.5")
        with pytest.raises(RemoteDisconnected):
            ask(server.base_url)


def test_answers_are_held_when_paused() -> None:
    """Concurrency can be tested without sleeping: hold the answers, wait for the requests, let go."""
    with ModelServer(Reply(text="x")) as server:
        server.pause()
        answers: list[object] = []
        callers = [threading.Thread(target=lambda: answers.append(text_of(ask(server.base_url)))) for _ in range(5)]
        for caller in callers:
            caller.start()
        server.wait_in_flight(5)
        assert answers == []
        assert server.in_flight == 5
        server.resume()
        for caller in callers:
            caller.join()
        assert answers == ["x"] * 5
        assert server.max_in_flight == 5
        server.wait_served(5)  # a caller has its answer a moment before the server counts it
        with pytest.raises(TimeoutError, match="waited 0 s for 1 requests in flight"):
            server.wait_in_flight(1, timeout_s=0)


def test_a_body_in_chunks_is_read_when_the_client_sends_one() -> None:
    """HTTP allows both; clients differ."""
    with ModelServer() as server:
        place = urlsplit(server.base_url)
        connection = HTTPConnection(place.netloc, timeout=90)
        data = json.dumps(HELLO).encode()
        connection.request(
            "POST",
            "/v1/chat/completions",
            body=iter([data[:10], data[10:]]),
            headers={"Transfer-Encoding": "chunked"},
            encode_chunked=True,
        )
        assert text_of((200, json.loads(connection.getresponse().read()))) == "echo: hello"
        connection.request("GET", "/v1/models")
        assert json.loads(connection.getresponse().read())["data"] == [{"id": "scripted", "object": "model"}]
        connection.request("GET", "/v1/nothing")
        assert connection.getresponse().status == 404


@pytest.mark.parametrize(("results", "asks"), [(0, True), (1, True), (2, False)])
def test_a_tool_is_asked_for_until_enough_results_are_there(results: int, *, asks: bool) -> None:
    """The script of tool-loop benchmarks."""
    messages: Sequence[object] = [*HELLO["messages"], *([{"role": "tool", "content": "r"}] * results)]
    tools = [{"type": "function", "function": {"name": "find"}}]
    with ModelServer(tool_loop(2)) as server:
        message = ask(server.base_url, {"messages": messages, "tools": tools})[1]["choices"][0]["message"]
    assert ("tool_calls" in message) == asks
    assert message["content"] == (None if asks else "done")


def test_it_serves_from_its_own_process_when_started_as_one() -> None:
    """For benchmarks: prints its URL first, counts at /stats, ends when its starter is gone."""
    command = [sys.executable, "-W", "error", "-m", "ensemble_ray.testing.model_server"]
    with subprocess.Popen(  # noqa: S603  our own interpreter
        [*command, "--text", "hi", "--latency-ms", "1", "--keep-requests", "--until-stdin-closes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = process.stdout.readline().strip()
        assert text_of(ask(url)) == "hi"
        assert text_of(ask(url)) == "hi"
        stats = stats_of(url)
        counts = {"requests": 2, "served": 2, "repeated": 1, "abandoned": 0, "max_in_flight": 1}
        counts |= {"batches": 0, "batch_answers": 0}
        assert stats == {**counts, "delays_ms": 2, "longest_delay_ms": 1}
        assert stats_of(url) == {**stats, "longest_delay_ms": 0}
        process.stdin.close()
        assert process.wait(timeout=90) == 0


def test_delays_follow_from_the_question_when_they_are_spread() -> None:
    """For benchmarks: lognormal, and the same for the same question, so that all who are compared wait alike."""
    command = [sys.executable, "-m", "ensemble_ray.testing.model_server", "--text", "hi", "--until-stdin-closes"]
    with ForkedProgram[str](
        [*command, "--latency-ms", "4", "--latency-spread", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = process.stdout.readline().strip()
        delays = []
        for question in ("one", "two", "one"):
            before = stats_of(url)["delays_ms"]
            assert text_of(ask(url, {**HELLO, "messages": [{"role": "user", "content": question}]})) == "hi"
            delays.append(stats_of(url)["delays_ms"] - before)
        process.stdin.close()
        assert process.wait(timeout=90) == 0
    assert abs(delays[0] - delays[2]) <= 1  # told in whole ms
    assert abs(delays[0] - delays[1]) > 1


def test_requests_are_told_apart_by_their_key_when_they_carry_one() -> None:
    """S-DUR-27: how often each model call was asked for, and whose answer was given whole."""
    script = ["one", Fault(status=500), Reply(text="two", fragments=["t", "w", "o"]), Reply(text="x", cut_after=1), "y"]
    with ModelServer(script) as server:
        for key in ("a", "b"):
            ask(server.base_url, headers={"Idempotency-Key": key})
        place = urlsplit(server.base_url)
        for key in ("b", "c"):
            connection = HTTPConnection(place.netloc, timeout=90)
            streamed = json.dumps({**HELLO, "stream": True})
            connection.request("POST", "/v1/chat/completions", body=streamed, headers={"Idempotency-Key": key})
            with contextlib.suppress(HTTPException):
                connection.getresponse().read()
        ask(server.base_url)
        server.wait_arrived(5)
        assert server.requests_by_key() == {"a": 1, "b": 2, "c": 1, "": 1}
        assert server.answered_keys() == {"a", "b"}
        first, refused, *_ = server.requests
        assert first.answered_at is not None
        assert first.arrived_at <= first.answered_at
        assert refused.answered_at is None
        with pytest.raises(TimeoutError, match="waited 0 s for 6 requests"):
            server.wait_arrived(6, timeout_s=0)


def test_an_answer_is_not_counted_as_given_when_its_client_had_gone() -> None:
    """What the server would have said to a dead process was not paid for by anybody's record."""
    with ModelServer("x") as server:
        server.pause()
        place = urlsplit(server.base_url)
        connection = HTTPConnection(place.netloc, timeout=90)
        connection.request("POST", "/v1/chat/completions", body=json.dumps(HELLO), headers={"Idempotency-Key": "a"})
        server.wait_in_flight(1)
        connection.close()
        server.wait_served(1)
        server.resume()
        assert ask(server.base_url, headers={"Idempotency-Key": "b"})[0] == 200
        assert server.answered_keys() == {"b"}
        assert server.abandoned == 1


def test_requests_for_a_form_are_refused_when_the_server_takes_none() -> None:
    """They use up no answer of the script; what was asked for can be seen either way."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": False}}
    with ModelServer(["first", "second"], rejects_response_format=True) as server:
        status, answer = ask(server.base_url, {**HELLO, "response_format": form})
        assert (status, answer["error"]["code"]) == (400, "invalid_value")
        assert "response_format" in answer["error"]["message"]
        assert [text_of(ask(server.base_url)), text_of(ask(server.base_url))] == ["first", "second"]
        assert [request.response_format for request in server.requests] == [form, None, None]
    with ModelServer("{}", rejects_response_format=Fault(status=501)) as server:
        assert ask(server.base_url, {**HELLO, "response_format": form})[0] == 501


def test_answers_of_real_endpoints_are_sent_when_scripted() -> None:
    """S-CONV-22: reasoning, members of a provider, an error in a success, and bytes that no other answer expresses."""
    streamed = {**HELLO, "stream": True}
    odd = RawAnswer(body=[b"data: ", b"odd\n\n"], content_type="text/x-odd", status=203, headers={"x-odd": "yes"})
    refused = Fault(status=200, code="429", message="slow down", retry_after_s=2)
    thinking = Reply(text="so be it", reasoning="hm well", members={"extra": 1}, is_ended=False)
    with ModelServer([odd, refused, refused, thinking, thinking]) as server:
        answers = [send(server.base_url, body) for body in (HELLO, HELLO, streamed, HELLO, streamed)]
    raw, plain, events, whole, pieces = answers
    assert (raw.status, raw.headers["content-type"], raw.headers["x-odd"], raw.read) == (
        203,
        "text/x-odd",
        "yes",
        b"data: odd\n\n",
    )
    error = json.loads(plain.read)["error"]
    assert (plain.status, error["code"], plain.headers["retry-after"]) == (200, "429", "2")
    assert events.read == b"data: %b\n\n" % plain.read
    message = json.loads(whole.read)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["extra"]) == ("so be it", "hm well", 1)
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in pieces.read.decode().split("\n\n") if line]
    assert [next(iter(delta.items())) for delta in deltas] == [
        ("reasoning_content", "hm "), ("reasoning_content", "well"), ("extra", 1), ("content", "so "), ("content", "be "), ("content", "it"),
    ]  # fmt: skip
