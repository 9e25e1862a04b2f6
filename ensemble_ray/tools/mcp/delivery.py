"""What is known of the messages that a piece of work sent to an MCP server. Package: tools.

In: each message as it leaves, and the status of each HTTP answer. Out: whether the server may have carried the work out, and whether it is
lost. Rules: the SDK sends in tasks of its own, which inherit the context of the work; so one cell in the context is filled from there.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from mcp import MCPError
    from mcp.shared.message import SessionMessage

__all__ = ["MESSAGE_BYTES", "McpDelivery", "MessageStream", "ReadMessages", "current_delivery", "is_lost"]

#: Longest message, bytes after unpacking.
MESSAGE_BYTES = 16 * 2**20
#: What the SDK makes of an answer of HTTP that is no answer of the protocol; it has the same text for every status.
_NO_ANSWER = "Server returned an error response"
#: How its texts for answers of HTTP begin that cannot be read; other errors with that code are the server's own.
_UNREADABLE = ("Failed to parse JSON response: ", "Failed to parse SSE message: ")


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
    """Return whether the server did not refuse the work, but is lost.

    It closed the connection, forgot the session or sent what cannot be read, or a proxy answers for it.
    """
    from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, PARSE_ERROR

    delivery = current_delivery.get() or McpDelivery()
    if error.code == CONNECTION_CLOSED or delivery.is_forgotten:
        return True
    if error.code == PARSE_ERROR:
        return delivery.status is not None and error.message.startswith(_UNREADABLE)
    is_unanswered = error.code == INTERNAL_ERROR and error.message == _NO_ANSWER
    return is_unanswered and (delivery.status or 0) >= HTTPStatus.INTERNAL_SERVER_ERROR


class MessageStream:
    """A stream of messages as the SDK enters, leaves and closes it."""

    async def aclose(self) -> None:
        """Close it; what it is made on may be closed elsewhere."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.aclose()


class ReadMessages(MessageStream):
    """A stream of messages that come in."""

    async def receive(self) -> SessionMessage | Exception:
        """Return the next message, or what is wrong with it.

        Raises:
            anyio.EndOfStream: no other comes.
        """
        raise NotImplementedError

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        from anyio import EndOfStream

        try:
            return await self.receive()
        except EndOfStream:
            raise StopAsyncIteration from None
