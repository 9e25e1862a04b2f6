"""WebSearchTool offline: providers of one's own, and keys that stay hidden. The services: tests/contracts."""

from __future__ import annotations

import json

import pytest
from pydantic import SecretStr

from ensemble_ray import ToolResult, WebSearchTool
from ensemble_ray.tools.builtin.web import SerpApiSearch, TavilySearch
from tests.ensemble_ray.tools.builtin.travel import travelled


class _Echo:
    async def search(self, query: str) -> str:
        return f"found {query}"


def _search(tool: WebSearchTool, query: str) -> ToolResult:
    return tool.execute(json.dumps({"query": query}))


def test_provider_is_asked_when_it_is_an_object_or_a_callable() -> None:
    """S-BIT-30."""
    assert _search(WebSearchTool(_Echo()), " tides ").output == "found tides"
    assert _search(WebSearchTool(lambda query: f"called {query}"), "tides").output == "called tides"


def test_tool_is_refused_when_there_is_no_provider_or_key() -> None:
    """S-BIT-30, S-CONV-13."""
    with pytest.raises(ValueError, match="provider must not be None"):
        WebSearchTool()
    with pytest.raises(ValueError, match="provider must have search"):
        WebSearchTool(7)  # type: ignore[arg-type]
    for factory in (WebSearchTool.of_tavily, WebSearchTool.of_serp_api):
        for key in (None, "", " ", SecretStr("")):
            with pytest.raises(ValueError, match="api_key must not be blank"):
                factory(key)


def test_failure_is_told_when_the_query_is_blank_or_the_provider_fails() -> None:
    """S-BIT-31."""

    def failing(_query: str) -> str:
        msg = "quota used up"
        raise RuntimeError(msg)

    assert _search(WebSearchTool(failing), "\t").error_message == "Search query must not be blank"
    assert _search(WebSearchTool(failing), "x").error_message == "Search failed: quota used up"


@pytest.mark.parametrize("kind", [TavilySearch, SerpApiSearch])
def test_key_is_hidden_when_the_provider_is_shown(kind: type[TavilySearch | SerpApiSearch]) -> None:
    """S-BIT-34: in its own form and in its attributes', and still there after travelling."""
    provider = kind("tvly-secret")
    assert "tvly-secret" not in repr(provider)
    assert "tvly-secret" not in str(vars(provider))
    copy = travelled(WebSearchTool(provider))
    assert copy.name == "web_search"
    assert "tvly-secret" not in repr(copy) + str(vars(copy))
