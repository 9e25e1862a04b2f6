"""What the page at an endpoint shows to a key with quotas and roles."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, expect

from ensemble_ray import ChatResponse, TokenUsage
from ensemble_ray.access.admission import Right
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.process.concurrency import threads
from ensemble_ray.serve.api import build_api
from ensemble_ray.testing import ScriptedModel
from tests.browser.conftest import Watched
from tests.serve.http_server import served_app
from tests.serve.keys import make_key, standing_callers
from tests.serve.teams import INPUTS, pair
from tests.serve.test_roles import asking

pytestmark = pytest.mark.asyncio(loop_scope="package")
FIVE = ChatResponse("fine", usage=TokenUsage(input_tokens=3, output_tokens=2))


@asynccontextmanager
async def endpoint(home: str) -> AsyncGenerator[tuple[str, KeyFile]]:
    """An endpoint behind a real server, with Studio, and its keys."""
    runs, callers, file = standing_callers(
        Path(home), {"pair": pair(ScriptedModel(otherwise=FIVE)), "asking": asking()}
    )
    serving = served_app(build_api(runs, callers=callers, has_studio=True))
    url = await threads.run(serving.__enter__)
    try:
        yield url, file
    finally:
        await threads.run(serving.__exit__, None, None, None)


async def enter(page: Page, url: str, view: str, headers: dict[str, str]) -> None:
    """Open a view with a key."""
    await page.goto("about:blank")
    await page.goto(f"{url}/studio/#{view}")
    await page.get_by_label("Key", exact=True).fill(headers["authorization"].removeprefix("Bearer "))
    await page.get_by_role("button", name="Use it").click()


async def test_bars_show_the_usage_of_the_key_when_it_has_quotas(home: str, page: Page, watched: Watched) -> None:
    """S-QUO-42: used and limit of each quota; a key without quotas has no such view."""
    watched.expected.append("401")
    async with endpoint(home) as (url, file):
        ann = make_key(file, quotas=["runs=4/day", "tokens=1k/day"])
        async with httpx.AsyncClient(base_url=url, headers=ann, timeout=60) as client:
            body = {"ensemble": "pair", "inputs": INPUTS}
            assert (await client.post("/runs?wait=60", json=body)).status_code == 200
        await enter(page, url, "/usage", ann)
        runs, tokens = page.locator("[data-quota=runs]"), page.locator("[data-quota=tokens]")
        await expect(runs).to_contain_text("1 of 4")
        await expect(runs.get_by_role("meter")).to_have_attribute("aria-valuenow", "25")
        await expect(tokens).to_contain_text("10 of 1,000")
        await expect(page.locator("main")).to_contain_text("Key ann")
        await expect(page.get_by_role("link", name="Usage")).to_have_attribute("aria-current", "page")
        await page.evaluate("sessionStorage.clear()")
        await enter(page, url, "/runs", make_key(file, "ben"))
        await expect(page.locator(".run").first).to_be_visible()
        await expect(page.get_by_role("link", name="Usage")).to_have_count(0)
        await page.evaluate("sessionStorage.clear()")
        await page.goto("about:blank")


async def test_buttons_are_disabled_when_the_key_lacks_the_role(home: str, page: Page, watched: Watched) -> None:
    """S-QUO-53, S-STU-143: the page says which one and which the key has; there is no box to tick."""
    watched.expected.append("401")
    async with endpoint(home) as (url, file):
        lead, ann = make_key(file, "lead", roles=["lead"]), make_key(file, roles=["legal"], rights=set(Right))
        async with httpx.AsyncClient(base_url=url, headers=lead, timeout=60) as client:
            body = {"ensemble": "asking", "inputs": {}, "run_id": "r"}
            assert (await client.post("/runs?wait=60", json=body)).json()["status"] == "waiting"
        await enter(page, url, "/reviews", lead)
        detail = page.locator(".inbox-detail")
        await expect(detail).to_contain_text("Needs the role legal, which your key lacks. Its roles: lead.")
        for name in ("Approve", "Edit…", "End run"):
            await expect(page.get_by_role("button", name=name)).to_be_disabled()
        await expect(detail.get_by_role("checkbox")).to_have_count(0)
        await page.keyboard.press("y")
        await page.evaluate("sessionStorage.clear()")
        await enter(page, url, "/reviews", ann)
        await expect(detail).to_contain_text("Needs the role legal, which your key has.")
        await page.get_by_role("button", name="Approve").click()
        await expect(page.locator(".empty")).to_contain_text("No open reviews")
        await page.goto(f"{url}/studio/#/runs/r/steps")
        await page.locator(".step-row").first.click()
        await expect(page.locator(".step-panel")).to_contain_text(re.compile(r"Approved by ann \(legal\)"))
        await page.evaluate("sessionStorage.clear()")
        await page.goto("about:blank")
