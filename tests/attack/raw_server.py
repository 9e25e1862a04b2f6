"""An endpoint that keeps no rules: it reads requests and writes whatever bytes an attack is made of. Loopback only."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self

__all__ = ["RawServer", "Write"]

#: Sends bytes to the client; raises `OSError` when it is gone.
Write = Callable[[bytes], None]
#: More is sent to nobody: a client that takes it all fails its test, and does not fill the machine.
_MOST_BYTES = 512 * 2**20


class RawServer:
    """Answers each request by a function that writes raw bytes, then closes the connection.

    Args:
        answer: Gets a way to write, and the number of the request from 0. It ends when the client is gone.
    """

    def __init__(self, answer: Callable[[Write, int], None]) -> None:
        self._answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        #: scheme, host and port
        self.origin = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        #: heads and bodies of the requests, as they came
        self.requests: list[bytes] = []
        #: what was handed to the network
        self.sent_bytes = 0
        #: set at the end
        self.stopped = threading.Event()

    @property
    def base_url(self) -> str:
        """What `OpenAIChatModel(base_url=...)` takes."""
        return f"{self.origin}/v1"

    def __enter__(self) -> Self:
        self._start(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join(timeout=10)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self._connections.append(connection)
                self._start(lambda connection=connection: self._serve(connection))

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            request = _read(connection)
            if request is None:
                return
            self.requests.append(request)

            def write(data: bytes) -> None:
                if self.sent_bytes > _MOST_BYTES or self.stopped.is_set():
                    raise OSError("enough")
                connection.sendall(data)
                self.sent_bytes += len(data)

            self._answer(write, len(self.requests) - 1)
            connection.shutdown(socket.SHUT_RDWR)


def _read(connection: socket.socket) -> bytes | None:
    """The head and the body of a request; None where the client leaves before its end."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(65536)
        if not piece:
            return None
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
    )
    while len(body) < length:
        piece = connection.recv(65536)
        if not piece:
            return None
        body += piece
    return head + b"\r\n\r\n" + body
