"""The web application of a dashboard (S-WEB-20, S-WEB-21).

In: the parts of one dashboard. Out: an ASGI application: its page, its data, its WebSocket, and what it serves beside. On the loop of
its server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.websockets import WebSocket

from ensemble_ray.access.admission import is_loopback
from ensemble_ray.events.messages import Message
from ensemble_ray.process.forks import SystemClock
from ensemble_ray.studio.app import mount_page, mount_studio
from ensemble_ray.studio.body_limit import BodyLimit
from ensemble_ray.studio.dashboard.actions import DashboardActions
from ensemble_ray.studio.dashboard.pages import PageSocket
from ensemble_ray.studio.loopback import LoopbackCheck
from ensemble_ray.studio.reading import StudioReader
from ensemble_ray.studio.service import Studio
from ensemble_ray.text.foreign_text import whole_data

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ensemble_ray.record.following import LiveEvents
    from ensemble_ray.studio.dashboard.hub import MessageHub
    from ensemble_ray.studio.dashboard.ports import Control
    from ensemble_ray.studio.dashboard.reviews import WebReviewHandler
    from ensemble_ray.studio.dashboard.shown_runs import ShownRuns

#: How often pages are told that the server lives, s (S-WEB-38).
HEARTBEAT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardParts:
    """What a dashboard's application is made of."""

    hub: MessageHub
    reviews: WebReviewHandler
    #: where it is served
    host: str
    #: the port at which it listens just now
    port: Callable[[], int]
    runs: ShownRuns
    #: what happens just now in a run
    live: Callable[[str], LiveEvents | None]
    #: begins and steers runs; None: nobody does
    control: Control | None = None


def dashboard_app(parts: DashboardParts) -> ASGIApp:
    """Return the application of a dashboard."""
    app = FastAPI(
        title="ensemble_ray dashboard", docs_url=None, redoc_url=None, openapi_url=None, lifespan=_open(parts)
    )
    is_local = is_loopback(parts.host)
    control = parts.control
    pages = PageSocket(
        parts.hub, parts.reviews, is_local=is_local, control=None if control is None else control.sockets
    )

    async def get_status() -> JSONResponse:
        """Say that it runs, and for how many pages."""
        return JSONResponse({"status": "running", "clients": parts.hub.connected, "port": parts.port()})

    async def get_reviews() -> JSONResponse:
        """List the gates that wait, oldest first."""
        return JSONResponse(whole_data(parts.reviews.open_reviews()))

    async def connect(websocket: WebSocket) -> None:
        """Serve a page."""
        await pages.serve(websocket)

    app.get("/api/status")(get_status)
    app.get("/api/reviews")(get_reviews)
    app.websocket("/ws")(connect)
    reader = StudioReader(parts.runs, can_decide=True, is_asked_here=parts.reviews.is_open, is_of_one=True)
    studio = Studio(
        reader=reader,
        title="the runs of this program",
        actions=DashboardActions(parts.runs, parts.reviews, reader),
        live=parts.live,
    )
    mount_studio(app, studio)
    if control is not None:
        app.mount("/api", control.app)
    mount_page(app)  # behind all others: it answers whatever else is asked for
    limited = BodyLimit(app)
    return LoopbackCheck(limited) if is_local else limited


def _open(parts: DashboardParts) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def opened(_app: FastAPI) -> AsyncGenerator[None]:
        """Send heartbeats while it serves."""
        async with contextlib.AsyncExitStack() as stack:
            if parts.control is not None:
                await stack.enter_async_context(parts.control)
            beating = asyncio.get_running_loop().create_task(_beat(parts.hub))
            stack.callback(beating.cancel)
            yield

    return opened


async def _beat(hub: MessageHub) -> None:
    clock = SystemClock()
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        hub.send_to_all(Message("heartbeat", {"server_time_ms": round(clock.now() * 1000)}))
