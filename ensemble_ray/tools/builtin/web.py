"""Built-in tools for the web: page text, search, and one HTTP endpoint."""

from __future__ import annotations

import importlib.util
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol, cast, runtime_checkable
from urllib.parse import quote, urlencode, urlsplit

from pydantic import BaseModel, Field, SecretStr
from pydantic_core import from_json

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, ToolConfigurationError, ValidationError, message_of
from ensemble_ray.process.concurrency import call_user, threads
from ensemble_ray.text.foreign_text import header_flaw, header_name_flaw
from ensemble_ray.tools.approval import approve, preview
from ensemble_ray.tools.tool import AbstractAgentTool, AbstractTypedAgentTool, ToolResult
from ensemble_ray.tools.web.net import RequestFailedError, WebAnswer, exchange, fetch
from ensemble_ray.tools.web.page_reader import PageError, read_page
from ensemble_ray.values.attachments import Image, picture_in

_TIMEOUT_S = 15.0
_MAX_PAGE_BYTES = 5_242_880
_PAGE_HEADERS = {
    "User-Agent": "ensemble-ray-web-scraper/1.0",
    "Accept": "text/html,application/xhtml+xml,text/plain;q=0.9,*/*;q=0.5",
}
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}charset=[\"']?\s*([\w.:-]{1,64})", re.IGNORECASE)
_META_WITHIN_BYTES = 1024


class WebScrapeInput(BaseModel):
    """Arguments of `WebScraperTool`."""

    url: str = Field(description="Address of the page, beginning with http:// or https://")


class WebScraperTool(AbstractTypedAgentTool[WebScrapeInput]):
    """Fetches a web page and returns its text without markup, navigation, header and footer; or fetches a picture.

    Args:
        max_content_length: Characters of the text; a longer text is cut and marked.
        fetcher: `fetcher(url) -> html`, sync or async, instead of the guarded fetcher.
        allow_private_hosts: Allow the guarded fetcher to reach loopback, private, link-local and metadata addresses.

    Raises:
        ValueError: `max_content_length` is not positive.
        ToolConfigurationError: the extra `web` is not installed.
    """

    name = "web_scrape"
    effect = "none"
    description = "Fetches a web page and returns its readable text, without markup and navigation."
    input_type = WebScrapeInput

    def __init__(
        self,
        max_content_length: int = 5000,
        fetcher: Callable[[str], str | Awaitable[str]] | None = None,
        *,
        allow_private_hosts: bool = False,
    ) -> None:
        if max_content_length <= 0:
            raise ValueError(f"max_content_length must be > 0, got: {max_content_length}")
        if fetcher is not None and not callable(fetcher):
            raise ValidationError(f"WebScraperTool fetcher must be callable, got: {type(fetcher).__name__}")
        if importlib.util.find_spec("selectolax") is None:
            raise ToolConfigurationError(
                "This tool needs 'selectolax', which is not installed: pip install 'ensemble-ray[web]'"
            )
        self._max_content_length = max_content_length
        self._fetcher = fetcher
        self._allow_private_hosts = allow_private_hosts

    async def execute_typed(self, arguments: WebScrapeInput, /) -> ToolResult:
        url = arguments.url.strip()
        if not url:
            return ToolResult.failure("URL must not be blank")
        try:
            html = await self._fetch(url) if self._fetcher is None else await call_user(self._fetcher, url)
        except (ExitEarlyError, IllegalStateError):
            raise
        except Exception as error:  # noqa: BLE001  a custom fetcher may raise any error
            return ToolResult.failure(f"Failed to fetch URL: {message_of(error)}")
        if isinstance(html, Image):
            return ToolResult.success(html)
        if not isinstance(html, str | bytes):
            return ToolResult.failure(f"Failed to fetch URL: the fetcher must return text, got: {type(html).__name__}")
        limit = self._max_content_length
        try:
            text = await read_page(html, most_characters=limit + 1)
        except PageError as error:
            return ToolResult.failure(f"Failed to read page: {error}")
        return ToolResult.success(text if len(text) <= limit else f"{text[:limit]} [truncated at {limit} chars]")

    async def _fetch(self, url: str) -> str | Image:
        answer = await fetch(
            url,
            headers=_PAGE_HEADERS,
            max_bytes=_MAX_PAGE_BYTES,
            timeout_s=_TIMEOUT_S,
            allow_private_hosts=self._allow_private_hosts,
        )
        if not answer.is_success:
            raise RequestFailedError(f"HTTP {answer.status} from {url}")
        if (picture := picture_in(answer.body, name=urlsplit(url).path.rpartition("/")[2])) is not None:
            if answer.is_truncated:
                raise RequestFailedError(f"the picture is larger than {_MAX_PAGE_BYTES:,} bytes")
            return picture
        declared = _META_CHARSET.search(answer.body[:_META_WITHIN_BYTES])
        charset = declared[1].decode("ascii", "replace") if declared else "utf-8"
        return await threads.run(answer.text, default_encoding=charset)


_MAX_RESULTS = 5
#: short, because parsing JSON blocks every other thread
_MAX_SEARCH_BYTES = 1_048_576
_SEARCH_AGENT = "ensemble-ray-web-search/1.0"


@runtime_checkable
class WebSearchProvider(Protocol):
    """A search service. A plain callable from query to text works, too."""

    def search(self, query: str) -> str | Awaitable[str]:
        """Return the results as text for a model; may be `async`."""
        ...


class WebSearchInput(BaseModel):
    """Arguments of `WebSearchTool`."""

    query: str = Field(description="What to search for, in a few words")


class WebSearchTool(AbstractTypedAgentTool[WebSearchInput]):
    """Searches the web with a provider.

    Args:
        provider: An object with `search(query) -> str`, or a callable with that signature; sync or async.

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
        query = arguments.query.strip()
        if not query:
            return ToolResult.failure("Search query must not be blank")
        provider = self._provider
        search = provider.search if isinstance(provider, WebSearchProvider) else provider
        try:
            return ToolResult.success(await call_user(search, query))
        except (ExitEarlyError, IllegalStateError):
            raise
        except Exception as error:  # noqa: BLE001  a provider may raise any error
            return ToolResult.failure(f"Search failed: {message_of(error)}")


class _KeyedSearch(ABC):
    provider_name = ""
    default_endpoint = ""

    def __init__(self, api_key: str | SecretStr | None, *, endpoint: str | None = None) -> None:
        plain = api_key.get_secret_value() if isinstance(api_key, SecretStr) else api_key
        if plain is None or not plain.strip():
            raise ValueError("api_key must not be blank")
        self._key = SecretStr(plain.strip())
        self._endpoint = endpoint or self.default_endpoint

    async def search(self, query: str) -> str:
        method, url, body = self._request(query)
        headers = {"User-Agent": _SEARCH_AGENT, **({"Content-Type": "application/json"} if body else {})}
        try:
            answer = await exchange(
                method, url, headers=headers, body=body, max_bytes=_MAX_SEARCH_BYTES, timeout_s=_TIMEOUT_S
            )
            found = await threads.run(self._read, answer)
        except RequestFailedError as error:
            raise RequestFailedError(self._without_key(str(error))) from None
        return self._without_key(found)

    @abstractmethod
    def _request(self, query: str) -> tuple[str, str, bytes]:
        """Return method, URL and body."""

    @abstractmethod
    def _hits(self, document: Mapping[str, object]) -> Sequence[tuple[object, object, object]]:
        """Return title, address and extract of each hit."""

    def _read(self, answer: WebAnswer) -> str:
        if answer.status != 200:  # noqa: PLR2004  the service's only status of success
            raise RequestFailedError(f"{self.provider_name} answered with HTTP status {answer.status}")
        try:
            document: object = json.loads(answer.text())
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise RequestFailedError(f"{self.provider_name} answered with something that is no JSON object")
        return _format_hits(self._hits(cast("dict[str, object]", document))[:_MAX_RESULTS])

    def _without_key(self, text: str) -> str:
        key = self._key.get_secret_value()
        for form in {key, quote(key, safe=""), json.dumps(key)[1:-1]}:
            text = text.replace(form, "***")
        return text


class TavilySearch(_KeyedSearch):
    provider_name = "Tavily"
    default_endpoint = "https://api.tavily.com/search"

    def _request(self, query: str) -> tuple[str, str, bytes]:
        key = self._key.get_secret_value()
        request = {"api_key": key, "query": query, "search_depth": "basic", "max_results": _MAX_RESULTS}
        return "POST", self._endpoint, json.dumps(request).encode()

    def _hits(self, document: Mapping[str, object]) -> Sequence[tuple[object, object, object]]:
        return [(hit.get("title"), hit.get("url"), hit.get("content")) for hit in _objects(document.get("results"))]


class SerpApiSearch(_KeyedSearch):
    provider_name = "SerpAPI"
    default_endpoint = "https://serpapi.com/search.json"

    def _request(self, query: str) -> tuple[str, str, bytes]:
        request = {"engine": "google", "q": query, "api_key": self._key.get_secret_value(), "num": _MAX_RESULTS}
        return "GET", f"{self._endpoint}?{urlencode(request)}", b""

    def _hits(self, document: Mapping[str, object]) -> Sequence[tuple[object, object, object]]:
        hits = _objects(document.get("organic_results"))
        return [(hit.get("title"), hit.get("link"), hit.get("snippet")) for hit in hits]


def _objects(value: object) -> list[Mapping[str, object]]:
    if not isinstance(value, list):
        return []
    return [cast("Mapping[str, object]", item) for item in cast("list[object]", value) if isinstance(item, dict)]


def _format_hits(hits: Sequence[tuple[object, object, object]]) -> str:
    blocks: list[str] = []
    for title, url, extract in hits:
        lines = [
            line.format(part.strip())
            for line, part in ((f"{len(blocks) + 1}. {{}}", title), ("   URL: {}", url), ("   {}", extract))
            if isinstance(part, str) and part.strip()
        ]
        if lines:
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks) or "No results found."


_DEFAULT_MAX_BYTES = 1_048_576
_ERROR_BODY_CHARACTERS = 200
_GRACE_S = 10.0  # after the tool's own limit, which reports more
_READING = frozenset({"GET", "HEAD"})


class HttpAgentTool(AbstractAgentTool):
    """Sends its input to one HTTP endpoint and returns the body of the answer.

    With GET, the input is the query parameter `input`. With other methods, it is the body.

    Args:
        name: Name for the model.
        description: Explains to the model when to use the tool and what input it expects.
        url: The endpoint.
        method: HTTP method.
        headers: Headers of every request; their values are never shown.
        timeout: Time limit of one exchange, in seconds or as a `timedelta`.
        max_response_bytes: Limit of the body; a longer body is cut and marked.
        require_approval: Whether the tool asks the run's review handler before each request.

    Raises:
        ValueError: name or url is blank, there is no description, a header is malformed, or a limit is not positive.
    """

    def __init__(
        self,
        name: str | None = None,
        description: str | None = None,
        url: str | None = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str | SecretStr] | None = None,
        timeout: float | timedelta = 30.0,
        max_response_bytes: int = _DEFAULT_MAX_BYTES,
        require_approval: bool = False,
    ) -> None:
        self.name = _require("name", name)
        if description is None:
            raise ValueError("HttpAgentTool description must not be None")
        self.description = description
        self._url = _require("url", url)
        self._method = _require("method", method).upper()
        self._headers = _checked_headers(headers or {})
        self._limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        if not self._limit_s > 0:
            raise ValueError(f"HttpAgentTool timeout must be > 0, got: {timeout}")
        if max_response_bytes <= 0:
            raise ValueError(f"HttpAgentTool max_response_bytes must be > 0, got: {max_response_bytes}")
        self._max_bytes = max_response_bytes
        self.require_approval = require_approval
        self.timeout = self._limit_s + _GRACE_S
        self.effect = "none" if self._method in _READING else "once"

    @classmethod
    def get(cls, name: str | None = None, description: str | None = None, url: str | None = None) -> HttpAgentTool:
        """Build a tool that uses GET."""
        return cls(name, description, url, method="GET")

    @classmethod
    def post(cls, name: str | None = None, description: str | None = None, url: str | None = None) -> HttpAgentTool:
        """Build a tool that uses POST."""
        return cls(name, description, url, method="POST")

    async def do_execute(self, text: str, /) -> ToolResult:
        if self.require_approval:
            described = f"HTTP {self._method} {self._url}"
            request = f"{described}\nBody: {preview(text or '')}"
            approved = await approve(self.context.review_handler, self.name, request, text or "")
            if approved is None:
                return ToolResult.failure(f"HTTP request rejected by reviewer: {self._method} {self._url}")
            text = approved
        # the texts may be long
        url, headers, body = await threads.run(self._request, text or "")
        try:
            answer = await exchange(
                self._method, url, headers=headers, body=body, max_bytes=self._max_bytes, timeout_s=self._limit_s
            )
        except RequestFailedError as error:
            return ToolResult.failure(f"HTTP request failed: {error}")
        return await threads.run(self._read, answer)

    def _request(self, text: str) -> tuple[str, dict[str, str], bytes]:
        headers = {name: value.get_secret_value() for name, value in self._headers.items()}
        if self._method == "GET":
            base, mark, fragment = self._url.partition("#")
            joiner = "" if base.endswith(("?", "&")) else "&" if "?" in base else "?"
            url = f"{base}{joiner}input={quote(text, safe='', errors='replace')}{mark}{fragment}"
            return url, headers, b""
        try:
            from_json(text, allow_inf_nan=False)
            kind = "application/json"
        except (ValueError, TypeError):  # half of a surrogate pair
            kind = "text/plain; charset=UTF-8"
        headers.setdefault("content-type", kind)
        # half of a surrogate pair has no UTF-8 form
        return self._url, headers, text.encode("utf-8", "replace")

    def _read(self, answer: WebAnswer) -> ToolResult:
        body = answer.text()
        if answer.status >= 400:  # noqa: PLR2004  the first error status of HTTP
            reason = f": {body[:_ERROR_BODY_CHARACTERS]}" if body.strip() else ""
            return ToolResult.failure(f"HTTP {answer.status}{reason}")
        if answer.is_truncated:
            body += f"\n[response truncated at {self._max_bytes} bytes]"
        return ToolResult.success(body)


def _require(field: str, value: str | None) -> str:
    if value is None or not value.strip():
        raise ValueError(f"HttpAgentTool {field} must not be blank")
    return value


def _checked_headers(headers: Mapping[str, str | SecretStr]) -> dict[str, SecretStr]:
    checked: dict[str, SecretStr] = {}
    for name, value in headers.items():
        if header_name_flaw(name):
            raise ValueError(f"HttpAgentTool header name is not valid: {name!r}")
        plain = (value.get_secret_value() if isinstance(value, SecretStr) else value).strip()
        if flaw := header_flaw(plain):
            raise ValueError(f"HttpAgentTool header '{name}' {flaw}")
        checked[name.lower()] = SecretStr(plain)
    return checked
