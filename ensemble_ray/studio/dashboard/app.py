"""The ASGI application of a dashboard: its page, data, WebSocket and control routes (S-WEB-20, S-WEB-21)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import cast

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp
from starlette.types import Message as WebSocketMessage
from starlette.websockets import WebSocket, WebSocketDisconnect

from ensemble_ray.access.admission import headers_of, is_allowed_origin, is_local_origin, is_loopback
from ensemble_ray.errors import ReviewRoleError, message_of
from ensemble_ray.events.messages import Message
from ensemble_ray.process.concurrency import SystemClock
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.following import LiveEvents
from ensemble_ray.studio.app import Studio, mount_page, mount_studio
from ensemble_ray.studio.dashboard.hub import (
    Connection,
    Control,
    ControlMessages,
    MessageHub,
    Sent,
    ShownRuns,
    WebReviewHandler,
    decode,
    encode,
)
from ensemble_ray.studio.http_server import ANYBODY, BodyLimit, LoopbackCheck, not_found
from ensemble_ray.studio.local_actions import LocalActions, StudioActions
from ensemble_ray.studio.reading import StudioReader
from ensemble_ray.studio.schemas import Decision, NewFork, ReviewSchema, RunPreview
from ensemble_ray.text.foreign_text import whole_data

_GOING_AWAY, _POLICY_VIOLATION, _TRY_AGAIN = 1001, 1008, 1013
_log = bounded_logger(__name__)


class _Client:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def send(self, message: Mapping[str, object]) -> None:
        self._connection.put(encode(str(message["type"]), {key: message[key] for key in message if key != "type"}))

    def subscribe(self, types: AbstractSet[str] | None, run_id: str | None) -> None:
        def wants(sent: Sent) -> bool:
            return (types is None or sent.message.type in types) and (run_id is None or sent.run_id == run_id)

        self._connection.wants = None if types is None and run_id is None else wants


class PageSocket:
    """The WebSocket of pages, at `/ws`."""

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
            hub: Sends messages to pages.
            reviews: Receives their decisions.
            is_local: Whether to accept only pages of this machine (S-WEB-71).
            control: Answers their other messages.
        """
        self._hub = hub
        self._reviews = reviews
        self._is_local = is_local
        self._control = control

    async def serve(self, websocket: WebSocket) -> None:
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
            self._hub.detach(connection)
            if self._control is not None:
                self._control.drop(client)
            sending.cancel()

    async def _take(self, client: _Client, message: WebSocketMessage) -> None:
        """An invalid message is logged (S-WEB-31)."""
        try:
            kind, data = decode(cast("str | None", message.get("text")) or "")
        except ValueError as error:
            _log.warning("A page of the dashboard sent an invalid message: %s", message_of(error))
            return
        if kind == "ping":
            await client.send({"type": "pong"})
        elif kind == "review_decision":
            review_id, decision, text = data.get("review_id"), data.get("decision"), data.get("revised_output")
            if not isinstance(review_id, str) or not isinstance(decision, str) or not isinstance(text, str | None):
                _log.warning("A page of the dashboard sent a decision without review_id or decision")
            elif not self._reviews.decide(review_id, decision, text):
                _log.info("A page decided review '%s', which is not open", review_id)
        elif self._control is not None and (answer := self._control.handlers.get(kind)) is not None:
            try:
                await answer(client, data)
            except Exception as error:  # noqa: BLE001  a failed message keeps the page connected
                _log.warning("A page's message of type '%s' failed: %s", kind, message_of(error))
        else:
            _log.warning("A page of the dashboard sent a message of an unknown type: '%s'", kind)


async def _send(websocket: WebSocket, connection: Connection) -> None:
    with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):  # disconnected; `serve` notices it too
        while texts := await connection.take():
            for text in texts:
                await websocket.send_text(text)
        if connection.is_overrun:
            _log.warning("Disconnected a page of the dashboard: its queue of unread messages is full")
            await websocket.close(_TRY_AGAIN, "Too slow")
        else:
            await websocket.close(_GOING_AWAY, "The dashboard stops")


class DashboardActions:
    """Actions on the runs of a dashboard. Implements `StudioActions`."""

    def __init__(self, runs: ShownRuns, reviews: WebReviewHandler, reader: StudioReader) -> None:
        self._runs = runs
        self._reviews = reviews
        self._reader = reader
        self._clock = SystemClock()

    async def cancel(self, run_id: str) -> None:
        await self._make_recorded(run_id).cancel(run_id)

    async def delete(self, run_id: str) -> None:
        await self._make_recorded(run_id).delete(run_id)

    async def preview_resume(self, run_id: str) -> RunPreview:
        return await self._make_recorded(run_id).preview_resume(run_id)

    async def preview_fork(self, run_id: str, from_step: str) -> RunPreview:
        return await self._make_recorded(run_id).preview_fork(run_id, from_step)

    async def resume(self, run_id: str) -> str:
        return await self._make_recorded(run_id).resume(run_id)

    async def fork(self, run_id: str, asked: NewFork) -> str:
        return await self._make_recorded(run_id).fork(run_id, asked)

    async def decide(
        self, run_id: str, gate_id: str, decision: Decision, *, by: str | None, roles: frozenset[str] | None
    ) -> ReviewSchema:
        """Decide a gate of this process, or else in the record."""
        detail = await self._reader.run(run_id, ANYBODY)
        shown = next((each for each in detail.reviews if each.gate_id == gate_id), None)
        role = None if shown is None or roles is None else shown.required_role
        if role is not None and role not in (roles or ()):
            text = f"Gate '{gate_id}' of run '{run_id}' requires the role '{role}'"
            raise ReviewRoleError(text, run_id, gate_id, role, sorted(roles or ()))
        if shown is None or not self._reviews.decide(gate_id, decision.decision, decision.text):
            return await self._make_recorded(run_id).decide(run_id, gate_id, decision, by=by, roles=roles)
        change = {
            "decision": decision.decision,
            "text": decision.text if decision.decision == "edit" else None,
            "decided_by": type(self._reviews).__name__,
            "decided_at": round(self._clock.now() * 1000),
            "decidable": False,
        }
        return shown.model_copy(update=change)

    def _make_recorded(self, run_id: str) -> StudioActions:
        place = self._runs.place_of(run_id)
        if place is None:
            raise not_found("run", run_id)
        return LocalActions(place)


HEARTBEAT_S = 15.0  # S-WEB-38


def dashboard_app(
    hub: MessageHub,
    reviews: WebReviewHandler,
    runs: ShownRuns,
    *,
    host: str,
    port: Callable[[], int],
    live: Callable[[str], LiveEvents | None],
    control: Control | None = None,
) -> ASGIApp:
    """`port` returns the current port, `live` the live events of a run."""
    app = FastAPI(
        title="ensemble_ray dashboard",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lambda _app: _open(hub, control),
    )
    is_local = is_loopback(host)
    pages = PageSocket(hub, reviews, is_local=is_local, control=None if control is None else control.sockets)

    async def get_status() -> JSONResponse:
        return JSONResponse({"status": "running", "clients": hub.connected, "port": port()})

    async def get_reviews() -> JSONResponse:
        return JSONResponse(whole_data(reviews.open_reviews()))

    app.get("/api/status")(get_status)
    app.get("/api/reviews")(get_reviews)
    app.websocket("/ws")(pages.serve)
    reader = StudioReader(runs, can_decide=True, is_asked_here=reviews.is_open, is_of_one=True)
    studio = Studio(
        reader=reader,
        title="the runs of this program",
        actions=DashboardActions(runs, reviews, reader),
        live=live,
    )
    mount_studio(app, studio)
    if control is not None:
        app.mount("/api", control.app)
    mount_page(app)  # last: it answers all other paths
    limited = BodyLimit(app)
    return LoopbackCheck(limited) if is_local else limited


@contextlib.asynccontextmanager
async def _open(hub: MessageHub, control: Control | None) -> AsyncGenerator[None]:
    clock = SystemClock()

    async def beat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            hub.send_to_all(Message("heartbeat", {"server_time_ms": round(clock.now() * 1000)}))

    async with contextlib.AsyncExitStack() as stack:
        if control is not None:
            await stack.enter_async_context(control)
        stack.callback(asyncio.get_running_loop().create_task(beat()).cancel)
        yield
