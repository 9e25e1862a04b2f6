"""The interface of an endpoint behind a real HTTP server, in a thread of the test's process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import uvicorn

from ensemble_ray.serve.api import build_api
from tests.serve.driving import driven


class _Server(uvicorn.Server):
    """Says when it answers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@contextmanager
def served(service: Any, **options: Any) -> Iterator[str]:
    """Serve runs; gives the address of the OpenAI API."""
    with served_app(build_api(service, **options)) as url:
        yield f"{url}/v1"


@contextmanager
def served_app(app: Any, ws: Literal["none", "websockets-sansio"] = "none") -> Iterator[str]:
    """Serve an application; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = _Server(uvicorn.Config(app, log_level="error", ws=ws, timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            assert server.ready.wait(timeout=60)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=60)
            assert not thread.is_alive(), "the server does not end"


@contextmanager
def served_teams(teams: Any, limits: Any = None, **options: Any) -> Iterator[str]:
    """Serve teams that run inline; gives the address of the OpenAI API."""
    with served(driven(teams, limits=limits), **options) as url:
        yield url
