"""A small web server on loopback for the contracts of the web tools: answers by path, remembers what it was asked."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from aiohttp import web


@dataclass
class Request:
    """What the server was asked."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Answer:
    """What it says; status 0: nothing, ever."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class WebServer:
    """Answers by path; remembers what it was asked."""

    base: str = ""
    port: int = 0
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[Request] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, which carries one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except asyncio.IncompleteReadError:
            writer.close()
            return
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.asked.append(Request(method, target, headers, body))
        answer = self.answers.get(urlsplit(target).path, Answer(404, b"nothing here"))
        if answer.status:
            length = {} if "Transfer-Encoding" in answer.headers else {"Content-Length": str(len(answer.body))}
            lines = {**length, "Connection": "close", **answer.headers}
            writer.write(f"HTTP/1.1 {answer.status} X\r\n".encode())
            writer.write("".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode() + b"\r\n")
            writer.write(answer.body)
        else:
            await reader.read()  # never answers; ends when the other side gives up
        writer.close()


@asynccontextmanager
async def handling(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], *, opened: Callable[[], object] = lambda: None
) -> AsyncIterator[str]:
    """A model endpoint's base URL for the block, answered by that handler; `opened` is called with each connection."""
    http = web.Server(handler, handler_cancellation=True)

    def accept() -> asyncio.Protocol:
        opened()
        return http()

    listening = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    finally:
        listening.close()
        for connection in http.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)


@asynccontextmanager
async def serving(*, tls: ssl.SSLContext | None = None) -> AsyncIterator[WebServer]:
    """A server on loopback for the block."""
    found = WebServer()
    listening = await asyncio.start_server(found.handle, "127.0.0.1", 0, ssl=tls)
    found.port = listening.sockets[0].getsockname()[1]
    found.base = f"http://127.0.0.1:{found.port}"
    try:
        yield found
    finally:
        listening.close()


@contextmanager
def closed_port() -> Iterator[int]:
    """A port of loopback on which nobody listens during the block."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
