"""A receiver of webhooks on loopback, which verifies each of them with the library `standardwebhooks`."""

from __future__ import annotations

import base64
import threading
from collections import deque
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from standardwebhooks import Webhook

from ensemble_ray.serve.driving.webhooks import WebhookRules, parse_secrets
from ensemble_ray.serve.schemas import NewWebhook

SECRET = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"
OTHER_SECRET = f"whsec_{base64.b64encode(bytes(range(32, 64))).decode()}"


def rules(secrets: str = SECRET, **teams: str | NewWebhook) -> WebhookRules:
    """Rules under which webhooks may reach loopback; with receivers of teams."""
    receivers = {name: NewWebhook(url=each) if isinstance(each, str) else each for name, each in teams.items()}
    return WebhookRules(secrets=parse_secrets(secrets), teams=receivers, hosts=frozenset({"127.0.0.1"}))


@dataclass(frozen=True)
class Received:
    """A webhook whose signature is right."""

    delivery_id: str
    timestamp: int
    body: bytes
    content: dict[str, Any]
    path: str


class Receiver:
    """Answers with the next of `statuses`, and then with 204.

    Args:
        secret: What signatures are made with.
    """

    def __init__(self, secret: str = SECRET, port: int = 0) -> None:
        self.statuses: deque[int] = deque()
        self.headers: dict[str, str] = {}
        self.received: list[Received] = []
        self.problems: list[str] = []
        #: while it is not set, requests from number `first_held` on, counted from 0, get no answer
        self.first_held = 0
        self.is_open = threading.Event()
        self.is_open.set()
        self._changed = threading.Condition()
        self._verifier = Webhook(secret)
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.port = self._server.server_address[1]
        self.origin = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)
        assert not self.problems, self.problems

    @property
    def types(self) -> list[str]:
        return [each.content["type"] for each in self.received]

    def wait(self, count: int, timeout_s: float = 120.0) -> list[Received]:
        """Wait for that many webhooks, repeated ones included. Blocks."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.received) >= count, timeout_s), self.received
        return list(self.received)

    def _receive(self, path: str, headers: dict[str, str], body: bytes) -> int:
        try:
            content = self._verifier.verify(body, headers)
        except Exception as error:  # noqa: BLE001  the test's thread reports it
            self.problems.append(f"{type(error).__name__}: {error}")
            content = {"type": "invalid"}
        with self._changed:
            self.received.append(
                Received(headers["webhook-id"], int(headers["webhook-timestamp"]), body, content, path)
            )
            self._changed.notify_all()
            return len(self.received) - 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                number = receiver._receive(
                    self.path, {name.lower(): value for name, value in self.headers.items()}, body
                )
                if number >= receiver.first_held:
                    receiver.is_open.wait(timeout=120)
                self.send_response(receiver.statuses.popleft() if receiver.statuses else 204)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Write no line for each request."""

        return Handler
