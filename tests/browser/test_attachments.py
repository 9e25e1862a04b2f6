"""Pictures, audio and files in the panel of a step, on a wide page and on a telephone."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Locator, Page, ViewportSize, expect

from ensemble_ray import Audio, Ensemble, File, Image, Task, tool
from ensemble_ray.testing import ScriptedModel
from tests.browser.conftest import Runs
from tests.builders import agent, call
from tests.media import SVG, WAV, make_png

_WIDE: ViewportSize = {"width": 1280, "height": 800}
_TELEPHONE: ViewportSize = {"width": 390, "height": 844}


@tool(effect="none")
def draw() -> list[object]:
    """Draw a plot."""
    return ["the plot:", Image(make_png((20, 90, 200), side=640), name="plot.png")]


def _record(runs: Runs) -> None:
    model = ScriptedModel(call("draw"), "A red square and a blue one.", reads=("image", "audio", "file"))
    attached = [
        Image(make_png(side=900), name="a photo with a long name, from the second day at the sea.png"),
        Image(SVG, name="evil.png", media_type="image/png"),
        Image(SVG, name="drawing.svg"),
        Audio(WAV, name="call.wav"),
        File(b"%PDF-1.7 x", name="report.pdf"),
    ]
    look = Task(name="look", description="Look", agent=agent(model, tools=[draw]), attachments=attached)
    Ensemble(tasks=[look]).run(runtime=runs.inline, run_id="seen")


def _entry(panel: Locator, name: str) -> Locator:
    return panel.locator(".attachment", has_text=name)


@pytest.mark.parametrize("size", [_WIDE, _TELEPHONE], ids=["wide", "telephone"])
async def test_step_shows_pictures_and_offers_files(own: Runs, page: Page, size: ViewportSize, tmp_path: Path) -> None:
    """S-ATT-73: pictures inline within the panel, audio in a player, all others and SVG as downloads; as WCAG asks."""
    _record(own)
    await page.set_viewport_size(size)
    await page.goto(own.at("/runs/seen/steps?step=look%230"))
    panel = page.locator(".step-panel")
    await _entry(panel, "a photo").scroll_into_view_if_needed()
    photo = _entry(panel, "a photo").locator("img")
    await expect(photo).to_be_visible()
    assert await photo.evaluate("image => image.complete && image.naturalWidth") == 900
    box, around = await photo.bounding_box(), await panel.bounding_box()
    assert box is not None
    assert around is not None
    assert around["x"] <= box["x"] < box["x"] + box["width"] <= around["x"] + around["width"] <= size["width"]
    assert await panel.evaluate("element => element.scrollWidth <= element.clientWidth")
    await _entry(panel, "evil.png").scroll_into_view_if_needed()
    await expect(_entry(panel, "evil.png")).to_contain_text("Not shown: its content is no image that a page may show")
    await expect(_entry(panel, "drawing.svg").locator("img")).to_have_count(0)
    await expect(_entry(panel, "report.pdf").locator("img, audio")).to_have_count(0)
    sound = _entry(panel, "call.wav")
    await sound.get_by_role("button", name="Load the player").click()
    await expect(sound.locator("audio")).to_be_visible()
    assert str(await sound.locator("audio").get_attribute("src")).startswith("data:audio/wav;base64,")
    called = panel.locator(".message.tool", has_text="draw")
    await expect(called.locator("summary")).to_contain_text("1 FILE")
    await called.locator("summary").click()
    await _entry(called, "plot.png").scroll_into_view_if_needed()
    await expect(called.locator("img")).to_be_visible()
    results = await Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa"]})
    assert results.violations_count == 0, results.generate_report()
    async with page.expect_download() as downloading:
        await _entry(panel, "drawing.svg").get_by_role("button", name="Download drawing.svg").click()
    download = await downloading.value
    assert download.suggested_filename == "drawing.svg"
    await download.save_as(tmp_path / "saved")
    assert (tmp_path / "saved").read_bytes() == SVG
    assert await page.evaluate("window.pwned") is None


async def test_export_names_attachments_without_their_contents(own: Runs, page: Page, tmp_path: Path) -> None:
    """S-ATT-74: a page that is a file has names, types and sizes."""
    _record(own)
    await page.goto(own.at("/runs/seen/steps"))
    exported = await page.evaluate("fetch('api/studio/runs/seen/export?format=html').then((answer) => answer.text())")
    (tmp_path / "run.html").write_text(exported)
    await page.goto(f"file://{tmp_path}/run.html#/runs/seen/steps?step=look%230")
    entry = _entry(page.locator(".step-panel"), "report.pdf")
    await expect(entry).to_contain_text("application/pdf · 10 B")
    await expect(page.locator(".attachment img, .attachment button")).to_have_count(0)
