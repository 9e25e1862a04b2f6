"""Fetches a page and gives its words. Room: built-in tools. In: a URL; out: the text of the page's body.

Fetching is guarded (`tools/net.py`): only http and https, no private addresses unless allowed. Parsing runs in a
daemon thread, and the parser lets go of the interpreter meanwhile: a large page takes a while, one that is nested
out of spite a long while, and neither delays anybody else; the tool's time limit ends the waiting.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, message_of
from ensemble_ray.threads import call_user, threads
from ensemble_ray.tools.net import RequestFailedError, fetch, require_web
from ensemble_ray.tools.tool import ToolResult
from ensemble_ray.tools.typed import AbstractTypedAgentTool

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

__all__ = ["WebScraperTool", "page_text"]

_MAX_BYTES = 5_242_880
_TIMEOUT_S = 15.0
_HEADERS = {
    "User-Agent": "ensemble-ray-web-scraper/1.0",
    "Accept": "text/html,application/xhtml+xml,text/plain;q=0.9,*/*;q=0.5",
    # a compressed page could unfold to far more than the limit before it is counted
    "Accept-Encoding": "identity",
}
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}charset=[\"']?\s*([\w.:-]+)", re.IGNORECASE)
#: a page names its charset in its first bytes or not at all
_META_WITHIN_BYTES = 1024

#: whole elements that hold no words of the page (S-BIT-41)
_REMOVED = frozenset({"script", "style", "nav", "footer", "header"})
#: elements that run on in the line; around every other one there is a gap between words
_INLINE = frozenset(
    {
        *("a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i"),
        *("ins", "kbd", "label", "mark", "q", "s", "samp", "small", "span", "strike", "strong", "sub", "sup"),
        *("time", "tt", "u", "var", "wbr"),
    }
)


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
            msg = f"max_content_length must be > 0, got: {max_content_length}"
            raise ValueError(msg)
        require_web("selectolax")
        if fetcher is None:
            require_web("httpx")
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
        return ToolResult.success(self._cut(await threads.run(page_text, html)))

    async def _fetch(self, url: str) -> str:
        answer = await fetch(
            url,
            headers=_HEADERS,
            max_bytes=_MAX_BYTES,
            timeout_s=_TIMEOUT_S,
            allow_private_hosts=self._allow_private_hosts,
        )
        if not answer.is_success:
            msg = f"HTTP {answer.status} from {url}"
            raise RequestFailedError(msg)
        declared = _META_CHARSET.search(answer.body[:_META_WITHIN_BYTES])
        return answer.text(default_encoding=declared[1].decode("ascii", "replace") if declared else "utf-8")

    def _cut(self, text: str) -> str:
        limit = self._max_content_length
        return text if len(text) <= limit else f"{text[:limit]} [truncated at {limit} chars]"


def page_text(html: str) -> str:
    """The words of a page's body, one space between them; "" where there is no body (S-BIT-41).

    Words of neighbouring blocks are kept apart, a word that inline markup divides stays whole.
    """
    require_web("selectolax")
    from selectolax.lexbor import LexborHTMLParser

    body = LexborHTMLParser(html).body
    if body is None:
        return ""
    pieces: list[str] = []
    # a stack of our own: pages nest deeper than Python's
    pending: list[LexborNode | str] = [body]
    while pending:
        node = pending.pop()
        if isinstance(node, str):
            pieces.append(node)
        elif node.is_text_node:
            pieces.append(node.text_content or "")
        elif node.is_element_node and node.tag not in _REMOVED:
            if node.tag not in _INLINE:
                pieces.append(" ")
                pending.append(" ")
            pending.extend(reversed(_children(node)))
    return " ".join("".join(pieces).split())


def _children(node: LexborNode) -> list[LexborNode]:
    found: list[LexborNode] = []
    child = node.first_child
    while child is not None:
        found.append(child)
        child = child.next
    return found
