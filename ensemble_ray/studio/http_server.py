"""HttpServer: serves one application in this process, beside whatever else it does.

In: an ASGI application, where to listen. Out: a server on a daemon thread with a loop of its own, so that neither pages nor clients that
are slow hold a run, and the process may end while it serves. Never: a signal handler, a line on the terminal.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from ensemble_ray.errors import EnsembleError
from ensemble_ray.process.forks import abandon, new_lock, track
from ensemble_ray.studio.installed import check_installed

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Receive, Scope, Send

#: Extension of a request's scope: drops its connection, with all that waits to be sent on it.
_ABORT = "ensemble_ray.abort"

#: How long answers that go on may take to end when the server stops, s.
_CLOSING_S = 1.0
#: How long a start or a stop is waited for, s: only a process that gets no time takes so long.
_PATIENCE_S = 30.0
#: Longest message of a client, bytes: a text that a person wrote in place of a model's.
_MESSAGE_BYTES = 8_388_608


class HttpServer:
    """One application at one address. May be started again after it was stopped; thread-safe."""

    def __init__(
        self, app: ASGIApp, *, host: str, port: int, name: str, on_stop: Callable[[], None] | None = None
    ) -> None:
        """Choose what is served, and where.

        Args:
            app: The application.
            host: A name or an address of this machine; brackets of IPv6 may be there.
            port: 0: any that is free.
            name: What errors and the thread call it, such as `dashboard`.
            on_stop: Called on the server's loop when it stops, before connections are closed.
        """
        self._app = app
        self._host = host
        self._port = port
        self._name = name
        self._on_stop = on_stop
        self._lock = new_lock()
        self._running: tuple[uvicorn.Server, threading.Thread, int, socket.socket] | None = None
        track(self)

    def after_fork(self) -> None:
        """Let go of the parent's port: it would be taken as long as the child lives."""
        if self._running is not None:
            abandon(self._running)
            self._running[3].close()
            self._running = None

    @property
    def port(self) -> int:
        """The port at which it listens; -1 while it does not."""
        running = self._running
        return -1 if running is None else running[2]

    def start(self) -> None:
        """Listen and serve; nothing where it does already.

        Raises:
            ValidationError: the packages that it needs are not installed.
            EnsembleError: nobody can listen there, such as when the port is taken.
        """
        with self._lock:
            if self._running is not None:
                return
            check_installed(f"The {self._name}")
            server_class = _server_class()
            opened = self._listen()
            started = threading.Event()
            server = server_class(self._app, started.set, self._on_stop)
            thread = threading.Thread(
                target=_serve, args=(server, opened, started), name=f"ensemble-ray-{self._name}", daemon=True
            )
            port = int(opened.getsockname()[1])
            thread.start()
            if not started.wait(_PATIENCE_S) or not server.started:
                server.should_exit = True
                opened.close()
                raise EnsembleError(f"The {self._name} at {self._place(port)} did not start; the log says more")
            self._running = server, thread, port, opened

    def stop(self) -> None:
        """End all connections and stop listening; nothing where it does not listen."""
        with self._lock:
            running, self._running = self._running, None
            if running is not None:
                server, thread, _, _ = running
                server.should_exit = True
                thread.join(_PATIENCE_S)

    def _listen(self) -> socket.socket:
        host = self._host.removeprefix("[").removesuffix("]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        opened = socket.socket(family)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((host, self._port))
            opened.listen()
        except OSError as error:
            opened.close()
            raise EnsembleError(
                f"The {self._name} cannot listen on {self._place(self._port)}: {error.strerror or error}. Choose another port, "
                "or 0 for any that is free"
            ) from error
        return opened

    def _place(self, port: int) -> str:
        host = self._host.removeprefix("[").removesuffix("]")
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _serve(server: uvicorn.Server, opened: socket.socket, started: threading.Event) -> None:
    """Serve until it is told to end; on the server's thread."""
    try:
        asyncio.run(server.serve(sockets=[opened]))
    finally:
        opened.close()
        started.set()  # also where it never did


async def disconnect(scope: Scope, receive: Receive) -> None:
    """Abort the connection of a request: to close it would wait until the client has read what the server holds for it."""
    abort = scope.get("extensions", {}).get(_ABORT)
    if abort is None:
        return  # another server closes the connection of an answer without an end
    abort()
    while (await receive())["type"] != "http.disconnect":
        pass  # what is left of the request


class _Abortable(asyncio.Protocol):
    """Before a protocol of uvicorn's: lets its requests abort their connection, which ASGI has no message for."""

    app: ASGIApp

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        app = self.app

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            scope["extensions"] = {**scope.get("extensions", {}), _ABORT: cast("asyncio.Transport", transport).abort}
            await app(scope, receive, send)

        self.app = serve


def _server_class() -> Callable[[ASGIApp, Callable[[], None], Callable[[], None] | None], uvicorn.Server]:
    """Return what makes the server."""
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    protocol = type("AbortableProtocol", (_Abortable, AutoHTTPProtocol), {})

    class Server(uvicorn.Server):
        """Says when it listens, and ends what goes on when it stops."""

        def __init__(self, app: ASGIApp, on_start: Callable[[], None], on_stop: Callable[[], None] | None) -> None:
            config = uvicorn.Config(
                app,
                http=protocol,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws_max_size=_MESSAGE_BYTES,
                ws_per_message_deflate=False,
                timeout_graceful_shutdown=int(_PATIENCE_S),
            )
            super().__init__(config)
            self._on_start = on_start
            self._on_stop = on_stop

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self._on_start()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if self._on_stop is not None:
                self._on_stop()
            if self.server_state.tasks:
                await asyncio.wait(set(self.server_state.tasks), timeout=_CLOSING_S)
            for task in set(self.server_state.tasks):
                task.cancel()
            await super().shutdown(sockets)

    return Server
