"""Failed runs: the cause is on the first screen, in the words of `ensemble-ray trace` and of the exception."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect
from pydantic import BaseModel

from ensemble_ray import (
    Ensemble,
    Graph,
    GraphEdge,
    HierarchicalConstraints,
    InlineRuntime,
    Loop,
    MapEnsemble,
    MapReduceEnsemble,
    Phase,
    PhaseReview,
    Task,
    ToolConfigurationError,
    tool,
)
from ensemble_ray.definition.fields import Origin
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.record.trace import fold_trace
from ensemble_ray.studio.server import StudioServer
from ensemble_ray.teamfile import load_source
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.browser.conftest import Runs, Watched
from tests.browser.killed import kill_run
from tests.browser.test_doing import drop
from tests.builders import agent, answer, call, task

pytestmark = pytest.mark.asyncio(loop_scope="package")


class Invoice(BaseModel):
    """What a task is to answer."""

    number: int
    total: float


def _says(*texts: str) -> ScriptedModel:
    return ScriptedModel(*texts, otherwise=texts[-1])


def _facts() -> Task:
    return task("Find what is known of the storm", agent(_says("Eleven boats."), "Researcher"), name="facts")


def model_fails() -> Ensemble:
    """The endpoint of the second task refuses the key."""
    facts = _facts()
    writer = agent(ScriptedModel(otherwise=ValueError("the endpoint refused the key (401)")))
    return Ensemble(tasks=[facts, task("Write the story", writer, name="story", context=[facts])])


def answer_does_not_parse() -> Ensemble:
    """A typed answer without its total."""
    clerk = agent(_says('{"number": 4711, "sum": "12.00"}'), "Clerk")
    read = task("Read the invoice", clerk, name="read", output_type=Invoice, max_output_retries=1)
    return Ensemble(tasks=[_facts(), read])


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    raise ToolConfigurationError(f"no dictionary for '{word}': set DICTIONARY")


def tool_ends_the_task() -> Ensemble:
    """A tool without its configuration."""
    model = ScriptedModel(call("look_up", '{"word": "kelp"}'), otherwise=answer("Kelp is a weed."))
    return Ensemble(tasks=[task("Say what kelp is", agent(model, "Reader", tools=[look_up]), name="define")])


def constraint_is_not_met() -> Ensemble:
    """A manager that never delegates to a required worker."""
    return Ensemble(
        tasks=[task("Write a letter", agent(_says("Dear all.")), name="letter")],
        workflow="hierarchical",
        manager_llm=_says("Done.", "Done."),
        hierarchical_constraints=HierarchicalConstraints(required_workers=["Writer"]),
    )


def phase_is_rejected() -> Ensemble:
    """A review that rejects the second phase."""
    research = Phase(name="research", tasks=[_facts()])
    check = PhaseReview(
        task=task("Check the draft", agent(_says("REJECT: it names no source"), "Critic"), name="check")
    )
    draft = task("Draft the story", agent(_says("It was windy.")), name="draft")
    return Ensemble(phases=[research, Phase(name="draft", tasks=[draft], after=[research], review=check)])


def _never(_: object) -> bool:
    return False


def _states(**texts: str) -> dict[str, Task]:
    return {name: task(f"Do {name}", agent(_says(text), name.capitalize()), name=name) for name, text in texts.items()}


def no_edge_matches() -> Ensemble:
    """A graph that knows no way on."""
    edges = [
        GraphEdge(from_state="triage", to_state="billing"),
        GraphEdge(from_state="billing", to_state=Graph.END, condition=_never, label="is paid"),
    ]
    states = _states(triage="about money", billing="Invoice 4711 is open.")
    return Ensemble(graph=Graph(name="desk", states=states, edges=edges, start="triage"))


def _refine(until: Callable[[Any], bool], **fields: Any) -> Ensemble:
    draft = task("Draft a line", agent(_says("A line.")), name="draft")
    return Ensemble(loops=[Loop(name="refine", body=[draft], until=until, max_iterations=3, **fields)])


def loop_reaches_its_cap() -> Ensemble:
    """A loop that nobody is content with."""
    return _refine(_never, on_max_iterations="throw")


def _is_good(_: object) -> bool:
    return bool(dict[str, int]()["score"])


def predicate_raises() -> Ensemble:
    """A predicate that looks for what is not there."""
    return _refine(_is_good)


def _reviews() -> Iterator[str]:
    yield "fine lid"
    raise OSError("reviews.csv ends in the middle of line 2")


def _read(item: object) -> Task:
    return task(f"Read {item}", name=None)


def _join(notes: list[Task]) -> Task:
    return task("Join the notes", context=notes)


def source_raises() -> MapReduceEnsemble:
    """Items that cannot be read to their end."""
    return MapReduceEnsemble(items=_reviews(), map_task=_read, reduce_task=_join, chunk_size=2, llm=_says("a note"))


def _read_price(item: dict[str, str]) -> Task:
    return task(f"Read {item['price']}")


def factory_raises() -> MapReduceEnsemble:
    """A factory that asks its item for what it has not."""
    items = iter([{"cost": "12"}])
    return MapReduceEnsemble(items=items, map_task=_read_price, reduce_task=_join, chunk_size=2, llm=_says("a note"))


def budget_is_spent() -> Ensemble:
    """A budget for one task of two."""
    model = ScriptedModel(otherwise=answer("Eleven boats.", 90, 10))
    return Ensemble(tasks=[task("Find", name="find"), task("Write", name="write")], llm=model, max_tokens=420)


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A run that failed, and what its first screen says of it."""

    make: Callable[[], Any] | None = None  # None: its process is killed
    says: tuple[str, ...]


_HERE = f'File "{__file__}", line '
BROKEN = {
    "model": Broken(
        make=model_fails,
        says=(
            "Task 'story' (agent 'Writer') failed",
            "the endpoint refused the key (401)",
            "ensemble-ray fork model --from story",
        ),
    ),
    "parse": Broken(
        make=answer_does_not_parse,
        says=(
            "Task 'read' (agent 'Clerk') failed",
            "OutputParsingError",
            '"sum": "12.00"',
            "total",
            "Raise max_output_retries",
            "ensemble-ray fork parse --from read",
        ),
    ),
    "tool": Broken(
        make=tool_ends_the_task,
        says=("Task 'define' (agent 'Reader') failed", "no dictionary for 'kelp': set DICTIONARY", _HERE, "look_up"),
    ),
    "constraint": Broken(make=constraint_is_not_met, says=("The manager failed", "ConstraintViolationError", "Writer")),
    "rejected": Broken(
        make=phase_is_rejected,
        says=("Phase 'draft' failed", "it names no source", "ensemble-ray fork rejected --from 'phase:draft#0'"),
    ),
    "edge": Broken(
        make=no_edge_matches,
        says=(
            "Graph 'desk', step 2, failed",
            "state 'billing' has no matching outgoing edge",
            "Add an edge without a condition",
            "ensemble-ray fork edge --from 'graph:desk#1'",
        ),
    ),
    "cap": Broken(
        make=loop_reaches_its_cap,
        says=("Loop 'refine' failed", "did not converge after 3 iterations", "ensemble-ray fork cap --from 'loop:refine#2'"),
    ),
    "predicate": Broken(make=predicate_raises, says=("Loop 'refine' ('_is_good') failed", "KeyError: 'score'", _HERE)),
    "source": Broken(
        make=source_raises,
        says=("Code that makes items or tasks ('_reviews') failed", "reviews.csv ends in the middle of line 2", _HERE, "ensemble-ray resume source"),
    ),
    "factory": Broken(make=factory_raises, says=("Code that makes items or tasks ('_read_price') failed", "'price'", _HERE)),
    "budget": Broken(
        make=budget_is_spent,
        says=("The budget was exhausted at: Task 'write'", "max_tokens 420", "ensemble-ray resume budget --max-tokens N"),
    ),
    "killed": Broken(
        says=("The process of the run died", "Pay the invoice", "outcome of a call is unknown", "resume killed"),
    ),
}  # fmt: skip


def run_broken(home: Path, name: str) -> BaseException | None:
    """Record a broken run under its name; return what it raised."""
    make = BROKEN[name].make
    if make is None:
        kill_run(home, name)
        return None
    team = load_source(Origin(place=f"{__name__}:{make.__name__}"))
    try:
        team.run(runtime=InlineRuntime(home=home), run_id=name)
    except Exception as error:  # noqa: BLE001  each has its own
        return error
    return None


def some_items_fail() -> MapEnsemble:
    """A map of which some items fail, most for one reason."""

    async def read(asked: ScriptedCall) -> object:
        number = asked.number
        if number % 3 == 0:
            return RuntimeError(f"no answer for review {number}")
        return ValueError("the page is empty") if number == 1 else answer("a note")

    return MapEnsemble(
        items=range(12),
        map_task=_read,
        llm=ScriptedModel(otherwise=read),
        on_item_error="collect",
        parallel_error_strategy="continue_on_error",
    )


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """All broken runs, and the page over them."""
    home = tmp_path_factory.mktemp("broken")
    for name in BROKEN:
        run_broken(home, name)
    some_items_fail().run(runtime=InlineRuntime(home=home), run_id="partly")
    server = StudioServer(StoreAddress.of(home), port=0)
    server.start()
    yield Runs(home, server)
    server.stop()


#: Whether a text is drawn in the window, not scrolled away and not covered.
_IS_SEEN = """(wanted) => {
    const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_ELEMENT);
    let smallest = null;
    for (let at = walker.nextNode(); at; at = walker.nextNode()) if (at.getClientRects().length && at.textContent.includes(wanted)) smallest = at;
    if (!smallest) return "no such text";
    const box = smallest.getBoundingClientRect();
    if (!box.width || box.top < 0 || box.bottom > window.innerHeight) return `not in the window: ${box.top} to ${box.bottom}`;
    const line = smallest.getClientRects()[0];
    const seen = document.elementFromPoint(line.left + Math.min(6, line.width / 2), line.top + line.height / 2);
    return seen && (smallest.contains(seen) || seen.contains(smallest)) ? "" : `covered by ${seen?.className}`;
}"""


@pytest.mark.parametrize("name", BROKEN)
async def test_the_cause_is_on_the_first_screen(name: str, page: Page, broken: Runs) -> None:
    """S-STU-210: what failed, the cause, the line of user code and the next command, without a click or scrolling."""
    await page.goto(broken.at(f"/runs/{name}"))
    await expect(page.locator(".failure")).to_be_visible()
    await expect(page.locator(".node").first).to_be_visible()
    unseen = {text: why for text in BROKEN[name].says if (why := await page.evaluate(_IS_SEEN, text))}
    assert not unseen


async def test_a_refused_answer_stands_beside_its_reason(page: Page, broken: Runs) -> None:
    """S-STU-210: at one height, so that both are compared."""
    await page.goto(broken.at("/runs/parse"))
    boxes = [
        await page.get_by_role("region", name=name, exact=True).bounding_box()
        for name in ("Last answer", "Why it was refused")
    ]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]


async def test_failed_items_of_a_completed_run_are_grouped_by_error(page: Page, broken: Runs) -> None:
    """S-STU-212: the most frequent error first, with its number of items and links to them; no red card."""
    await page.goto(broken.at("/runs/partly"))
    groups = page.locator(".failed-steps li")
    await expect(groups).to_have_count(2)
    await expect(groups.first).to_contain_text("\u00d74")
    await expect(groups.first).to_contain_text("no answer for review")
    await expect(groups.nth(1)).to_contain_text("the page is empty")
    await expect(page.locator(".failed-steps h2")).to_have_text("5 steps failed, and the run completed without them")
    assert await page.locator(".failure, .banner").count() == 0
    await groups.nth(1).get_by_role("link").click()
    await expect(page.locator(".step-panel")).to_contain_text("the page is empty")
    await page.get_by_role("link", name="Show all failed steps").click()
    await expect(page.locator(".step-row")).to_have_count(5)


@pytest.mark.parametrize(
    ("name", "status", "offered"),
    [
        ("model", "Failed", {"Fork"}),
        ("source", "Failed", {"Continue"}),
        ("budget", "Budget exhausted", {"Fork"}),
        ("killed", "Process died", {"Continue", "Fork", "End run"}),
        ("partly", "Completed", set[str]()),
    ],
)
async def test_states_and_actions_have_plain_names_and_no_action_is_refused(
    name: str, status: str, offered: set[str], page: Page, broken: Runs
) -> None:
    """S-STU-213, S-STU-215."""
    await page.goto(broken.at(f"/runs/{name}"))
    head = page.locator(".run-head")
    await expect(head.locator(".status")).to_have_text(status)
    names = ("Continue", "Fork", "End run")
    shown = {each for each in names if await head.get_by_role("button", name=each, exact=True).count()}
    assert shown == offered


async def test_a_file_of_a_failed_run_has_its_card(page: Page, broken: Runs, tmp_path: Path, watched: Watched) -> None:
    """S-STU-160, S-STU-210: an exported page, exported JSON, and a trace that is dropped on the page."""
    await page.goto(broken.at("/runs/parse"))
    await page.get_by_role("button", name="Export").click()
    async with page.expect_download() as downloading:
        await page.get_by_role("menuitem", name=re.compile("One HTML file")).click()
    file = tmp_path / "parse.html"
    await (await downloading.value).save_as(file)
    await page.goto(file.as_uri())
    card = page.locator(".failure")
    for text in BROKEN["parse"].says:
        await expect(card).to_contain_text(text)
    assert await card.get_by_role("button", name="Fork").count() == 0
    trace = await asyncio.to_thread(_trace_of, broken.home, "parse")
    await page.goto(broken.at("/runs"))
    await expect(page.locator(".run").first).to_be_visible()
    await drop(page, "parse.trace.json", trace)
    await expect(card).to_contain_text("Task 'Read the invoice' failed")
    await expect(card).to_contain_text("OutputParsingError")


def _trace_of(home: Path, run_id: str) -> str:
    return fold_trace(run_blocking(store_at(StoreAddress.of(home)).facts(run_id))).to_json()


async def test_cards_are_accessible_and_fit_a_telephone(page: Page, broken: Runs) -> None:
    """S-STU-170, S-STU-173: in both schemes, and at 400 pixels."""
    await page.emulate_media(reduced_motion="reduce")
    tags = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    breaches: list[str] = []
    for name in ("parse", "killed", "partly"):
        await page.goto(broken.at(f"/runs/{name}"))
        await expect(page.locator(".failure, .failed-steps")).to_be_visible()
        await expect(page.locator(".node").first).to_be_visible()
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)
            found = await Axe().run(page, options={"runOnly": tags, "resultTypes": ["violations"]})
            breaches += [f"{name}: {each['id']}: {each['nodes'][0]['target']}" for each in found.response["violations"]]
        await page.set_viewport_size({"width": 400, "height": 800})
        assert await page.evaluate("document.documentElement.scrollWidth") <= 400
        await page.set_viewport_size({"width": 1280, "height": 800})
    assert breaches == []
