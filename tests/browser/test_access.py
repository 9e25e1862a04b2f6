"""Who uses the page without a mouse, without sight, on a telephone, in the dark; and who needs a key."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from ensemble_ray.access.admission import Right, new_key
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.server import StudioServer
from tests.browser.conftest import Runs, Watched

pytestmark = pytest.mark.asyncio(loop_scope="package")

_VIEWS = {
    "/runs": ".run",
    "/runs?group=error": ".group",
    "/runs/report/flow?step=write%230": ".node",
    "/runs/report/timeline": "canvas[data-drawn]",
    "/runs/report/timeline?as=table": "table.data",
    "/runs/failed/steps?step=story%230": ".step-row",
    "/runs/report/budget": ".panel",
    "/reviews": ".inbox-row",
    "/compare?a=report&b=failed": ".versus",
}


async def test_no_view_breaks_a_rule_of_accessibility(runs: Runs, page: Page) -> None:
    """S-STU-170, S-STU-171: axe finds no breach of WCAG A and AA, nor of its contrast in the dark."""
    await page.emulate_media(reduced_motion="reduce")
    tags = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    contrast = {"type": "rule", "values": ["color-contrast"]}  # no other rule depends on colours
    broken = []
    for path, shown in _VIEWS.items():
        await page.goto(runs.at(path))
        await expect(page.locator(shown).first).to_be_visible()
        if "step=" in path:
            await expect(page.locator(".step-panel .section-body").first).to_be_visible()
        for scheme, rules in (("light", tags), ("dark", contrast)):
            await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            found = await Axe().run(page, options={"runOnly": rules, "resultTypes": ["violations"]})
            broken += [
                f"{path}: {each['id']}: {node['target']} {node['failureSummary']}"
                for each in found.response["violations"]
                for node in each["nodes"]
            ]
    assert broken == []


async def test_no_view_is_wider_than_a_telephone(runs: Runs, page: Page) -> None:
    """S-STU-173: at 400 pixels nothing is cut off at the side, and a wall has no broken view either."""
    for width in (400, 3840):
        await page.set_viewport_size({"width": width, "height": 800})
        for path, shown in _VIEWS.items():
            await page.goto(runs.at(path))
            await expect(page.locator(shown).first).to_be_attached()
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, path


async def test_everything_is_done_with_the_keyboard(runs: Runs, page: Page) -> None:
    """S-STU-171: from the list to a step and back, search, tabs, help; focus is where it belongs."""
    await page.goto(runs.at("/runs"))
    await expect(page.locator(".run").first).to_be_visible()
    await page.keyboard.press("Tab")
    await expect(page.locator(".skip")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator("main")).to_be_focused()
    await page.keyboard.press("/")
    await expect(page.get_by_label("Search runs")).to_be_focused()
    await page.keyboard.type("report")
    await expect(page.locator(".run")).to_have_count(1)
    await page.keyboard.press("Escape")
    await page.keyboard.press("j")
    await expect(page.locator(".run-name").first).to_be_focused()
    outline = await page.locator(".run").first.evaluate("e => getComputedStyle(e).outlineStyle")
    assert outline == "solid"
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(re.compile("#/runs/report/flow"))
    await expect(page.locator(".node").first).to_be_visible()
    await page.keyboard.press("3")
    await expect(page.get_by_role("tab", name="Steps")).to_have_attribute("aria-selected", "true")
    await page.keyboard.press("j")
    await expect(page.locator(".step-panel h2")).to_contain_text("demand")
    await page.keyboard.press("j")
    await expect(page.locator(".step-panel h2")).to_contain_text("prices")
    await page.keyboard.press("Escape")
    await expect(page.locator(".side")).to_be_hidden()
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog")).to_contain_text("first error")
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await page.keyboard.press("v")
    await expect(page).to_have_url(re.compile("#/reviews"))


async def test_colours_follow_the_reader(runs: Runs, page: Page) -> None:
    """S-STU-172: as the system says, or as chosen, also after a reload; no motion where none is wanted."""
    await page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    await page.goto(runs.at("/runs"))
    background = "getComputedStyle(document.body).backgroundColor"
    dark = await page.evaluate(background)
    await page.get_by_role("button", name="Colours: as the system").click()
    light = await page.evaluate(background)
    assert light != dark
    await page.reload()
    await expect(page.get_by_role("button", name="Colours: light")).to_be_visible()
    assert await page.evaluate(background) == light
    await page.goto(runs.at("/runs/report/flow"))
    assert await page.locator(".node").first.evaluate("e => getComputedStyle(e).transitionDuration") == "0s"


async def test_a_key_is_asked_for_and_kept_in_the_tab(own: Runs, page: Page, watched: Watched) -> None:
    """S-STU-174: where the server wants a key; a wrong one is asked for again, the right one is used from then on."""
    watched.expected.append("401")
    text, key = new_key(
        "reader", rights=frozenset([Right.READ]), teams=["*"], rate=None, created_at=datetime(2026, 1, 1, tzinfo=UTC)
    )
    KeyFile(own.home).add(key)
    server = StudioServer(StoreAddress.of(own.home), host="0.0.0.0", port=0)  # noqa: S104  beyond loopback
    server.start()
    try:
        await page.goto(f"http://127.0.0.1:{server.port}/#/runs")
        for tried in ("erk_wrong", text):
            await page.get_by_label("Key", exact=True).fill(tried)
            await page.get_by_role("button", name="Use it").click()
        await expect(page.locator(".empty")).to_contain_text("No runs yet")
        await page.reload()
        await expect(page.locator(".empty")).to_contain_text("No runs yet")
        assert await page.evaluate("JSON.stringify(localStorage)") == "{}"
        await page.goto("about:blank")  # or it asks on while the server stops
    finally:
        server.stop()


_TOKENS = Path(__file__).parents[2] / "ensemble_ray" / "studio" / "page" / "css" / "tokens.css"
_PAIR = re.compile(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)")
#: What is written on what.
_ON = (
    *((text, ground) for text in ("text", "muted", "accent", "danger") for ground in ("bg", "surface", "raised", "sunken", "hover")),
    *((tone, f"{tone}-bg") for tone in ("running", "waiting", "completed", "failed", "exited", "stopped")),
    *((tone, "surface") for tone in ("running", "waiting", "completed", "failed", "exited", "stopped", "critical")),
    ("text", "waiting-bg"), ("text", "failed-bg"), ("text", "selected"), ("muted", "selected"),
    ("on-accent", "accent"), ("on-danger", "danger"), ("on-bar", "model"),
)  # fmt: skip


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


async def test_colours_have_the_contrast_of_wcag_aa() -> None:
    """S-STU-170: texts 4.5, what shows a state or a role 3, in both schemes."""
    pairs = {name: (light, dark) for name, light, dark in _PAIR.findall(_TOKENS.read_text())}
    marks = [(f"role-{number}", "surface") for number in range(12)]
    marks += [(name, "surface") for name in ("model", "tool", "person", "focus")]
    low = []
    for least, wanted in ((4.5, _ON), (3.0, marks)):
        for front, back in wanted:
            for scheme in (0, 1):
                bright, dim = sorted((_luminance(pairs[front][scheme]), _luminance(pairs[back][scheme])), reverse=True)
                contrast = (bright + 0.05) / (dim + 0.05)
                if contrast < least:
                    low.append(f"{front} on {back} ({('light', 'dark')[scheme]}): {contrast:.2f}")
    assert low == []
