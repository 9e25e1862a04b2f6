"""Addresses of MCP servers, and the delivery state and message streams that its transports share."""

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
    """One server: a program that this process starts, or a URL. Equal addresses share a session."""

    #: program and arguments; empty for a URL
    command: tuple[str, ...] = ()
    #: variables of the program besides the default ones
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    #: working directory of the program; None: this process's
    cwd: str | None = None
    url: str = ""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    connect_timeout_s: float = 30.0
    #: whether the session offers elicitation
    has_reviewer: bool = False
    #: limit of sampling requests per call; 0: the session does not offer sampling
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
        if server.startswith(_STDIO):
            if headers:
                raise ValidationError("MCP headers are for a URL: pass secrets of a program by env")
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
            raise ValidationError("MCP server must be a URL without a name or password: pass them in headers")
        if env or cwd is not None:
            raise ValidationError("MCP env and cwd are for a program, and not for a URL")
        return cls(url=server, headers=_checked(headers), connect_timeout_s=connect_timeout_s, max_samples=max_samples)

    @property
    def shown(self) -> str:
        if self.command:
            return f"{_STDIO}{self.command[0]}"
        return urlsplit(self.url)._replace(query="", fragment="").geturl()


def _checked(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    for name, value in headers.items():
        if flaw := header_name_flaw(name):
            raise ValidationError(f"MCP headers: {name!r} {flaw}")
        if flaw := header_flaw(value.strip()):
            raise ValidationError(f"MCP headers: '{name}' {flaw}")
    return tuple((name, value.strip()) for name, value in headers.items())


#: Limit of a message, bytes after unpacking.
MESSAGE_BYTES = 16 * 2**20
#: The SDK's message for an HTTP answer outside of the protocol, with any status.
_NO_ANSWER = "Server returned an error response"
#: Beginnings of the SDK's messages for unreadable HTTP answers; other errors with that code are the server's.
_UNREADABLE = ("Failed to parse JSON response: ", "Failed to parse SSE message: ")


@dataclass(slots=True)
class McpDelivery:
    #: messages that the server may have processed
    sent: int = 0
    status: int | None = None
    #: the server did not process the newest message, because it no longer has the session
    is_forgotten: bool = False


current_delivery: ContextVar[McpDelivery | None] = ContextVar("ensemble_ray_mcp_delivery", default=None)


def is_lost(error: MCPError) -> bool:
    """Return whether the server is lost; otherwise, the error is its refusal."""
    from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, PARSE_ERROR

    delivery = current_delivery.get() or McpDelivery()
    if error.code == CONNECTION_CLOSED or delivery.is_forgotten:
        return True
    if error.code == PARSE_ERROR:
        return delivery.status is not None and error.message.startswith(_UNREADABLE)
    is_unanswered = error.code == INTERNAL_ERROR and error.message == _NO_ANSWER
    return is_unanswered and (delivery.status or 0) >= HTTPStatus.INTERNAL_SERVER_ERROR


class MessageStream:
    async def aclose(self) -> None:
        """Close the stream. By default, its transport is closed elsewhere."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.aclose()


class ReadMessages(MessageStream):
    async def receive(self) -> SessionMessage | Exception:
        """Return the next message, or the error of an unreadable one; raise `anyio.EndOfStream` at the end."""
        raise NotImplementedError

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        from anyio import EndOfStream

        try:
            return await self.receive()
        except EndOfStream:
            raise StopAsyncIteration from None
