"""What a call gives when a server on a port answers it with what cannot be read, over both transports of HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
import queue
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ensemble_ray import MCP
from ensemble_ray.tools.mcp import session as http_client
from tests.scenarios.teams import PATIENCE_S
from tests.scenarios.test_mcp import offered, use

pytest.importorskip("mcp")

LIMIT = 2**20
#: Headers and body of an answer.
Answer = tuple[dict[str, str], bytes]
PACKED = [({"Content-Encoding": "br"}, b"x"), ({"Content-Encoding": "gzip"}, gzip.compress(bytes(4 * LIMIT)))]


class Speaking(BaseHTTPRequestHandler):
    """A server of both transports, at `/mcp` and `/sse`."""

    protocol_version = "HTTP/1.1"
    #: answers a call; None: with 202 alone
    on_call: Callable[[dict[str, Any]], Answer | None]
    #: what is sent as events; None: the end
    events: queue.Queue[bytes | None]

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name of the base class
        pass

    def answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        """Send a whole answer."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Take a message."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/sse":
            self.answer(405)
        elif "id" not in asked:
            self.answer(202)
        elif asked["method"] == "tools/call":
            reply = type(self).on_call(asked)
            self.answer(202) if reply is None else self.answer(200, *reply)
        elif self.path == "/mcp":
            self.answer(200, {"Content-Type": "application/json"}, reply_to(asked))
        else:
            self.events.put(b"event: message\ndata: " + reply_to(asked) + b"\n\n")
            self.answer(202)

    def do_GET(self) -> None:
        """Send events until their end."""
        if self.path != "/sse":
            self.answer(405)
            return
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"event: endpoint\ndata: /messages\n\n")
        while (event := self.events.get()) is not None:
            self.wfile.write(event)


@contextmanager
def speaking(on_call: Callable[[dict[str, Any]], Answer | None]) -> Generator[tuple[str, queue.Queue[bytes | None]]]:
    """Serve; yields the address, and what takes events."""
    events: queue.Queue[bytes | None] = queue.Queue()
    handler = type("Handler", (Speaking,), {"on_call": staticmethod(on_call), "events": events})
    web = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    web.daemon_threads = True
    threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{web.server_port}", events
    finally:
        events.put(None)
        web.shutdown()
        web.server_close()


def reply_to(asked: dict[str, Any]) -> bytes:
    """The answer to a request that is no call."""
    known: dict[str, dict[str, Any]] = {
        "initialize": {
            "protocolVersion": asked.get("params", {}).get("protocolVersion"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "speaking", "version": "1"},
        },
        "tools/list": {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in ("put", "wait")]},
    }
    result = known.get(asked["method"])
    answer = {"error": {"code": -32601, "message": "no"}} if result is None else {"result": result}
    return json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}).encode()


@pytest.mark.parametrize(("headers", "body"), [({}, b"no message"), *PACKED])
async def test_an_answer_over_http_that_cannot_be_read_fails_its_call_alone(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], body: bytes
) -> None:
    """S-INT-88, S-SEC-101: a call that goes on is still answered."""
    monkeypatch.setattr(http_client, "MESSAGE_BYTES", LIMIT)
    asked_to_wait, failed_once = threading.Event(), threading.Event()
    calls: list[str] = []

    def on_call(asked: dict[str, Any]) -> Answer:
        calls.append(asked["params"]["name"])
        kind = {"Content-Type": "application/json"}
        if calls[-1] == "put":
            return {**kind, **headers}, body
        asked_to_wait.set()
        failed_once.wait(PATIENCE_S)
        result = {"content": [{"type": "text", "text": "waited"}]}
        return kind, json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode()

    with speaking(on_call) as (origin, _):
        tools = await offered(MCP(f"{origin}/mcp", timeout=None))
        waiting = asyncio.create_task(use(tools["wait"]))
        await asyncio.to_thread(asked_to_wait.wait, PATIENCE_S)
        failed = await use(tools["put"])
        failed_once.set()
        assert (await waiting).output == "waited"
    assert (failed.error_message or "").startswith("Outcome unknown: MCP server")
    assert "cannot be read: " in (failed.error_message or "")
    assert calls == ["wait", "put"]


async def test_an_error_32700_with_an_id_is_an_answer_over_http() -> None:
    """S-INT-88."""
    calls: list[str] = []

    def on_call(asked: dict[str, Any]) -> Answer:
        calls.append(asked["params"]["name"])
        error = {"code": -32700, "message": "cannot parse the date"}
        return {"Content-Type": "application/json"}, json.dumps(
            {"jsonrpc": "2.0", "id": asked["id"], "error": error}
        ).encode()

    with speaking(on_call) as (origin, _):
        tools = await offered(MCP(f"{origin}/mcp", effect="idempotent"))
        failed = await use(tools["put"])
    assert "cannot parse the date" in (failed.error_message or "")
    assert calls == ["put"]


@pytest.mark.parametrize("answer", [*PACKED, b"event: message\ndata: no message\n\n", b"data: " + b"x" * 2 * LIMIT])
async def test_a_call_over_the_older_transport_fails_when_it_breaks(
    monkeypatch: pytest.MonkeyPatch, answer: Answer | bytes
) -> None:
    """S-LLM-66, S-INT-88, S-SEC-102: whether the answer to the message or the stream cannot be read."""
    monkeypatch.setattr(http_client, "MESSAGE_BYTES", LIMIT)

    def on_call(_: dict[str, Any]) -> Answer | None:
        if isinstance(answer, tuple):
            return answer
        events.put(answer)
        return None

    with speaking(on_call) as (origin, events):
        tools = await offered(MCP(f"{origin}/sse", timeout=None))
        failed = await use(tools["put"])
    assert (failed.error_message or "").startswith("Outcome unknown: MCP server")
