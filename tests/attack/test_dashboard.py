"""Pages of other sites at a dashboard: what their browsers are made to send, and what files they ask for."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Iterator

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from ensemble_ray import WebDashboard
from tests.scenarios.pages import PATIENCE_S


@pytest.fixture(scope="module")
def dashboard() -> Iterator[WebDashboard]:
    """A dashboard on loopback."""
    with WebDashboard.on_port(0) as running:
        yield running


def first_word(dashboard: WebDashboard, headers: list[tuple[str, str]]) -> str | tuple[int, str]:
    """Return what a connection with these headers is told first, or how it is ended."""
    url = f"ws://127.0.0.1:{dashboard.actual_port}/ws"
    with connect(url, additional_headers=headers) as connection:
        try:
            return str(json.loads(connection.recv(timeout=PATIENCE_S))["type"])
        except ConnectionClosed as closed:
            return (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd is not None else (0, "")


@pytest.mark.parametrize(
    "origin", ["http://localhost", "http://LOCALHOST:1", "https://127.0.0.1:7329", "http://[::1]:80"]
)
def test_pages_of_this_machine_are_let_in(dashboard: WebDashboard, origin: str) -> None:
    """S-WEB-71: any port, any case."""
    assert first_word(dashboard, [("Origin", origin)]) == "hello"


@pytest.mark.parametrize(
    "origins",
    [
        [],
        [""],
        ["null"],
        ["http://localhost.evil.com"],
        ["http://evil.com?q=localhost"],
        ["http://localhost@evil.com"],
        ["http://evil.com"],
        ["http://[::1"],
        ["no url"],
    ],
)
def test_pages_of_other_sites_are_not(dashboard: WebDashboard, origins: list[str]) -> None:
    """S-WEB-71: closed with 1008, and they hear nothing."""
    refused = first_word(dashboard, [("Origin", each) for each in origins])
    assert refused == (1008, "Origin not allowed")


def asked(dashboard: WebDashboard, method: str = "GET", path: str = "/api/status", **headers: str) -> tuple[int, bytes]:
    """Return status and body of an answer; the path is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.actual_port, timeout=PATIENCE_S)
    try:
        connection.putrequest(method, path, skip_host="host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:7329", "localhost."])
def test_names_of_loopback(dashboard: WebDashboard, host: str) -> None:
    """S-WEB-73."""
    assert asked(dashboard, host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.com", "localhost.evil.com", "evil.com:7329", "127.0.0.1.evil.com", "", "::1"])
@pytest.mark.parametrize("path", ["/api/status", "/api/reviews", "/"])
def test_names_that_lead_here(dashboard: WebDashboard, host: str, path: str) -> None:
    """S-WEB-73: a name of somebody else's is no way in (DNS rebinding)."""
    status, body = asked(dashboard, path=path, host=host)
    assert (status, json.loads(body)["code"]) == (403, "HOST_NOT_SERVED")


def test_a_connection_for_another_name(dashboard: WebDashboard) -> None:
    """S-WEB-73: a WebSocket neither."""
    own = ("127.0.0.1", dashboard.actual_port)
    with (
        socket.create_connection(own, timeout=PATIENCE_S) as opened,
        pytest.raises(InvalidStatus) as refused,
        connect("ws://evil.com/ws", sock=opened, origin="http://localhost"),  # type: ignore[arg-type]
    ):
        pass
    assert refused.value.response.status_code == 403


@pytest.mark.parametrize("origin", ["", "null", "http://evil.com", "http://localhost.evil.com"])
@pytest.mark.parametrize(("method", "path"), [("POST", "/api/reviews"), ("POST", "/anything"), ("DELETE", "/api/runs")])
def test_requests_that_change_something(dashboard: WebDashboard, method: str, path: str, origin: str) -> None:
    """S-WEB-74: pages of this machine alone, whatever the route; that of others learns not even whether there is one."""
    status, body = asked(dashboard, method, path, origin=origin)
    assert (status, json.loads(body)["code"]) == (403, "ORIGIN_NOT_ALLOWED")


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../../../../etc/passwd",
        "/../dashboard.py",
        "/..%2f..%2fdashboard.py",
        "/%2e%2e/%2e%2e/pyproject.toml",
        "//etc/passwd",
        "/..\\..\\dashboard.py",
        "/index.html/../../app.py",
        "/.%00/",
        "/../x",
    ],
)
def test_files_outside_the_page(dashboard: WebDashboard, path: str) -> None:
    """S-WEB-75."""
    status, body = asked(dashboard, path=path)
    assert status == 404
    assert b"root:" not in body
    assert b"import" not in body


def test_a_dashboard_for_others(caplog: pytest.LogCaptureFixture) -> None:
    """S-WEB-70, S-WEB-72: beyond loopback it says so at WARN, and lets in its own pages and programs."""
    with caplog.at_level(logging.WARNING), WebDashboard(port=0, host="0.0.0.0") as dashboard:  # noqa: S104  it is the test
        assert first_word(dashboard, [("Origin", "http://evil.com")]) == (1008, "Origin not allowed")
        assert first_word(dashboard, [("Origin", f"http://127.0.0.1:{dashboard.actual_port}")]) == "hello"
        assert first_word(dashboard, []) == "hello"
        assert asked(dashboard, host="evil.com")[0] == 200
    assert "The dashboard listens on 0.0.0.0" in caplog.text


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "::1"])
def test_a_dashboard_for_this_machine(host: str, caplog: pytest.LogCaptureFixture) -> None:
    """S-WEB-70: nobody else reaches it, and nothing is to be warned of."""
    with caplog.at_level(logging.WARNING), WebDashboard(port=0, host=host) as dashboard:
        address = "::1" if ":" in host else "127.0.0.1"
        with socket.create_connection((address, dashboard.actual_port), timeout=PATIENCE_S) as opened:
            assert opened.getpeername()[0] == address
    assert caplog.text == ""
