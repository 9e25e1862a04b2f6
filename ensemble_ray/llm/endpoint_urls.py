"""Endpoints for people: a URL without what may be secret in it. Package: llm. Pure.

In: a URL as a user wrote it, which may hold a user, a password, and a key in its query. Out: where it leads.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote, unquote_plus, urlencode, urlsplit

__all__ = ["flaw_of", "key_headers", "provider_of", "resource_url", "secrets_of", "shown_url"]

#: Stands for a query or a fragment.
_MORE = "?..."
#: What OpenTelemetry calls who answers at a host, or below one.
_PROVIDERS = {
    "api.openai.com": "openai",
    "openai.azure.com": "azure.ai.openai",
    "cognitiveservices.azure.com": "azure.ai.openai",
    "services.ai.azure.com": "azure.ai.inference",
    "api.anthropic.com": "anthropic",
    "generativelanguage.googleapis.com": "gcp.gemini",
    "aiplatform.googleapis.com": "gcp.vertex_ai",
    "amazonaws.com": "aws.bedrock",
    "api.mistral.ai": "mistral_ai",
    "api.groq.com": "groq",
    "api.deepseek.com": "deepseek",
    "api.perplexity.ai": "perplexity",
    "api.x.ai": "x_ai",
    "api.cohere.ai": "cohere",
}


def shown_url(url: str) -> str:
    """Return scheme, host, port and path of a URL, and `?...` where more follows (S-SEC-67).

    Of a text that is no URL, what cannot be a user or a password, or a query.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return _end_of(url)
    if not (parts.scheme and parts.netloc):
        return _end_of(url)
    # A password may hold the signs that end a host, where somebody forgot to escape them.
    path = "/..." if "@" in parts.path else parts.path
    more = _MORE if parts.query or parts.fragment else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}{more}"


def flaw_of(url: str) -> str:
    """Return why no request can go to a URL, without repeating what may be secret in it; empty when one can."""
    if not url.startswith(("http://", "https://")):
        return f"must begin with http:// or https://, got: {shown_url(url)}"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "is no URL: its host or its port cannot be read. Signs such as / ? # @ in a password are written %2F %3F %23 %40"
    return "" if parts.hostname else "is no URL: it names no host"


def provider_of(url: str) -> str:
    """Return who answers at a URL: OpenTelemetry's name where it has one, else the host's; empty where there is no host.

    Examples:
        >>> provider_of("https://team.openai.azure.com/openai/v1"), provider_of("http://10.0.0.7:8000/v1")
        ('azure.ai.openai', '10.0.0.7')
    """
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return ""
    known = (name for end, name in _PROVIDERS.items() if host == end or host.endswith(f".{end}"))
    return next(known, host)


def resource_url(base_url: str, path: str, query: Mapping[str, object] | None = None) -> str:
    """Return the URL of a resource below a base URL, whose own query stays the query.

    Args:
        base_url: Where the protocol begins.
        path: The resource, such as `/chat/completions`.
        query: More of the query; a name that the base URL has as well takes this value.

    Examples:
        >>> resource_url("https://x.openai.azure.com/openai/deployments/gpt?api-version=1", "/chat/completions")
        'https://x.openai.azure.com/openai/deployments/gpt/chat/completions?api-version=1'
    """
    place, _, found = base_url.partition("#")[0].partition("?")
    more = {name: str(value).lower() if isinstance(value, bool) else value for name, value in (query or {}).items()}
    pairs = [pair for pair in found.split("&") if pair and unquote_plus(pair.partition("=")[0]) not in more]
    whole = "&".join([*pairs, urlencode(more, doseq=True)] if more else pairs)
    return f"{place.rstrip('/')}{path}{f'?{whole}' if whole else ''}"


def key_headers(base_url: str, key: str) -> dict[str, str]:
    """Return the headers that carry a key: none without one, and on Azure that of its deployments too (S-LLM-27)."""
    if not key:
        return {}
    headers = {"Authorization": f"Bearer {key}"}
    return {**headers, "api-key": key} if provider_of(base_url).startswith("azure.") else headers


def secrets_of(url: str) -> set[str]:
    """Return what may be secret in a URL, as it stands there and decoded: an endpoint may repeat it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return set()
    found = {parts.password or "", parts.fragment}
    pairs = (pair.partition("=") for pair in parts.query.split("&"))
    found.update(value for name, _, value in pairs if name != "api-version")
    return found | set(map(unquote, found)) | set(map(unquote_plus, found))


def _end_of(text: str) -> str:
    for sign in "?#":
        text = text.partition(sign)[0]
    return text.rpartition("@")[2]
