"""What the panel of a step says of its calls: attempts and waits, lines of tools and handlers, repairs, reasoning."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from ensemble_ray import (
    Agent,
    ChatResponse,
    Ensemble,
    EnsembleDevTools,
    RateLimit,
    RetryPolicy,
    Task,
    TaskExecutionError,
    TaskHandlerContext,
    TokenUsage,
    current_tool_context,
    tool,
)
from ensemble_ray.testing import ScriptedModel
from tests.browser.conftest import Runs
from tests.browser.test_doing import drop
from tests.builders import answer, call

# ruff: noqa: T201  what is printed is the subject

pytestmark = pytest.mark.asyncio(loop_scope="package")

_PATIENT = RetryPolicy(first_delay=0, max_delay=0, max_attempts=3)


class StatusError(Exception):
    """What a provider says when it refuses a request."""

    def __init__(self, status: int, text: str, retry_after: str = "0") -> None:
        super().__init__(text)
        self.status_code = status
        self.headers = {"retry-after": retry_after}


@tool(effect="none")
def search_rates(banks: list[str], limit: int = 5) -> str:
    """Search the rates of banks."""
    print(f"reading {limit} pages of {len(banks)} banks")
    current_tool_context().logger.warning("page 4 is empty")
    return "3.1 %, 2.9 %, 3.4 %"


@tool(effect="none")
def convert(amount: str) -> str:
    """Convert an amount."""
    print("asked the exchange for", amount)
    logging.getLogger("exchange").error("no rate of today")
    raise LookupError("there is no rate of today")


def _check_rates(context: TaskHandlerContext) -> str:
    print("\n".join(f"row {number} is fine" for number in range(60)))
    raise ValueError("row 61 has no rate")


def rates_team() -> Ensemble:
    """A model that is refused twice, reasons and calls two tools; one of them with arguments that nearly fit, one in vain."""
    first = ChatResponse(
        tool_calls=(
            call("search_rates", '{"banks": "[\\"north\\", \\"south\\"]", "limit": null}'),
            call("convert", '{"amount": "12 GBP"}', number=1),
        ),
        reasoning="The rates of both banks decide. I look them up, and convert the amount meanwhile.",
        usage=TokenUsage(420, 61, 24),
    )
    model = ScriptedModel(
        first,
        StatusError(429, "Too many requests: 20 per minute are allowed", "0.02"),
        StatusError(503, "The engine is overloaded"),
        answer("Take the offer of the south bank: 3.4 %.", 640, 30),
    )
    agent = Agent(role="Analyst", goal="Compare rates", llm=model, tools=[search_rates, convert])
    rates = Task(name="rates", description="Compare the rates", expected_output="A bank", agent=agent)
    return Ensemble(tasks=[rates], retry=_PATIENT)


def refused_team() -> Ensemble:
    """A model that is refused until no attempt is left."""
    model = ScriptedModel(otherwise=lambda _: StatusError(503, "The engine is overloaded"))
    agent = Agent(role="Analyst", goal="Compare rates", llm=model, rate_limit=RateLimit.of(1000, timedelta(seconds=1)))
    return Ensemble(tasks=[Task(name="rates", description="Compare the rates", agent=agent)], retry=_PATIENT)


def checked_team() -> Ensemble:
    """A handler that prints a lot before it fails."""
    return Ensemble(tasks=[Task(name="check", description="Check the rates", handler=_check_rates)])


def record(runs: Runs) -> None:
    """Run the teams."""
    rates_team().run(runtime=runs.inline, run_id="rates")
    for team in (refused_team(), checked_team()):
        with pytest.raises(TaskExecutionError):
            team.run(runtime=runs.inline, run_id="refused" if team.tasks[0].name == "rates" else "checked")


async def test_a_step_shows_its_attempts_lines_repairs_and_reasoning(own: Runs, page: Page) -> None:
    """S-STU-220 to S-STU-222, S-STU-178: in the order in which they happened; and as WCAG asks."""
    record(own)
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]  one of both
        await page.goto(own.at("/runs/rates/steps?step=rates%230"))
        panel = page.locator(".step-panel")
        await expect(panel.locator(".facts")).to_contain_text("Model retries2, waited 20 ms")
        results = await Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa"]})
        assert results.violations_count == 0, results.generate_report()
    second = panel.locator(".message.assistant", has_text="answer 2")
    await expect(second).to_contain_text("attempt 3 of 3")
    await expect(second.locator(".attempts li")).to_have_text(
        [
            "Attempt 1HTTP 429: Too many requests: 20 per minute are allowedwaited 20 ms",
            "Attempt 2HTTP 503: The engine is overloadedagain immediately",
        ]
    )
    first = panel.locator(".message.assistant", has_text="answer 1")
    await expect(first.locator(".attempts")).to_have_count(0)
    reasoning = first.locator(".message.reasoning")
    await expect(reasoning).not_to_have_attribute("open", "")
    await reasoning.locator("summary").click()
    await expect(reasoning.get_by_role("region", name="Reasoning")).to_contain_text("decide. I look them up")
    repaired = panel.locator(".message.tool", has_text="search_rates")
    await expect(repaired.locator("summary")).to_contain_text("REPAIRED2 lines")
    await repaired.locator("summary").click()
    await expect(repaired.locator(".bullets li")).to_have_text(
        ["banks: JSON in a string", "limit: null for an argument that can be left out"]
    )
    await expect(repaired.locator(".log li")).to_have_text(
        ["reading 5 pages of 2 banks", "WARNING ensemble_ray.tool.search_rates: page 4 is empty"]
    )
    failed = panel.locator(".message.tool", has_text="convert")
    await expect(failed.locator(".log li.is-failed")).to_have_text("ERROR exchange: no rate of today")
    await expect(failed.locator(".log li.is-failed")).to_be_visible()


async def test_files_have_the_attempts_lines_and_repairs(own: Runs, page: Page, tmp_path: Path) -> None:
    """S-STU-220 to S-STU-222: an exported file has all of them, a trace has them as texts."""
    output = rates_team().run(runtime=own.inline, run_id="rates")
    trace = EnsembleDevTools.export_trace(output, tmp_path)
    await page.goto(own.at("/runs/rates/steps"))
    await page.get_by_role("button", name="Export").click()
    async with page.expect_download() as downloading:
        await page.get_by_role("menuitem", name=re.compile("One HTML file")).click()
    file = tmp_path / "rates.html"
    await (await downloading.value).save_as(file)
    for address, first in ((file.as_uri(), "Attempt 1HTTP 429"), (own.at("/runs"), "BeforeHTTP 429")):
        await page.goto(address)
        if address.startswith("http"):
            await expect(page.locator(".run").first).to_be_visible()
            await drop(page, trace.name, trace.read_text())
        await page.get_by_role("tab", name="Steps").click()
        await page.locator(".step-row").first.click()
        panel = page.locator(".step-panel")
        await expect(panel.locator(".attempts li")).to_have_count(2)
        await expect(panel.locator(".attempts li").first).to_contain_text(first)
        await expect(panel.locator(".message.tool .log li")).to_have_count(4)
        await expect(panel.locator(".message.tool .bullets li")).to_have_count(2)


async def test_a_failed_step_shows_why_its_model_did_not_answer(own: Runs, page: Page) -> None:
    """S-STU-220: the attempts are beside the error, with the last one."""
    record(own)
    await page.goto(own.at("/runs/refused/steps?step=rates%230"))
    section = page.locator(".section", has=page.get_by_role("heading", name="Error", exact=True))
    await expect(section.locator(".attempts li")).to_have_text(
        [
            *(f"Attempt {number}HTTP 503: The engine is overloadedagain immediately" for number in (1, 2)),
            "Attempt 3failed, the last one allowed",
        ]
    )


async def test_a_failed_handler_shows_what_it_printed(own: Runs, page: Page) -> None:
    """S-STU-221: the end of its lines is in sight, and the number of those that are left out; on a telephone, too."""
    record(own)
    await page.set_viewport_size({"width": 400, "height": 800})
    await page.goto(own.at("/runs/checked/steps?step=check%230"))
    section = page.locator(".section", has=page.get_by_role("heading", name="Calls", exact=True))
    lines = section.locator(".log li")
    await expect(lines).to_have_count(51)
    await expect(lines.nth(25)).to_have_text("10 more lines")
    await expect(lines.last).to_have_text("row 59 is fine")
    await expect(lines.last).to_be_in_viewport()
    await expect(section.locator("summary")).to_contain_text(["Calls", "over 50 lines"])
    await expect(section.get_by_role("heading", name="Arguments")).to_have_count(0)
    assert await page.evaluate("document.documentElement.scrollWidth") <= 400
