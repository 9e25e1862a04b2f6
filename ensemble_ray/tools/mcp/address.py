"""Addresses of MCP servers, and the delivery state and message streams that its transports share."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from msgspec import Struct

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
    """A program that this process starts, or a URL. Equal addresses share a session."""

    command: tuple[str, ...] = ()  # empty for a URL
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    cwd: str | None = None
    url: str = ""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    connect_timeout_s: float = 30.0
    has_reviewer: bool = False  # the session offers elicitation
    max_samples: int = 0  # sampling requests per call; 0: not offered

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
        flaws = [f"{name!r} {flaw}" for name in headers if (flaw := header_name_flaw(name))]
        flaws += [f"'{name}' {flaw}" for name, value in headers.items() if (flaw := header_flaw(value.strip()))]
        if flaws:
            raise ValidationError(f"MCP headers: {flaws[0]}")
        sent = tuple((name, value.strip()) for name, value in headers.items())
        return cls(url=server, headers=sent, connect_timeout_s=connect_timeout_s, max_samples=max_samples)

    @property
    def shown(self) -> str:
        if self.command:
            return f"{_STDIO}{self.command[0]}"
        return urlsplit(self.url)._replace(query="", fragment="").geturl()


MESSAGE_BYTES = 16 * 2**20  # after unpacking
_NO_ANSWER = "Server returned an error response"  # the SDK's message for any HTTP status
#: the SDK's messages for unreadable HTTP answers
_UNREADABLE = ("Failed to parse JSON response: ", "Failed to parse SSE message: ")


class McpDelivery(Struct):
    sent: int = 0  # messages that the server may have processed
    status: int | None = None
    #: the server no longer has the session, so it did not process the newest message
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
        """Close the stream."""

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
