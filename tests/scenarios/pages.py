"""Pages of a dashboard, as tests play them: real WebSockets, everything that they are told, what they say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from ensemble_ray import WebDashboard
from tests.scenarios.teams import PATIENCE_S

Said = dict[str, Any]


class Page:
    """One connection. Keeps what it is told, in order; not its heartbeats, which come when their time has come."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self.heard: list[Said] = []
        self.hello: Said = self.next()

    def next(self) -> Said:
        """Return what comes next."""
        said: Said = json.loads(self._connection.recv(timeout=PATIENCE_S))
        if said["type"] != "heartbeat":
            self.heard.append(said)
        return said

    def until(self, kind: str, has: Callable[[Said], object] = lambda _: True) -> Said:
        """Return the next message of a type that has something."""
        while not ((said := self.next())["type"] == kind and has(said)):
            pass
        return said

    def until_end(self) -> list[Said]:
        """Return what comes until a run is over."""
        before = len(self.heard)
        self.until("ensemble_completed")
        return self.heard[before:]

    def log(self, kind: str, **data: object) -> None:
        """Say something."""
        self._connection.send(json.dumps({"type": kind, **data}))

    def send(self, data: str | bytes) -> None:
        """Send whatever it is."""
        self._connection.send(data)

    def decide(self, review_id: str, decision: str, text: str | None = None) -> None:
        """Decide at a gate."""
        self.log("review_decision", review_id=review_id, decision=decision, revised_output=text)

    def closed(self) -> tuple[int, str]:
        """Return with which code and reason the server ends it, behind all that it says before."""
        with pytest.raises(ConnectionClosed) as closed:
            self.until("")
        end = closed.value.rcvd
        assert end is not None
        return end.code, end.reason


def kinds(messages: list[Said]) -> list[str]:
    """Return the types of messages."""
    return [each["type"] for each in messages]


def stored(page: Page) -> list[Said]:
    """Return what a page was told of the past."""
    found: list[Said] = page.hello.get("snapshot_trace", [])
    return found


def url_of(dashboard: WebDashboard, scheme: str = "http") -> str:
    """Return where a dashboard is."""
    return f"{scheme}://localhost:{dashboard.actual_port}"


@contextmanager
def opened(dashboard: WebDashboard) -> Iterator[Page]:
    """Open a page of a dashboard."""
    with connect(f"{url_of(dashboard, 'ws')}/ws", origin=url_of(dashboard), max_size=None) as connection:  # type: ignore[arg-type]
        yield Page(connection)


class Background:
    """A call in a thread, and what came of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._result: list[Any] = []
        self._error: list[BaseException] = []

        def call() -> None:
            try:
                self._result.append(function())
            except Exception as error:  # noqa: BLE001  it is raised where it is asked for
                self._error.append(error)

        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()

    def result(self) -> Any:
        """Return what it gave, when it is there."""
        self._thread.join(PATIENCE_S)
        if self._error:
            raise self._error[0]
        return self._result[0]
