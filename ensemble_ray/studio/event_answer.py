"""EventAnswer: server-sent events that go on, with heartbeats. Package: studio; the endpoint's streams are of the same kind."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError

from ensemble_ray.studio.http_server import disconnect

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

#: Comments that keep idle connections open come so often, s.
_HEARTBEAT_S = 15
#: A client that takes nothing for so long is disconnected, s; it can come back and misses nothing.
SEND_TIMEOUT_S = 60.0
#: Proxies pass each event on at once, and keep none.
STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventAnswer(EventSourceResponse):
    """An answer of events."""

    def __init__(
        self,
        events: AsyncGenerator[ServerSentEvent],
        *,
        headers: Mapping[str, str] | None = None,
        separator: str = "\n",
    ) -> None:
        super().__init__(
            events,
            ping=_HEARTBEAT_S,
            send_timeout=SEND_TIMEOUT_S,
            sep=separator,
            headers={**STREAM_HEADERS, **(headers or {})},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            await disconnect(scope, receive)
