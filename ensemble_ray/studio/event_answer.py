"""A response with an open stream of server-sent events and heartbeats. The endpoint uses it too."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError

from ensemble_ray.studio.http_server import disconnect

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

#: Interval of the comments that keep idle connections open, s.
_HEARTBEAT_S = 15
#: A client that reads no data for this long is disconnected, s. After a reconnect it gets the missed events.
SEND_TIMEOUT_S = 60.0
#: Proxies must forward events without buffering, and must not cache them.
STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventAnswer(EventSourceResponse):
    """A response with a stream of events."""

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
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            await disconnect(scope, receive)
