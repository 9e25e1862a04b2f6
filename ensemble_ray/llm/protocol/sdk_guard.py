"""Limits on answers and redirects of the `openai` package's HTTP client, for calls of this library alone.

The package reads failures without a limit, unpacks all encodings, and follows redirects with the prompt.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from msgspec import Struct
from openai import OpenAIError

from ensemble_ray.errors.bodies import CLIENT_ERROR
from ensemble_ray.llm.failures import CallFailure
from ensemble_ray.llm.protocol.transport import RedirectRefusedError, follow_redirect, is_redirect
from ensemble_ray.llm.protocol.wire import ERROR_BODY_BYTES, AnswerLimits
from ensemble_ray.process.context import ScopedVariable
from ensemble_ray.text.unpacking import bound_response


class AnswerRefusedError(OpenAIError):
    """Carries a `CallFailure` through the package, which does not retry after an `OpenAIError`."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure)
        self.failure = failure


class _GuardedCall(Struct):
    limits: AnswerLimits
    stream: bool
    redirects: int = 0


_guarded_call: ContextVar[_GuardedCall | None] = ContextVar("ensemble_ray_guarded_call", default=None)


def guard_answers(limits: AnswerLimits, *, stream: bool) -> AbstractContextManager[None]:
    return ScopedVariable(_guarded_call, _GuardedCall(limits, stream))


def guard(client: Any) -> None:
    """Add the hook; it has no effect outside `guard_answers`."""
    hooks: dict[str, list[object]] = client.event_hooks
    if _guard_response not in hooks["response"]:
        # First, so that the limits also apply to the user's hooks.
        client.event_hooks = {**hooks, "response": [_guard_response, *hooks["response"]]}


async def _guard_response(response: Any) -> None:
    call = _guarded_call.get()
    if call is None:
        return
    status: int = response.status_code

    def fail(reason: str) -> AnswerRefusedError:
        return AnswerRefusedError(CallFailure(status=status, reason=reason))

    try:
        if is_redirect(status):
            location, url = response.headers.get("location"), str(response.request.url)
            follow_redirect(url, status, location, followed=call.redirects)
            call.redirects += 1
    except RedirectRefusedError as error:
        raise fail(str(error)) from None
    limits = call.limits
    bound_response(
        response,
        fail,
        max_bytes=limits.stream_bytes if call.stream else limits.body_bytes,
        check=limits.check_stream if call.stream else limits.check_body,
        cut_bytes=ERROR_BODY_BYTES if status >= CLIENT_ERROR else None,
        layers=1,
    )
