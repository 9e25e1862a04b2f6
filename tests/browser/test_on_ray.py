"""A run on a cluster, seen while it goes on: its steps, and the processes that have its agents."""

from __future__ import annotations

import asyncio
import re

import pytest
from playwright.async_api import Page, expect

from ensemble_ray import Runtime
from tests.browser.conftest import Runs, open_tabs
from tests.browser.gates import Gate
from tests.browser.recorded import blocked_team

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_what_is_known_of_processes_is_seen(ray_runtime: Runtime, own: Runs, gate: Gate, page: Page) -> None:
    """S-STU-100, S-STU-147: which process of the cluster has which agent, and does what; a link leads to the step; then the run ends."""
    work = asyncio.create_task(asyncio.to_thread(blocked_team(gate).run, runtime=ray_runtime, run_id="on-ray"))
    await page.goto(own.at("/runs"))
    await page.locator(".run").click()
    await expect(page.locator(".node.is-running")).to_contain_text("Wait for the test")
    await open_tabs(page, own, "on-ray", "timeline", "steps", "budget")
    await page.get_by_role("link", name="Actors").click()
    row = page.locator("table.data tr", has_text="second#0")
    await expect(row).to_contain_text(re.compile(r"AGENT.*Writer.*Say what is at hand.* s.*MB\d{2,}"))
    await expect(page.locator("table.data tr", has_text="SCHEDULER")).to_contain_text("runs: 1")
    step = row.get_by_role("link", name="second")
    await step.focus()
    async with page.expect_response("**/api/studio/actors"):
        pass
    async with page.expect_response("**/api/studio/actors"):
        pass  # what came before is drawn
    await expect(step).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator(".step-panel h2")).to_contain_text("Wait for the test")
    await page.get_by_role("tab", name="Actors").click()
    await expect(row).to_have_count(1)
    gate.open.set()
    await work
    await page.get_by_role("tab", name="Flow").click()
    await expect(page.locator(".node.is-completed")).to_have_count(3)
