"""Fetches a page and gives its words. Package: built-in tools. In: a URL; out: the text of the page's body.

Fetching is guarded (`tools/web/net.py`): only http and https, no private addresses unless allowed, all limits counted while
the page is read. Bytes become text in a thread, and HTML is parsed in a process that is killed with its call
(`web/page_reader.py`): a page that is made to be slow costs a bounded time and delays nobody else.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Awaitable, Callable

from pydantic import BaseModel, Field

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, ToolConfigurationError, ValidationError, message_of
from ensemble_ray.process.threads import call_user, threads
from ensemble_ray.tools.tool import ToolResult
from ensemble_ray.tools.typed import AbstractTypedAgentTool
from ensemble_ray.tools.web.net import RequestFailedError, fetch
from ensemble_ray.tools.web.page_reader import PageError, read_page

__all__ = ["WebScraperTool"]

_MAX_BYTES = 5_242_880
_TIMEOUT_S = 15.0
_HEADERS = {
    "User-Agent": "ensemble-ray-web-scraper/1.0",
    "Accept": "text/html,application/xhtml+xml,text/plain;q=0.9,*/*;q=0.5",
}
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}charset=[\"']?\s*([\w.:-]{1,64})", re.IGNORECASE)
#: a page names its charset in its first bytes or not at all
_META_WITHIN_BYTES = 1024


class WebScrapeInput(BaseModel):
    """Which page to fetch."""

    url: str = Field(description="Address of the page, beginning with http:// or https://")


class WebScraperTool(AbstractTypedAgentTool[WebScrapeInput]):
    """Fetches a web page and returns its text without markup, navigation, header and footer.

    Args:
        max_content_length: Longer text is cut, and says so.
        fetcher: `fetcher(url) -> html`, sync or async, in place of the guarded fetcher.
        allow_private_hosts: Let the guarded fetcher reach loopback, private, link-local and metadata addresses.

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
        """Fetch the page and give its text."""
        url = arguments.url.strip()
        if not url:
            return ToolResult.failure("URL must not be blank")
        try:
            html = await self._fetch(url) if self._fetcher is None else await call_user(self._fetcher, url)
        except (ExitEarlyError, IllegalStateError):
            raise
        except Exception as error:  # noqa: BLE001  a custom fetcher may raise anything
            return ToolResult.failure(f"Failed to fetch URL: {message_of(error)}")
        if not isinstance(html, str | bytes):
            return ToolResult.failure(f"Failed to fetch URL: the fetcher gave no text but: {type(html).__name__}")
        try:
            text = await read_page(html, most_characters=self._max_content_length + 1)
        except PageError as error:
            return ToolResult.failure(f"Failed to read page: {error}")
        return ToolResult.success(self._cut(text))

    async def _fetch(self, url: str) -> str:
        answer = await fetch(
            url,
            headers=_HEADERS,
            max_bytes=_MAX_BYTES,
            timeout_s=_TIMEOUT_S,
            allow_private_hosts=self._allow_private_hosts,
        )
        if not answer.is_success:
            raise RequestFailedError(f"HTTP {answer.status} from {url}")
        declared = _META_CHARSET.search(answer.body[:_META_WITHIN_BYTES])
        charset = declared[1].decode("ascii", "replace") if declared else "utf-8"
        return await threads.run(answer.text, default_encoding=charset)

    def _cut(self, text: str) -> str:
        limit = self._max_content_length
        return text if len(text) <= limit else f"{text[:limit]} [truncated at {limit} chars]"
