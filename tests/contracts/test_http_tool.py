"""HttpAgentTool against a server on loopback: what is sent, and what an answer means."""

from __future__ import annotations

import logging

import pytest

from ensemble_ray import HttpAgentTool
from tests.contracts.web_server import Answer, WebServer


async def test_input_is_the_body_when_posting(server: WebServer) -> None:
    """S-BIT-70, S-BIT-71: any host, since the address is the developer's own."""
    server.answers["/api"] = Answer(body="grün".encode())
    tool = HttpAgentTool("api", "d", f"{server.base}/api", headers={"Authorization": "Bearer s3cret"})
    assert (await tool.aexecute('{"a": "é"}')).output == "grün"
    [asked] = server.asked
    assert (asked.method, asked.target, asked.body) == ("POST", "/api", '{"a": "é"}'.encode())
    assert asked.headers["content-type"] == "application/json"
    assert asked.headers["authorization"] == "Bearer s3cret"


async def test_input_is_a_query_parameter_when_getting(server: WebServer) -> None:
    """S-BIT-70, S-BIT-71."""
    server.answers["/api"] = Answer(body=b"ok")
    assert (await HttpAgentTool.get("api", "d", f"{server.base}/api?k=v").aexecute("a b&é")).output == "ok"
    [asked] = server.asked
    assert (asked.method, asked.target) == ("GET", "/api?k=v&input=a%20b%26%C3%A9")
    assert "content-type" not in asked.headers


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b"", "HTTP 400"),
        (404, b" \n", "HTTP 404"),
        (500, b"x" * 300, "HTTP 500: " + "x" * 200),
        (422, "grün".encode(), "HTTP 422: grün"),
    ],
)
async def test_failure_has_status_and_reason_when_the_server_refuses(
    server: WebServer, status: int, body: bytes, message: str
) -> None:
    """S-BIT-72."""
    server.answers["/api"] = Answer(status, body)
    assert (await HttpAgentTool.post("api", "d", f"{server.base}/api").aexecute("x")).error_message == message


async def test_each_answer_without_a_body_is_a_success(server: WebServer) -> None:
    """S-BIT-72: the HTTP client shares the stream of their bodies."""
    server.answers["/api"] = Answer(204)
    tool = HttpAgentTool.post("api", "d", f"{server.base}/api")
    for _ in range(3):
        result = await tool.aexecute("x")
        assert (result.is_success, result.output) == (True, "")


async def test_redirect_is_not_followed_when_the_server_sends_one(server: WebServer) -> None:
    """S-BIT-72: it is no error, and nobody else chooses the host."""
    server.answers["/api"] = Answer(302, b"moved", {"Location": "/elsewhere"})
    assert (await HttpAgentTool.post("api", "d", f"{server.base}/api").aexecute("x")).output == "moved"
    assert len(server.asked) == 1


async def test_failure_is_told_when_no_answer_comes(server: WebServer, caplog: pytest.LogCaptureFixture) -> None:
    """S-BIT-72: and neither text nor log shows a header."""
    caplog.set_level(logging.DEBUG)
    server.answers["/never"] = Answer(0)
    headers = {"Authorization": "s3cret"}
    never = await HttpAgentTool("api", "d", f"{server.base}/never", headers=headers, timeout=0.2).aexecute("x")
    assert never.error_message == "HTTP request failed: timed out after 0.2 s"
    for url in ("http://127.0.0.1:1/", "ftp://x/", "http://[oops"):
        result = await HttpAgentTool("api", "d", url, headers=headers).aexecute("x")
        assert str(result.error_message).startswith("HTTP request failed: ")
    assert "s3cret" not in caplog.text


async def test_body_is_cut_when_longer_than_the_limit(server: WebServer) -> None:
    """S-BIT-73: exactly the limit is not cut, and no half character is shown."""
    server.answers |= {"/ten": Answer(body=b"x" * 10), "/eleven": Answer(body=b"x" * 9 + "é".encode())}
    for path, text in (("/ten", "x" * 10), ("/eleven", "x" * 9 + "\n[response truncated at 10 bytes]")):
        tool = HttpAgentTool("api", "d", server.base + path, max_response_bytes=10)
        assert (await tool.aexecute("x")).output == text


def test_tool_works_outside_an_event_loop_when_called_plainly() -> None:
    """S-TOOL-43, S-CONV-16: an async tool is waited for."""
    result = HttpAgentTool("api", "d", "http://127.0.0.1:1/").execute("x")
    assert str(result.error_message).startswith("HTTP request failed: ")
