"""Notifiers of reviews, against a server of this machine."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ensemble_ray import ReviewDecision, ReviewHandler, ReviewNotifier, ReviewRequest, ReviewTiming, ValidationError

REQUEST = ReviewRequest(
    task_description="d" * 201,
    timing=ReviewTiming.AFTER_EXECUTION,
    prompt="Is it polite?",
    required_role="editor",
    timeout=timedelta(seconds=90),
)


class Webhook:
    """Keeps what is posted, and answers with a status."""

    def __init__(self) -> None:
        self.posted: list[object] = []
        self.status = 200
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        """Take one post."""
        self.posted.append(await request.json())
        return web.Response(status=self.status)


@pytest.fixture
async def webhook() -> AsyncIterator[Webhook]:
    """A server that runs."""
    hook, app = Webhook(), web.Application()
    app.router.add_post("/hook/secret", hook.take)
    async with TestServer(app) as server:
        hook.url = str(server.make_url("/hook/secret"))
        yield hook


async def test_slack_is_told_of_a_request(webhook: Webhook) -> None:
    """S-REV-71: the task is cut."""
    await ReviewNotifier.slack(webhook.url)(REQUEST)
    text = f"Review required: {'d' * 200}...\nRole: editor\nPrompt: Is it polite?\nTimeout: 90 s"
    assert webhook.posted == [{"text": text}]


async def test_what_is_not_there_is_not_told(webhook: Webhook) -> None:
    """S-REV-71: neither role nor prompt."""
    plain = ReviewRequest(task_description="Draft", timing=ReviewTiming.AFTER_EXECUTION, timeout=None)
    await ReviewNotifier.slack(webhook.url)(plain)
    assert webhook.posted == [{"text": "Review required: Draft\nTimeout: none"}]


async def test_failures_are_logged_without_the_url(webhook: Webhook, caplog: pytest.LogCaptureFixture) -> None:
    """S-REV-71: refused, and not reached."""
    webhook.status = 403
    with caplog.at_level(logging.WARNING):
        await ReviewNotifier.slack(webhook.url)(REQUEST)
        await ReviewNotifier.slack("http://127.0.0.1:1/hook/secret")(REQUEST)
        await ReviewNotifier.slack("no url/hook/secret")(REQUEST)
    lines = [each.getMessage() for each in caplog.records if each.name.startswith("ensemble_ray")]
    assert lines[0] == "A review notification was refused with status 403"
    assert [line.partition(":")[0] for line in lines[1:]] == ["A review notification could not be sent"] * 2
    assert "secret" not in "".join(lines)


def test_a_webhook_needs_a_url() -> None:
    """S-REV-71."""
    with pytest.raises(ValidationError, match="webhook_url must not be blank"):
        ReviewNotifier.slack(" ")


async def test_notifiers_are_told_before_the_handler_is_asked(
    webhook: Webhook, caplog: pytest.LogCaptureFixture
) -> None:
    """S-REV-104: one that raises changes nothing."""
    heard: list[str] = []

    def fail(_request: ReviewRequest) -> None:
        heard.append("failing")
        raise RuntimeError("no paper")

    def approve(_request: ReviewRequest) -> ReviewDecision:
        heard.append("asked")
        return ReviewDecision.edit("x")

    handler = ReviewHandler.notifying(approve, fail, ReviewNotifier.slack(webhook.url))
    with caplog.at_level(logging.WARNING):
        assert await handler.review(REQUEST) == ReviewDecision.edit("x")  # type: ignore[misc]
    assert (heard, len(webhook.posted)) == (["failing", "asked"], 1)
    assert "A review notifier failed: no paper" in caplog.text
