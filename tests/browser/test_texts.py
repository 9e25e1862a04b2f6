"""Texts of models are data: whatever they hold, the page shows it and does nothing with it."""

from __future__ import annotations

import pytest
from playwright.async_api import Page, expect

from tests.browser.conftest import Runs

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_html_of_a_model_is_text(page: Page, runs: Runs) -> None:
    """S-STU-150: in lists, the graph, the timeline, the panel; no element of it is made, no script of it runs."""
    for path in (
        "/runs",
        "/runs/hostile/flow?step=attack%230",
        "/runs/hostile/steps?step=attack%230",
        "/runs/hostile/timeline",
    ):
        await page.goto(runs.at(path))
        await expect(page.locator(".run, .node, .step-row, canvas[data-drawn]").first).to_be_visible()
        if "step=" in path:
            await expect(page.locator(".step-panel")).to_contain_text("<script>window.pwned = 1</script>")
        assert await page.locator("main script, main img, main a[href^='javascript:']").count() == 0
        assert await page.evaluate("window.pwned") is None


async def test_control_characters_are_seen(page: Page, runs: Runs) -> None:
    """S-STU-151: escape sequences and marks of direction are symbols; right-to-left texts have their direction."""
    await page.goto(runs.at("/runs/hostile/steps?step=attack%230"))
    output = page.get_by_role("region", name="Output")
    await expect(output).to_contain_text("\u241b[31mred\u241b[0m \u2407bell")
    await expect(output).to_contain_text("\u27e6RLO\u27e7gnp.exe\u27e6PDF\u27e7")
    text = await output.inner_text()
    assert not any(ord(char) < 32 and char not in "\n\t" for char in text)
    assert "\u202e" not in text
    assert await output.evaluate("e => getComputedStyle(e).unicodeBidi") == "isolate"


async def test_a_line_of_a_megabyte_is_cut_and_shown_on_demand(page: Page, runs: Runs) -> None:
    """S-STU-152: its beginning, its length, and all of it when asked for; what the server cut is fetched then."""
    await page.goto(runs.at("/runs/hostile/steps?step=attack%230"))
    section = page.locator(".section", has=page.get_by_role("heading", name="Output", exact=True))
    await expect(section.locator(".more").first).to_contain_text("12,000 of 1,048,")
    assert len(await section.get_by_role("region").inner_text()) < 13_000
    await section.get_by_role("button", name="Show all").click()
    await expect(section.get_by_role("button", name="Show all")).to_have_count(0)
    length = await section.get_by_role("region").evaluate("e => e.textContent.length")
    assert length > 1_048_576


async def test_texts_are_cut_and_compared_by_words(page: Page, runs: Runs) -> None:
    """S-STU-153: pieces make up the whole, no pair of a character is torn apart; changes of either kind give both texts."""
    await page.goto(runs.at("/runs"))
    torn, changes, far = await page.evaluate(
        """async () => {
            const {diff, head, oneLine, pieces, visible} = await import("./js/text.js");
            const long = "\\u{1F600}".repeat(5000) + "\\n" + "word ".repeat(3000);
            const whole = pieces(long);
            const torn = [whole.join("") === long, whole.some((piece) => /^[\\udc00-\\udfff]/.test(piece)), head(long, 4001).length];
            const changes = diff("the lower wall holds", "the higher wall holds well");
            const far = diff(Array.from({length: 3000}, (_, i) => "a" + i).join(" "), Array.from({length: 3000}, (_, i) => "b" + i).join(" "));
            return [torn, changes, far.map((change) => change.kind)];
        }"""
    )
    assert torn == [True, False, 4000]
    assert "".join(each["text"] for each in changes if each["kind"] != "added") == "the lower wall holds"
    assert "".join(each["text"] for each in changes if each["kind"] != "removed") == "the higher wall holds well"
    assert [each["text"] for each in changes if each["kind"] == "same"] == ["the ", " wall holds"]
    assert far == ["removed", "added"]
