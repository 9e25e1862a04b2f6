"""WebScraperTool offline: what a page's text is, and a fetcher of one's own. The guarded fetcher: tests/contracts."""

from __future__ import annotations

import json
import sys

import pytest

from ensemble_ray import ExitEarlyError, ToolConfigurationError, ToolResult, WebScraperTool
from ensemble_ray.tools.web.page_text import page_text
from tests.ensemble_ray.tools.builtin.travel import travelled

_PAGE = """<!doctype html><html><head><title>Title</title><style>x{}</style></head><body>
<header>Head</header><nav>Menu</nav><script>var x = "<p>no</p>";</script><style>y{}</style>
<h1>News</h1><p>Fish &amp; chips&nbsp;for <b>ev</b>ery<em>one</em>.<br>Second line</p><ul><li>a</li><li>b</li></ul>
<footer>Foot</footer><!-- comment --></body></html>"""


def _page(_url: str) -> str:
    return _PAGE


def _scrape(tool: WebScraperTool, url: str) -> ToolResult:
    return tool.execute(json.dumps({"url": url}))


def test_text_is_the_body_without_its_frame_when_extracted() -> None:
    """S-BIT-41: words of blocks stay apart, words with inline markup stay whole."""
    text = page_text(_PAGE)
    assert text == "News Fish & chips for everyone. Second line a b"


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("", ""),
        ("<frameset><frame src=a></frameset>", ""),
        ("just words", "just words"),
        ("<p>a<p>b", "a b"),
        ("<table><tr><td>a</td><td>b</td></tr></table>", "a b"),
        ("<header><p>x</p></header><div>y</div>", "y"),
        ("<p>&lt;b&gt; &eacute;&#x20AC;</p>", "<b> é€"),
    ],
)
def test_text_is_found_when_the_page_is_odd(html: str, text: str) -> None:
    """S-BIT-41."""
    assert page_text(html) == text


def test_text_is_found_when_the_page_is_nested_beyond_the_stack() -> None:
    """S-BIT-41: bad input is never a crash."""
    assert page_text("<div>" * 5_000 + "deep") == "deep"


@pytest.mark.program
def test_text_is_cut_when_longer_than_the_limit() -> None:
    """S-BIT-42: equal length is not cut."""

    def ten_letters(_url: str) -> str:
        return "<p>abcdefghij</p>"

    assert _scrape(WebScraperTool(10, ten_letters), "http://x").output == "abcdefghij"
    assert _scrape(WebScraperTool(9, ten_letters), "http://x").output == "abcdefghi [truncated at 9 chars]"


@pytest.mark.program
def test_limit_is_5000_when_none_is_given() -> None:
    """S-BIT-42."""
    result = _scrape(WebScraperTool(fetcher=lambda _url: "x" * 5001), "http://x")
    assert result.output == "x" * 5000 + " [truncated at 5000 chars]"


def test_failure_is_told_when_the_url_is_blank_or_the_fetcher_fails() -> None:
    """S-BIT-40."""

    def failing(_url: str) -> str:
        msg = "no route"
        raise OSError(msg)

    assert _scrape(WebScraperTool(fetcher=failing), " ").error_message == "URL must not be blank"
    assert _scrape(WebScraperTool(fetcher=failing), "http://x").error_message == "Failed to fetch URL: no route"


@pytest.mark.program
async def test_own_fetcher_replaces_everything_when_given() -> None:
    """S-BIT-43, S-CONV-16: sync or async; it judges addresses itself."""
    asked: list[str] = []

    async def fetcher(url: str) -> str:
        asked.append(url)
        return _PAGE

    result = await WebScraperTool(fetcher=fetcher).aexecute('{"url": " http://127.0.0.1/x "}')
    assert (result.is_success, asked) == (True, ["http://127.0.0.1/x"])
    assert _scrape(WebScraperTool(fetcher=_page), "anything").output == result.output


def test_control_flow_passes_when_the_fetcher_ends_the_run() -> None:
    """S-TOOL-41 for a built-in tool."""

    def ending(_url: str) -> str:
        raise ExitEarlyError

    with pytest.raises(ExitEarlyError):
        _scrape(WebScraperTool(fetcher=ending), "http://x")


def test_tool_is_refused_when_its_limit_is_not_positive() -> None:
    """S-BIT-42."""
    with pytest.raises(ValueError, match="max_content_length must be > 0, got: 0"):
        WebScraperTool(0)


def test_tool_is_refused_when_the_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-ERR-21: at construction, with the command that mends it."""
    monkeypatch.setitem(sys.modules, "selectolax", None)
    with pytest.raises(ToolConfigurationError, match=r"pip install 'ensemble-ray\[web\]'"):
        WebScraperTool()


@pytest.mark.program
def test_tool_travels_when_pickled() -> None:
    """S-CONV-34."""
    copy = travelled(WebScraperTool(fetcher=_page))
    assert (copy.name, _scrape(copy, "x").is_success) == ("web_scrape", True)
