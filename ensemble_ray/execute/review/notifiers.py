"""Notify people of open reviews (S-REV-71). Errors of a notifier are logged and do not affect the gate."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

import aiohttp

from ensemble_ray.errors import ValidationError
from ensemble_ray.errors.bodies import tls_flaw
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.reviews import ReviewRequest

_log = bounded_logger(__name__)
_MOST_DESCRIPTION = 200
_LIMIT_S = 10.0  # for the connection and for the whole exchange, s
_FIRST_ERROR = 400


class ReviewNotifier(Protocol):
    """Notifies people of an open review; `ReviewNotifier.slack` is one."""

    def __call__(self, request: ReviewRequest, /) -> Awaitable[object] | object:
        """Send the notification; may be `async`."""
        ...

    @staticmethod
    def slack(webhook_url: str) -> SlackNotifier:
        """Return a notifier that posts to an incoming webhook of Slack, or to a compatible one.

        Raises:
            ValidationError: the URL is blank.
        """
        return SlackNotifier(webhook_url)


class SlackNotifier:
    """Posts `{"text": ...}` to a webhook. Failures are logged without the URL, which is a secret."""

    def __init__(self, webhook_url: str) -> None:
        if not isinstance(webhook_url, str) or not webhook_url.strip():
            raise ValidationError("webhook_url must not be blank")
        self._url = webhook_url.strip()

    def __repr__(self) -> str:
        return "ReviewNotifier.slack(...)"

    async def __call__(self, request: ReviewRequest, /) -> None:
        task = request.task_description
        lines = [f"Review required: {task if len(task) <= _MOST_DESCRIPTION else f'{task[:_MOST_DESCRIPTION]}...'}"]
        if request.required_role is not None:
            lines.append(f"Role: {request.required_role}")
        if request.prompt is not None:
            lines.append(f"Prompt: {request.prompt}")
        lines.append("Timeout: none" if request.timeout_s is None else f"Timeout: {request.timeout_s:g} s")
        limits = aiohttp.ClientTimeout(total=_LIMIT_S, connect=_LIMIT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=limits) as session,
                session.post(self._url, json={"text": "\n".join(lines)}) as response,
            ):
                if response.status >= _FIRST_ERROR:
                    _log.warning("A review notification was refused with status %d", response.status)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            _log.warning("A review notification could not be sent: %s", tls_flaw(error) or type(error).__name__)
