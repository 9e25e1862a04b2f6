"""A browser, and a page over runs that were recorded for it. Without Chromium these tests are skipped, and only they.

All of them share one browser and one event loop, and one page, since a new one takes a second of processor time to load the
scripts. Tests of several pages, or with a clock of their own, take a context. A test fails where its page says an error on its
console, asks anybody but its server, or does what its policy forbids.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Error,
    Page,
    Request,
    ViewportSize,
    async_playwright,
    expect,
)

from ensemble_ray import InlineRuntime, TaskExecutionError
from ensemble_ray.definition.fields import Origin
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.server import StudioServer
from ensemble_ray.teamfile import load_source
from tests.browser import recorded
from tests.browser.gates import Gate
from tests.browser.killed import kill_run

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
#: What a page may take on a machine that does a lot of other things meanwhile, ms.
_PATIENCE_MS = 40_000
_SIZE: ViewportSize = {"width": 1280, "height": 800}
#: Of several pages of a browser one is in front; the others are to draw and to look again as it does.
_AWAKE = (
    "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding",
    "--disable-backgrounding-occluded-windows",
)
#: What a tab shows when it is drawn.
_DRAWN = {
    "flow": ".node",
    "timeline": "canvas[data-drawn]",
    "steps": ".step-row",
    "budget": ".panel",
    "actors": ".actors .card, .actors .empty",
}
TABS = tuple(_DRAWN)
#: Maps of the long map-reduce; with their reduces some 2,500 steps.
_MANY = 2000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark these tests as starting programs, run them in one loop, and skip them where there is no browser."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker("program")
        if isinstance(item, pytest.Function) and item.get_closest_marker("asyncio"):
            item.add_marker(pytest.mark.asyncio(loop_scope="package"), append=False)
        if _CHROMIUM is None and "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="there is no chromium: apt-get install chromium"))


@dataclass
class Runs:
    """A home with runs, and the server that shows them."""

    home: Path
    server: StudioServer

    def at(self, path: str) -> str:
        """Return the address of a view."""
        return f"{self.server.url}#{path}"

    @property
    def inline(self) -> InlineRuntime:
        """A runtime that records there."""
        return InlineRuntime(home=self.home)


def _record(home: Path) -> None:
    """Leave runs of all kinds in a home, each under its name."""
    inline = InlineRuntime(home=home)
    # by its place, so that another process finds it when the run is forked
    report = load_source(Origin(place="tests.browser.recorded:report_team"))
    report.run(runtime=inline, run_id="report", options=recorded.TAGS)
    recorded.drafting_loop().run(runtime=inline, run_id="loop")
    recorded.routing_graph().run(runtime=inline, run_id="graph")
    recorded.hostile_team().run(runtime=inline, run_id="hostile")
    recorded.doubtful_team().run(runtime=inline, run_id="doubtful")
    recorded.mapped(60).run(runtime=inline, run_id="mapped")
    recorded.mapped(_MANY).run(runtime=inline, run_id="many")
    recorded.reviewed_team().run(runtime=inline, run_id="waiting")
    with pytest.raises(TaskExecutionError):
        recorded.failing_team().run(runtime=inline, run_id="failed")
    kill_run(home, "killed")


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Runs that ended, failed, were killed and wait, and the page over them; tests only look at these."""
    home = tmp_path_factory.mktemp("studio")
    _record(home)
    yield from _serve(home)


@pytest.fixture
def own(home: str) -> Iterator[Runs]:
    """A home of the test's own, and the page over it: what is done there is seen by nobody else."""
    yield from _serve(Path(home))


def _serve(home: Path) -> Iterator[Runs]:
    server = StudioServer(StoreAddress.of(home), port=0)
    server.start()
    yield Runs(home, server)
    server.stop()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate that is open at the end, whatever became of the test."""
    made = Gate()
    yield made
    made.open.set()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncGenerator[Browser, None]:
    """One browser for all tests."""
    expect.set_options(timeout=_PATIENCE_MS)
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox", *_AWAKE])
        yield opened
        await opened.close()


async def open_tabs(page: Page, runs: Runs, run: str, *tabs: str) -> None:
    """Open tabs of a run, by their addresses, and see each of them drawn."""
    for tab in tabs:
        await page.goto(runs.at(f"/runs/{run}/{tab}"))
        await expect(page.get_by_role("tab", selected=True)).to_have_text(tab.capitalize())
        await expect(page.locator(_DRAWN[tab]).first).to_be_visible()
        assert await page.locator(".empty", has_text="cannot be shown").count() == 0


@dataclass
class Watched:
    """What a page did that it should not do."""

    faults: list[str] = field(default_factory=list)
    #: Parts of messages that a test brings about on purpose, such as a dead server's.
    expected: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        """Listen to a page."""
        page.on("console", self._console)
        page.on("pageerror", self._error)
        page.on("request", self._request)
        page.on("dialog", self._dialog)

    def detach(self, page: Page) -> None:
        """Listen to it no more."""
        page.remove_listener("console", self._console)
        page.remove_listener("pageerror", self._error)
        page.remove_listener("request", self._request)
        page.remove_listener("dialog", self._dialog)

    def _error(self, error: Error) -> None:
        self.faults.append(f"error: {error}")

    def _dialog(self, dialog: Dialog) -> None:
        self.faults.append(f"dialog: {dialog.message}")

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"} and not any(part in message.text for part in self.expected):
            self.faults.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "file:", "data:", "blob:")):
            self.faults.append(f"request: {request.url}")


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Fails the test whose pages had faults."""
    seen = Watched()
    yield seen
    assert seen.faults == []


@asynccontextmanager
async def _profile(browser: Browser) -> AsyncGenerator[BrowserContext, None]:
    opened = await browser.new_context(viewport=_SIZE)
    opened.set_default_timeout(_PATIENCE_MS)
    yield opened
    await asyncio.wait_for(opened.close(), _PATIENCE_MS / 1000)  # which has no limit of its own


@pytest_asyncio.fixture(loop_scope="package")
async def context(browser: Browser, watched: Watched) -> AsyncGenerator[BrowserContext, None]:
    """A fresh profile whose pages are watched."""
    async with _profile(browser) as opened:
        opened.on("page", watched.watch)
        yield opened


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared_page(browser: Browser) -> AsyncGenerator[Page, None]:
    """The page that tests take in turn."""
    async with _profile(browser) as opened:
        yield await asyncio.wait_for(opened.new_page(), _PATIENCE_MS / 1000)


@pytest_asyncio.fixture(loop_scope="package")
async def page(shared_page: Page, watched: Watched) -> AsyncGenerator[Page, None]:
    """An empty page, which knows nothing of earlier tests."""
    watched.watch(shared_page)
    yield shared_page
    await shared_page.unroute_all()
    if shared_page.url.startswith("http"):
        await shared_page.evaluate("localStorage.clear(); sessionStorage.clear()")
    await shared_page.goto("about:blank")
    await shared_page.emulate_media(color_scheme="light", reduced_motion="no-preference")
    await shared_page.set_viewport_size(_SIZE)
    watched.detach(shared_page)
