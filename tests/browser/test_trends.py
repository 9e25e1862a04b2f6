"""Trends of teams over days; and every view on a telephone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from ensemble_ray import Agent, CostConfiguration, Ensemble, InlineRuntime, Task, TaskExecutionError
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.server import StudioServer
from ensemble_ray.testing import ScriptedModel
from tests.browser import recorded
from tests.browser.conftest import Runs
from tests.builders import answer

pytestmark = pytest.mark.asyncio(loop_scope="package")

_PRICES = CostConfiguration(input_token_rate=Decimal("0.000003"), output_token_rate=Decimal("0.000015"))


def _team(name: str, model: ScriptedModel) -> Ensemble:
    agent = Agent(role="Reporter", goal="Report", llm=model)
    task = Task(name="report", description="Report the weather", expected_output="A line", agent=agent)
    return Ensemble(name=name, tasks=[task], cost_configuration=_PRICES)


def _began_before(home: Path, run_id: str, days: int) -> None:
    """Change the beginning of an ended run."""
    meta = home / "runs" / run_id / "meta.json"
    text = meta.read_text()
    began = re.search(r'"created_at": "([^"]+)"', text)
    assert began is not None
    earlier = datetime.fromisoformat(began[1]) - timedelta(days=days)
    meta.write_text(text.replace(began[1], earlier.isoformat()))


def record_days(home: Path) -> None:
    """Leave runs of two teams on several days: two failed, and one used a hundred times the usual tokens."""
    inline = InlineRuntime(home=home)
    for number in range(10):
        tokens = 9000 if number == 3 else 90
        run_id = f"weather-{number}"
        _team("Weather reporters", ScriptedModel(answer("Rain.", tokens, 10))).run(runtime=inline, run_id=run_id)
        _began_before(home, run_id, number // 2)
    for number in range(2):
        with pytest.raises(TaskExecutionError):
            _team("Weather reporters", ScriptedModel(RuntimeError("no such place"))).run(
                runtime=inline, run_id=f"storm-{number}"
            )
    recorded.doubtful_team().run(runtime=inline, run_id="clerk")


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Runs of several days, and the page over them; tests only look at these."""
    home = tmp_path_factory.mktemp("days")
    record_days(home)
    server = StudioServer(StoreAddress.of(home), port=0)
    server.start()
    yield Runs(home, server)
    server.stop()


async def test_trends_show_each_team_by_day(page: Page, days: Runs) -> None:
    """S-STU-264, S-STU-104: failures, percentiles, tokens and costs in charts; the same in words; the address has the choices."""
    await page.goto(days.at("/runs"))
    await page.get_by_role("link", name="Trends").click()
    await expect(page).to_have_url(re.compile("#/trends"))
    teams = page.locator(".trend")
    await expect(teams).to_have_count(2)
    await expect(page.locator(".page-head")).to_contain_text("13 runs of 2 teams")
    weather = teams.first
    await expect(weather.locator(".facts")).to_contain_text("2 (17 %)")
    await expect(weather.locator(".facts")).to_contain_text("9.9k (2 unknown)")
    charts = weather.get_by_role("img")
    await expect(charts).to_have_count(4)
    await expect(charts.first).to_have_attribute(
        "aria-label", re.compile("Runs of Weather reporters by day, at most 4")
    )
    await page.get_by_role("button", name="Table").click()
    await expect(page).to_have_url(re.compile("as=table"))
    rows = weather.locator("tbody tr")
    await expect(rows).to_have_count(5)
    await expect(rows.first.locator("td").nth(1)).to_have_text("2")
    await expect(rows.first.locator("td").nth(2)).to_have_text("50 %")
    await page.get_by_label("Search teams").fill("clerk")
    await expect(teams).to_have_count(1)
    await page.get_by_label("Search teams").fill("no such team")
    await expect(page.locator(".empty")).to_contain_text("No matching team")
    await page.reload()
    await expect(page.locator(".empty")).to_contain_text("No matching team")


async def test_unusual_runs_are_links(page: Page, days: Runs) -> None:
    """S-STU-262, S-STU-264: as marks in the charts, and in a list that the keyboard reaches."""
    await page.goto(days.at("/trends?days=7"))
    unusual = page.locator(".unusual li", has_text="weather-3")
    await expect(unusual).to_contain_text("9.0k tokens, 90.1 \u00d7 the median")
    mark = page.locator(".trend-mark[aria-label^='weather-3']")
    await mark.last.click()
    await expect(page).to_have_url(re.compile("#/runs/weather-3/flow"))
    await page.go_back()
    await unusual.get_by_role("link").focus()
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(re.compile("#/runs/weather-3/flow"))


async def test_trends_read_records_until_all_are_counted(
    page: Page, days: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-STU-263, S-STU-264: the view shows what is counted so far, and requests the rest."""
    monkeypatch.setattr("ensemble_ray.studio.reading._READ_A_PAGE", 3)
    server = StudioServer(StoreAddress.of(days.home), port=0)
    server.start()
    try:
        async with page.expect_response(re.compile("api/studio/trends")) as first:
            await page.goto(f"{server.url}#/trends")
        told = await (await first.value).json()
        assert (told["counted"], told["runs"], told["is_complete"]) == (3, 13, False)
        await expect(page.locator(".page-head")).to_contain_text("13 runs of 2 teams")
    finally:
        server.stop()


async def test_a_file_has_no_trends(page: Page, days: Runs, tmp_path: Path) -> None:
    """S-STU-264: an exported page has no link to them."""
    await page.goto(days.at("/runs/clerk/flow"))
    await page.get_by_role("button", name="Export").click()
    async with page.expect_download() as download:
        await page.get_by_role("menuitem", name="One HTML file").click()
    file = tmp_path / "run.html"
    await (await download.value).save_as(file)
    await page.goto(file.as_uri())
    await expect(page.locator(".node").first).to_be_visible()
    assert await page.get_by_role("link", name="Trends").count() == 0


async def test_trends_break_no_rule_of_accessibility(page: Page, days: Runs) -> None:
    """S-STU-170, S-STU-171: as charts and as tables, light and dark."""
    await page.emulate_media(reduced_motion="reduce")
    tags = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    broken = []
    for path in ("/trends", "/trends?as=table"):
        await page.goto(days.at(path))
        await expect(page.locator(".trend").first).to_be_visible()
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            found = await Axe().run(page, options={"runOnly": tags, "resultTypes": ["violations"]})
            broken += [f"{path}: {each['id']}: {each['nodes']}" for each in found.response["violations"]]
    assert broken == []


#: Views at 400 pixels, each with what is shown when it is drawn.
_VIEWS = {
    "/runs": ".run",
    "/runs/report/flow": ".node",
    "/runs/report/timeline": "canvas[data-drawn]",
    "/runs/report/timeline?as=table": "table.data",
    "/runs/loop/steps": ".step-row",
    "/runs/failed/steps": ".step-row",
    "/runs/failed/steps?step=story%230": ".step-panel .section-body",
    "/runs/report/flow?step=find-prices%230": ".step-panel .section-body",
    "/runs/report/budget": ".panel",
    "/runs/report/actors": ".actors .card, .actors .empty",
    "/runs/killed/flow": ".failure",
    "/runs/mapped/items": ".item-row",
    "/reviews": ".inbox-row",
    "/compare?a=report&b=failed": ".versus",
    "/actors": ".actors .card, .actors .empty",
    "/trends": ".trend",
    "/trends?as=table": ".trend",
    "/evaluations": ".empty",
    "/files": ".run",
}
#: Visible texts under 12 pixels; texts over each other in one head, row or card.
_MEASURE = """() => {
    const CARDS = ".topbar, .page-head, .run, .run-head, .run-title, .banner, .failure, .step-head, .step-row, .inbox-row, .inbox-head, .node, .panel, .trend, .toolbar, .filters, .node-title-row, tr";
    const clipped = (box, element) => {
        let [l, t, r, b] = [box.left, box.top, box.right, box.bottom];
        for (let at = element; at && at !== document.body; at = at.parentElement) {
            if (getComputedStyle(at).overflow === "visible") continue;
            const room = at.getBoundingClientRect();
            [l, t, r, b] = [Math.max(l, room.left), Math.max(t, room.top), Math.min(r, room.right), Math.min(b, room.bottom)];
        }
        return {l, t, r, b};
    };
    const small = new Set(), over = new Set(), byCard = new Map();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
        if (!text || element.closest(".sr, .skip, option, script, noscript") || !element.checkVisibility({checkVisibilityCSS: true})) continue;
        const range = document.createRange();
        range.selectNodeContents(walker.currentNode);
        const boxes = [...range.getClientRects()].map((box) => clipped(box, element)).filter((box) => box.r - box.l > 1 && box.b - box.t > 1);
        if (!boxes.length) continue;
        const canvas = element.closest(".flow-canvas");
        const scale = canvas ? new DOMMatrix(getComputedStyle(canvas).transform).a : 1;
        const size = parseFloat(getComputedStyle(element).fontSize) * scale;
        if (size < 11.99) small.add(`${size} px: ${text.slice(0, 40)}`);
        const card = element.closest(CARDS);
        if (card) byCard.set(card, [...(byCard.get(card) ?? []), ...boxes.map((box) => ({...box, text, node: walker.currentNode}))]);
    }
    for (const boxes of byCard.values())
        boxes.forEach((one, at) => boxes.slice(at + 1).forEach((two) => {
            const [x, y] = [Math.min(one.r, two.r) - Math.max(one.l, two.l), Math.min(one.b, two.b) - Math.max(one.t, two.t)];
            if (one.node !== two.node && x > 2 && y > 4) over.add(`${one.text.slice(0, 40)} | ${two.text.slice(0, 40)}`);
        }));
    return {width: document.documentElement.scrollWidth, small: [...small], over: [...over]};
}"""


async def test_every_view_is_readable_on_a_telephone(runs: Runs, page: Page, tmp_path: Path) -> None:
    """S-STU-173: at 400 pixels no view is wider, no text is under 12 pixels, and no text is over another."""
    (tmp_path / "a-plan-with-a-long-name-that-needs-two-lines.dag.json").write_text('{"type": "dag"}')
    server = StudioServer(StoreAddress.of(runs.home), port=0, files=tmp_path)
    server.start()
    await page.set_viewport_size({"width": 400, "height": 800})
    broken = []
    try:
        for path, shown in _VIEWS.items():
            await page.goto(f"{server.url}#{path}")
            await expect(page.locator(shown).first).to_be_visible()
            found = await page.evaluate(_MEASURE)
            broken += [f"{path}: {each}" for each in (*found["small"], *found["over"])]
            if found["width"] > 400:
                broken.append(f"{path}: {found['width']} pixels wide")
    finally:
        server.stop()
    assert broken == [], "\n".join(broken)


async def test_titles_have_two_lines_and_ids_on_a_telephone(runs: Runs, page: Page) -> None:
    """S-STU-173: in the list, the head of a run, steps and reviews; an id is not cut."""
    await page.set_viewport_size({"width": 400, "height": 800})
    await page.goto(runs.at("/runs"))
    await expect(page.locator(".run", has_text="report").first.locator(".run-id")).to_be_visible()
    await page.goto(runs.at("/runs/report/steps?step=find-prices%230"))
    head = page.locator(".step-head code")
    await expect(head).to_have_text("find-prices#0")
    assert await head.evaluate("e => e.scrollWidth <= e.clientWidth")
    await page.goto(runs.at("/runs/report/steps"))
    row = page.locator(".step-row", has_text="find-prices#0")
    await expect(row.locator(".step-id")).to_be_visible()
    title = await row.locator(".step-title").bounding_box()
    assert title is not None
    assert title["height"] > 30
    await page.goto(runs.at("/reviews"))
    await expect(page.locator(".inbox-row").first.locator("code")).to_have_text("waiting")
