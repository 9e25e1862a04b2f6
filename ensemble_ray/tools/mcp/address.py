"""Where an MCP server is, and how it is reached. Pure.

In: `stdio:COMMAND ARGUMENTS` or a URL. Out: a value that says which session is meant: equal addresses share one.
Never: a secret in a text that is shown.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ensemble_ray.errors import ValidationError
from ensemble_ray.text.foreign_text import header_flaw, header_name_flaw

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from mcp import MCPError
    from mcp.shared.message import SessionMessage


_STDIO = "stdio:"
_FORMS = "'stdio:COMMAND ARGUMENTS' or 'https://HOST/PATH'"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """One server: a program that this process starts, or a URL."""

    #: program and arguments; empty for a URL
    command: tuple[str, ...] = ()
    #: what the program gets beside the few variables that every program needs
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    #: where the program runs; None: where this process does
    cwd: str | None = None
    url: str = ""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    #: longest time until the session stands, s
    connect_timeout_s: float = 30.0
    #: whether the session offers to ask a person
    has_reviewer: bool = False
    #: how often a model may be asked in one call; 0: it is not offered
    max_samples: int = 0

    @classmethod
    def of(
        cls,
        server: str,
        *,
        env: Mapping[str, str],
        headers: Mapping[str, str],
        cwd: str | None,
        connect_timeout_s: float,
        max_samples: int,
    ) -> ServerAddress:
        """Read an address.

        Raises:
            ValidationError: it is neither a command nor a URL, or has what belongs to the other.
        """
        if server.startswith(_STDIO):
            if headers:
                raise ValidationError("MCP headers are for a URL: give a program its secrets by env")
            try:
                command = tuple(shlex.split(server.removeprefix(_STDIO)))
            except ValueError as error:
                raise ValidationError(f"MCP server has no readable command: {error}") from None
            if not command:
                raise ValidationError(f"MCP server must be {_FORMS}, got a command without a program")
            return cls(
                command=command,
                env=tuple(env.items()),
                cwd=cwd,
                connect_timeout_s=connect_timeout_s,
                max_samples=max_samples,
            )
        parts = urlsplit(server)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValidationError(f"MCP server must be {_FORMS}, got: {server.partition('@')[2] or server!r}")
        if parts.username is not None or parts.password is not None:
            raise ValidationError("MCP server must be a URL without a name or password: give them in headers")
        if env or cwd is not None:
            raise ValidationError("MCP env and cwd are for a program, and not for a URL")
        return cls(url=server, headers=_checked(headers), connect_timeout_s=connect_timeout_s, max_samples=max_samples)

    @property
    def shown(self) -> str:
        """The server for texts: its program, or its URL without a query."""
        if self.command:
            return f"{_STDIO}{self.command[0]}"
        return urlsplit(self.url)._replace(query="", fragment="").geturl()


def _checked(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return headers without blanks around their values.

    Raises:
        ValidationError: one cannot be sent; its value is not shown.
    """
    for name, value in headers.items():
        if flaw := header_name_flaw(name):
            raise ValidationError(f"MCP headers: {name!r} {flaw}")
        if flaw := header_flaw(value.strip()):
            raise ValidationError(f"MCP headers: '{name}' {flaw}")
    return tuple((name, value.strip()) for name, value in headers.items())


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
