"""Takes the pictures of the documentation: `python -m tests.browser.pictures docs/pictures/studio [NAME...]`. They are to be looked at."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from ensemble_ray import Ensemble, InlineRuntime, TaskExecutionError
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.server import StudioServer
from tests.browser import clusters, recorded
from tests.browser.killed import kill_run

_WIDTH, _HEIGHT = 1240, 740


def _record(home: Path) -> None:
    inline = InlineRuntime(home=home)

    def run(name: str, team: Ensemble) -> None:
        with contextlib.suppress(TaskExecutionError):
            team.run(runtime=inline, run_id=name, options=recorded.TAGS)

    run("harbour-review", recorded.drafting_loop(1.0))
    recorded.mapped(240, 0.5, at_once=24).run(runtime=inline, run_id="kettle-reviews")
    recorded.letters(400, 0.3).run(runtime=inline, run_id="damaged-letters")
    run("ticket-4711", recorded.routing_graph())
    run("storm-story", recorded.failing_team(2.0))
    kill_run(home, "invoice-0923")
    run("market-letter-44", recorded.report_team(1.0))
    run("market-letter-45", recorded.report_team(1.4, mood="Prices of whole systems will hold."))
    run("customer-letter", recorded.reviewed_team())
    run("customer-letter-b", recorded.reviewed_team(timeout=timedelta(minutes=4), role="editor"))


def _take(page: Page, url: str, folder: Path, name: str, *, scheme: str = "light") -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.goto("about:blank")
    page.goto(url)
    page.wait_for_selector(
        ".run, .node, canvas[data-drawn], .step-row, .panel, .inbox-row, .compare-table, .data, .trend, .item-row"
    )
    page.wait_for_timeout(900)
    page.evaluate("document.querySelector('.brand small').textContent = ''")  # where this machine keeps its files
    if name == "reviews":
        page.get_by_role("button", name="Edit…").click()
        field = page.get_by_role("textbox", name="Your text")
        text = field.input_value()
        field.fill(
            text.replace(
                "We expect prices of whole systems to fall by another tenth", "Prices of whole systems may fall"
            )
        )
        page.wait_for_timeout(400)
    if name == "timeline":
        page.locator("canvas").hover(position={"x": 900, "y": 190})
        page.wait_for_timeout(200)
    if name.startswith("flow"):
        page.locator(".node.is-running", has_text="Say in two").wait_for()
    if name == "compare":
        page.get_by_label("Only what differs").check()
        page.wait_for_timeout(200)
    page.screenshot(path=folder / f"{name}.png")


def _take_actors(folder: Path) -> None:
    """Begin runs on a local Ray, and take a picture of their processes: one was killed, one limit is full, one endpoint fails."""
    home = Path(tempfile.mkdtemp(prefix="studio-"))
    server = StudioServer(StoreAddress.of(home), port=0)
    at_work = clusters.ClusterAtWork(home)
    with at_work, sync_playwright() as playwright:
        server.start()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme, width in (("light", _WIDTH), ("dark", _WIDTH), ("light", 400)):
            page = browser.new_page(viewport={"width": width, "height": 940}, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(f"{server.url}#/actors")
            page.wait_for_selector(".restarted", timeout=60_000)
            page.wait_for_selector(".limits .status.is-failed, .limits .status.is-waiting", timeout=60_000)
            page.evaluate("document.querySelector('.brand small').textContent = ''")
            page.evaluate("document.querySelector('.node-title-row h2').textContent = 'node-1'")
            kind = "" if (scheme, width) == ("light", _WIDTH) else f"-{scheme}-{width}"
            page.screenshot(path=folder / f"actors{kind}.png")
        browser.close()
        server.stop()
    shutil.rmtree(home, ignore_errors=True)


def main(folder: Path, names: Collection[str] = ()) -> None:
    """Record runs, begin one that goes on, and take a picture of each view; where names are given, of these."""
    folder.mkdir(parents=True, exist_ok=True)
    if not names or "actors" in names:
        _take_actors(folder)
    if names and set(names) == {"actors"}:
        return
    home = Path(tempfile.mkdtemp(prefix="studio-"))
    _record(home)
    server = StudioServer(StoreAddress.of(home), port=0)
    server.start()
    slow = threading.Thread(
        target=lambda: recorded.report_team(6.0).run(runtime=InlineRuntime(home=home), run_id="market-letter-46"),
        daemon=True,
    )
    slow.start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
        for name, path, scheme in (
            ("runs", "/runs", "light"),
            ("flow", "/runs/market-letter-46/flow?step=find-prices%230", "light"),
            ("flow-dark", "/runs/market-letter-46/flow", "dark"),
            ("timeline", "/runs/market-letter-44/timeline", "light"),
            ("failure", "/runs/storm-story/flow", "light"),
            ("step", "/runs/storm-story/steps?step=story%230", "light"),
            ("trends", "/trends", "light"),
            ("map-reduce", "/runs/kettle-reviews/timeline", "dark"),
            ("items", "/runs/damaged-letters/items", "light"),
            ("reviews", "/reviews", "light"),
            ("budget", "/runs/market-letter-44/budget", "light"),
            ("compare", "/compare?a=market-letter-44&b=market-letter-45&step=edit%230", "light"),
        ):
            if names and name not in names:
                continue
            _take(page, f"{server.url}#{path}", folder, name, scheme=scheme)
        browser.close()
    server.stop()
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
