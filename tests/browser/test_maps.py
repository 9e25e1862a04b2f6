"""Maps: a level is one node, which opens to a table of its items with a histogram; items that failed are repeated."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from ensemble_ray import Agent, EnsembleDevTools, MapEnsemble, MapReduceEnsemble, Task
from ensemble_ray.definition.fields import Origin
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.server import StudioServer
from ensemble_ray.teamfile import load_source
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.browser import recorded
from tests.browser.conftest import Runs
from tests.browser.gates import Gate
from tests.browser.recorded import Reading, letters
from tests.browser.test_doing import drop
from tests.builders import answer

pytestmark = pytest.mark.asyncio(loop_scope="package")


def planned_letters() -> MapReduceEnsemble:
    """The same with a plan: a fork repeats what failed."""
    reader = Agent(role="Reader", goal="Read letters", llm=ScriptedModel(otherwise=Reading(21)))

    def read(item: int) -> Task:
        return Task(description=f"Say what letter {item} is about", expected_output="A line", agent=reader)

    def join(notes: list[Task]) -> Task:
        return Task(description="Join the notes of letter 1", expected_output="A list", agent=reader, context=notes)

    return MapReduceEnsemble(
        items=list(range(21)),
        map_task=read,
        reduce_task=join,
        chunk_size=7,
        retry=None,
        parallel_error_strategy="continue_on_error",
    )


async def _record_letters(own: Runs) -> None:
    await asyncio.to_thread(letters(70).run, runtime=own.inline, run_id="letters")


async def test_a_level_is_one_node_in_both_views(page: Page, runs: Runs) -> None:
    """S-STU-240, S-STU-241: all of it in sight, with its progress; a click opens its items, and old links still work."""
    for view in ("", "?as=ran"):
        await page.goto(runs.at(f"/runs/many/flow{view}"))
        node = page.locator(".node", has_text="\u00d72,000")
        await expect(node).to_contain_text("2,000 completed")
        await expect(node).to_be_in_viewport(ratio=0.99)
        assert await page.locator(".node").count() <= 6
    await page.locator(".node", has_text="\u00d7400").click()
    await expect(page).to_have_url(re.compile(r"/items\?.*level=1$"))
    await expect(page.get_by_role("tab", name="Items")).to_have_attribute("aria-selected", "true")
    await expect(page.get_by_role("status").filter(has_text="400 reduces")).to_be_visible()
    assert await page.locator(".step-row").count() < 80
    await page.get_by_role("button", name="Items \u00d72,000").click()
    await expect(page.get_by_role("grid")).to_have_attribute("aria-rowcount", "2001")
    await page.goto(runs.at("/runs/many/steps?level=1"))
    await expect(page.get_by_role("status").filter(has_text="400 of")).to_be_visible()
    await page.goto(runs.at("/runs/report/flow"))
    await expect(page.locator(".node").first).to_be_visible()
    await expect(page.get_by_role("tab", name="Items")).to_have_count(0)


async def test_the_failed_and_the_slowest_items_are_first(own: Runs, page: Page) -> None:
    """S-STU-242, S-STU-240, S-STU-244: the node has the failures; heads sort; the address has it all."""
    await _record_letters(own)
    await page.goto(own.at("/runs/letters/flow"))
    node = page.locator(".node")
    await expect(node).to_contain_text("3 failed")
    await expect(node).to_contain_text("67 completed")
    await node.click()
    rows = page.locator(".step-row")
    for at, title in enumerate(("letter 20", "letter 40", "letter 60")):
        await expect(rows.filter(has_text=title)).to_contain_text("the endpoint did not answer")
        await expect(rows.nth(at).locator(".is-failed")).to_be_visible()
    await expect(rows.nth(3)).to_contain_text("letter 7 ")

    await page.get_by_role("button", name="Tokens").click()
    await expect(page).to_have_url(re.compile("sort=tokens"))
    await expect(page.locator("[aria-sort=descending]")).to_have_text("Tokens")
    await expect(rows.first).to_contain_text("letter 69")
    await page.get_by_role("button", name="Tokens").click()
    await expect(rows.first).to_contain_text("letter 0")
    await expect(page.locator("[aria-sort=ascending]")).to_have_text("Tokens")
    await page.get_by_role("button", name="Duration").click()
    await expect(rows.first).to_contain_text("letter 7 ")
    await page.get_by_role("button", name="Error").click()
    await expect(rows.first).to_contain_text("letter 20")
    await page.get_by_role("button", name="Item", exact=True).click()
    await expect(rows.nth(1)).to_contain_text("letter 1")

    await page.locator(".chip", has_text=re.compile("failed", re.IGNORECASE)).click()
    await expect(rows).to_have_count(3)
    await page.reload()
    await expect(rows).to_have_count(3)
    await page.get_by_label("Search items").fill("letter 40")
    await expect(rows).to_have_count(1)
    await expect(page.get_by_role("status").filter(has_text="1 of 70 items")).to_be_visible()
    await rows.click()
    await expect(page.locator(".step-panel")).to_contain_text("the endpoint did not answer")


async def test_a_bar_of_the_histogram_shows_its_items(own: Runs, page: Page) -> None:
    """S-STU-243: durations in words; the last bar has the slowest item; arrows move between bars."""
    await _record_letters(own)
    await page.goto(own.at("/runs/letters/items"))
    await expect(page.locator(".item-times")).to_contain_text(re.compile("Half take at most .* the slowest"))
    bars = page.locator(".bar")
    await bars.first.focus()
    await page.keyboard.press("ArrowRight")
    await expect(bars.nth(1)).to_be_focused()
    await bars.last.click()
    await expect(page.locator(".step-row").first).to_contain_text("letter 7 ")
    await expect(page).to_have_url(re.compile("took="))
    await expect(bars.last).to_have_attribute("aria-pressed", "true")
    await bars.last.click()
    await expect(page.get_by_role("status").filter(has_text="70 items")).to_be_visible()


async def test_listed_items_that_failed_are_repeated(own: Runs, page: Page) -> None:
    """S-STU-245: with the line of Python where the run left them out; a fork is offered where the page may start one."""
    await _record_letters(own)
    await page.goto(own.at("/runs/letters/items?q=letter%2040"))
    await page.get_by_role("button", name="Retry this item…").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("items[index] for index in [40]")
    await expect(dialog.get_by_role("button", name="Fork…")).to_have_count(0)
    await page.keyboard.press("Escape")
    await page.goto(own.at("/runs/letters/items"))
    await page.get_by_role("button", name="Retry these 3…").click()
    await expect(dialog).to_contain_text("[20, 40, 60]")
    await page.keyboard.press("Escape")

    team = load_source(Origin(place="tests.browser.test_maps:planned_letters"))
    with pytest.raises(Exception, match="1 of 25 tasks failed"):
        await asyncio.to_thread(team.run, runtime=own.inline, run_id="planned")
    await page.goto(own.at("/runs/planned/items"))
    await page.get_by_role("button", name="Retry this item…").click()
    await expect(dialog).to_contain_text("ensemble-ray fork planned --from task-21")
    await dialog.get_by_role("button", name="Fork…").click()
    await expect(dialog.get_by_label("From step")).to_have_value("task-21")


async def test_a_level_follows_its_run(own: Runs, page: Page) -> None:
    """S-STU-240, S-STU-112: a page that is opened before any item ended shows the progress without a reload."""
    gates = [Gate(), Gate()]

    async def reply(call: ScriptedCall) -> object:
        await gates[int(re.findall(r"letter (\d+)", call.text)[0]) > 4].passed()
        return answer("A complaint.", 10, 5)

    reader = Agent(role="Reader", goal="Read", llm=ScriptedModel(otherwise=reply))

    def read(item: int) -> Task:
        return Task(description=f"Say what letter {item} is about", expected_output="A line", agent=reader)

    team = MapEnsemble(items=list(range(10)), map_task=read)
    work = asyncio.create_task(asyncio.to_thread(team.run, runtime=own.inline, run_id="slow"))
    try:
        assert await asyncio.to_thread(gates[0].is_reached.wait, 60)
        await page.goto(own.at("/runs/slow/flow"))
        await expect(page.locator(".node")).to_contain_text("\u00d710")
        gates[0].open.set()
        await expect(page.locator(".node.is-running")).to_contain_text("5 of 10 ended")
        await page.get_by_role("tab", name="Items").click()
        await expect(page.locator(".chip", has_text="5").first).to_be_visible()
        await page.get_by_role("tab", name="Flow").click()
        gates[1].open.set()
        await expect(page.locator(".node.is-completed")).to_contain_text("10 completed")
    finally:
        for gate in gates:
            gate.open.set()
        await work


async def test_ten_thousand_items_are_a_window_of_rows(own: Runs, page: Page, tmp_path: Path) -> None:
    """S-STU-242: also in an exported file; only visible rows are in the document, sorted and filtered as any."""
    await asyncio.to_thread(letters(21).run, runtime=own.inline, run_id="small")
    exported = await page.request.get(f"{own.server.url}api/studio/runs/small/export?format=json")
    data = await exported.json()
    done = next(step for step in data["steps"] if step["status"] == "completed")
    data["steps"] = [
        {
            **done,
            "id": f"map-{number}#0",
            "number": number,
            "title": f"Say what letter {number} is about",
            "ended_at": done["started_at"] + 10 + number * 7919 % 1000,
        }
        for number in range(10_000)
    ]
    data["run"]["counts"] = {"completed": 10_000}
    (tmp_path / "large.json").write_text(json.dumps(data))
    server = StudioServer(StoreAddress.of(own.home), port=0, files=tmp_path)
    server.start()
    try:
        await page.goto(f"{server.url}#/runs/file%3Alarge.json/items")
        rows = page.locator(".step-row")
        await expect(page.get_by_role("status").filter(has_text="10,000 items")).to_be_visible()
        assert await rows.count() < 80
        await page.get_by_role("button", name="Item", exact=True).click()
        await page.get_by_role("grid").focus()
        await page.keyboard.press("End")
        await expect(page.locator(".step-row[aria-selected=true]")).to_contain_text("letter 9999")
        assert await rows.count() < 80
        await page.get_by_label("Search items").fill("letter 123 ")
        await expect(rows).to_have_count(1)
        await page.goto("about:blank")  # or it asks on while the server stops
    finally:
        server.stop()


async def test_an_exported_file_has_the_items(own: Runs, page: Page, tmp_path: Path) -> None:
    """S-STU-160, S-STU-241, S-STU-245: offline, with the same table and the way to repeat what failed."""
    await _record_letters(own)
    await page.goto(own.at("/runs/letters/flow"))
    await page.get_by_role("button", name="Export").click()
    async with page.expect_download() as downloading:
        await page.get_by_role("menuitem", name=re.compile("One HTML file")).click()
    file = tmp_path / "letters.html"
    await (await downloading.value).save_as(file)
    await page.goto(file.as_uri())
    await page.locator(".node", has_text="3 failed").click()
    await expect(page.locator(".step-row").first).to_contain_text("the endpoint did not answer")
    await page.get_by_role("button", name="Retry these 3…").click()
    await expect(page.get_by_role("dialog")).to_contain_text("[20, 40, 60]")


async def test_levels_in_files_are_single_nodes(runs: Runs, page: Page, tmp_path: Path) -> None:
    """S-STU-240, S-VIZ-83: of a graph before any run, and of a trace, whose items are listed."""
    team = recorded.mapped(60)
    dag = EnsembleDevTools.export_dag(team, tmp_path)
    output = await asyncio.to_thread(team.run, runtime="inline")
    trace = EnsembleDevTools.export_trace(output, tmp_path)
    await page.goto(runs.at("/runs"))
    await expect(page.locator(".run").first).to_be_visible()
    await drop(page, dag.name, dag.read_text())
    await expect(page.locator(".node")).to_have_count(4)
    await expect(page.locator(".node", has_text="\u00d760")).to_be_visible()
    await drop(page, trace.name, trace.read_text())
    await expect(page.locator(".node", has_text="60 completed")).to_be_visible()
    await page.locator(".node", has_text="60 completed").click()
    await expect(page.get_by_role("status").filter(has_text="60 items")).to_be_visible()


async def test_the_items_are_for_everybody(own: Runs, page: Page) -> None:
    """S-STU-170, S-STU-171, S-STU-173: rules of accessibility in both schemes, the keyboard, a telephone."""
    await _record_letters(own)
    await page.emulate_media(reduced_motion="reduce")
    await page.goto(own.at("/runs/letters/items?sort=duration"))
    await expect(page.locator(".step-row").first).to_be_visible()
    tags = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    broken = []
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        found = await Axe().run(page, options={"runOnly": tags, "resultTypes": ["violations"]})
        broken += [
            f"{each['id']}: {node['target']} {node['failureSummary']}"
            for each in found.response["violations"]
            for node in each["nodes"]
        ]
    assert broken == []
    await page.keyboard.press("j")
    await expect(page.locator(".step-panel h2")).to_contain_text("letter 7 ")
    await page.keyboard.press("Escape")
    await expect(page.locator(".side")).to_be_hidden()
    await page.get_by_role("grid").focus()
    await page.keyboard.press("ArrowDown")
    await expect(page.locator(".step-panel h2")).to_contain_text("letter 7 ")
    await page.keyboard.press("Enter")
    await expect(page.locator(".side button").first).to_be_focused()
    await page.set_viewport_size({"width": 400, "height": 800})
    await page.goto(own.at("/runs/letters/items"))
    await expect(page.locator(".step-row").first).to_be_attached()
    assert await page.evaluate("document.documentElement.scrollWidth") <= 400
