"""Runs that go on while a page looks at them: what moves, what survives a reload, two pages, a server that goes away."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.async_api import BrowserContext, Page, Route, expect

from ensemble_ray import Ensemble, EnsembleOutput, InlineRuntime, WebDashboard, tool
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.server import StudioServer
from tests.browser.conftest import Runs, Watched
from tests.browser.gates import Gate, Thinker
from tests.browser.recorded import blocked_team, doubtful_team, reviewed_team
from tests.browser.way import Way
from tests.builders import agent, task

pytestmark = pytest.mark.asyncio(loop_scope="package")


#: In this time each view looks again, ms.
_LOOKS_AGAIN_MS = 3500
#: The notice that the connection is lost; an endpoint has another one.
LOST = ".notice:not(.drain-notice)"
#: Whether the first block of reasoning is indented; false while the page draws it again.
IS_INSIDE = """() => {
  const block = document.querySelector("details.reasoning");
  return block && block.getBoundingClientRect().left - block.parentElement.getBoundingClientRect().left >= 8;
}"""
#: Whether the end of what a model says is in sight.
AT_ITS_END = """() => {
    const pre = document.querySelector(".section.live pre");
    return pre.scrollHeight - pre.scrollTop - pre.clientHeight < 2;
}"""


@tool(effect="none")
def look() -> str:
    """Look it up."""
    return "42"


def begin(runs: Runs, gate: Gate) -> asyncio.Task[EnsembleOutput]:
    """Begin a run whose second task waits at a gate."""
    return asyncio.create_task(asyncio.to_thread(blocked_team(gate).run, runtime=runs.inline, run_id="slow"))


async def test_a_page_follows_a_run_to_its_end(own: Runs, page: Page, gate: Gate) -> None:
    """S-VIZ-74, S-VIZ-75, S-STU-102: pending grey, running, done in the role's colour, without a reload; bars grow meanwhile."""
    work = begin(own, gate)
    await page.goto(own.at("/runs"))
    await expect(page.locator(".run .is-running")).to_have_count(1)
    await page.locator(".run").click()
    await expect(page.locator(".node.is-running")).to_contain_text("Wait for the test")
    await expect(page.locator(".node.is-completed")).to_contain_text("Say what is at hand")
    await expect(page.locator(".node.is-pending")).to_contain_text("Come to an end")
    pulse = await page.locator(".node.is-running").evaluate("e => getComputedStyle(e).animationName")
    assert pulse == "glow"
    await page.get_by_role("tab", name="Timeline").click()
    await expect(page.get_by_label("Follow latest")).to_be_checked()
    await expect(page.locator("canvas")).to_have_attribute("aria-label", re.compile("2 steps"))
    gate.open.set()
    await expect(page.locator("canvas")).to_have_attribute("aria-label", re.compile("3 steps"))
    await expect(page.locator(".run-head .status")).to_have_text("Completed")
    await page.get_by_role("tab", name="Flow").click()
    await expect(page.locator(".node.is-completed")).to_have_count(3)
    await work


async def test_a_reload_in_mid_run_and_a_second_page_see_the_same(
    own: Runs, context: BrowserContext, gate: Gate
) -> None:
    """S-STU-102, S-STU-103: who joins late or comes back sees what the others see."""
    work = begin(own, gate)
    pages = [await context.new_page() for _ in range(2)]
    for page in pages:
        await page.goto(own.at("/runs/slow/steps"))
        await expect(page.locator(".step-row .is-running")).to_have_count(1)
    await pages[0].reload()
    await expect(pages[0].locator(".step-row .is-running")).to_have_count(1)
    gate.open.set()
    for page in pages:
        await expect(page.locator(".step-row .is-completed")).to_have_count(3)
        await expect(page.locator(".run-head .status")).to_have_text("Completed")
    # not `all_inner_texts`, which depends on whether a row that is drawn anew meanwhile is still in the document
    texts = [await page.locator(".step-row").all_text_contents() for page in pages]
    assert texts[0] == texts[1]
    await work


async def test_reasoning_is_shown_while_it_is_thought_and_behind_its_answer(page: Page, tmp_path: Path) -> None:
    """S-STU-178: what is thought or said just now, of the present answer alone, with its end in sight; then a folded block in each answer."""
    thoughts = "Perhaps 41. " * 200
    model = Thinker((thoughts, "I look it up."), ("It says 42.", "It is 42."))
    work = task("Find the number", agent(model, tools=[look], stream=True), name="find")
    live, block = page.locator(".section.live"), page.locator("details.reasoning")
    with WebDashboard(port=0) as dashboard:
        team = Ensemble(tasks=[work], dashboard=dashboard)
        run = asyncio.create_task(asyncio.to_thread(team.run, runtime=InlineRuntime(home=tmp_path), run_id="think"))
        try:
            await asyncio.to_thread(model.gates[0].is_reached.wait, 60)
            await page.goto(f"http://127.0.0.1:{dashboard.actual_port}/#/runs/think/steps?step=find%230")
            for gate, (title, said) in zip(
                model.gates,
                (
                    ("Reasoning so far", thoughts),
                    ("Answer so far", "I look it up."),
                    ("Reasoning so far", "It says 42."),
                    ("Answer so far", "It is 42."),
                ),
                strict=True,
            ):
                await expect(live.locator("h3")).to_contain_text(title)
                await expect(live.locator("pre")).to_have_text(said)
                await page.wait_for_function(AT_ITS_END)
                gate.open.set()
            await run
            await expect(live).to_be_hidden()
            await expect(block).to_have_count(2)
            await expect(block.first.locator("pre")).to_be_hidden()
            await block.first.locator("summary").click()
            await expect(block.first.locator("pre")).to_have_text(thoughts)
            await page.wait_for_function(IS_INSIDE)
            await page.goto("about:blank")
        finally:
            for gate in model.gates:
                gate.open.set()


async def test_a_second_answer_takes_the_place_of_the_first(page: Page, tmp_path: Path, watched: Watched) -> None:
    """S-STU-178: also of a model that tells no reasoning."""
    watched.expected.append("ERR_")  # the dashboard may end while the page asks for the end of the run
    model = Thinker(("", "I look it up."), ("", "It is 42."))
    work = task("Find the number", agent(model, tools=[look], stream=True), name="find")
    said = page.locator(".section.live pre")
    with WebDashboard(port=0) as dashboard:
        team = Ensemble(tasks=[work], dashboard=dashboard)
        run = asyncio.create_task(asyncio.to_thread(team.run, runtime=InlineRuntime(home=tmp_path), run_id="say"))
        try:
            await asyncio.to_thread(model.gates[0].is_reached.wait, 60)
            await page.goto(f"http://127.0.0.1:{dashboard.actual_port}/#/runs/say/steps?step=find%230")
            for turn, text in enumerate(("I look it up.", "It is 42.")):
                model.gates[2 * turn].open.set()
                await expect(said).to_have_text(text)
                model.gates[2 * turn + 1].open.set()
            await run
            await page.goto("about:blank")  # no request is in progress when the dashboard ends
        finally:
            for gate in model.gates:
                gate.open.set()


async def test_a_page_comes_back_when_its_server_does(own: Runs, page: Page, gate: Gate, watched: Watched) -> None:
    """S-WEB-80: it says that the connection is lost, tries again, and has all that happened meanwhile."""
    watched.expected.append("ERR_")
    async with Way().held() as way:
        way.target = own.server.port
        work = begin(own, gate)
        await page.goto(f"http://127.0.0.1:{way.port}/#/runs/slow/flow")
        await expect(page.locator(".node.is-running")).to_have_count(1)
        way.cut()
        own.server.stop()
        await expect(page.locator(LOST)).to_contain_text("The connection is lost")
        gate.open.set()
        await work
        again = StudioServer(StoreAddress.of(own.home), port=0)
        again.start()
        try:
            way.target = again.port
            await page.evaluate("window.dispatchEvent(new Event('online'))")
            await expect(page.locator(".node.is-completed")).to_have_count(3)
            await expect(page.locator(LOST)).to_be_hidden()
        finally:
            again.stop()


async def test_what_cannot_be_had_again_is_said_to_be_old(own: Runs, context: BrowserContext, watched: Watched) -> None:
    """S-STU-108: what is shown stays, with a notice, which goes when the server answers."""
    watched.expected.append("ERR_")
    reviewed_team().run(runtime=own.inline, run_id="asks")
    page = await context.new_page()
    await page.clock.install()
    for view, shown in (("/runs", ".run"), ("/actors", ".empty"), ("/reviews", ".inbox-row")):
        await page.goto(own.at(view))
        await expect(page.locator(shown)).to_have_count(1)
        await page.route("**/api/studio/**", _no_answer)
        await page.clock.run_for(_LOOKS_AGAIN_MS)
        await expect(page.locator(LOST)).to_have_text(re.compile("may be outdated: The server does not answer"))
        await expect(page.locator(shown)).to_have_count(1)
        await page.unroute("**/api/studio/**")
        await page.clock.run_for(_LOOKS_AGAIN_MS)
        await expect(page.locator(LOST)).to_be_hidden()


async def test_a_next_page_that_cannot_be_had_is_said(own: Runs, page: Page, watched: Watched) -> None:
    """S-STU-108: what is shown stays, and may be tried again."""
    watched.expected.append("ERR_")
    doubtful_team().run(runtime=own.inline, run_id="one")
    (row,) = await _rows(own, page)

    async def answer(route: Route) -> None:
        if "cursor=" in route.request.url:
            await route.abort()
        else:
            await route.fulfill(json={"runs": [row], "next_cursor": "more", "total_known": 2})

    await page.route("**/api/studio/runs?*", answer)
    await page.goto(own.at("/runs"))
    await page.get_by_role("button", name="Show more").click()
    await expect(page.locator(".toast")).to_contain_text("The server does not answer")
    await expect(page.locator(".run")).to_have_count(1)
    await expect(page.get_by_role("button", name="Show more")).to_be_visible()


async def test_a_search_that_reads_long_is_not_begun_anew(own: Runs, context: BrowserContext) -> None:
    """S-STU-105, S-STU-106: the list looks again when the search has ended, and shows nothing of what was looked for before."""
    doubtful_team().run(runtime=own.inline, run_id="one")
    page = await context.new_page()
    (row,) = await _rows(own, page)
    asked: list[str] = []
    goes_on = asyncio.Event()
    next_cursors = {"": "1", "1": "2", "2": None}

    async def answer(route: Route) -> None:
        cursor = parse_qs(urlsplit(route.request.url).query).get("cursor", [""])[0]
        asked.append(cursor)
        if cursor == "1":
            await goes_on.wait()
        found = [row] if cursor == "2" else []
        await route.fulfill(json={"runs": found, "next_cursor": next_cursors[cursor], "total_known": 1})

    await page.clock.install()
    await page.goto(own.at("/runs"))
    await expect(page.locator(".run")).to_have_count(1)
    await page.route("**/api/studio/runs?*q=words*", answer)
    try:
        await page.get_by_label("Search runs").fill("words")
        await expect(page.get_by_text("Searching…")).to_be_visible()
        await expect(page.locator(".run")).to_have_count(0)
        await page.clock.run_for(2 * _LOOKS_AGAIN_MS)  # it would have looked again twice
    finally:
        goes_on.set()
    await expect(page.locator(".run")).to_have_count(1)
    assert asked[:3] == ["", "1", "2"]


async def _no_answer(route: Route) -> None:
    await route.abort()


async def _rows(runs: Runs, page: Page) -> list[dict[str, object]]:
    """Return the rows of all runs."""
    found = await (await page.request.get(f"{runs.server.url}api/studio/runs")).json()
    rows: list[dict[str, object]] = found["runs"]
    return rows


async def test_waits_between_tries_double_up_to_half_a_minute(own: Runs, page: Page) -> None:
    """S-WEB-80: 1, 2, 4 ... 30 s; events of a stream are whole whatever pieces they come in."""
    await page.goto(own.at("/runs"))
    waits, events = await page.evaluate(
        """async () => {
            const {eventParser, retryDelay} = await import("./js/source/stream.js");
            const events = [];
            const parse = eventParser((event) => events.push([event.event, event.data, event.id]));
            for (const char of ": beat\\n\\nid: 7\\r\\nevent: steps\\r\\ndata: {\\r\\ndata: }\\r\\n\\r\\ndata: x\\n\\n") parse(char);
            return [[1, 2, 3, 4, 5, 6, 7].map(retryDelay), events];
        }"""
    )
    assert waits == [1000, 2000, 4000, 8000, 16000, 30000, 30000]
    assert events == [["steps", "{\n}", "7"], ["message", "x", None]]


async def test_a_stream_is_opened_once_at_a_time(own: Runs, page: Page) -> None:
    """S-STU-103: a network that comes back while a try is under way begins no second one."""
    await page.goto(own.at("/runs"))
    tries = await page.evaluate(
        """async () => {
            const {listen} = await import("./js/source/stream.js");
            let tries = 0;
            const open = () => ((tries += 1) === 1 ? Promise.reject(new Error("down")) : new Promise(() => undefined));
            const ignore = () => undefined;
            const failed = new Promise((resolve) => {
                const listener = {onSteps: ignore, onAnswer: ignore, onToken: ignore, onEnd: ignore, onConnection: resolve};
                window.stopListening = listen({open, cursor: 0, listener});
            });
            await failed;
            await new Promise((resolve) => setTimeout(resolve));
            for (let each = 0; each < 3; each += 1) window.dispatchEvent(new Event("online"));
            window.stopListening();
            return tries;
        }"""
    )
    assert tries == 2


async def test_an_answer_is_shown_once_after_an_interruption(own: Runs, page: Page) -> None:
    """S-STU-103: each connection tells from its beginning what a model is saying."""
    await page.goto(own.at("/runs"))
    said = await page.evaluate(
        """async () => {
            const {RunModel} = await import("./js/model/run.js");
            let listener;
            const source = {live: (run, after, given) => { listener = given; return () => undefined; }};
            const model = new RunModel({source}, {run_id: "r", cursor: 0, is_live: true}, []);
            model.follow();
            for (const each of [1, 2]) {
                listener.onConnection(true, 0);
                for (const text of ["Half ", "an answer"]) listener.onToken({step: "a#0", text});
                listener.onConnection(false, 1000);
            }
            return model.tokens.get("a#0");
        }"""
    )
    assert said == "Half an answer"


async def test_the_last_look_at_a_run_may_fail(own: Runs, page: Page) -> None:
    """S-STU-102: where the server is gone when the stream has told the end, the page keeps what it has, without an error."""
    await page.goto(own.at("/runs"))
    kept, told = await page.evaluate(
        """async () => {
            const {RunModel} = await import("./js/model/run.js");
            let listener;
            const gone = () => Promise.reject(new Error("gone"));
            const source = {live: (run, after, given) => { listener = given; return () => undefined; }, run: gone, steps: gone};
            const model = new RunModel({source}, {run_id: "r", cursor: 0, is_live: true}, [{id: "a#0"}]);
            model.follow();
            const told = new Promise((resolve) => model.watch(() => resolve(true)));
            listener.onEnd();
            return [[...model.steps.keys()], await told];
        }"""
    )
    assert (kept, told) == (["a#0"], True)
