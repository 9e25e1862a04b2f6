"""One page's connection: what is sent to it, and what it says (S-WEB-31, S-WEB-37, S-WEB-53, S-WEB-71).

On the loop of the server. Never: an answer to what cannot be read, an end of the connection for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, cast

from starlette.websockets import WebSocket, WebSocketDisconnect

from ensemble_ray.access.admission import headers_of, is_allowed_origin, is_local_origin
from ensemble_ray.errors import message_of
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.studio.dashboard.texts import decode, encode

if TYPE_CHECKING:
    from starlette.types import Message as WebSocketMessage

    from ensemble_ray.studio.dashboard.hub import Connection, MessageHub
    from ensemble_ray.studio.dashboard.ports import ControlMessages
    from ensemble_ray.studio.dashboard.reviews import WebReviewHandler
    from ensemble_ray.studio.dashboard.snapshot import Sent

_GOING_AWAY, _POLICY_VIOLATION, _TRY_AGAIN = 1001, 1008, 1013
_log = bounded_logger(__name__)


class _Client:
    """A page, as who answers its messages sees it. Fulfils `PageClient`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def send(self, message: Mapping[str, object]) -> None:
        """Send it a message."""
        self._connection.put(encode(str(message["type"]), {key: message[key] for key in message if key != "type"}))

    def subscribe(self, types: AbstractSet[str] | None, run_id: str | None) -> None:
        """Send it from now on only what is of these types and of that run."""

        def wants(sent: Sent) -> bool:
            return (types is None or sent.message.type in types) and (run_id is None or sent.run_id == run_id)

        self._connection.wants = None if types is None and run_id is None else wants


class PageSocket:
    """Serves `/ws`."""

    def __init__(
        self,
        hub: MessageHub,
        reviews: WebReviewHandler,
        *,
        is_local: bool,
        control: ControlMessages | None = None,
    ) -> None:
        """Serve pages.

        Args:
            hub: Has what is sent to them.
            reviews: Takes their decisions.
            is_local: Whether only pages of this machine are let in (S-WEB-71).
            control: Answers what else they say; None: nobody does.
        """
        self._hub = hub
        self._reviews = reviews
        self._is_local = is_local
        self._control = control

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one page until it goes."""
        await websocket.accept()
        origins = headers_of(websocket.scope, b"origin")
        if not (is_local_origin(origins) if self._is_local else is_allowed_origin(websocket.scope)):
            _log.warning("Refused a connection from the page '%.200s'", ", ".join(origins) or "none")
            await websocket.close(_POLICY_VIOLATION, "Origin not allowed")
            return
        connection = self._hub.join()
        client = _Client(connection)
        sending = asyncio.get_running_loop().create_task(_send(websocket, connection))
        try:
            while (message := await websocket.receive())["type"] != "websocket.disconnect":
                await self._take(client, message)
        except asyncio.CancelledError:
            pass  # the server stops, and this was the connection's task
        finally:
            self._hub.leave(connection)
            if self._control is not None:
                self._control.forget(client)
            sending.cancel()

    async def _take(self, client: _Client, message: WebSocketMessage) -> None:
        """Do what a page says; what cannot be read is logged (S-WEB-31)."""
        try:
            kind, data = decode(cast("str | None", message.get("text")) or "")
        except ValueError as error:
            _log.warning("A page of the dashboard sent what is no message: %s", message_of(error))
            return
        if kind == "ping":
            await client.send({"type": "pong"})
        elif kind == "review_decision":
            self._decide(data)
        elif self._control is not None and (answer := self._control.handlers.get(kind)) is not None:
            try:
                await answer(client, data)
            except Exception as error:  # noqa: BLE001  a page's message that fails leaves it connected
                _log.warning("A page's message of type '%s' failed: %s", kind, message_of(error))
        else:
            _log.warning("A page of the dashboard sent a message of an unknown type: '%s'", kind)

    def _decide(self, data: Mapping[str, object]) -> None:
        review_id, decision, text = data.get("review_id"), data.get("decision"), data.get("revised_output")
        if not isinstance(review_id, str) or not isinstance(decision, str) or not isinstance(text, str | None):
            _log.warning("A page of the dashboard sent a decision that has no review_id or no decision")
        elif not self._reviews.decide(review_id, decision, text):
            _log.info("A decision came for review '%s', which waits for none", review_id)


async def _send(websocket: WebSocket, connection: Connection) -> None:
    """Send what waits until the connection ends."""
    with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):  # it has gone, which its reader hears, too
        while texts := await connection.take():
            for text in texts:
                await websocket.send_text(text)
        if connection.is_overrun:
            _log.warning("A page of the dashboard was given up: it took nothing while too much was sent")
            await websocket.close(_TRY_AGAIN, "Too slow")
        else:
            await websocket.close(_GOING_AWAY, "The dashboard stops")
