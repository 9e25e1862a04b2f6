"""A minimal HTTP/1.1 server for loopback tests. Room: testing; bytes come in, a handler's answer goes out.

It is made for one use: a protocol server that costs less than the client it measures. So it looks for the body's
length only, parses headers when somebody asks for them, and answers one request per connection at a time. It must
never listen on anything but loopback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import cached_property

__all__ = ["Connection", "Exchange", "HttpRequest", "serve_http"]

_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    408: "Request Timeout",
    409: "Conflict",
    422: "Unprocessable Entity",
    429: "Too Many Requests",
    500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    529: "Overloaded",
}


class HttpRequest:
    """One request; headers are parsed on first use."""

    def __init__(self, head: bytes, raw: bytes) -> None:
        self.head = head
        #: the body as it came
        self.raw = raw
        self.method, self.path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """Header names in lower case."""
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        pairs = (line.partition(":") for line in lines)
        return {name.strip().lower(): value.strip() for name, _, value in pairs}

    @property
    def is_last(self) -> bool:
        """Whether the client asked for the connection to be closed after the answer."""
        return b"\r\nconnection: close" in self.head.lower()


class Exchange:
    """The open answer to one request. Every method is silent once the client is gone."""

    __slots__ = ("_connection", "is_open", "request")

    def __init__(self, connection: Connection, request: HttpRequest) -> None:
        self._connection = connection
        self.request = request
        self.is_open = True

    def reply(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answer in one piece."""
        extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items()) if headers else ""
        head = (
            f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}\r\n"
            f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
        )
        self._write(head.encode() + body)
        self._finish()

    def start(self, *, content_type: str) -> None:
        """Begin an answer in pieces."""
        self._write(f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n".encode())

    def piece(self, data: bytes) -> None:
        """Send one piece."""
        self._write(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self) -> None:
        """The last piece has been sent."""
        self._write(b"0\r\n\r\n")
        self._finish()

    def drop(self) -> None:
        """Cut the connection without another byte."""
        if self.is_open:
            self.is_open = False
            self._connection.cut()

    def _write(self, data: bytes) -> None:
        if self.is_open:
            self._connection.write(data)

    def _finish(self) -> None:
        if self.is_open:
            self.is_open = False
            self._connection.finished()


class Connection(asyncio.Protocol):
    """One client connection: finds requests in the bytes, hands each to the handler."""

    def __init__(
        self,
        handle: Callable[[Exchange], None],
        lost: Callable[[Exchange], None],
        connections: set[Connection],
        opened: Callable[[], object],
    ) -> None:
        self._connections = connections
        self._opened = opened
        self._handle = handle
        self._lost = lost
        self._buffer = bytearray()
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there."""
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            self._connections.add(self)
            self._opened()

    def data_received(self, data: bytes) -> None:
        """Bytes came; they may be half a request or two."""
        self._buffer += data
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the protocol's signature
        """The client is gone, or was cut."""
        self._transport = None
        self._connections.discard(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None and exchange.is_open:
            exchange.is_open = False
            self._lost(exchange)

    def write(self, data: bytes) -> None:
        """Send bytes, unless the client is gone."""
        if self._transport is not None:
            self._transport.write(data)

    def cut(self) -> None:
        """Close at once, without sending what is buffered."""
        if self._transport is not None:
            self._transport.abort()

    def finished(self) -> None:
        """The answer is complete: take the next request of this connection, unless the client wanted it closed."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None and exchange.request.is_last and self._transport is not None:
            self._transport.close()
        elif self._buffer:
            self._next()

    def _next(self) -> None:
        if self._exchange is not None:
            return
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end])
        found = _body(self._buffer, head, end + 4)
        if found is None:
            return
        body, used = found
        del self._buffer[:used]
        self._exchange = Exchange(self, HttpRequest(head, body))
        self._handle(self._exchange)


def _body(buffer: bytearray, head: bytes, start: int) -> tuple[bytes, int] | None:
    """The body that begins at `start` and where it ends; None while it is not complete."""
    lowered = head.lower()
    at = lowered.find(b"\r\ncontent-length:")
    if at >= 0:
        stop = lowered.find(b"\r\n", at + 2)
        length = int(lowered[at + 17 : stop if stop >= 0 else None])
        return (bytes(buffer[start : start + length]), start + length) if len(buffer) >= start + length else None
    if b"\r\ntransfer-encoding: chunked" not in lowered:
        return b"", start
    parts: list[bytes] = []
    while True:
        line_end = buffer.find(b"\r\n", start)
        if line_end < 0:
            return None
        size = int(bytes(buffer[start:line_end]).split(b";")[0], 16)
        start = line_end + 2
        if len(buffer) < start + size + 2:
            return None
        parts.append(bytes(buffer[start : start + size]))
        start += size + 2
        if size == 0:
            return b"".join(parts), start


async def serve_http(
    handle: Callable[[Exchange], None],
    lost: Callable[[Exchange], None],
    *,
    connections: set[Connection],
    opened: Callable[[], object] = lambda: None,
    port: int = 0,
) -> asyncio.Server:
    """Listen on 127.0.0.1.

    Args:
        handle: Called with each request; it answers now or later through the exchange.
        lost: Called when a client goes away before its answer was complete.
        connections: Holds the open connections, so that whoever stops the server can cut them.
        opened: Called when a client has connected.
        port: Where to listen; 0 finds a free port.
    """
    loop = asyncio.get_running_loop()
    # Fan-outs open a thousand connections at once; the default backlog of 100 would make clients retry for a second.
    return await loop.create_server(
        lambda: Connection(handle, lost, connections, opened), "127.0.0.1", port, backlog=4096
    )
