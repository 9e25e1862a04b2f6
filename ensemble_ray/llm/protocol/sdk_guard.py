"""Limits on what a client of the `openai` package reads, and on where it sends a request. Package: llm.

In: a client's HTTP client. Out: the same with a hook that acts on calls of ours alone. The package reads failures whole,
unpacks whatever comes, and follows redirects with the prompt; so the limits are kept below it, where bytes arrive.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from openai import OpenAIError

from ensemble_ray.llm.protocol.answer_limits import ERROR_BODY_BYTES, AnswerLimits, AnswerUnpacker, TooMuchError
from ensemble_ray.llm.protocol.errors import CallFailure
from ensemble_ray.llm.protocol.redirects import (
    RedirectRefusedError,
    follow_redirect,
    is_redirect,
)

__all__ = ["AnswerRefusedError", "guard", "guard_answers"]

_FAILED = 400


class AnswerRefusedError(OpenAIError):
    """Carries a `CallFailure` through the package, which passes its own errors on without another attempt."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure)
        self.failure = failure


@dataclass(slots=True)
class _GuardedCall:
    """A call that is being made."""

    limits: AnswerLimits
    stream: bool
    redirects: int = 0


_guarded_call: ContextVar[_GuardedCall | None] = ContextVar("ensemble_ray_watched_call", default=None)


@contextmanager
def guard_answers(limits: AnswerLimits, *, stream: bool) -> Generator[None]:
    """Keep these limits on the answers of guarded clients in the block; `stream`: those of streams."""
    token = _guarded_call.set(_GuardedCall(limits, stream))
    try:
        yield
    finally:
        _guarded_call.reset(token)


def guard(client: Any) -> None:
    """Add the hook to an HTTP client of the package, a user's own too; it does nothing outside of `guarded`."""
    hooks: dict[str, list[object]] = client.event_hooks
    if _guard_response not in hooks["response"]:
        # The first one: what a user's own hook reads is counted too.
        client.event_hooks = {**hooks, "response": [_guard_response, *hooks["response"]]}


async def _guard_response(response: Any) -> None:
    call = _guarded_call.get()
    if call is None:
        return
    try:
        if is_redirect(response.status_code):
            location, url = response.headers.get("location"), str(response.request.url)
            follow_redirect(url, response.status_code, location, followed=call.redirects)
            call.redirects += 1
        unpacker = AnswerUnpacker(response.headers.pop("content-encoding", ""))
    except (RedirectRefusedError, TooMuchError) as error:
        raise AnswerRefusedError(CallFailure(status=response.status_code, reason=str(error))) from None
    # A response takes streams of its own package alone: openai 3 speaks httpx2, a client of the user's own may be of httpx.
    package = sys.modules[type(response.stream).__module__.partition(".")[0]]
    bounded = cast("Any", type("BoundedStream", (_BoundedStream, package.AsyncByteStream), {}))
    response.stream = bounded(response, unpacker, call)


class _BoundedStream:
    """The body of a response, unpacked, within the limits; of a failure, what can be told."""

    def __init__(self, response: Any, unpacker: AnswerUnpacker, call: _GuardedCall) -> None:
        self._packed = response.stream
        self._unpacker = unpacker
        self._status: int = response.status_code
        self._check = call.limits.check_stream if call.stream else call.limits.check_body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received_bytes = 0
        try:
            async for piece in self._packed:
                for content in self._unpacker.feed(piece):
                    received_bytes += len(content)
                    if self._status >= _FAILED and received_bytes > ERROR_BODY_BYTES:
                        return
                    self._check(received_bytes)
                    yield content
        except TooMuchError as error:
            raise AnswerRefusedError(CallFailure(status=self._status, reason=str(error))) from None

    async def aclose(self) -> None:
        """Let go of the connection."""
        await self._packed.aclose()
