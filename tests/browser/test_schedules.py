"""The page of an endpoint's schedules: what it lists, and its buttons."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from ensemble_ray import Schedule
from ensemble_ray.serve.api import build_api
from tests.browser.conftest import Runs
from tests.serve.driving import driven
from tests.serve.http_server import served_app
from tests.serve.scheduling import NOON, Desk, SetClock

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_schedules_are_listed_paused_and_run(home: str, page: Page) -> None:
    """S-SCH-52: with histories that lead to the runs; also on a telephone, and by the rules of accessibility."""
    desk, clock = Desk(), SetClock(NOON + timedelta(minutes=30))
    away = Path(home) / "none"
    team = desk.team(
        hourly=Schedule(every="1h"),
        nightly=Schedule(cron="0 3 * * *", timezone="Europe/Berlin"),
        inbox=Schedule(folder=away, pattern="*.pdf", input="text"),
    )
    with served_app(build_api(driven({"letters": team}, clock=clock), has_studio=True)) as url:
        await clock.move(30 * 60)
        await desk.next()
        await page.goto(f"{url}/studio/#/runs")
        await page.get_by_role("link", name="Schedules").click()
        hourly = page.get_by_role("region", name="letters / hourly", exact=True)
        await expect(hourly.locator(".schedule-when")).to_contain_text("Every 1h")
        await expect(hourly.locator("tbody tr")).to_have_count(1)
        inbox = page.get_by_role("region", name="letters / inbox", exact=True)
        await expect(inbox.locator(".banner")).to_contain_text(f"Cannot list {away}")
        await expect(inbox.get_by_role("button", name="Run now")).to_have_count(0)
        nightly = page.get_by_role("region", name="letters / nightly", exact=True)
        await expect(nightly).to_contain_text("0 3 * * * (Europe/Berlin)")
        await nightly.get_by_role("button", name="Pause").click()
        await expect(nightly.locator(".badge")).to_have_text("PAUSED")
        await nightly.get_by_role("button", name="Run now").click()
        await desk.next()
        await expect(nightly.locator("tbody tr")).to_contain_text("Requested")
        found = await Axe().run(page, options={"resultTypes": ["violations"]})
        assert [each["id"] for each in found.response["violations"]] == []
        await page.set_viewport_size({"width": 400, "height": 800})
        assert await page.evaluate("document.documentElement.scrollWidth") <= 400
        await page.set_viewport_size({"width": 1280, "height": 800})
        await nightly.get_by_role("button", name="Resume").click()
        await expect(nightly.locator(".badge")).to_have_count(0)
        await nightly.locator("tbody a").click()
        await expect(page.get_by_role("tab", name="Flow")).to_be_visible()
        await page.goto("about:blank")


async def test_a_page_over_records_has_no_schedules(runs: Runs, page: Page) -> None:
    """S-SCH-52."""
    await page.goto(runs.at("/runs"))
    await expect(page.locator(".run").first).to_be_visible()
    await expect(page.get_by_role("link", name="Schedules")).to_have_count(0)
