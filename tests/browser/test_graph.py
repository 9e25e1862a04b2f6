"""The graph of a run: its size, critical path, lines, labels, names and colours."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from ensemble_ray import Agent, ChatResponse, Ensemble, Graph, GraphEdge, GraphRoutingContext, Loop, Phase, Task
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from ensemble_ray.visualization import dev_tools
from tests.browser.conftest import Runs
from tests.browser.gates import Gate
from tests.browser.recorded import blocked_team
from tests.builders import answer, call

pytestmark = pytest.mark.asyncio(loop_scope="package")

_ROLES = (
    "Market researcher for home batteries", "Analyst", "Regulatory affairs specialist", "Data engineer", "Statistician",
    "Supply chain expert for Northern and Eastern Europe", "Copy editor", "Fact checker", "Translator", "Illustrator",
    "Photo editor", "Editor in chief",
)  # fmt: skip
_SLOW = 5


def wide_team() -> Ensemble:
    """Twelve roles: one slow task and a chain of quick ones side by side, joined by the last."""
    gate = Gate()

    def begin(_: ScriptedCall) -> object:
        gate.open.set()
        return answer("The chain has ended", 20, 4)

    async def compare(asked: ScriptedCall) -> object:
        found = await gate(asked)
        await asyncio.sleep(0.02)  # records have milliseconds
        return found

    def make(at: int, *context: Task, reply: Callable[[ScriptedCall], object] | None = None) -> Task:
        text = f"Collect what is known about part {at + 1} of the market for home batteries and name the sources"
        if at == _SLOW:
            text = "Compare the delivery times of the twelve largest suppliers with their contracts"
        model = ScriptedModel(otherwise=reply or answer(f"Notes {at}", 120, 30))
        return Task(
            name=f"part-{at}",
            description=text,
            expected_output="Notes",
            agent=Agent(role=_ROLES[at], goal="Help", llm=model),
            context=list(context),
        )

    first = [make(at, reply=compare if at == _SLOW else None) for at in range(7)]
    chain = [make(7, *first[:_SLOW])]
    chain.append(make(8, chain[-1]))
    chain.append(make(9, chain[-1]))
    beside = make(10, chain[-1], reply=begin)  # the slow task ends when this one has begun
    return Ensemble(tasks=[*first, *chain, beside, make(11, chain[-1], *first[_SLOW:])], workflow="parallel")


def phased_team() -> Ensemble:
    """Two phases, the second with a loop."""

    def make(name: str, role: str, *context: Task, text: str = "") -> Task:
        model = ScriptedModel(otherwise=answer(text or name, 50, 9))
        return Task(
            name=name, description=f"{name.capitalize()} the article on tides", expected_output="Text",
            agent=Agent(role=role, goal="Help", llm=model), context=list(context),
        )  # fmt: skip

    draft = make("draft", "Writer")
    body = [draft, make("criticise", "Critic", draft)]
    research = Phase(name="research", tasks=[make("plan", "Planner"), make("find", "Researcher")], workflow="parallel")
    writing = Phase(
        name="writing", tasks=[make("title", "Writer")], loops=[Loop(name="polish", body=body, max_iterations=2)],
        after=[research],
    )  # fmt: skip
    return Ensemble(phases=[research, writing])


def labelled_graph() -> Ensemble:
    """States with long conditions, of which one leads back."""
    visits = itertools.count()

    def make(name: str, text: str) -> Task:
        model = ScriptedModel(otherwise=answer(name, 40, 6))
        return Task(
            name=name, description=text, expected_output="x", agent=Agent(role=name.title(), goal="x", llm=model)
        )

    def is_again(_: GraphRoutingContext) -> bool:
        return next(visits) == 0

    states = {
        "triage": make("triage", "Say what the customer wants"),
        "refund": make("refund", "Pay the money back"),
        "repair": make("repair", "Order the spare part and a visit"),
        "answer": make("answer", "Answer the customer"),
    }
    edges = [
        GraphEdge(from_state="triage", to_state="refund", condition=lambda _: False, label="the customer wants money"),
        GraphEdge(from_state="triage", to_state="repair", condition=lambda _: True, label="the device can be repaired"),
        GraphEdge(from_state="repair", to_state="triage", condition=is_again, label="the spare part is not in stock any more"),
        GraphEdge(from_state="repair", to_state="answer"),
        GraphEdge(from_state="refund", to_state="answer"),
        GraphEdge(from_state="answer", to_state=Graph.END),
    ]  # fmt: skip
    return Ensemble(graph=Graph(name="service", states=states, edges=edges, start="triage"))


def managed_team() -> Ensemble:
    """A manager who asks two of three workers."""

    def ask(role: str, number: int) -> ChatResponse:
        arguments = f'{{"agent_role": "{role}", "task_description": "Do the part of the {role}"}}'
        return answer("", 60, 9, calls=[call("delegate_task", arguments, number=number)])

    workers = [
        Agent(role=role, goal=f"Do what a {role} does", llm=ScriptedModel(otherwise=answer(f"{role} did it", 40, 8)))
        for role in ("Researcher", "Writer", "Translator for technical documents")
    ]
    manager = ScriptedModel(ask("Researcher", 0), ask("Writer", 1), otherwise=answer("All done", 90, 12))
    task = Task(name="make", description="Make the leaflet", expected_output="Text", agent=workers[1])
    return Ensemble(tasks=[task], agents=workers, workflow="hierarchical", manager_llm=manager)


TEAMS = {"wide": wide_team, "phased": phased_team, "labelled": labelled_graph, "managed": managed_team}

#: Boxes of the nodes and of the view, on the screen.
_BOXES = "all => all.map(e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; })"


async def _open(page: Page, runs: Runs, run: str, view: str) -> None:
    """Open a graph on an empty page: no element is of the graph before."""
    await page.goto("about:blank")
    await page.goto(runs.at(f"/runs/{run}/flow?as={view}"))
    await expect(page.locator(".node").first).to_be_visible()


async def test_a_graph_fits_into_its_window_at_the_start(page: Page, own: Runs) -> None:
    """S-STU-250: a wide one too, in a narrow window too; a node then shows its title alone, in larger letters."""
    wide_team().run(runtime=own.inline, run_id="wide")
    for width, view in itertools.product((1280, 520), ("declared", "ran")):
        await page.set_viewport_size({"width": width, "height": 800})
        await _open(page, own, "wide", view)
        await expect(page.locator(".node")).to_have_count(12)
        ((left, top, right, bottom),) = await page.locator(".flow-view").evaluate_all(_BOXES)
        for box in await page.locator(".node").evaluate_all(_BOXES):
            assert box[0] >= left
            assert box[1] >= top
            assert box[2] <= right
            assert box[3] <= bottom
    await expect(page.locator(".node-foot").first).to_be_hidden()
    for _ in range(6):
        await page.get_by_role("button", name="Larger").click()
    await expect(page.locator(".node-foot").first).to_be_visible()


async def test_the_critical_path_is_that_of_the_times_in_both_views(page: Page, own: Runs) -> None:
    """S-STU-251: one slow task before the last, beside a longer chain of quick ones."""
    wide_team().run(runtime=own.inline, run_id="wide")
    for view in ("declared", "ran"):
        await _open(page, own, "wide", view)
        marked = page.locator(".node.critical")
        await expect(marked).to_have_count(2)
        await expect(marked.first).to_have_attribute(
            "aria-label", re.compile("Compare the delivery.*on the critical path")
        )
        await expect(page.locator(".edges .edge-line.critical")).to_have_count(1)
        await expect(page.locator(".flow-legend")).to_contain_text("critical path by time")


async def test_the_critical_path_appears_when_the_run_has_ended(own: Runs, page: Page, gate: Gate) -> None:
    """S-STU-251: an active run has none yet."""
    other = Task(name="other", description="Do the other part", expected_output="x",
                 agent=Agent(role="Other", goal="x", llm=ScriptedModel(otherwise=answer("x", 1, 1))))  # fmt: skip
    team = blocked_team(gate)
    team = team.replace(tasks=[other, *team.tasks], workflow="parallel")
    work = asyncio.create_task(asyncio.to_thread(team.run, runtime=own.inline, run_id="slow"))
    assert await asyncio.to_thread(gate.is_reached.wait, 60)
    await page.goto(own.at("/runs/slow/flow"))
    await expect(page.locator(".node.is-running")).to_have_count(1)
    await expect(page.locator(".node.critical")).to_have_count(0)
    gate.open.set()
    await work
    await expect(page.locator(".node.critical")).to_have_count(3)


async def test_each_kind_of_line_has_one_style_and_is_in_the_legend(page: Page, own: Runs) -> None:
    """S-STU-252, S-VIZ-93: over several graphs, a kind is always drawn the same, and no two kinds are."""
    styles: dict[str, set[str]] = {}
    for name, make in TEAMS.items():
        make().run(runtime=own.inline, run_id=name)
        for view in ("declared", "ran"):
            await _open(page, own, name, view)
            drawn = await page.locator(".edges .edge-line").evaluate_all(
                "all => all.map(e => [e.classList[1], getComputedStyle(e).strokeDasharray])"
            )
            shown = await page.locator(".sample .edge-line.edge").evaluate_all("all => all.map(e => e.classList[1])")
            assert set(shown) == {kind for kind, _ in drawn}
            for kind, dashes in drawn:
                styles.setdefault(kind, set()).add(dashes)
    assert set(styles) == {"dependency", "unconditional", "conditional", "loop", "delegation"}
    assert all(len(found) == 1 for found in styles.values())
    assert len(set.union(*styles.values())) == len(styles)


async def test_names_are_whole_and_labels_beside_their_lines(page: Page, own: Runs) -> None:
    """S-STU-253: no text of a node is cut, each node has at most one badge, labels touch no line and no node."""
    for name, make in TEAMS.items():
        make().run(runtime=own.inline, run_id=name)
        for view in ("declared", "ran"):
            await _open(page, own, name, view)
            faults = await page.evaluate(
                """() => {
                    const canvas = document.querySelector(".flow-canvas");
                    canvas.classList.remove("far"); // as after zooming in
                    const faults = [];
                    for (const text of document.querySelectorAll(".node-title, .node-agent bdi, .edge-label"))
                        if (text.textContent.length <= 120 && (text.scrollHeight > text.clientHeight + 1 && text.clientHeight || text.scrollWidth > text.clientWidth + 1 && text.clientWidth)) faults.push(`cut: ${text.textContent}`);
                    const box = (e) => e.getBoundingClientRect();
                    const isOver = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
                    for (const node of document.querySelectorAll(".node")) {
                        if (node.querySelectorAll(".badge").length > 1) faults.push(`badges: ${node.textContent}`);
                        for (const part of node.querySelectorAll(".node-title, .node-foot > *"))
                            if (box(part).bottom > box(node).bottom + 1) faults.push(`below its node: ${part.textContent}`);
                    }
                    for (const label of document.querySelectorAll(".edge-label")) {
                        for (const node of document.querySelectorAll(".node")) if (isOver(box(label), box(node))) faults.push(`on a node: ${label.textContent}`);
                        for (const line of document.querySelectorAll(".edges .edge-line")) {
                            const to = line.getScreenCTM();
                            for (let at = 0; at < line.getTotalLength(); at += 2) {
                                const {x, y} = line.getPointAtLength(at).matrixTransform(to);
                                if (isOver(box(label), {left: x - 1, right: x + 1, top: y - 1, bottom: y + 1})) { faults.push(`on a line: ${label.textContent}`); break; }
                            }
                        }
                    }
                    return faults;
                }"""
            )
            assert faults == [], (name, view)


async def test_arrows_end_at_the_borders_of_their_nodes(page: Page, own: Runs) -> None:
    """S-STU-253: of nodes, of frames, and of the round end of a graph."""
    for name, make in TEAMS.items():
        make().run(runtime=own.inline, run_id=name)
        for view in ("declared", "ran"):
            await _open(page, own, name, view)
            far = await page.evaluate(
                """() => {
                    const scale = document.querySelector(".flow-canvas").getBoundingClientRect().width / document.querySelector(".flow-canvas").offsetWidth;
                    const boxes = [...document.querySelectorAll(".node, .flow-group")].map((e) => e.getBoundingClientRect());
                    return [...document.querySelectorAll(".edges .edge-line")].map((line) => {
                        const {x, y} = line.getPointAtLength(line.getTotalLength()).matrixTransform(line.getScreenCTM());
                        return Math.min(...boxes.filter((b) => x > b.left - 3 && x < b.right + 3 && y > b.top - 3 && y < b.bottom + 3)
                            .map((b) => Math.min(Math.abs(x - b.left), Math.abs(x - b.right), Math.abs(y - b.top), Math.abs(y - b.bottom)))) / scale;
                    });
                }"""
            )
            assert far
            assert max(far) < 2, (name, view)


async def test_a_role_has_its_colour_in_all_tabs(page: Page, own: Runs) -> None:
    """S-STU-254: twelve roles, twelve colours; a reload and another tab first change none."""
    wide_team().run(runtime=own.inline, run_id="wide")
    colours: list[dict[str, str]] = []
    for tab, names in (
        ("flow", ".node-agent"),
        ("timeline?as=table", "td .row"),
        ("budget", "td .row"),
        ("steps", ".step-agent .row"),
    ):
        await page.goto("about:blank")
        await page.goto(own.at(f"/runs/wide/{tab}"))
        await expect(page.locator(names)).to_have_count(12)
        found = await page.locator(names).evaluate_all(
            "all => all.map(e => [e.textContent, getComputedStyle(e.querySelector('.dot')).backgroundColor])"
        )
        colours.append(dict(found))
    assert sorted(colours[0]) == sorted(_ROLES)
    assert len(set(colours[0].values())) == 12
    assert colours.count(colours[0]) == len(colours)


_TOKENS = Path(__file__).parents[2] / "ensemble_ray" / "studio" / "page" / "css" / "tokens.css"
_PAIR = re.compile(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)")
#: Colours with a meaning in time, and of the critical path.
_TIMES = (
    "running", "waiting", "completed", "failed", "exited", "stopped", "critical",
    "queue", "rate-limit", "model", "tool", "person", "other",
)  # fmt: skip
_ROLE_COUNT, _LEAST = 12, 0.09


def _oklab(colour: str) -> tuple[float, float, float]:
    """Return a colour in a space in which distances are differences that people see; 0.02 can just be seen."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    middle = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


async def test_colours_of_roles_differ_from_each_other_and_from_those_of_time() -> None:
    """S-STU-254: in both schemes; pictures use the same ones."""
    pairs = {name: (light, dark) for name, light, dark in _PAIR.findall(_TOKENS.read_text())}
    roles = [f"role-{number}" for number in range(_ROLE_COUNT)]
    near = []
    for scheme, (one, other) in itertools.product(
        (0, 1), [*itertools.combinations(roles, 2), *itertools.product(roles, _TIMES)]
    ):
        a, b = _oklab(pairs[one][scheme]), _oklab(pairs[other][scheme])
        if sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5 < _LEAST:
            near.append((one, other, scheme))
    assert near == []
    drawn = re.findall(r"--r(\d+):(#\w{6})", dev_tools._STYLE)
    assert drawn == [(str(at), pairs[role][scheme]) for scheme in (0, 1) for at, role in enumerate(roles)]
