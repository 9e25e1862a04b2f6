"""The page of an endpoint: the versions of its teams, and a banner while it drains."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from ensemble_ray.process.concurrency import threads
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.catalog import served_team
from ensemble_ray.testing import ScriptedModel
from tests.serve.driving import driven
from tests.serve.http_server import served_app
from tests.serve.teams import KEY, KEY_VARIABLE, pair
from tests.serve.versioned import loaded, write

pytestmark = pytest.mark.asyncio(loop_scope="package")


def call(url: str, path: str, body: object) -> httpx.Response:
    """Send a request to the endpoint."""
    return httpx.post(f"{url}{path}", json=body, timeout=60)


async def test_versions_and_a_drain_are_shown(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-VER-9, S-VER-41: with shares, also at a telephone's width; the banner goes away with the end of the drain."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    file = write(tmp_path, "http://127.0.0.1:9/v1", "Hello")
    teams = {**loaded(file), "module": served_team("module", pair(ScriptedModel()))}
    with served_app(build_api(driven(teams), has_studio=True)) as url:
        write(tmp_path, "http://127.0.0.1:9/v1", "Servus")
        answer = await threads.run(call, url, "/ensembles/greeting/versions", {"share": 0.25})
        new, old = [each["version"] for each in answer.json()["versions"]]
        await page.goto(f"{url}/studio/#/teams")
        rows = page.locator("table.data tbody tr")
        await expect(rows).to_have_count(2)
        await expect(rows.nth(0)).to_contain_text(new)
        await expect(rows.nth(0)).to_contain_text("25 %")
        await expect(rows.nth(1)).to_contain_text(f"{old}75 %")
        await expect(page.locator(".card", has_text="module")).to_contain_text("it has no versions")
        notice = page.locator("body > .notice")
        await expect(notice).to_be_hidden()
        await threads.run(call, url, "/drain", {})
        await page.reload()
        await expect(notice).to_have_text("This endpoint is drained and accepts no new runs")
        found = await Axe().run(page, options={"resultTypes": ["violations"]})
        assert [each["id"] for each in found.response["violations"]] == []
        await page.set_viewport_size({"width": 400, "height": 800})
        assert await page.evaluate("document.documentElement.scrollWidth") == 400
        await threads.run(call, url, "/drain/end", {})
        await page.reload()
        await expect(rows).to_have_count(2)
        await expect(notice).to_be_hidden()
        await page.set_viewport_size({"width": 1280, "height": 800})
        await page.goto("about:blank")
