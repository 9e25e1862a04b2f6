"""An address that a test holds, and that leads to one server after the other, or to none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

__all__ = ["Way"]


class Way:
    """Passes connections on to a port of this machine; a port that was freed could be somebody else's by now."""

    def __init__(self) -> None:
        #: where connections lead; None: nowhere
        self.target: int | None = None
        self.port = 0
        self._open: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncGenerator[Way]:
        """Listen at a free port."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self.cut()
            server.close()

    def cut(self) -> None:
        """End all connections; new ones lead nowhere."""
        self.target = None
        for writer in self._open:
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.target is None:
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self._open |= {writer, far_writer}
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        self._open -= {writer, far_writer}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()
