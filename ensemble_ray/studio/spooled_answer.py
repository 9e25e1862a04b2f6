"""SpooledAnswer: an answer of any length, which is sent from a temporary file."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import IO, TYPE_CHECKING

from starlette.responses import Response

from ensemble_ray.process.forks import threads
from ensemble_ray.studio.http_server import disconnect
from ensemble_ray.studio.refusals import StudioRefusal

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from ensemble_ray.studio.service import Studio

_PIECE_BYTES = 65_536
#: A client that takes no piece for so long is disconnected, s.
_STALLED_S = 60.0
#: So is one that takes less on average, behind that time.
_LEAST_BYTES_PER_S = 65_536


class SpooledAnswer(Response):
    """Writes the body to a file without a name and sends it in pieces: a slow client holds one piece in memory.

    One studio writes and sends a few of them at a time (`Studio.documents`), and refuses more with 429.
    """

    def __init__(
        self,
        studio: Studio,
        write: Callable[[IO[bytes]], Awaitable[object]],
        *,
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._slots = studio.documents
        self._write = write
        self.status_code = HTTPStatus.OK
        self.media_type = media_type
        self.background = None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer.

        Raises:
            StudioRefusal: too many are being sent.
        """
        if self._slots.locked():
            text = "Too many exports and files are being sent. What to do: try again when one of them has ended"
            raise StudioRefusal(HTTPStatus.TOO_MANY_REQUESTS, "TOO_MANY_EXPORTS", text)
        async with self._slots:
            with tempfile.TemporaryFile(prefix="ensemble-ray-") as file:
                await self._write(file)
                del self._write  # with the texts that it holds
                self.headers["content-length"] = str(file.tell())
                file.seek(0)
                try:
                    await self._send(file, send)
                except TimeoutError:
                    await disconnect(scope, receive)

    async def _send(self, file: IO[bytes], send: Send) -> None:
        """Send the file.

        Raises:
            TimeoutError: the client is too slow.
        """
        loop = asyncio.get_running_loop()
        latest_at = loop.time() + _STALLED_S
        async with asyncio.timeout_at(latest_at):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        is_more = True
        while is_more:
            piece = await threads.run(file.read, _PIECE_BYTES)
            is_more = bool(piece)
            async with asyncio.timeout_at(min(latest_at, loop.time() + _STALLED_S)):
                await send({"type": "http.response.body", "body": piece, "more_body": is_more})
            latest_at += len(piece) / _LEAST_BYTES_PER_S
