"""The table of runs: what tells runs apart, columns, order, groups, filters, and what is done with several runs."""

from __future__ import annotations

import contextlib
import re
from datetime import datetime

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from ensemble_ray import Agent, ChatResponse, Ensemble, Review, RunOptions, Task, TaskExecutionError
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import ScriptedModel
from tests.browser import recorded
from tests.browser.conftest import Runs

pytestmark = pytest.mark.asyncio(loop_scope="package")


def leave_run(runs: Runs, run_id: str, team: str, topic: str, fault: str = "", **tags: str) -> None:
    """Record a run of a small team, which fails with a fault."""

    def write(_: object) -> str:
        if fault:
            raise ValueError(fault)
        return f"All about {topic}."

    task = Task(name="write", description="Write about {topic}", expected_output="x", handler=write)
    with contextlib.suppress(TaskExecutionError):
        Ensemble(name=team, tasks=[task], inputs={"topic": topic}).run(
            runtime=runs.inline, run_id=run_id, options=RunOptions(tags=tags)
        )


@pytest.fixture
def table(own: Runs) -> Runs:
    """Five runs of two teams: two failed with nearly the same error."""
    leave_run(own, "w-1", "Market writers", "tides", stage="test")
    leave_run(own, "w-2", "Market writers", "storms", fault="no answer within 12.5 s", stage="test")
    leave_run(own, "r-1", "Review readers", "kettles", stage="live")
    leave_run(own, "w-3", "Market writers", "floods", fault="no answer within 31.25 s")
    leave_run(own, "w-4", "Market writers", "clouds")
    return own


async def names(page: Page) -> list[str]:
    """The ids of the rows in their order."""
    return await page.locator(".run .run-id").all_inner_texts()


async def test_a_run_is_told_from_others_everywhere(table: Runs, page: Page) -> None:
    """S-STU-105, S-STU-237: by its team and its inputs, a failed run by its error."""
    await page.goto(table.at("/runs"))
    row = page.locator(".run[data-key=w-1]")
    await expect(row).to_contain_text("Market writers")
    await expect(row.locator(".run-line")).to_have_text("topic: tides")
    failed = page.locator(".run[data-key=w-2] .run-line.bad")
    await expect(failed).to_contain_text("no answer within 12.5 s")
    assert await page.title() == "Runs · Studio"

    await page.goto(table.at("/runs/w-1/flow"))
    await expect(page.locator(".run-head")).to_contain_text("topic: tides")
    await expect(page).to_have_title("Market writers · topic: tides · Studio")
    options = page.get_by_label("Run", exact=True).locator("option")
    await expect(options).to_have_count(4)
    await expect(options.filter(has_text="topic: clouds")).to_have_count(1)
    await expect(options.filter(has_text="no answer within 12.5 s")).to_have_count(1)
    await page.goto(table.at("/runs/w-2/flow"))
    await expect(page).to_have_title(re.compile("Market writers · .*no answer within 12.5 s.* · Studio"))

    await page.goto(table.at("/compare?a=w-1&b=w-2"))
    sides = page.locator(".versus .panel")
    await expect(sides.first).to_contain_text("topic: tides")
    await expect(sides.last).to_contain_text("no answer within 12.5 s")
    await expect(page).to_have_title(re.compile("^Compare Market writers · topic: tides / Market writers"))

    draft = Task(
        name="draft",
        description="Draft it",
        expected_output="x",
        handler=lambda _: "ok",
        review=Review.required("Fine?"),
    )
    asking = Ensemble(name="Letter writers", tasks=[draft], inputs={"reader": "Ann"}, review_wait="detach")
    asking.run(runtime=table.inline, run_id="asks")
    await page.goto(table.at("/reviews"))
    await expect(page.locator(".inbox-row")).to_contain_text("reader: Ann")
    await expect(page.locator(".inbox-head")).to_contain_text("Letter writers · reader: Ann")
    await expect(page).to_have_title("Review · Letter writers · reader: Ann · Studio")


async def test_columns_are_chosen_and_stay_so(table: Runs, page: Page) -> None:
    """S-STU-105: in the browser's store; heads stand over their columns, and no head is red."""
    await page.goto(table.at("/runs"))
    heads = page.locator(".runs thead th")
    usual = ["", "Run", "Tags", "Duration", "Tokens", "Cost", "Started"]
    await expect(heads).to_have_text(usual)
    await page.get_by_text("Columns", exact=True).click()
    for word in ("Inputs", "Output or error", "State", "Attempts"):
        await page.get_by_label(word, exact=True).check()
    await page.get_by_label("Cost", exact=True).uncheck()
    await page.keyboard.press("Escape")
    wanted = ["", "Run", "Inputs", "Output or error", "State", "Tags", "Duration", "Tokens", "Attempts", "Started"]
    await expect(heads).to_have_text(wanted)
    await page.reload()
    await expect(heads).to_have_text(wanted)
    cells = page.locator(".run[data-key=w-1] td")
    await expect(cells.nth(2)).to_have_text("topic: tides")
    await expect(cells.nth(3)).to_have_text("All about tides.")
    await expect(page.locator(".run[data-key=w-2] td").nth(3)).to_contain_text("no answer within 12.5 s")
    await expect(cells.nth(5)).to_have_text("stage: test")
    await expect(cells.nth(8)).to_have_text("1")
    today = datetime.now().astimezone()
    await expect(cells.nth(9).locator("time")).to_have_attribute(
        "title", re.compile(rf"^{today:%Y-%m-%d} \d\d:\d\d:\d\d UTC")
    )
    placed = await page.evaluate(
        """() => {
            const at = (cells) => [...cells].map((e) => {
                const box = e.getBoundingClientRect();
                return [Math.round(box.left), Math.round(box.right), e.classList.contains("num"), getComputedStyle(e).textAlign];
            });
            return [at(document.querySelectorAll(".runs thead th")), at(document.querySelectorAll(".run[data-key=w-1] td"))];
        }"""
    )
    assert placed[0] == placed[1]
    colours = await page.evaluate(
        """() => {
            const red = getComputedStyle(document.querySelector(".run-line.bad")).color;
            return [...document.querySelectorAll(".runs thead th")].map((e) => getComputedStyle(e).color === red);
        }"""
    )
    assert not any(colours)


async def test_heads_of_columns_sort(table: Runs, page: Page) -> None:
    """S-STU-231, S-STU-235: in both directions, in the address too; screen readers are told."""
    await page.goto(table.at("/runs"))
    await expect(page.locator(".run")).to_have_count(5)
    assert await names(page) == ["w-4", "w-3", "r-1", "w-2", "w-1"]
    await page.get_by_role("button", name="Started").click()
    await expect(page.get_by_role("columnheader", name="Started")).to_have_attribute("aria-sort", "ascending")
    await expect(page.locator(".run .run-id").first).to_have_text("w-1")
    await page.get_by_role("columnheader", name="Run").get_by_role("button").click()
    await expect(page).to_have_url(re.compile("sort=name"))
    await expect(page.locator(".run .run-id").last).to_have_text("r-1")
    assert await names(page) == ["w-4", "w-3", "w-2", "w-1", "r-1"]
    await page.reload()
    await expect(page.locator(".run .run-id").last).to_have_text("r-1")
    await page.get_by_role("columnheader", name="Run").get_by_role("button").click()
    await expect(page.locator(".run .run-id").first).to_have_text("r-1")
    await page.get_by_role("button", name="Duration").click()
    await expect(page.get_by_role("columnheader", name="Duration")).to_have_attribute("aria-sort", "descending")
    await expect(page.locator(".run")).to_have_count(5)
    await expect(page.locator(".run .run-bar").first).to_have_attribute("style", re.compile(r"--part: ?1(;|$)"))


async def test_filters_show_counts_and_accept_dates(table: Runs, page: Page) -> None:
    """S-STU-106, S-STU-232: days of the reader's clock, included; the address accepts what the field accepts."""
    await page.goto(table.at("/runs?q=status:failed%20tag:stage"))
    await expect(page.locator(".run")).to_have_count(1)
    await expect(page.get_by_label("Search runs")).to_have_value("tag:stage")
    await expect(page).to_have_url(re.compile(r"#/runs\?tag=stage&status=failed|#/runs\?status=failed&tag=stage"))
    chips = page.get_by_role("group", name="Filter by status")
    await expect(chips.get_by_role("button", pressed=True)).to_have_text(re.compile("failed 1", re.IGNORECASE))
    await expect(chips.get_by_role("button", name="All")).to_have_text("All 3")
    await page.get_by_label("Search runs").fill("")
    await expect(chips.get_by_role("button", name="All")).to_have_text("All 5")
    await expect(page.locator(".page-head")).to_contain_text("2 of 5 recorded")
    await chips.get_by_role("button", name="All").click()
    today = await page.evaluate("new Date().toLocaleDateString('sv')")
    await page.get_by_label("Started from").fill(today)
    await page.get_by_label("Started until").fill(today)
    await expect(page).to_have_url(re.compile(f"since={today}&until={today}"))
    await expect(page.locator(".run")).to_have_count(5)
    await page.get_by_label("Started until").fill("2020-01-01")
    await expect(page.get_by_text("No matching run")).to_be_visible()
    await page.get_by_role("button", name="Show all runs").click()
    await expect(page.locator(".run")).to_have_count(5)
    await expect(page.get_by_label("Started until")).to_have_value("")


async def test_runs_are_grouped_by_their_error(table: Runs, page: Page) -> None:
    """S-STU-233, S-STU-235: errors that differ only in numbers are one group, which opens into its runs."""
    await page.goto(table.at("/runs"))
    await page.get_by_label("Group by").select_option("error")
    groups = page.locator(".group")
    await expect(groups).to_have_count(2)
    await expect(groups.first).to_contain_text("no answer within … s")
    await expect(groups.first).to_contain_text("2 runs")
    await expect(groups.last).to_contain_text("No error")
    opener = groups.first.get_by_role("button")
    await opener.click()
    await expect(opener).to_have_attribute("aria-expanded", "true")
    await expect(page.locator(".run")).to_have_count(2)
    assert await names(page) == ["w-3", "w-2"]
    await opener.click()
    await expect(page.locator(".run")).to_have_count(0)
    for group, texts in (
        ("team", ["Market writers", "Review readers"]),
        ("tag", ["stage:test", "stage:live", "No tag"]),
    ):
        await page.get_by_label("Group by").select_option(group)
        for text in texts:
            await expect(groups.filter(has_text=text)).to_have_count(1)


async def test_several_runs_are_compared_and_deleted(table: Runs, page: Page) -> None:
    """S-STU-234, S-STU-236: a dialog names what is lost; Esc deletes nothing; other runs stay."""
    await page.goto(table.at("/runs"))
    bar = page.get_by_role("region", name="Selected runs")
    await expect(bar).to_be_hidden()
    await page.get_by_label("Select w-3").check()
    await expect(bar.get_by_role("link", name="Compare")).to_have_count(0)
    await page.get_by_label("Select w-2").check()
    await expect(bar).to_contain_text("2 runs selected")
    await bar.get_by_role("link", name="Compare").click()
    await expect(page).to_have_url(re.compile("#/compare\\?a=w-2&b=w-3"))
    await page.go_back()
    await page.get_by_label("Select w-3").check()
    await page.get_by_label("Select w-2").check()
    for name in ("End", "Continue"):  # they have ended, and only their program has the team
        await expect(bar.get_by_role("button", name=name)).to_have_count(0)
    await bar.get_by_role("button", name="Delete").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("Delete 2 runs?")
    await expect(dialog.locator("li")).to_have_text([re.compile("w-2.*12.5 s"), re.compile("w-3.*31.25 s")])
    await page.keyboard.press("Escape")
    await expect(page.locator(".run")).to_have_count(5)
    await bar.get_by_role("button", name="Delete").click()
    await dialog.get_by_role("button", name="Delete 2 runs").click()
    await expect(page.locator(".run")).to_have_count(3)
    await expect(page.locator(".toast")).to_have_text("2 runs deleted")
    await expect(bar).to_be_hidden()
    left = {run.run_id for run in await SqliteStore(table.home).runs()}
    assert left == {"w-1", "w-4", "r-1"}


async def test_a_selected_run_that_waits_is_cancelled(own: Runs, page: Page) -> None:
    """S-STU-236: an action is about those of the selected runs that it fits, and says so."""
    recorded.reviewed_team().run(runtime=own.inline, run_id="asks")
    leave_run(own, "over", "Market writers", "tides")
    await page.goto(own.at("/runs"))
    await expect(page.locator(".run")).to_have_count(2)
    await page.get_by_label("Select all runs shown").check()
    bar = page.get_by_role("region", name="Selected runs")
    await expect(bar).to_contain_text("2 runs selected")
    await bar.get_by_role("button", name="End 1 of 2").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.locator("li")).to_contain_text("asks")
    await dialog.get_by_role("button", name="End 1 run").click()
    await expect(page.locator(".run[data-key=asks] .is-stopped")).to_have_count(1)
    await expect(bar).to_be_hidden()


async def test_selected_runs_are_exported(table: Runs, page: Page) -> None:
    """S-STU-236: a file for each."""
    await page.goto(table.at("/runs"))
    files: list[str] = []
    page.on("download", lambda download: files.append(download.suggested_filename))
    for run in ("w-1", "r-1"):
        await page.get_by_label(f"Select {run}").check()
    await page.get_by_role("button", name="Export").click()
    async with page.expect_download(lambda download: download.suggested_filename == "r-1.json"):
        await page.get_by_role("menuitem", name=re.compile("JSON")).click()
    assert files == ["w-1.json", "r-1.json"]


async def test_the_table_is_used_with_the_keyboard_and_has_no_breach(table: Runs, page: Page) -> None:
    """S-STU-170, S-STU-171, S-STU-236: `j`, `x`, heads; axe over a selection, a dialog and groups, light and dark."""
    await page.emulate_media(reduced_motion="reduce")
    await page.goto(table.at("/runs"))
    await expect(page.locator(".run")).to_have_count(5)
    await page.keyboard.press("j")
    await page.keyboard.press("x")
    await page.keyboard.press("j")
    await page.keyboard.press("x")
    await expect(page.get_by_role("region", name="Selected runs")).to_contain_text("2 runs selected")
    await expect(page.get_by_label("Select w-3")).to_be_checked()
    await page.get_by_role("button", name="Duration").press("Enter")
    await expect(page.get_by_role("button", name="Duration")).to_be_focused()
    await expect(page.get_by_label("Select w-3")).to_be_checked()
    broken = await breaches(page)
    await page.get_by_role("button", name="Delete").click()
    broken += await breaches(page)
    await page.keyboard.press("Escape")
    await page.goto(table.at("/runs?group=team"))
    await page.locator(".group button").first.click()
    await expect(page.locator(".run").first).to_be_visible()
    broken += await breaches(page)
    assert broken == []


async def breaches(page: Page) -> list[str]:
    """What axe finds against WCAG A and AA, in both schemes."""
    tags = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    found = []
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        result = await Axe().run(page, options={"runOnly": tags, "resultTypes": ["violations"]})
        found += [
            f"{scheme}: {each['id']}: {node['target']} {node['failureSummary']}"
            for each in result.response["violations"]
            for node in each["nodes"]
        ]
    return found


async def test_estimated_tokens_are_marked(own: Runs, page: Page) -> None:
    """S-STU-105: where the provider did not count, the list and the head show what the budget counted."""
    model = ScriptedModel(otherwise=ChatResponse(text="A plain answer of six words."))
    agent = Agent(role="Speaker", goal="Speak", llm=model)
    Ensemble(tasks=[Task(name="say", description="Say it", expected_output="x", agent=agent)]).run(
        runtime=own.inline, run_id="guessed"
    )
    await page.goto(own.at("/runs"))
    cell = page.locator(".run .c-tokens")
    await expect(cell).to_have_text(re.compile(r"^~\d+$"))
    text = await cell.inner_text()
    await page.goto(own.at("/runs/guessed/budget"))
    await expect(page.locator(".facts")).to_contain_text(f"Tokens{text}")
    await expect(page.locator(".panel .big").first).to_contain_text(text.removeprefix("~"))


async def test_a_telephone_shows_names_ids_and_errors(table: Runs, page: Page) -> None:
    """S-STU-105, S-STU-173: at 400 pixels the columns that fit, without an overlap."""
    await page.set_viewport_size({"width": 400, "height": 800})
    for path in ("/runs", "/runs?group=error"):
        await page.goto(table.at(path))
        if "group" in path:
            await page.locator(".group button").first.click()
        await expect(page.locator(".run").first).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 400
    await expect(page.locator(".runs thead th").filter(visible=True)).to_have_count(3)
    await expect(page.locator(".run .run-id").first).to_be_visible()
