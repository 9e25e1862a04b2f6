"""What is known of the messages that a piece of work sent to an MCP server. Package: tools.

In: each message as it leaves, and the status of each HTTP answer. Out: whether the server may have carried the work out, and whether it is
lost. Rules: the SDK sends in tasks of its own, which inherit the context of the work; so one cell in the context is filled from there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from mcp import MCPError
    from mcp.client._transport import ReadStream, TransportStreams, WriteStream
    from mcp.shared.message import SessionMessage

__all__ = ["McpDelivery", "WrappedStream", "current_delivery", "is_lost", "watch_transport"]

S = TypeVar("S", bound="WriteStream[Any] | ReadStream[Any]")
#: What the SDK makes of an answer of HTTP that is no answer of the protocol; it has the same text for every status.
_NO_ANSWER = "Server returned an error response"


@dataclass(slots=True)
class McpDelivery:
    """What became of the messages of one piece of work."""

    #: messages that the server may have worked on
    sent: int = 0
    #: of the newest answer of HTTP
    status: int | None = None
    #: the newest message was for a session that the server no longer knows, and was not looked at
    is_forgotten: bool = False


#: Of the work that this code is part of; work without one is not asked about.
current_delivery: ContextVar[McpDelivery | None] = ContextVar("ensemble_ray_mcp_delivery", default=None)


def is_lost(error: MCPError) -> bool:
    """Return whether the server did not refuse the work, but went away: it closed the connection or forgot the session, or a proxy answers for it."""
    from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR

    if error.code == CONNECTION_CLOSED:
        return True
    delivery = current_delivery.get() or McpDelivery()
    if delivery.is_forgotten:
        return True
    is_unanswered = error.code == INTERNAL_ERROR and error.message == _NO_ANSWER
    return is_unanswered and (delivery.status or 0) >= HTTPStatus.INTERNAL_SERVER_ERROR


@asynccontextmanager
async def watch_transport(transport: AbstractAsyncContextManager[TransportStreams]) -> AsyncGenerator[TransportStreams]:
    """Open a program's transport; each message that its writer takes is told."""
    async with transport as (received, sent):
        yield received, _WatchedStream(sent)


class WrappedStream(Generic[S]):
    """A stream of the SDK that is closed, entered and left as the one inside of it."""

    def __init__(self, inner: S) -> None:
        self._inner = inner

    async def aclose(self) -> None:
        """Close the stream inside."""
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(exc_type, exc_val, exc_tb)


class _WatchedStream(WrappedStream["WriteStream[SessionMessage]"]):
    """The stream of messages to a program."""

    async def send(self, item: SessionMessage, /) -> None:
        """Send a message; one that nobody took, since the program ended, was not sent."""
        from anyio import BrokenResourceError, ClosedResourceError

        delivery = current_delivery.get() or McpDelivery()
        delivery.sent += 1  # before: a writer may take what a cancelled sender gave
        try:
            await self._inner.send(item)
        except (BrokenResourceError, ClosedResourceError):
            delivery.sent -= 1
            raise
