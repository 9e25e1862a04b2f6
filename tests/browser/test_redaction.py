"""Values of a redacted run on its page, for readers who may see them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, expect

from ensemble_ray import Agent, Ensemble, Redactor, Task
from ensemble_ray.access.admission import Right
from ensemble_ray.process.concurrency import threads
from ensemble_ray.serve.api import build_api
from ensemble_ray.testing import ScriptedModel
from tests.browser.conftest import Runs, Watched
from tests.browser.test_quotas import enter
from tests.scenarios.test_redaction import KEY
from tests.serve.http_server import served_app
from tests.serve.keys import make_key, standing_callers

pytestmark = pytest.mark.asyncio(loop_scope="package")
WHO, FOUND = "ann@corp.example", "bob@corp.example"
VARIABLE = "ENSEMBLE_RAY_REDACTION_KEY"


def team() -> Ensemble:
    writer = Agent("Writer", "Write", llm=ScriptedModel(otherwise=f"Sent to {FOUND}."))
    return Ensemble(
        tasks=[Task("Write to {who}", "A line", agent=writer, name="first")],
        redactor=Redactor(reversible=True, reveal_roles="privacy"),
    )


async def assert_hidden(page: Page) -> None:
    await expect(page.locator(".run-subject")).to_contain_text("[EMAIL_")
    await expect(page.locator(".step-panel")).to_contain_text("Sent to [EMAIL_")
    for value in (WHO, FOUND):
        await expect(page.locator("body")).not_to_contain_text(value)


async def test_values_are_shown_until_they_are_hidden_when_the_reader_reveals_a_run(
    own: Runs, page: Page, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-RED-62, S-RED-65: on this machine, with its key; views that open later show values too, and a new view of the run does not."""
    watched.expected.append("409")
    monkeypatch.setenv(VARIABLE, KEY)
    await threads.run(lambda: team().run({"who": WHO}, runtime=own.inline, run_id="r"))
    await page.goto(own.at("/runs/r/steps?step=first%230"))
    await assert_hidden(page)
    monkeypatch.delenv(VARIABLE)
    await page.get_by_role("button", name="Reveal").click()
    await expect(page.locator(".toast")).to_contain_text(f"needs a key in the environment variable {VARIABLE}")
    await assert_hidden(page)
    monkeypatch.setenv(VARIABLE, KEY)
    await page.get_by_role("button", name="Reveal").click()
    await expect(page.locator(".run-subject")).to_contain_text(WHO)
    await expect(page.locator(".step-panel")).to_contain_text(f"Sent to {FOUND}.")
    await page.get_by_role("tab", name="Flow").click()
    await page.get_by_role("tab", name="Steps").click()
    await page.locator(".step-row").first.click()
    await expect(page.locator(".step-panel")).to_contain_text(f"Sent to {FOUND}.")
    await page.get_by_role("button", name="Hide values").click()
    await assert_hidden(page)
    await page.get_by_role("button", name="Reveal").click()
    await expect(page.locator(".run-subject")).to_contain_text(WHO)
    await page.goto(own.at("/runs"))
    await expect(page.locator(".run").first).to_contain_text("[EMAIL_")
    await page.goto(own.at("/runs/r/steps?step=first%230"))
    await assert_hidden(page)
    await page.goto("about:blank")


async def test_only_keys_with_the_right_or_the_role_have_the_button(
    home: str, page: Page, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-RED-63, S-RED-65: at an endpoint."""
    watched.expected.append("401")
    monkeypatch.setenv(VARIABLE, KEY)
    runs, callers, file = standing_callers(Path(home), {"team": team()})
    serving = served_app(build_api(runs, callers=callers, has_studio=True))
    url = await threads.run(serving.__enter__)
    try:
        admin = make_key(file, "boss")
        ann = make_key(file, rights=[Right.READ], roles=["privacy"])
        ben = make_key(file, "ben", rights=[Right.READ], roles=["legal"])
        async with httpx.AsyncClient(base_url=url, headers=admin, timeout=60) as client:
            assert (await client.post("/runs?wait=60", json={"inputs": {"who": WHO}, "run_id": "r"})).status_code == 200
        for headers, can in ((ben, False), (ann, True), (admin, True)):
            await enter(page, url, "/runs/r/steps?step=first%230", headers)
            await assert_hidden(page)
            button = page.get_by_role("button", name="Reveal")
            await expect(button).to_have_count(1 if can else 0)
            if can:
                await button.click()
                await expect(page.locator(".step-panel")).to_contain_text(f"Sent to {FOUND}.")
            await page.evaluate("sessionStorage.clear()")
        await page.goto("about:blank")
    finally:
        await threads.run(serving.__exit__, None, None, None)
