"""What hostile MCP servers and A2A agents answer over HTTP: bodies without an end, and bombs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from ensemble_ray import MCP, RemoteAgent, ToolConfigurationError, ToolResult
from ensemble_ray.tools.a2a import client as a2a_client
from ensemble_ray.tools.mcp import session as http_client
from ensemble_ray.tools.mcp.address import ServerAddress
from tests.attack.raw_server import RawServer, Write
from tests.attack.test_answers import LIMIT, gzip_bomb, head, memory_below, once, repeated

pytest.importorskip("mcp")
pytest.importorskip("a2a")
import httpx2

CARD = {
    "name": "Painter",
    "description": "Paints",
    "version": "1",
    "capabilities": {"streaming": True},
    "defaultInputModes": ["text/plain"],
    "defaultOutputModes": ["text/plain"],
    "skills": [],
}
SSE = "text/event-stream"
Answer = Callable[[Write, int], None]


def hostile(kind: str, content_type: str) -> Answer:
    """An answer that is too long."""
    if kind == "endless":
        return repeated(head(content_type=content_type), b"x" * 65536)
    layers = "gzip" if kind == "bomb" else kind
    return once(head(f"Content-Encoding: {layers}", content_type=content_type), gzip_bomb(200))


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, so that reaching them takes no time."""
    monkeypatch.setattr(http_client, "MESSAGE_BYTES", LIMIT)
    for name in ("_CARD_BYTES", "_ANSWER_BYTES", "_STREAM_BYTES"):
        monkeypatch.setattr(a2a_client, name, LIMIT)


@pytest.mark.parametrize("kind", ["endless", "bomb", "br"])
async def test_an_mcp_server_is_unreachable_when_its_answer_is_too_long(kind: str) -> None:
    """S-SEC-101, S-SEC-102: no more than the limit is held."""
    with RawServer(once(head(status="500 No"))) as server, pytest.raises(ToolConfigurationError):
        await MCP(f"{server.origin}/mcp").resolve()  # what is imported is not counted
    with RawServer(hostile(kind, "application/json")) as server, memory_below(12 * LIMIT):
        async with asyncio.timeout(60):
            with pytest.raises(ToolConfigurationError, match="cannot be reached") as caught:
                await MCP(f"{server.origin}/mcp").resolve()
    assert len(str(caught.value)) < 1500
    assert server.sent_bytes < 32 * LIMIT


async def test_an_mcp_stream_is_unpacked_in_pieces_when_it_is_a_bomb() -> None:
    """S-SEC-101, S-SEC-102: an event has a limit."""
    with RawServer(hostile("bomb", SSE)) as server, memory_below(48 * LIMIT):
        async with asyncio.timeout(60):
            with pytest.raises(ToolConfigurationError, match="cannot be reached"):
                await MCP(f"{server.origin}/mcp").resolve()


@pytest.mark.parametrize("client", [http_client.HttpClient, http_client.SseHttpClient])
async def test_a_refused_answer_of_an_mcp_server_leaves_no_connection_open(
    client: Callable[[ServerAddress], httpx2.AsyncClient],
) -> None:
    """S-SEC-101: more of them come than a client may have connections."""
    with RawServer(hostile("br", SSE)) as server:
        async with client(ServerAddress(url=server.origin, connect_timeout_s=5)) as http:
            for _ in range(101):
                with pytest.raises(httpx2.StreamError, match="is packed as 'br'"):
                    await http.send(http.build_request("GET", server.origin), stream=True)


@pytest.mark.parametrize("kind", ["endless", "bomb", "br"])
async def test_an_agent_has_no_card_when_the_card_is_too_long(kind: str) -> None:
    """S-SEC-101, S-SEC-103."""
    with RawServer(once(head(status="404 No"))) as server, pytest.raises(ToolConfigurationError):
        await RemoteAgent.adiscover(server.origin)  # what is imported is not counted
    with (
        RawServer(hostile(kind, "application/json")) as server,
        memory_below(12 * LIMIT),
        pytest.raises(ToolConfigurationError, match="its card cannot be read") as caught,
    ):
        await RemoteAgent.adiscover(server.origin)
    assert ("longer than" in str(caught.value)) == (kind != "br")
    assert server.sent_bytes < 32 * LIMIT


@pytest.mark.parametrize("content_type", ["application/json", SSE])
@pytest.mark.parametrize("kind", ["endless", "bomb"])
async def test_an_agents_answer_is_refused_when_it_is_too_long(kind: str, content_type: str) -> None:
    """S-SEC-101, S-SEC-103: what it did is not known, and it is not asked again."""

    def answer(write: Write, number: int) -> None:
        if number == 0:
            interface = {"url": f"{server.origin}/rpc", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}
            once(head(), json.dumps({**CARD, "supportedInterfaces": [interface]}).encode())(write, number)
        else:
            hostile(kind, content_type)(write, number)

    with RawServer(answer) as server, memory_below(24 * LIMIT):
        result = await asyncio.to_thread(RemoteAgent(server.origin).as_tool().execute, "paint")
    assert isinstance(result, ToolResult)
    assert (result.error_message or "").startswith("Outcome unknown: ")
    assert f"longer than {LIMIT} bytes" in (result.error_message or "")
    assert len(server.requests) == 2
