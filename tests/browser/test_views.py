"""Every view over runs that ended, failed, were killed or wait: what it shows, and that it asks for nothing it may not."""

from __future__ import annotations

import asyncio
import re

import pytest
from playwright.async_api import Page, expect

from ensemble_ray import RunOptions
from tests.browser.conftest import TABS, Runs, open_tabs
from tests.browser.gates import Gate
from tests.browser.recorded import blocked_team, doubtful_team
from tests.golden.cases import cases_of
from tests.golden.records import restore_sqlite
from tests.golden.store import load

pytestmark = pytest.mark.asyncio(loop_scope="package")

_ON_RAY = ("synthesized-finished", "looped-killed", "parallel_errors-failed", "hierarchical-killed")
_RUNS = ("report", "loop", "graph", "mapped", "doubtful", "waiting", "failed", "killed")


async def test_every_tab_of_every_run_opens(page: Page, runs: Runs) -> None:
    """S-STU-100, S-STU-101: finished, failed, killed and waiting runs; no error, no foreign request, no breach of the policy."""
    for run in _RUNS:
        await open_tabs(page, runs, run, *TABS)


async def test_every_tab_of_every_run_that_a_cluster_made_opens(page: Page, own: Runs) -> None:
    """S-STU-100, S-STU-101: the same, of golden records; none of them waits for a person."""
    cases = [case for case in cases_of("ray") if case.name in _ON_RAY]
    assert len(cases) == len(_ON_RAY)
    for case in cases:
        restore_sqlite(load(case), own.home)
        await open_tabs(page, own, case.run_id, *TABS)


async def test_every_tab_of_a_run_that_goes_on_opens(own: Runs, page: Page, gate: Gate) -> None:
    """S-STU-100: with the process that owns it; one of a cluster is looked at in `test_on_ray`."""
    work = asyncio.create_task(asyncio.to_thread(blocked_team(gate).run, runtime=own.inline, run_id="slow"))
    assert await asyncio.to_thread(gate.is_reached.wait, 60)
    await open_tabs(page, own, "slow", *TABS)
    await expect(page.locator("table.data tr", has_text="DRIVER")).to_contain_text("second#0")
    gate.open.set()
    await work


async def test_the_list_says_how_every_run_stands(page: Page, runs: Runs) -> None:
    """S-STU-105: status, team, summary, tokens; a click leads to the run."""
    await page.goto(runs.at("/runs"))
    rows = page.locator(".run")
    await expect(rows).to_have_count(len(_RUNS) + 2)
    failed = rows.filter(has_text="Failed")
    await expect(failed).to_have_count(1)
    await expect(rows.filter(has_text="1 to review")).to_have_count(1)
    await expect(rows.filter(has_text="killed")).to_contain_text("Process died")
    await failed.click()
    await expect(page).to_have_url(re.compile("#/runs/failed/flow"))
    await expect(page.locator(".failure")).to_contain_text("refused the key (401)")


async def test_search_and_filters_stand_in_the_address(page: Page, runs: Runs) -> None:
    """S-STU-104, S-STU-106: what is searched survives a reload; an address that finds nothing says what to do."""
    await page.goto(runs.at("/runs"))
    await page.get_by_role("button", name="failed").click()
    await expect(page.locator(".run")).to_have_count(1)
    await expect(page).to_have_url(re.compile("status=failed"))
    await page.reload()
    await expect(page.locator(".run")).to_have_count(1)
    await expect(page.get_by_role("button", name="failed")).to_have_attribute("aria-pressed", "true")
    await page.get_by_label("Search runs").fill("no such words")
    await expect(page.get_by_text("No matching run")).to_be_visible()
    await page.get_by_role("button", name="Show all runs").click()
    await expect(page.locator(".run").nth(5)).to_be_visible()


async def test_a_filter_may_have_spaces(own: Runs, page: Page) -> None:
    """S-STU-106: in quotation marks, also while the second one is not typed yet; an address with such a filter shows them."""
    for run_id, value in (("one", "two docs"), ("other", "two")):
        doubtful_team().run(runtime=own.inline, run_id=run_id, options=RunOptions(tags={"for": value, "kind": run_id}))
    await page.goto(own.at("/runs"))
    await expect(page.locator(".run")).to_have_count(2)
    field = page.get_by_label("Search runs")
    for text in ('tag:"for:two docs" clerk', 'clerk tag:"for:two docs'):
        await field.fill(text)
        await expect(page.locator(".run")).to_have_count(1)
        await expect(page.locator(".run")).to_contain_text("one")
        await expect(page).to_have_url(re.compile(r"tag=for%3Atwo\+docs"))
        await field.fill("")
        await expect(page.locator(".run")).to_have_count(2)
    await page.goto(own.at("/runs?tag=for%3Atwo+docs&q=one"))
    await page.reload()
    await expect(field).to_have_value('tag:"for:two docs" one')
    await expect(page.locator(".run")).to_have_count(1)


async def test_an_empty_home_says_how_to_begin(own: Runs, page: Page) -> None:
    """S-STU-107."""
    await page.goto(own.at("/runs"))
    await expect(page.locator(".empty")).to_contain_text("ensemble-ray run team.yaml")
    await page.goto(own.at("/reviews"))
    await expect(page.locator(".empty")).to_contain_text("No open reviews")


async def test_the_flow_shows_roles_states_and_the_critical_path(page: Page, runs: Runs) -> None:
    """S-VIZ-71, S-STU-110, S-STU-251: nodes bear their role's colour and open their step."""
    await page.goto(runs.at("/runs/report/flow"))
    nodes = page.locator(".node")
    await expect(nodes).to_have_count(6)
    await expect(page.locator(".node.is-completed")).to_have_count(6)
    await expect(page.locator(".node.critical")).to_have_count(4)
    assert await page.locator(".edges .edge-line.critical").count() == 3
    researchers = page.locator(".node", has_text="Researcher")
    classes = {(await each.get_attribute("class") or "").split("role-")[1][0] for each in await researchers.all()}
    assert len(classes) == 1
    await nodes.filter(has_text="Say in two sentences").click()
    await expect(page).to_have_url(re.compile("step=analyse%230"))
    await expect(page.locator(".step-panel")).to_contain_text("installers are the limit")


async def test_a_graph_shows_what_it_did_not_take(page: Page, runs: Runs) -> None:
    """S-VIZ-72: top to bottom, unconditional edges dashed, labels on the others, what was not fired is grey."""
    await page.goto(runs.at("/runs/graph/flow"))
    await expect(page.locator(".edge-label", has_text="about money")).to_be_visible()
    await expect(page.locator(".edge-label.faint")).to_have_text("anything else")
    assert await page.locator(".edges .edge-line.unconditional").count() == 4
    assert await page.locator(".edges .edge-line.faint").count() == 2
    dashes = await page.locator(".edges .edge-line.unconditional").first.evaluate(
        "e => getComputedStyle(e).strokeDasharray"
    )
    assert dashes != "none"
    tops = [
        await page.locator(".node", has_text=name).evaluate("e => e.getBoundingClientRect().top")
        for name in ("triage:", "billing:", "reply:")
    ]
    assert tops == sorted(tops)


async def test_a_loop_is_shown_as_declared_and_as_it_ran(page: Page, runs: Runs) -> None:
    """S-STU-111: the switch stands in the address; a node that was done several times says how often."""
    await page.goto(runs.at("/runs/loop/flow"))
    await expect(page.locator(".node")).to_have_count(2)
    await expect(page.locator(".node").first).to_contain_text("\u00d73")
    await expect(page.locator(".flow-group")).to_contain_text("LOOP ≤5")
    await page.get_by_role("button", name="As it ran").click()
    await expect(page.locator(".node")).to_have_count(6)
    await expect(page).to_have_url(re.compile("as=ran"))


async def test_levels_of_thousands_are_folded_to_counts(page: Page, runs: Runs) -> None:
    """S-STU-112: a level of 2,000 is one node, which opens to its items."""
    await page.goto(runs.at("/runs/many/flow?as=ran"))
    node = page.locator(".node", has_text="\u00d72,000")
    await expect(node).to_contain_text("2,000 completed")
    assert await page.locator(".node").count() < 100
    await node.click()
    await expect(page.get_by_role("status").filter(has_text="2,000 items")).to_be_visible()


async def test_thousands_of_steps_are_a_window_of_rows(page: Page, runs: Runs) -> None:
    """S-STU-120: only rows in sight are in the document, at the top, in the middle and at the end."""
    await page.goto(runs.at("/runs/many/steps"))
    rows = page.locator(".step-row")
    await expect(rows.first).to_be_visible()
    assert await rows.count() < 80
    tree = page.get_by_role("tree")
    total = int(await rows.first.get_attribute("aria-setsize") or 0)
    assert total > 2_400
    await tree.focus()
    await page.keyboard.press("End")
    await expect(page.locator(".step-row[aria-selected=true]")).to_have_attribute("aria-posinset", str(total))
    assert await rows.count() < 80


async def test_thousands_of_bars_are_drawn_as_few(page: Page, runs: Runs) -> None:
    """S-VIZ-73, S-STU-130: bars of less than a pixel are drawn together; when zoomed in, each by itself."""
    await page.goto(runs.at("/runs/many/timeline"))
    canvas = page.locator("canvas")
    await expect(canvas).to_have_attribute("aria-label", re.compile(r"Timeline of 2,[45]\d+ steps of 2 agents"))
    together, apart = await page.evaluate(
        """async () => {
            const {LaneChart} = await import("./js/ui/lane_chart.js");
            const {lanesOf} = await import("./js/model/lanes.js");
            const steps = Array.from({length: 10_000}, (_, at) => ({id: `s${at}`, kind: "map", title: "", agent: "Reader",
                status: at === 5000 ? "failed" : "completed", started_at: at * 10, ended_at: at * 10 + 9, segments: [], tools: []}));
            const chart = new LaneChart(document.querySelector("canvas"));
            chart.lanes = lanesOf(steps, 100_000);
            chart.span = {from: 0, to: 100_000};
            chart.draw();
            const together = chart.drawn;
            chart.span = {from: 40_000, to: 40_500};
            chart.draw();
            return [together, chart.drawn];
        }"""
    )
    assert 1 < together < 2_000
    assert 50 <= apart <= 52
    whole = int(await canvas.get_attribute("data-drawn") or 0)
    for _ in range(12):
        await page.keyboard.press("+")
    await expect(canvas).not_to_have_attribute("data-drawn", str(whole))
    assert int(await canvas.get_attribute("data-drawn") or 0) < whole
    await page.get_by_role("button", name="Table").click()
    await expect(page.locator("table.data tbody tr")).to_have_count(200)


async def test_the_timeline_has_lanes_and_says_what_lies_under_the_pointer(page: Page, runs: Runs) -> None:
    """S-VIZ-73: one lane per agent; a click on a bar opens its step; the table has the same."""
    await page.goto(runs.at("/runs/report/timeline"))
    canvas = page.locator("canvas")
    await expect(canvas).to_have_attribute("aria-label", re.compile("6 steps of 4 agents"))
    tip = page.locator(".tip-box")
    for x in range(180, 1200, 30):
        await canvas.hover(position={"x": x, "y": 52})
        if await tip.is_visible():
            break
    await expect(tip).to_contain_text("Find what is known")
    await canvas.click(position={"x": x, "y": 52})
    await expect(page).to_have_url(re.compile("step=find-"))
    await page.get_by_role("button", name="Table").click()
    rows = page.locator("table.data tbody tr")
    await expect(rows).to_have_count(6)
    await expect(rows.first).to_contain_text("search_reports")


async def test_a_step_shows_its_prompt_its_answers_and_its_tools(page: Page, runs: Runs) -> None:
    """S-STU-121: an address leads to a step; tools that were offered stand beside those that were called."""
    await page.goto(runs.at("/runs/report/steps?step=find-prices%230"))
    panel = page.locator(".step-panel")
    await expect(panel.locator(".message.user")).to_contain_text("Find what is known about prices")
    await expect(panel.locator(".message.assistant")).to_have_count(2)
    call = panel.locator(".message.tool")
    await expect(call).to_contain_text("search_reports")
    await call.locator("summary").click()
    await expect(call).to_contain_text("Cells cost 61 USD per kWh")
    await expect(panel.locator(".tools li.used")).to_have_text(re.compile("search_reports"))
    await expect(panel.locator(".tools li:not(.used)")).to_contain_text("send_newsletter offered")


async def test_the_first_error_is_one_click_away(page: Page, runs: Runs) -> None:
    """S-STU-122: the banner and the key e lead to the step that failed first, with its causes."""
    await page.goto(runs.at("/runs/failed/flow"))
    await page.get_by_role("link", name="Jump to first error").click()
    await expect(page.locator(".step-panel")).to_contain_text("ValueError: the endpoint refused the key (401)")
    await page.goto(runs.at("/runs/failed/flow"))
    await expect(page.locator(".node.is-failed")).to_have_count(1)
    await page.keyboard.press("e")
    await expect(page).to_have_url(re.compile("step=story"))


async def test_a_killed_run_says_what_nobody_knows(page: Page, runs: Runs) -> None:
    """S-STU-123, S-STU-201: the call that its process died in has an unknown effect, and resuming says so before."""
    await page.goto(runs.at("/runs/killed/steps"))
    await expect(page.locator(".failure")).to_contain_text("ensemble-ray resume killed")
    await page.locator(".step-row", has_text="Pay the invoice").click()
    await expect(page.locator(".step-panel")).to_contain_text("unknown")


async def test_a_budget_is_spent_of_allowed(page: Page, runs: Runs) -> None:
    """S-STU-140: spent of allowed, by agent, and the end in words."""
    await page.goto(runs.at("/runs/report/budget"))
    meter = page.get_by_role("meter", name="Tokens")
    assert 0 < int(await meter.get_attribute("aria-valuenow") or 0) < 100
    await expect(page.locator(".panel").first).to_contain_text("of 20,000")
    await expect(page.locator("table.data tbody tr")).to_have_count(4)


async def test_two_runs_stand_side_by_side(page: Page, runs: Runs) -> None:
    """S-STU-141."""
    await page.goto(runs.at("/compare?a=report&b=failed"))
    await expect(page.locator(".versus .panel")).to_have_count(2)
    rows = page.locator(".compare-table tbody tr")
    await expect(rows).to_have_count(8)
    await rows.filter(has_text="analyse").click()
    await expect(page.locator(".outputs")).to_contain_text("installers are the limit")
    await expect(page.locator(".outputs")).to_contain_text("This run has no such step")
