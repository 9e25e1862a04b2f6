"""How a session with an MCP server is opened. Package: tools. The SDK is imported here, when the first session is opened."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Literal, TextIO

from ensemble_ray.errors import ToolConfigurationError, message_of
from ensemble_ray.errors.tls import tls_flaw
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.tools.mcp.address import ServerAddress
from ensemble_ray.tools.mcp.delivery import MESSAGE_BYTES, McpDelivery, current_delivery
from ensemble_ray.tools.mcp.listing import mend_transport
from ensemble_ray.tools.mcp.questions import elicitation_callback, sampling_callback

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import TransportStreams

__all__ = ["ErrorLines", "open_session", "reason_of"]

_log = bounded_logger(__name__)
#: Lines of a program's standard error that an error shows.
_SHOWN_LINES = 10
#: What is read of one of them, characters; the rest of a line is dropped.
_LINE_CHARS = 2**14
#: How long the last lines of a program that ended are waited for, s; one that it started may hold the pipe open.
_LAST_LINES_S = 0.5
#: Statuses with which a server of the older SSE transport answers what it does not know; others are about keys and limits.
_REFUSALS = frozenset(range(400, 500)) - {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS}
_INSTALL = "MCP needs the package mcp, which is not installed: pip install 'ensemble-ray[mcp]'"


@asynccontextmanager
async def open_session(
    address: ServerAddress, stderr: ErrorLines, on_fault: Callable[[str], None]
) -> AsyncGenerator[Client]:
    """Open a session, which is closed in the same task; a URL that refuses streamable HTTP is tried with the older SSE transport.

    Args:
        address: The server.
        stderr: Takes what a program writes to its standard error.
        on_fault: Called with what the server did wrong when it ends the session.

    Raises:
        ToolConfigurationError: the SDK is not installed, or neither transport works.
        TimeoutError: it takes longer than `connect_timeout_s`.
    """
    try:
        from mcp import Client
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import streamable_http_client

        from ensemble_ray.tools.mcp.http_client import http_client, sse_http_client
        from ensemble_ray.tools.mcp.program import open_program
    except ImportError:
        raise ToolConfigurationError(_INSTALL) from None

    def client(transport: AbstractAsyncContextManager[TransportStreams], mode: Literal["auto", "legacy"]) -> Client:
        return Client(
            mend_transport(transport, address.shown, on_fault),
            raise_exceptions=True,
            mode=mode,
            elicitation_callback=elicitation_callback if address.has_reviewer else None,
            sampling_callback=sampling_callback if address.max_samples else None,
        )

    async with AsyncExitStack() as stack:

        async def enter(opened: Client) -> Client:
            async with asyncio.timeout(address.connect_timeout_s):
                return await stack.enter_async_context(opened)

        if address.command:
            yield await enter(client(open_program(address, stderr.open()), "auto"))
            return
        opening = McpDelivery()
        current_delivery.set(opening)  # of this session's task; each call has its own
        http = await stack.enter_async_context(http_client(address))
        try:
            transport = streamable_http_client(address.url, http_client=http, max_sse_event_size=MESSAGE_BYTES)
            opened = await enter(client(transport, "auto"))
        except Exception as error:
            if (status := opening.status or 0) not in _REFUSALS:
                raise
            refusal = f"it refuses streamable HTTP (HTTP status {status}: {reason_of(error)})"
            sse = sse_client(address.url, httpx_client_factory=partial(sse_http_client, address))
            try:
                opened = await enter(client(sse, "legacy"))
            except Exception as older:
                why = reason_of(older)
                if isinstance(older, TimeoutError):
                    why = f"no answer within {address.connect_timeout_s:g} s"
                elif (opening.status or 0) >= HTTPStatus.BAD_REQUEST:
                    why = f"HTTP status {opening.status}"
                raise ToolConfigurationError(
                    f"MCP server '{address.shown}' cannot be reached: {refusal}, and the older SSE transport failed, too: {why}"
                ) from older
        yield opened


def reason_of(error: BaseException | None) -> str:
    """Return the text of what ended a session: of the first error, where several came together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "it closed the connection" if error is None else tls_flaw(error) or message_of(error)


class ErrorLines:
    """The newest lines of a program's standard error; a thread reads them, and logs them on DEBUG."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._stream: TextIO | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def open(self) -> TextIO:
        """Return what the program is given to write to."""
        read_end, write_end = os.pipe()
        self._stream = os.fdopen(write_end, "w")
        threading.Thread(target=self._read, args=(read_end,), name="mcp stderr", daemon=True).start()
        return self._stream

    async def last(self) -> str:
        """Return the last lines of a program that ended, after `close`."""
        if self._stream is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_LINES_S):
                    await self._ended.wait()
        return "\n".join(self._lines)

    def close(self) -> None:
        """Close this process's end; the thread ends with the program, and with what it left running."""
        if self._stream is not None:
            self._stream.close()

    def _read(self, read_end: int) -> None:
        with contextlib.suppress(OSError), os.fdopen(read_end, errors="replace") as lines:
            is_rest = False
            while line := lines.readline(_LINE_CHARS):
                if not is_rest:
                    self._lines.append(line.rstrip("\n")[:500])
                    _log.debug("%s", line.rstrip("\n"))
                is_rest = not line.endswith("\n")
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ended.set)
