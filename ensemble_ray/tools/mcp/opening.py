"""How a session with an MCP server is opened. Package: tools. The SDK is imported here, when the first session is opened."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, TextIO

from ensemble_ray.errors import ToolConfigurationError
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.tools.mcp.address import ServerAddress
from ensemble_ray.tools.mcp.delivery import watch_transport
from ensemble_ray.tools.mcp.questions import elicitation_callback, sampling_callback

if TYPE_CHECKING:
    from mcp import Client

__all__ = ["ErrorLines", "open_session"]

_log = bounded_logger(__name__)
#: Lines of a program's standard error that an error shows.
_SHOWN_LINES = 10
#: How long the last lines of a program that ended are waited for, s; one that it started may hold the pipe open.
_LAST_LINES_S = 0.5
_INSTALL = "MCP needs the package mcp, which is not installed: pip install 'ensemble-ray[mcp]'"


@asynccontextmanager
async def open_session(address: ServerAddress, stderr: ErrorLines) -> AsyncGenerator[Client]:
    """Open a session, which is closed in the same task.

    Raises:
        ToolConfigurationError: the SDK is not installed.
    """
    try:
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        from ensemble_ray.tools.mcp.http_client import http_client
    except ImportError:
        raise ToolConfigurationError(_INSTALL) from None
    async with AsyncExitStack() as stack:
        if address.command:
            program, *arguments = address.command
            parameters = StdioServerParameters(command=program, args=arguments, env=dict(address.env), cwd=address.cwd)
            transport = watch_transport(stdio_client(parameters, errlog=stderr.open()))
        else:
            http = await stack.enter_async_context(http_client(address))
            transport = streamable_http_client(address.url, http_client=http)
        asks_person = elicitation_callback if address.has_reviewer else None
        asks_model = sampling_callback if address.has_model else None
        client = Client(
            transport, raise_exceptions=True, elicitation_callback=asks_person, sampling_callback=asks_model
        )
        yield await stack.enter_async_context(client)


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
            for line in lines:
                self._lines.append(line.rstrip("\n")[:500])
                _log.debug("%s", line.rstrip("\n"))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ended.set)
