"""An HTTP server on a daemon thread with its own event loop, and the layers in front of its applications.

Slow pages and clients cannot block a run, and the process can end while the server runs.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from http import HTTPStatus
from pathlib import Path, PurePath
from typing import Protocol, cast

import uvicorn
from fastapi import Request
from msgspec import Struct
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ensemble_ray.access import admission
from ensemble_ray.access.admission import ApiKey, Right, digest_of, is_key
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.access.quotas import Standing
from ensemble_ray.definition.fields import Origin
from ensemble_ray.errors import EnsembleError, ValidationError
from ensemble_ray.process.concurrency import abandon, new_lock, track
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.stores import RecordedRun
from ensemble_ray.studio import check_installed

_ABORT = "ensemble_ray.abort"  # extension of a scope: aborts the connection and drops unsent data

_CLOSING_S = 1.0  # for open responses when the server stops
_PATIENCE_S = 30.0  # for a start or a stop; only a starved process needs that long
_MESSAGE_BYTES = 8_388_608  # the edited output of a review


class HttpServer:
    """Serves one application at one address. Can be restarted after a stop. Thread-safe."""

    def __init__(
        self, app: ASGIApp, *, host: str, port: int, name: str, on_stop: Callable[[], None] | None = None
    ) -> None:
        """Configure the server.

        Args:
            app: The application.
            host: A name or an address of this machine, IPv6 with or without brackets.
            port: 0: any free port.
            name: Name in errors and of the thread, such as `dashboard`.
            on_stop: Called on the loop of the server before it closes connections.
        """
        self._app = app
        self._host = host.removeprefix("[").removesuffix("]")
        self._port = port
        self._name = name
        self._on_stop = on_stop
        self._lock = new_lock()
        self._running: tuple[uvicorn.Server, threading.Thread, int, socket.socket] | None = None
        track(self)

    def after_fork(self) -> None:
        """Close the port of the parent, which would stay in use as long as the child lives."""
        if self._running is not None:
            abandon(self._running)
            self._running[3].close()
            self._running = None

    @property
    def port(self) -> int:
        """-1 while it does not listen."""
        running = self._running
        return -1 if running is None else running[2]

    def start(self) -> None:
        """No effect if the server already runs."""
        with self._lock:
            if self._running is not None:
                return
            check_installed(f"The {self._name}")
            opened = self._listen()
            started = threading.Event()
            server = _Server(self._app, started.set, self._on_stop)

            def serve() -> None:
                try:
                    asyncio.run(server.serve(sockets=[opened]))
                finally:
                    opened.close()
                    started.set()  # also after a failed start

            thread = threading.Thread(target=serve, name=f"ensemble-ray-{self._name}", daemon=True)
            port = int(opened.getsockname()[1])
            thread.start()
            if not started.wait(_PATIENCE_S) or not server.started:
                server.should_exit = True
                opened.close()
                raise EnsembleError(f"The {self._name} at {self._place(port)} did not start; the log says more")
            self._running = server, thread, port, opened

    def stop(self) -> None:
        """Close all connections and stop listening."""
        with self._lock:
            running, self._running = self._running, None
            if running is not None:
                server, thread, _, _ = running
                server.should_exit = True
                thread.join(_PATIENCE_S)

    def _listen(self) -> socket.socket:
        opened = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((self._host, self._port))
            opened.listen()
        except OSError as error:
            opened.close()
            raise EnsembleError(
                f"The {self._name} cannot listen on {self._place(self._port)}: {error.strerror or error}. Choose another port, "
                "or 0 for any that is free"
            ) from error
        return opened

    def _place(self, port: int) -> str:
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"


async def disconnect(scope: Scope, receive: Receive) -> None:
    """Abort the connection. A close would wait until the client has read all buffered data."""
    abort = scope.get("extensions", {}).get(_ABORT)
    if abort is None:
        return  # another server closes the connection of an unfinished answer
    abort()
    while (await receive())["type"] != "http.disconnect":
        pass  # the rest of the request


class _Abortable(asyncio.Protocol):
    """Mixin for a protocol of uvicorn: requests can abort their connection. ASGI has no message for that."""

    app: ASGIApp

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        app = self.app

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            scope["extensions"] = {**scope.get("extensions", {}), _ABORT: cast("asyncio.Transport", transport).abort}
            await app(scope, receive, send)

        self.app = serve


class _Server(uvicorn.Server):
    """Reports when it listens, and cancels open requests when it stops."""

    def __init__(self, app: ASGIApp, on_start: Callable[[], None], on_stop: Callable[[], None] | None) -> None:
        config = uvicorn.Config(
            app,
            http=type("AbortableProtocol", (_Abortable, AutoHTTPProtocol), {}),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws_max_size=_MESSAGE_BYTES,
            ws_per_message_deflate=False,
            timeout_graceful_shutdown=int(_PATIENCE_S),
        )
        super().__init__(config)
        self._on_start, self._on_stop = on_start, on_stop

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


#: A route can set other values.
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class ResponseHeaders:
    """Adds headers to all answers, including refusals. `policy` is the policy of its pages."""

    def __init__(self, app: ASGIApp, *, policy: str = HEADERS["content-security-policy"]) -> None:
        self._app = app
        self._headers = {**HEADERS, "content-security-policy": policy}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def refuse(status: HTTPStatus, code: str, message: str) -> JSONResponse:
    failure = {"error": "InvalidRequest", "code": code, "message": message}
    return JSONResponse(failure, status_code=status, headers={**HEADERS, "connection": "close"})


DEFAULT_MAX_BODY_BYTES = 8_388_608  # larger data belongs in a file
#: The server drops so much beyond the limit: a client that is refused while it sends often loses the answer.
_DISCARDED_BYTES = 8_388_608
_LONGEST_NUMBER = 30


class BodyLimit:
    """Reads the body before the application does, up to a limit. The application receives it in one piece."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_bytes: int = DEFAULT_MAX_BODY_BYTES,
        refusal: Callable[[int], ASGIApp] = lambda limit: refuse(*too_long(limit)),
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = max((body_length(each) for each in admission.headers_of(scope, b"content-length")), default=0)
        body = None if announced > self._max_bytes + _DISCARDED_BYTES else await self._body(receive)
        if body is None:
            await self._refusal(self._max_bytes)(scope, receive, send)
            return

        async def replay() -> Message:
            return body.pop(0) if body else await receive()

        await self._app(scope, replay, send)

    async def _body(self, receive: Receive) -> list[Message] | None:
        """Return the body in one message, and a disconnect if there was one; None: it is too long."""
        parts = bytearray()
        length = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return [{"type": "http.request", "body": bytes(parts), "more_body": True}, message]
            part = message.get("body", b"")
            length += len(part)
            if length <= self._max_bytes:
                parts += part
            else:
                parts.clear()
            if length > self._max_bytes + _DISCARDED_BYTES:
                return None
            if not message.get("more_body", False):
                is_whole = length <= self._max_bytes
                return [{"type": "http.request", "body": bytes(parts), "more_body": False}] if is_whole else None


def too_long(limit: int) -> tuple[HTTPStatus, str, str]:
    """Return status, code and text of the refusal."""
    text = f"The body is longer than {limit:,} bytes. What to do: send less"
    return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "BODY_TOO_LARGE", text


def body_length(announced: str) -> int:
    """Return the length in a header; 0 if it is not a number. The received bytes are counted anyway."""
    return int(announced) if announced.isascii() and announced.isdecimal() and len(announced) < _LONGEST_NUMBER else 0


_log = bounded_logger(__name__)


class LoopbackCheck:
    """Refuses requests for a host other than loopback, and requests from pages of other sites.

    WebSockets check their `Origin` themselves, to report the reason on the connection (S-WEB-71).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        hosts = admission.headers_of(scope, b"host")
        host = admission.host_name(hosts[0]) if len(hosts) == 1 else None
        if host is None or not admission.is_loopback(host):
            shown = ", ".join(hosts) or "none"
            _log.warning("Refused a request for the host '%.200s'", shown)
            text = f"The host '{shown[:200]}' is not served here: use localhost or 127.0.0.1"
            await _refuse("HOST_NOT_SERVED", text, scope, receive, send)
        elif scope["type"] == "http" and not admission.is_allowed_origin(scope):
            text = "Origin not allowed: only pages of this machine may ask here"
            _log.warning("Refused a request from the page '%.200s'", ", ".join(admission.headers_of(scope, b"origin")))
            await _refuse("ORIGIN_NOT_ALLOWED", text, scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def _refuse(code: str, message: str, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": message[:100]})  # which is answered with 403
        return
    await refuse(HTTPStatus.FORBIDDEN, code, message)(scope, receive, send)


class StudioRefusal(Exception):  # noqa: N818  no defect: an answer
    """Studio answers with a failure, as in `FailureSchema` (S-STU-40)."""

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(status, code, message)
        self.status, self.code, self.message = status, code, message


def not_found(what: str, name: str) -> StudioRefusal:
    return StudioRefusal(HTTPStatus.NOT_FOUND, f"{what.upper()}_NOT_FOUND", f"There is no {what} '{name[:200]}' here")


class _KeyHolder(Struct, frozen=True):
    key: ApiKey

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def sees_cluster(self) -> bool:
        return Right.ADMIN in self.key.rights

    @property
    def sees_all(self) -> bool:
        return self.key.teams is None

    @property
    def roles(self) -> frozenset[str]:
        return self.key.roles

    standing = None  # only endpoints start runs

    def may_see(self, run: RecordedRun) -> bool:
        teams = self.key.teams
        names = {Origin(place=run.origin).name, PurePath(run.origin).name, run.origin}
        return teams is None or not names.isdisjoint(teams)


class KeyGuard:
    """Requires a key of every request."""

    def __init__(self, home: Path) -> None:
        self._file = KeyFile(home)
        self._admission = admission.Admission(admission.KeyPolicy.REQUIRED)
        self._stamp: tuple[int, int, int] | None = None
        if not self._file.read():
            msg = "Beyond loopback studio asks for a key, and there is none: ensemble-ray keys add NAME --rights read"
            raise ValidationError(msg)

    async def admit(self, request: Request, right: Right, *, is_counted: bool = True) -> _KeyHolder:
        await asyncio.to_thread(self._look)
        sent = admission.headers_of(request.scope, b"authorization")
        scheme, _, text = sent[0].strip().partition(" ") if len(sent) == 1 else ("", "", "")
        digest = digest_of(text.strip()) if scheme.lower() == "bearer" and is_key(text.strip()) else None
        credentials = admission.Credentials(digest=digest, is_local=False, is_counted=is_counted)
        decided = self._admission.decide(credentials, at=time.monotonic())
        if not isinstance(decided, admission.Admitted) or decided.key is None:
            wait_s = getattr(decided, "retry_after_s", None)
            if wait_s is not None:
                text = f"The key has no more requests for {wait_s} s"
                raise StudioRefusal(HTTPStatus.TOO_MANY_REQUESTS, "RATE_LIMITED", text)
            text = "Send a key that is known: Authorization: Bearer erk_..."
            raise StudioRefusal(HTTPStatus.UNAUTHORIZED, "KEY_NEEDED", text)
        if right not in decided.key.rights:
            text = f"The key '{decided.key.name}' lacks the right '{right.value}'"
            raise StudioRefusal(HTTPStatus.FORBIDDEN, "RIGHT_MISSING", text)
        return _KeyHolder(decided.key)

    def _look(self) -> None:
        """Reload the keys if their file changed."""
        stamp = self._file.stamp()
        if stamp != self._stamp or stamp is None:
            self._admission.use(self._file.read() or ())
            self._stamp = stamp


class Visitor(Protocol):
    """The person or program that sends a request."""

    @property
    def name(self) -> str | None:
        """In records of decisions; None: the user of this process."""
        ...

    @property
    def sees_cluster(self) -> bool:
        """Whether it has the right `admin`: it may see limits, endpoints, processes of other runs, and redacted values."""
        ...

    @property
    def sees_all(self) -> bool:
        """Whether it may see all runs."""
        ...

    @property
    def roles(self) -> frozenset[str] | None:
        """Roles for reviews; None: it is not identified, and states its role itself."""
        ...

    @property
    def standing(self) -> Standing | None:
        """Quotas of its key and today's usage; None: it has none."""
        ...

    def may_see(self, run: RecordedRun) -> bool: ...


class Guard(Protocol):
    """Admits or refuses requests."""

    async def admit(self, request: Request, right: Right, *, is_counted: bool = True) -> Visitor:
        """Return the visitor. A StudioRefusal: it lacks the right.

        `is_counted` is False for a request that was admitted and counted before.
        """
        ...


class _LocalUser:
    """The user of this machine, with all rights."""

    name = None
    sees_cluster = True
    sees_all = True
    roles = None
    standing = None

    def may_see(self, run: RecordedRun) -> bool:
        del run
        return True


ANYBODY: Visitor = _LocalUser()


class LocalGuard:
    """Admits every client that can reach the port."""

    async def admit(self, request: Request, right: Right, *, is_counted: bool = True) -> Visitor:
        del request, right, is_counted
        return ANYBODY


_HEARTBEAT_S = 15  # comments keep idle connections open
#: A client that reads no data for so long is disconnected. After a reconnect it gets the missed events.
SEND_TIMEOUT_S = 60.0
#: Proxies must neither buffer nor cache events.
STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventAnswer(EventSourceResponse):
    def __init__(
        self,
        events: AsyncGenerator[ServerSentEvent],
        *,
        headers: Mapping[str, str] | None = None,
        separator: str = "\n",
    ) -> None:
        super().__init__(
            events,
            ping=_HEARTBEAT_S,
            send_timeout=SEND_TIMEOUT_S,
            sep=separator,
            headers={**STREAM_HEADERS, **(headers or {})},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            await disconnect(scope, receive)
