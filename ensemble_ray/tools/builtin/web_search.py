"""Searches the web through a provider. Package: built-in tools. In: a query; out: titles, addresses and extracts.

A key is a `SecretStr` from the moment it arrives, and what a provider says, good or bad, is freed of it before anybody
sees it: some services quote the request in their errors (S-BIT-34).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, cast, runtime_checkable
from urllib.parse import quote, urlencode

from pydantic import BaseModel, Field, SecretStr

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, message_of
from ensemble_ray.process.threads import call_user, threads
from ensemble_ray.tools.tool import ToolResult
from ensemble_ray.tools.typed import AbstractTypedAgentTool
from ensemble_ray.tools.web.net import RequestFailedError, WebAnswer, exchange

__all__ = ["SerpApiSearch", "TavilySearch", "WebSearchProvider", "WebSearchTool"]

_MAX_RESULTS = 5
_TIMEOUT_S = 15.0
#: Of a service's answer, which has five hits; to read JSON holds every other thread, so it must not be long.
_MAX_BYTES = 1_048_576
_USER_AGENT = "ensemble-ray-web-search/1.0"
_NOTHING_FOUND = "No results found."


@runtime_checkable
class WebSearchProvider(Protocol):
    """Something that searches; a plain callable from query to text does as well."""

    def search(self, query: str) -> str | Awaitable[str]:
        """Return what was found, as text for a model; may be `async`."""
        ...


class WebSearchInput(BaseModel):
    """What to search for."""

    query: str = Field(description="What to search for, in a few words")


class WebSearchTool(AbstractTypedAgentTool[WebSearchInput]):
    """Searches the web through a provider of the user's choice.

    Args:
        provider: An object with `search(query) -> str`, or a callable of that shape; sync or async.

    Raises:
        ValueError: there is no provider.
    """

    name = "web_search"
    effect = "none"
    description = "Searches the web and returns the best hits with title, address and extract."
    input_type = WebSearchInput

    def __init__(self, provider: WebSearchProvider | Callable[[str], str | Awaitable[str]] | None = None) -> None:
        if provider is None:
            raise ValueError("provider must not be None")
        if not isinstance(provider, WebSearchProvider) and not callable(provider):
            raise ValueError(f"provider must have search(query) or be callable, got: {type(provider).__name__}")  # noqa: TRY004  the specification's class for bad arguments
        self._provider = provider

    @classmethod
    def of_tavily(cls, api_key: str | SecretStr | None = None) -> WebSearchTool:
        """Search with Tavily.

        Raises:
            ValueError: there is no key.
        """
        return cls(TavilySearch(api_key))

    @classmethod
    def of_serp_api(cls, api_key: str | SecretStr | None = None) -> WebSearchTool:
        """Search Google through SerpAPI.

        Raises:
            ValueError: there is no key.
        """
        return cls(SerpApiSearch(api_key))

    async def execute_typed(self, arguments: WebSearchInput, /) -> ToolResult:
        """Give what was found."""
        query = arguments.query.strip()
        if not query:
            return ToolResult.failure("Search query must not be blank")
        provider = self._provider
        search = provider.search if isinstance(provider, WebSearchProvider) else provider
        try:
            return ToolResult.success(await call_user(search, query))
        except (ExitEarlyError, IllegalStateError):
            raise
        except Exception as error:  # noqa: BLE001  a provider may raise anything
            return ToolResult.failure(f"Search failed: {message_of(error)}")


class _KeyedSearch(ABC):
    """What the providers with a key have in common: the key, one exchange, and nothing that leaves with the key."""

    provider_name = ""

    def __init__(self, api_key: str | SecretStr | None, *, endpoint: str) -> None:
        plain = api_key.get_secret_value() if isinstance(api_key, SecretStr) else api_key
        if plain is None or not plain.strip():
            raise ValueError("api_key must not be blank")
        self._key = SecretStr(plain.strip())
        self._endpoint = endpoint

    async def search(self, query: str) -> str:
        """Ask the service and lay out its hits (S-BIT-33).

        Raises:
            RequestFailedError: the service did not answer, or not as agreed.
        """
        try:
            found = await threads.run(self._read, await self._ask(query))
        except RequestFailedError as error:
            raise RequestFailedError(self._without_key(str(error))) from None
        return self._without_key(found)

    @abstractmethod
    async def _ask(self, query: str) -> WebAnswer:
        """Put the query to the service."""

    @abstractmethod
    def _hits(self, document: Mapping[str, object]) -> Sequence[tuple[object, object, object]]:
        """Title, address and extract of each hit."""

    def _read(self, answer: WebAnswer) -> str:
        if answer.status != 200:  # noqa: PLR2004  the one status the service promises
            raise RequestFailedError(f"{self.provider_name} answered with HTTP status {answer.status}")
        try:
            document: object = json.loads(answer.text())
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise RequestFailedError(f"{self.provider_name} answered with something that is no JSON object")
        return _layout(self._hits(cast("dict[str, object]", document))[:_MAX_RESULTS])

    def _without_key(self, text: str) -> str:
        key = self._key.get_secret_value()
        for form in {key, quote(key, safe=""), json.dumps(key)[1:-1]}:
            text = text.replace(form, "***")
        return text


class TavilySearch(_KeyedSearch):
    """The Tavily search service."""

    provider_name = "Tavily"

    def __init__(self, api_key: str | SecretStr | None, *, endpoint: str = "https://api.tavily.com/search") -> None:
        super().__init__(api_key, endpoint=endpoint)

    async def _ask(self, query: str) -> WebAnswer:
        wish = {
            "api_key": self._key.get_secret_value(),
            "query": query,
            "search_depth": "basic",
            "max_results": _MAX_RESULTS,
        }
        return await exchange(
            "POST",
            self._endpoint,
            headers={"Content-Type": "application/json", "User-Agent": _USER_AGENT},
            body=json.dumps(wish).encode(),
            max_bytes=_MAX_BYTES,
            timeout_s=_TIMEOUT_S,
        )

    def _hits(self, document: Mapping[str, object]) -> Sequence[tuple[object, object, object]]:
        return [(hit.get("title"), hit.get("url"), hit.get("content")) for hit in _objects(document.get("results"))]


class SerpApiSearch(_KeyedSearch):
    """Google's results through SerpAPI."""

    provider_name = "SerpAPI"

    def __init__(self, api_key: str | SecretStr | None, *, endpoint: str = "https://serpapi.com/search.json") -> None:
        super().__init__(api_key, endpoint=endpoint)

    async def _ask(self, query: str) -> WebAnswer:
        wish = {"engine": "google", "q": query, "api_key": self._key.get_secret_value(), "num": _MAX_RESULTS}
        return await exchange(
            "GET",
            f"{self._endpoint}?{urlencode(wish)}",
            headers={"User-Agent": _USER_AGENT},
            max_bytes=_MAX_BYTES,
            timeout_s=_TIMEOUT_S,
        )

    def _hits(self, document: Mapping[str, object]) -> Sequence[tuple[object, object, object]]:
        hits = _objects(document.get("organic_results"))
        return [(hit.get("title"), hit.get("link"), hit.get("snippet")) for hit in hits]


def _objects(value: object) -> list[Mapping[str, object]]:
    """Return the objects of a list; a service that sends something else has found nothing."""
    if not isinstance(value, list):
        return []
    return [cast("Mapping[str, object]", item) for item in cast("list[object]", value) if isinstance(item, dict)]


def _layout(hits: Sequence[tuple[object, object, object]]) -> str:
    blocks: list[str] = []
    for title, url, extract in hits:
        lines = [
            line.format(part.strip())
            for line, part in ((f"{len(blocks) + 1}. {{}}", title), ("   URL: {}", url), ("   {}", extract))
            if isinstance(part, str) and part.strip()
        ]
        if lines:
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks) or _NOTHING_FOUND
