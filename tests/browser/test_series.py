"""Several runs of one team, one above the other; and files of a folder, as pages show them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from ensemble_ray import EnsembleDevTools
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.server import StudioServer
from tests.browser import recorded
from tests.browser.conftest import Runs
from tests.browser.gates import Gate

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_finished_runs_lie_above_the_one_that_goes_on(own: Runs, page: Page, gate: Gate) -> None:
    """S-VIZ-76, S-VIZ-79: number, workflow, task count, duration; each opens into its lanes; the flow has a list to go to another."""
    past = Gate()
    past.open.set()
    for name in ("one", "two"):
        await asyncio.to_thread(recorded.blocked_team(past).run, runtime=own.inline, run_id=name)
    recorded.doubtful_team().run(runtime=own.inline, run_id="other")
    team = recorded.blocked_team(gate)
    work = asyncio.create_task(asyncio.to_thread(team.run, runtime=own.inline, run_id="now"))
    await page.goto(own.at("/runs"))
    await page.locator(".run[data-key=now]").click()
    await expect(page.locator(".node.is-running")).to_have_count(1)
    selector = page.get_by_label("Run", exact=True)
    await expect(selector.locator("option")).to_have_count(3)
    assert await selector.input_value() == "now"
    texts = [text.split(" \u00b7 ")[:2] for text in await selector.locator("option").all_inner_texts()]
    assert texts == [["#3", "Running"], ["#2", "Completed"], ["#1", "Completed"]]

    await page.get_by_role("tab", name="Timeline").click()
    lines = page.locator(".stack-run")
    await expect(lines).to_have_count(2)
    for number, name in enumerate(("one", "two")):
        await expect(lines.nth(number).locator("summary")).to_have_text(
            re.compile(rf"#{number + 1}\s*sequential\s*3 tasks\s*[\d.]+ m?s.*{name}$")
        )
    stack, holder = await page.locator(".stack").bounding_box(), await page.locator(".lanes-view").bounding_box()
    assert stack is not None
    assert holder is not None
    assert stack["y"] + stack["height"] <= holder["y"] + 1
    await lines.first.locator("summary").click()
    await expect(lines.first.locator("[data-drawn='3']")).to_be_visible()

    gate.open.set()
    await work
    await page.get_by_role("tab", name="Flow").click()
    await expect(selector.locator("option").first).to_have_text(re.compile("#3 \u00b7 Completed"))
    await selector.select_option("one")
    await expect(page).to_have_url(re.compile("#/runs/one/flow"))
    await expect(page.locator(".node.is-completed")).to_have_count(3)
    await page.get_by_role("tab", name="Timeline").click()
    await expect(page.locator("canvas.lanes")).to_have_attribute("aria-label", re.compile("3 steps"))
    await expect(page.locator(".stack")).to_be_hidden()


async def test_files_of_a_folder_are_opened_in_the_page(own: Runs, page: Page, tmp_path: Path) -> None:
    """S-VIZ-70, S-VIZ-78, S-STU-104: listed, looked at again by itself, each opened at an address of its own, which lasts a reload."""
    team = recorded.report_team()
    output = await asyncio.to_thread(team.run, runtime=own.inline, run_id="report")
    EnsembleDevTools.build_dag(team).to_json(tmp_path / "team.dag.json")
    (tmp_path / "wrong.json").write_text("{}")
    server = StudioServer(StoreAddress.of(own.home), port=0, files=tmp_path)
    server.start()
    try:
        await page.goto(server.url)
        await expect(page).to_have_url(re.compile("#/files$"))
        rows = page.get_by_role("listitem")
        await expect(rows).to_have_count(2)
        await expect(page.locator(".run-summary.bad")).to_contain_text("What to do")
        EnsembleDevTools.export_trace(output, tmp_path)
        await expect(rows).to_have_count(3)
        await page.get_by_role("link", name=re.compile("team.dag.json")).click()
        await expect(page.locator(".node")).to_have_count(6)
        await page.reload()
        await expect(page.locator(".edges .edge-line")).to_have_count(8)
        await expect(page.locator(".node.critical")).to_have_count(0)
        await expect(page.get_by_role("button", name=re.compile("Fork|End run|Continue"))).to_have_count(0)
        await page.get_by_role("link", name="All files").click()
        await page.get_by_role("link", name=re.compile("TRACE")).click()
        await page.locator(".node").first.click()
        await expect(page.locator(".step-panel")).to_contain_text("search_reports")
        await page.get_by_role("link", name="Runs", exact=True).click()
        await expect(page.locator(".run")).to_contain_text("report")
    finally:
        server.stop()
