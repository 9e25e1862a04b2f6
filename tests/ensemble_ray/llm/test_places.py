"""Endpoints for people: what may be secret in a URL is not shown."""

from __future__ import annotations

import pytest

from ensemble_ray.llm.failures import flaw_of, key_headers, resource_url, secrets_of, shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("https://me:pass@host/v1?key=x#y", "https://host/v1?..."),
        ("https://me:p@ss@[::1]:80/v1#y", "https://[::1]:80/v1?..."),
        ("https://me:12/3@host/v1", "https://me:12/..."),
        ("localhost:8000/v1", "localhost:8000/v1"),
        ("me:pass@host/v1?key=x", "host/v1"),
        ("http://me:pass@[::1/v1?key=x", "[::1/v1"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    """S-SEC-67: also where it is none."""
    assert shown_url(url) == shown


@pytest.mark.parametrize("url", ["http://", "http:///v1", "http://host:port/v1", "http://[::1/v1", "ws://host", "host"])
def test_a_url_that_leads_nowhere_has_a_flaw(url: str) -> None:
    """S-SEC-67: said before anything runs."""
    assert flaw_of(url)


def test_a_url_that_leads_somewhere_has_none() -> None:
    """S-SEC-67: whatever else stands in it."""
    assert flaw_of("https://me:pass@[::1]:80/v1?x=y") == ""


def test_secrets_are_found_as_they_stand_and_decoded() -> None:
    """S-SEC-67: an endpoint may repeat either."""
    found = secrets_of("https://me:p%40ss@host/v1?key=a%20b&more=c+d#end")
    assert "2024-10-21" not in secrets_of("https://host/v1?api-version=2024-10-21")
    assert {"p%40ss", "p@ss", "a%20b", "a b", "c+d", "c d", "end"} <= found


@pytest.mark.parametrize(
    ("base", "query", "url"),
    [
        ("https://host/v1", None, "https://host/v1/embeddings"),
        ("https://host/v1/", {}, "https://host/v1/embeddings"),
        ("https://host/d/gpt?api-version=1", None, "https://host/d/gpt/embeddings?api-version=1"),
        (
            "https://host/d/gpt/?api-version=1&a=%2F",
            {"b": "x y"},
            "https://host/d/gpt/embeddings?api-version=1&a=%2F&b=x+y",
        ),
        ("https://host?api-version=1", {"api-version": "2"}, "https://host/embeddings?api-version=2"),
        ("https://me:pass@host/v1?#end", None, "https://me:pass@host/v1/embeddings"),
    ],
)
def test_the_query_of_a_base_url_stays_the_query(base: str, query: dict[str, object] | None, url: str) -> None:
    """S-LLM-27: the resource is appended to the path."""
    assert resource_url(base, "/embeddings", query) == url


@pytest.mark.parametrize(
    ("url", "is_azure"),
    [
        ("https://team.openai.azure.com/openai/deployments/gpt?api-version=1", True),
        ("https://team.openai.azure.com/openai/v1", True),
        ("https://team.cognitiveservices.azure.com/openai/v1", True),
        ("https://team.services.ai.azure.com/openai/v1", True),
        ("https://api.openai.com/v1", False),
        ("https://openai.azure.com.elsewhere.org/v1", False),
        ("http://127.0.0.1:8000/v1", False),
    ],
)
def test_azure_gets_the_key_in_its_own_header_as_well(url: str, is_azure: bool) -> None:  # noqa: FBT001  a table
    """S-LLM-27: its deployments read `api-key`; no other host gets the key twice."""
    headers = key_headers(url, "k")
    assert headers == {"Authorization": "Bearer k", **({"api-key": "k"} if is_azure else {})}
    assert key_headers(url, "") == {}
