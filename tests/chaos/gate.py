"""Keeps a run from ending before somebody is killed in it, however late the harness is with that.

In: each request as it comes. Out: answers that are held, and when all was read that a dead process sent. Never: a word to a run that is far from its end, whose pace
decides what a kill falls on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator
from http.client import HTTPConnection
from urllib.parse import urlsplit

from ensemble_ray.testing import ModelServer, ServedRequest

__all__ = ["Gate", "all_read"]

#: How long the server may take to answer, s.
_PATIENCE_S = 60.0


class Gate:
    """Open, until it is told how far a run may come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: set[str] = set()
        self._most: int | None = None
        self._server: ModelServer | None = None

    def note(self, request: ServedRequest) -> None:
        """A request has come; called before it is answered."""
        with self._lock:
            self._keys.add(request.key)
            self._hold()

    @contextlib.contextmanager
    def closed(self, server: ModelServer, most: int) -> Generator[None, None, None]:
        """Meanwhile nothing is answered any more once so many different requests have come, repetitions left out."""
        with self._lock:
            self._server, self._most = server, most
            self._hold()
        try:
            yield
        finally:
            with self._lock:
                self._most = None
                server.resume()

    def _hold(self) -> None:
        if self._server is not None and self._most is not None and len(self._keys) >= self._most:
            self._server.pause()


def all_read(server: ModelServer) -> float:
    """When the server had read all that was sent before: it takes what comes in turn, and has answered us."""
    with contextlib.closing(HTTPConnection(urlsplit(server.base_url).netloc, timeout=_PATIENCE_S)) as connection:
        connection.request("GET", "/stats")
        connection.getresponse().read()
    return time.time()
