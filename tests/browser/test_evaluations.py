"""Evaluations in the browser: the list, one with its cases, and two side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from ensemble_ray import Case, Evaluation, InlineRuntime, Judge
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.server import StudioServer
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.browser.conftest import Runs, Watched
from tests.ensemble_ray.evaluation.teams import capital_of, make_cases, make_team

pytestmark = pytest.mark.asyncio(loop_scope="package")


def worse(call: ScriptedCall) -> object:
    """Answer as before, except for one country."""
    return "<b>Naples</b>" if "Italy" in call.text and "Judge" not in call.text else capital_of(call)


def record_evaluations(home: Path) -> None:
    """Leave two evaluations of one team, and one that was not run to its end."""
    inline = InlineRuntime(home=home)
    cases = [*make_cases(), Case("Atlantis", {"country": "Atlantis"}, expected={"name": "none"})]
    for name, answer in (("spring", capital_of), ("summer", worse)):
        team = make_team(ScriptedModel(otherwise=answer))
        Evaluation(team, cases, ["exact", Judge("Is it right?")], id=name, repeats=2).run(runtime=inline)
    make_team(ScriptedModel("Paris")).run(
        {"country": "France"}, runtime=inline, tags={"evaluation": "begun", "case": "x"}
    )


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Evaluations, and the page over them; tests only look at these."""
    home = tmp_path_factory.mktemp("evaluated")
    record_evaluations(home)
    server = StudioServer(StoreAddress.of(home), port=0)
    server.start()
    yield Runs(home, server)
    server.stop()


async def test_evaluations_are_listed_when_runs_have_their_tag(page: Page, evaluated: Runs) -> None:
    """S-EVL-50, S-EVL-52: one without a result leads to its runs."""
    await page.goto(evaluated.at("/runs"))
    await page.get_by_role("link", name="Evaluations").click()
    await expect(page).to_have_url(re.compile("#/evaluations"))
    await expect(page.locator(".page-head")).to_contain_text("3 evaluations")
    rows = page.locator(".evaluations tbody tr")
    await expect(rows).to_have_count(3)
    summer = page.locator("tr", has_text="summer")
    await expect(summer).to_contain_text("6 completed, 2 failed")
    await expect(summer).to_contain_text("exact 0.667")
    begun = page.locator("tr", has_text="begun")
    await expect(begun).to_contain_text("Not at its end")
    await begun.get_by_role("link").click()
    await expect(page).to_have_url(re.compile("tag=evaluation"))
    await expect(page.locator(".run")).to_have_count(1)


async def test_cases_are_side_by_side_when_an_evaluation_is_opened(page: Page, evaluated: Runs) -> None:
    """S-EVL-51, S-EVL-52: expected, outputs as text, scores, and links to runs and to those of judges."""
    await page.goto(evaluated.at("/evaluations"))
    await page.get_by_role("link", name="summer").click()
    await expect(page).to_have_url(re.compile(r"evaluations\?id=summer"))
    await expect(page.locator(".scores tbody tr").first).to_contain_text("0.208 to 0.939 (Wilson)")
    cases = page.locator(".case")
    await expect(cases).to_have_count(4)
    italy = page.locator(".case", has_text="Italy")
    await expect(italy).to_contain_text("<b>Naples</b>")
    await expect(italy.locator(".case-run")).to_have_count(2)
    await expect(italy.locator(".case-scores").first).to_contain_text("judge 0.750 short and right")
    await expect(page.locator(".case", has_text="Atlantis")).to_contain_text("no such country")
    run = italy.get_by_role("link", name="Run 2")
    await expect(run).to_have_attribute("href", re.compile("#/runs/.+/flow"))
    await italy.get_by_role("link", name="judge").first.click()
    await expect(page.locator(".run-title")).to_contain_text("judge")


async def test_regressions_come_first_when_two_evaluations_are_compared(page: Page, evaluated: Runs) -> None:
    """S-EVL-51, S-EVL-52."""
    await page.goto(evaluated.at("/evaluations?id=summer"))
    await page.get_by_label("Compare with").select_option("spring")
    await expect(page).to_have_url(re.compile("compare=spring"))
    first = page.locator(".case").first
    await expect(first).to_contain_text("Regression")
    await expect(first).to_contain_text("Output of spring")
    await expect(first.locator(".case-run")).to_have_count(4)
    await expect(page.locator(".card", has_text="Compared with spring")).to_contain_text("no significant difference")
    await page.reload()
    await expect(page.locator(".case").first).to_contain_text("Regression")
    await page.get_by_role("link", name="All evaluations").click()
    await expect(page.locator(".evaluations tbody tr")).to_have_count(3)


async def test_the_keyboard_reaches_evaluations_and_cases_when_keys_move_the_focus(page: Page, evaluated: Runs) -> None:
    """S-EVL-52, S-STU-171."""
    await page.goto(evaluated.at("/evaluations"))
    await expect(page.locator(".evaluations tbody tr")).to_have_count(3)
    for key, name in (("j", "begun"), ("j", "summer"), ("j", "spring"), ("k", "summer")):
        await page.keyboard.press(key)
        await expect(page.get_by_role("link", name=name)).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator(".case")).to_have_count(4)
    for key, name in (("j", "France"), ("j", "Italy"), ("k", "France")):
        await page.keyboard.press(key)
        await expect(page.locator(".case h2", has_text=name)).to_be_focused()


async def test_the_command_is_shown_when_there_is_no_evaluation(page: Page, tmp_path: Path) -> None:
    """S-EVL-52."""
    server = StudioServer(StoreAddress.of(tmp_path), port=0)
    server.start()
    await page.goto(Runs(tmp_path, server).at("/evaluations"))
    await expect(page.locator("main")).to_contain_text("No evaluations")
    await expect(page.locator("main")).to_contain_text("ensemble-ray eval team.yaml cases.jsonl --scorer exact")
    await page.goto("about:blank")
    server.stop()


async def test_an_unknown_evaluation_is_named_when_it_is_opened(page: Page, evaluated: Runs, watched: Watched) -> None:
    """S-EVL-51."""
    watched.expected.append("404")
    await page.goto(evaluated.at("/evaluations?id=nowhere"))
    await expect(page.locator("main")).to_contain_text("There is no evaluation 'nowhere' here")


async def test_evaluations_break_no_rule_of_accessibility(page: Page, evaluated: Runs) -> None:
    """S-EVL-52, S-STU-170, S-STU-171: the list and a comparison, light and dark."""
    await page.emulate_media(reduced_motion="reduce")
    tags = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    broken = []
    for path, shown in (("/evaluations", ".evaluations tbody tr"), ("/evaluations?id=summer&compare=spring", ".case")):
        await page.goto(evaluated.at(path))
        await expect(page.locator(shown).first).to_be_visible()
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            found = await Axe().run(page, options={"runOnly": tags, "resultTypes": ["violations"]})
            broken += [f"{path}: {each['id']}: {each['nodes']}" for each in found.response["violations"]]
    assert broken == []
    await page.goto("about:blank")
