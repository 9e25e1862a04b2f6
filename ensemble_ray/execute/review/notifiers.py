"""Tell people that a review waits for them (S-REV-71).

A notifier is any callable of a `ReviewRequest`, sync or async. What it cannot do is logged, and changes nothing for the gate.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, cast

import aiohttp

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.errors.bodies import tls_flaw
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import call_user
from ensemble_ray.values.reviews import Review, ReviewDecision, ReviewRequest

_log = bounded_logger(__name__)
_MOST_DESCRIPTION = 200
#: How long connecting, and the whole exchange, may take, s.
_LIMIT_S = 10.0
_FIRST_ERROR = 400


class ReviewNotifier(Protocol):
    """Tells somebody that a request waits; `ReviewNotifier.slack` is one."""

    def __call__(self, request: ReviewRequest, /) -> Awaitable[object] | object:
        """Tell it."""
        ...

    @staticmethod
    def slack(webhook_url: str) -> SlackNotifier:
        """Return a notifier that posts to an incoming webhook of Slack, or of what understands the same.

        Raises:
            ValidationError: the URL is blank.
        """
        return SlackNotifier(webhook_url)


class SlackNotifier:
    """Posts `{"text": ...}`."""

    def __init__(self, webhook_url: str) -> None:
        if not isinstance(webhook_url, str) or not webhook_url.strip():
            raise ValidationError("webhook_url must not be blank")
        self._url = webhook_url.strip()

    def __repr__(self) -> str:
        return "ReviewNotifier.slack(...)"  # whoever knows the URL may post

    async def __call__(self, request: ReviewRequest, /) -> None:
        """Post it; a failure is logged, without the URL."""
        limits = aiohttp.ClientTimeout(total=_LIMIT_S, connect=_LIMIT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=limits) as session,
                session.post(self._url, json={"text": render_message(request)}) as response,
            ):
                if response.status >= _FIRST_ERROR:
                    _log.warning("A review notification was refused with status %d", response.status)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            _log.warning("A review notification could not be sent: %s", tls_flaw(error) or type(error).__name__)


def render_message(request: ReviewRequest) -> str:
    """Return what people read of a request."""
    task = request.task_description
    lines = [f"Review required: {task if len(task) <= _MOST_DESCRIPTION else f'{task[:_MOST_DESCRIPTION]}...'}"]
    if request.required_role is not None:
        lines.append(f"Role: {request.required_role}")
    if request.prompt is not None:
        lines.append(f"Prompt: {request.prompt}")
    lines.append("Timeout: none" if request.timeout_s is None else f"Timeout: {request.timeout_s:g} s")
    return "\n".join(lines)


class NotifyingHandler:
    """Tells people of a request, then asks a handler. Fulfils `Reviewing`."""

    def __init__(self, handler: object, notifiers: tuple[object, ...]) -> None:
        self._handler = handler
        self._notifiers = notifiers
        #: as the handler says (S-WEB-58, S-WEB-51)
        self.is_concurrent = bool(getattr(handler, "is_concurrent", False))
        self.default_review: Review | None = getattr(handler, "default_review", None)

    async def review(self, request: ReviewRequest, /) -> ReviewDecision:
        """Tell everybody, one after the other, and ask."""
        for notify in self._notifiers:
            try:
                await call_user(cast("Callable[[ReviewRequest], object]", notify), request)
            except Exception as error:  # noqa: BLE001  code of the user, which must not end a run that it only watches
                _log.warning("A review notifier failed: %s", message_of(error))
        ask = cast("Callable[[ReviewRequest], object]", getattr(self._handler, "review", self._handler))
        return cast("ReviewDecision", await call_user(ask, request))
