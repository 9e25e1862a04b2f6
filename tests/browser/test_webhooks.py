"""The page of a run behind an endpoint: its webhooks, as they are delivered."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.async_api import Page, expect

from ensemble_ray.process.concurrency import threads
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.driving import webhooks
from ensemble_ray.testing import ScriptedModel
from tests.serve.driving import driven
from tests.serve.http_server import served_app
from tests.serve.teams import INPUTS, pair
from tests.serve.webhook_receiver import Receiver, rules

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_webhooks_of_a_run_are_shown_with_the_reason_of_a_failure(
    page: Page, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-HOK-13: their states are updated while one is pending; the path of a URL is not shown."""
    monkeypatch.setattr(webhooks, "_FIRST_PAUSE_S", 0.1)
    team = pair(ScriptedModel(otherwise="fine"))
    with Receiver() as receiver:
        receiver.statuses.append(503)
        receiver.first_held = 1
        receiver.is_open.clear()
        api = build_api(driven(team, webhooks=rules(team=f"{receiver.origin}/s3cret")), has_studio=True)
        with served_app(api) as url:
            async with httpx.AsyncClient(base_url=url) as client:
                ended = await client.post("/runs?wait=60", json={"run_id": "first", "inputs": INPUTS})
            assert ended.status_code == 200
            await threads.run(receiver.wait, 2)
            await page.goto(f"{url}/studio/#/runs/first")
            shown = page.locator(".deliveries")
            await expect(shown).to_have_text("1 pending")
            await expect(shown).to_have_attribute(
                "title", re.compile("^run.ended to .*: pending, 1 attempt, HTTP 503, next attempt")
            )
            receiver.is_open.set()
            await expect(shown).to_have_text("1 delivered")
            await expect(shown).to_have_attribute("title", f"run.ended to {receiver.origin}: delivered, 2 attempts")
            await page.goto("about:blank")
