"""BodyLimit: the longest body that a request may have, of the page and of the endpoint. Plain ASGI.

Never: more of a body in memory than the limit, whatever its header announces.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray.access.admission import headers_of
from ensemble_ray.studio.response_headers import refuse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Inputs are values for texts, and items of a map-reduce; what is larger belongs into a file.
DEFAULT_MAX_BODY_BYTES = 8_388_608
#: So much beyond the limit is read and thrown away: a client that is refused while it sends often loses the answer.
_DISCARDED_BYTES = 8_388_608
_LONGEST_NUMBER = 30


class BodyLimit:
    """Reads a request's body before anything else does, up to a limit.

    Args:
        app: What comes behind it; it gets the body in one piece.
        max_bytes: The longest body.
        refusal: Returns the answer to a longer one, for a limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_bytes: int = DEFAULT_MAX_BODY_BYTES,
        refusal: Callable[[int], ASGIApp] = lambda limit: refuse(*too_long(limit)),
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its body, or refuse it with 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = max((body_length(each) for each in headers_of(scope, b"content-length")), default=0)
        body = None if announced > self._max_bytes + _DISCARDED_BYTES else await self._body(receive)
        if body is None:
            await self._refusal(self._max_bytes)(scope, receive, send)
            return
        await self._app(scope, _Replayed(body, receive), send)

    async def _body(self, receive: Receive) -> list[Message] | None:
        """Return what came, in one message and perhaps a disconnect; None when it is too long."""
        parts = bytearray()
        length = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return [{"type": "http.request", "body": bytes(parts), "more_body": True}, message]
            part = message.get("body", b"")
            length += len(part)
            if length <= self._max_bytes:
                parts += part
            else:
                parts.clear()
            if length > self._max_bytes + _DISCARDED_BYTES:
                return None
            if not message.get("more_body", False):
                is_whole = length <= self._max_bytes
                return [{"type": "http.request", "body": bytes(parts), "more_body": False}] if is_whole else None


class _Replayed:
    """Gives what was read, and then what comes."""

    def __init__(self, messages: list[Message], receive: Receive) -> None:
        self._messages = messages
        self._receive = receive

    async def __call__(self) -> Message:
        return self._messages.pop(0) if self._messages else await self._receive()


def too_long(limit: int) -> tuple[HTTPStatus, str, str]:
    """Return status, code and text of the refusal of a longer body."""
    text = f"The body is longer than {limit:,} bytes. What to do: send less"
    return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "BODY_TOO_LARGE", text


def body_length(announced: str) -> int:
    """Return the length that a header announces; 0 where that is no number, since what comes is counted anyway."""
    return int(announced) if announced.isascii() and announced.isdecimal() and len(announced) < _LONGEST_NUMBER else 0
