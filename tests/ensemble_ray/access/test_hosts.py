"""Which hosts and pages are this machine's own, as headers say it."""

from __future__ import annotations

import pytest

from ensemble_ray.access.admission import host_name, is_local_origin, is_loopback


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost",
        "http://localhost:7329",
        "https://LocalHost:1",
        "HTTP://127.0.0.1:65535",
        "http://[::1]",
        "http://[::1]:7329",
    ],
)
def test_pages_of_this_machine(origin: str) -> None:
    """S-WEB-71: exactly the names of loopback, any port, any case."""
    assert is_local_origin([origin])


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "localhost",
        "//localhost",
        "file://localhost",
        "http://",
        "http://localhost.evil.com",
        "http://evil.com?q=localhost",
        "http://evil.com#localhost",
        "http://evil.com/localhost",
        "http://localhost@evil.com",
        "http://evil.com@localhost",
        "http://evil.com:80@localhost",
        "http://localhost:80:80",
        "http://localhost:x",
        "http://localhost:",
        "http://localhost/",
        "http://localhost.",
        "http://localhost\n",
        "http://localhost\\.evil.com",
        "http://127.0.0.2",
        "http://127.1",
        "http://2130706433",
        "http://[::ffff:127.0.0.1]",
        "http://[::1",
        "http://0.0.0.0",
        "http://loc\u0430lhost",
    ],
)
def test_pages_of_others(origin: str) -> None:
    """S-WEB-71: whatever only looks like it, and what cannot be read."""
    assert not is_local_origin([origin])


def test_a_request_says_once_where_it_comes_from() -> None:
    """S-WEB-71: none is none, and of two nobody knows which is true."""
    assert not is_local_origin([])
    assert not is_local_origin(["http://localhost", "http://evil.com"])
    assert not is_local_origin(["http://localhost", "http://localhost"])


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("127.0.0.9", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),  # noqa: S104  nothing listens
        ("::", False),
        ("localhost.evil.com", False),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_hosts_that_are_this_machine_alone(host: str, *, is_local: bool) -> None:
    """S-WEB-70, S-WEB-73."""
    assert is_loopback(host) is is_local


@pytest.mark.parametrize(
    ("header", "name"),
    [("localhost:7329", "localhost"), ("[::1]:80", "::1"), ("evil.com", "evil.com"), ("a:b", None), ("", None)],
)
def test_names_of_host_headers(header: str, name: str | None) -> None:
    """S-WEB-73."""
    assert host_name(header) == name
