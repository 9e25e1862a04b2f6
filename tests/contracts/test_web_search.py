"""WebSearchTool's services, played by a server on loopback: what is asked, how hits are laid out, no key anywhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import cast
from urllib.parse import parse_qs, urlsplit

import pytest

from ensemble_ray import ToolResult, WebSearchTool
from ensemble_ray.tools.builtin import web as web_search
from ensemble_ray.tools.builtin.web import SerpApiSearch, TavilySearch
from ensemble_ray.tools.web import net
from tests.contracts.web_server import Answer, WebServer, closed_port

_KEY = "tvly-s3cret/key+1"


async def _search(tool: WebSearchTool, query: str = "low tide") -> ToolResult:
    return await tool.aexecute(json.dumps({"query": query}))


def _hits(*hits: Mapping[str, object], under: str) -> Answer:
    return Answer(body=json.dumps({under: list(hits)}).encode(), headers={"Content-Type": "application/json"})


async def test_tavily_is_asked_as_agreed_when_searching(server: WebServer) -> None:
    """S-BIT-32, S-BIT-33."""
    server.answers["/search"] = _hits(
        {"title": "Tides", "url": "http://a/", "content": "Twice a day."},
        {"title": "Moon", "content": None},
        {"url": "http://c/", "content": "No title."},
        {},
        under="results",
    )
    result = await _search(WebSearchTool(TavilySearch(_KEY, endpoint=f"{server.base}/search")))
    assert result.output == (
        "1. Tides\n   URL: http://a/\n   Twice a day.\n\n2. Moon\n\n   URL: http://c/\n   No title."
    )
    [asked] = server.asked
    assert (asked.method, asked.headers["content-type"]) == ("POST", "application/json")
    assert json.loads(asked.body) == {
        "api_key": _KEY,
        "query": "low tide",
        "search_depth": "basic",
        "max_results": 5,
    }


async def test_serp_api_is_asked_as_agreed_when_searching(server: WebServer) -> None:
    """S-BIT-32, S-BIT-33."""
    server.answers["/search.json"] = _hits(
        {"title": "Tides {0}", "link": "http://a/", "snippet": "Twice."}, under="organic_results"
    )
    result = await _search(WebSearchTool(SerpApiSearch(_KEY, endpoint=f"{server.base}/search.json")))
    assert result.output == "1. Tides {0}\n   URL: http://a/\n   Twice."
    [asked] = server.asked
    assert asked.method == "GET"
    assert parse_qs(urlsplit(asked.target).query) == {
        "engine": ["google"],
        "q": ["low tide"],
        "api_key": [_KEY],
        "num": ["5"],
    }


def test_services_are_the_real_ones_when_none_is_named() -> None:
    """S-BIT-32: 10 s to connect, 15 s in all, one request of five hits."""
    tavily = cast("TavilySearch", WebSearchTool.of_tavily(_KEY)._provider)
    serp = cast("SerpApiSearch", WebSearchTool.of_serp_api(_KEY)._provider)
    assert tavily._endpoint == "https://api.tavily.com/search"
    assert serp._endpoint == "https://serpapi.com/search.json"
    assert (net.CONNECT_TIMEOUT_S, web_search._TIMEOUT_S) == (10.0, 15.0)


@pytest.mark.parametrize("body", [b'{"results": []}', b'{"results": null}', b"{}", b'{"results": [1, {}]}'])
async def test_nothing_found_is_said_when_there_are_no_hits(server: WebServer, body: bytes) -> None:
    """S-BIT-33."""
    server.answers["/search"] = Answer(body=body)
    result = await _search(WebSearchTool(TavilySearch(_KEY, endpoint=f"{server.base}/search")))
    assert result.output == "No results found."


@pytest.mark.parametrize("kind", [TavilySearch, SerpApiSearch])
@pytest.mark.parametrize("status", [401, 201, 302, 503])
async def test_failure_names_provider_and_status_when_it_is_not_200(
    server: WebServer, kind: type[TavilySearch | SerpApiSearch], status: int
) -> None:
    """S-BIT-31, S-BIT-32."""
    server.answers["/search"] = Answer(status, b"{}", {"Location": f"{server.base}/elsewhere"})
    result = await _search(WebSearchTool(kind(_KEY, endpoint=f"{server.base}/search")))
    assert result.error_message == f"Search failed: {kind.provider_name} answered with HTTP status {status}"
    assert len(server.asked) == 1


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"[" * 100_000, b"\xff"])
async def test_failure_is_told_when_the_service_answers_nonsense(server: WebServer, body: bytes) -> None:
    """S-BIT-31."""
    server.answers["/search"] = Answer(body=body)
    result = await _search(WebSearchTool(TavilySearch(_KEY, endpoint=f"{server.base}/search")))
    assert str(result.error_message).startswith("Search failed: Tavily answered with something")


@pytest.mark.parametrize("kind", [TavilySearch, SerpApiSearch])
async def test_key_is_nowhere_when_the_service_quotes_it(
    server: WebServer, kind: type[TavilySearch | SerpApiSearch], caplog: pytest.LogCaptureFixture
) -> None:
    """S-BIT-34: in no output, log, or failure; whole or percent-encoded."""
    caplog.set_level(logging.DEBUG)
    hit = {"title": f"for {_KEY}", "content": "q=tvly-s3cret%2Fkey%2B1", "snippet": "q=tvly-s3cret%2Fkey%2B1"}
    server.answers["/search"] = Answer(body=json.dumps({"results": [hit], "organic_results": [hit]}).encode())
    tool = WebSearchTool(kind(_KEY, endpoint=f"{server.base}/search"))
    found = await _search(tool)
    assert found.is_success
    with closed_port() as port:
        closed = await _search(WebSearchTool(kind(_KEY, endpoint=f"http://127.0.0.1:{port}/")))
    assert not closed.is_success
    assert "s3cret" not in f"{found} {closed} {caplog.text}"
