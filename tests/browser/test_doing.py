"""What is done from the page: reviews, actions with what they mean said before, exports, files that are dropped on it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.async_api import BrowserContext, Page, expect

from ensemble_ray import EnsembleDevTools, InlineRuntime, pending_reviews
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.server import StudioServer
from tests.browser import recorded
from tests.browser.conftest import Runs, Watched

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_a_review_is_approved_in_the_browser(own: Runs, page: Page) -> None:
    """S-WEB-81: task, output, countdown with the coming action, how many more wait; then the next one is shown."""
    for name in ("one", "two"):
        recorded.reviewed_team().run(runtime=own.inline, run_id=name)
    await page.goto(own.at("/reviews"))
    detail = page.locator(".inbox-detail")
    await expect(detail).to_contain_text("Does it promise anything that we cannot keep?")
    await expect(detail).to_contain_text("Home storage is growing")
    await expect(page.locator("[data-countdown]")).to_have_text(re.compile("Ends early in 3 h 59 m|Ends early in 4 h"))
    await expect(detail).to_contain_text("1 more review waits")
    await page.get_by_placeholder("Comment").fill("fine")
    await page.get_by_role("button", name="Approve").click()
    await expect(page.locator(".inbox-row")).to_have_count(1)
    assert len(pending_reviews(runtime=own.inline)) == 1
    await page.keyboard.press("y")
    await expect(page.locator(".empty")).to_contain_text("No open reviews")
    await page.goto(own.at("/runs/one/steps?step=letter%230"))
    await expect(page.locator(".step-panel")).to_contain_text("Approved")
    await expect(page.locator(".step-panel")).to_contain_text("fine")


async def test_an_edit_shows_what_it_changes(own: Runs, page: Page) -> None:
    """S-WEB-81, S-STU-142: a text area with the output, and the difference by words beside it."""
    recorded.reviewed_team().run(runtime=own.inline, run_id="one")
    await page.goto(own.at("/reviews"))
    await page.get_by_role("button", name="Edit…").click()
    field = page.get_by_role("textbox", name="Your text")
    text = await field.input_value()
    assert text.startswith("Home storage")
    await field.fill(text.replace("growing", "shrinking"))
    await expect(page.locator(".diff ins")).to_have_text("shrinking")
    await expect(page.locator(".diff del")).to_have_text("growing")
    await page.get_by_role("button", name="Use this text").click()
    await expect(page.locator(".empty")).to_contain_text("No open reviews")
    await page.goto(own.at("/runs/one/steps?step=letter%230"))
    await expect(page.locator(".step-panel")).to_contain_text("Edited")


async def test_a_role_that_is_required_disables_until_somebody_says_to_have_it(own: Runs, page: Page) -> None:
    """S-WEB-59, S-STU-143, S-QUO-55: the role is recorded with the decision."""
    recorded.reviewed_team(role="editor").run(runtime=own.inline, run_id="one")
    await page.goto(own.at("/reviews"))
    approve = page.get_by_role("button", name="Approve")
    await expect(approve).to_be_disabled()
    await page.keyboard.press("y")
    await page.get_by_role("checkbox", name=re.compile("editor")).check()
    await expect(approve).to_be_enabled()
    await approve.click()
    await expect(page.locator(".empty")).to_contain_text("No open reviews")
    await page.goto(own.at("/runs/one/steps?step=letter%230"))
    await expect(page.locator(".step-panel")).to_contain_text("(editor)")


async def test_the_second_of_two_decisions_says_who_was_first(
    own: Runs, context: BrowserContext, watched: Watched
) -> None:
    """S-STU-144: two pages show the same gate; the first decision counts, and the second is told."""
    watched.expected.append("409")
    recorded.reviewed_team().run(runtime=own.inline, run_id="one")
    pages = [await context.new_page() for _ in range(2)]
    await pages[1].clock.install()  # this one does not look again by itself
    for page in pages:
        await page.goto(own.at("/reviews"))
        await expect(page.get_by_role("button", name="Approve")).to_be_visible()
    await pages[1].clock.pause_at(await pages[1].evaluate("Date.now()") + 60_000)
    await pages[0].get_by_role("button", name="Approve").click()
    await expect(pages[0].locator(".empty")).to_be_visible()
    if await pages[1].get_by_role("button", name="End run").count():
        await pages[1].get_by_role("button", name="End run").click()
        await pages[1].get_by_role("button", name="Yes, end it here").click()
        await expect(pages[1].locator(".toast.bad")).to_contain_text("has been decided: approve, by")


async def test_a_fork_says_what_it_takes_and_what_it_does_again(page: Page, runs: Runs) -> None:
    """S-STU-145: before the click counts; Esc leaves everything as it was."""
    await page.goto(runs.at("/runs/report/steps?step=write%230"))
    await page.get_by_role("button", name="Fork from here").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("2 steps will be repeated")
    await expect(dialog).to_contain_text("4 steps are reused")
    await expect(dialog.get_by_role("button", name="Fork", exact=True)).to_be_enabled()
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)


async def test_resuming_a_killed_run_names_the_call_that_nobody_knows_of(page: Page, runs: Runs) -> None:
    """S-STU-145."""
    await page.goto(runs.at("/runs/killed/flow"))
    await page.get_by_role("button", name="Continue").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("transfer")


async def test_a_page_without_actions_offers_none(page: Page, runs: Runs) -> None:
    """S-STU-146: where the server only shows, the page has no buttons that do things, and says why in its inbox."""
    server = StudioServer(StoreAddress.of(runs.home), port=0, has_actions=False)
    server.start()
    try:
        await page.goto(f"{server.url}#/runs/failed/flow")
        await expect(page.get_by_role("button", name="Export")).to_be_visible()
        for name in ("Continue", "Fork", "End run"):
            assert await page.get_by_role("button", name=name, exact=True).count() == 0
        await page.goto(f"{server.url}#/reviews")
        await expect(page.get_by_role("button", name="Approve")).to_be_disabled()
        await page.goto("about:blank")  # or it asks on while the server stops
    finally:
        server.stop()


async def test_an_exported_file_opens_offline(page: Page, runs: Runs, tmp_path: Path, watched: Watched) -> None:
    """S-STU-160: one file with everything in it; it asks nobody anything, under a policy of its own."""
    await page.goto(runs.at("/runs/report/flow"))
    await page.get_by_role("button", name="Export").click()
    async with page.expect_download() as downloading:
        await page.get_by_role("menuitem", name=re.compile("One HTML file")).click()
    file = tmp_path / "report.html"
    await (await downloading.value).save_as(file)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(file.as_uri())
    await expect(page.locator(".node.is-completed")).to_have_count(6)
    for tab, shown in (
        ("Timeline", "canvas[data-drawn]"),
        ("Steps", ".step-row"),
        ("Budget", ".panel"),
        ("Flow", ".node"),
    ):
        await page.get_by_role("tab", name=tab).click()
        await expect(page.locator(shown).first).to_be_visible()
    await page.locator(".node", has_text="Say in two sentences").click()
    await expect(page.locator(".step-panel")).to_contain_text("installers are the limit")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert await page.get_by_role("button", name="Fork").count() == 0


async def test_a_hostile_run_is_exported_without_harm(page: Page, runs: Runs, tmp_path: Path) -> None:
    """S-STU-161: what a model said stays data in the file, too."""
    await page.goto(runs.at("/runs/hostile/flow"))
    await page.get_by_role("button", name="Export").click()
    async with page.expect_download() as downloading:
        await page.get_by_role("menuitem", name=re.compile("One HTML file")).click()
    file = tmp_path / "hostile.html"
    await (await downloading.value).save_as(file)
    await page.goto(file.as_uri())
    await page.locator(".node").first.click()
    await expect(page.locator(".step-panel")).to_contain_text("<script>window.pwned = 1</script>")
    assert await page.evaluate("window.pwned") is None


async def drop(page: Page, name: str, text: str) -> None:
    """Drop a file on the page."""
    await page.evaluate(
        """([name, text]) => {
            const data = new DataTransfer();
            data.items.add(new File([text], name, {type: "application/json"}));
            document.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
        }""",
        [name, text],
    )


async def test_graphs_and_traces_are_dropped_on_the_page(page: Page, runs: Runs, tmp_path: Path) -> None:
    """S-VIZ-70, S-VIZ-77, S-STU-162: a graph, a trace, half a trace; something else is refused with what to do."""
    team = recorded.report_team()
    dag = EnsembleDevTools.export_dag(team, tmp_path)
    output = team.run(runtime=InlineRuntime(home=tmp_path / "home"))
    trace = json.loads(EnsembleDevTools.export_trace(output, tmp_path).read_text())
    await page.goto(runs.at("/runs"))
    await expect(page.locator(".run").first).to_be_visible()
    await drop(page, dag.name, dag.read_text())
    await expect(page.locator(".node")).to_have_count(6)
    await expect(page.locator(".edges .edge-line")).to_have_count(8)
    await drop(page, "a.trace.json", json.dumps(trace))
    await expect(page.locator(".node.is-completed")).to_have_count(6)
    await page.locator(".node").first.click()
    await expect(page.locator(".step-panel")).to_contain_text("search_reports")
    for task in trace["task_traces"]:
        for name in ("started_at", "metrics", "prompts", "llm_interactions"):
            task.pop(name, None)
    trace.pop("metrics")
    await drop(page, "half.trace.json", json.dumps(trace))
    await expect(page.locator(".run-head")).to_contain_text("half")
    for tab in ("Timeline", "Steps", "Budget", "Flow"):
        await page.get_by_role("tab", name=tab).click()
    await expect(page.locator(".node")).to_have_count(6)
    await drop(page, "else.json", "{}")
    await expect(page.locator(".toast.bad")).to_contain_text("What to do")
