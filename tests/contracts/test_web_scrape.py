"""WebScraperTool's own fetcher against a server on loopback: what is read, and where it refuses to go."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import ToolResult, WebScraperTool
from ensemble_ray.tools.builtin import web as web_scrape
from ensemble_ray.tools.web import net
from tests.contracts.web_server import Answer, WebServer, closed_port, serving


async def _scrape(url: str, **options: Any) -> ToolResult:
    return await WebScraperTool(**({"allow_private_hosts": True} | options)).aexecute(json.dumps({"url": url}))


def _page(text: str, **headers: str) -> Answer:
    return Answer(body=f"<p>{text}</p>".encode(), headers={"Content-Type": "text/html", **headers})


async def test_page_is_read_when_the_host_is_allowed(server: WebServer) -> None:
    """S-BIT-43: GET with a User-Agent of our own."""
    server.answers["/a"] = _page("hello")
    assert (await _scrape(f"{server.base}/a?x=1#part")).output == "hello"
    [asked] = server.asked
    assert (asked.method, asked.target) == ("GET", "/a?x=1")
    assert asked.headers["user-agent"].startswith("ensemble-ray")
    assert asked.headers["host"] == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("status", [404, 500, 304, 204 + 200])
async def test_failure_names_the_status_when_it_is_no_success(server: WebServer, status: int) -> None:
    """S-BIT-40."""
    server.answers["/a"] = Answer(status, b"" if status == 304 else b"no")
    result = await _scrape(f"{server.base}/a")
    assert result.error_message == f"Failed to fetch URL: HTTP {status} from {server.base}/a"


async def test_redirects_are_followed_when_allowed(server: WebServer) -> None:
    """S-BIT-43: relative and absolute ones, but not without end."""
    server.answers |= {
        "/a": Answer(302, headers={"Location": "/b/c"}),
        "/b/c": Answer(301, headers={"Location": "d?x=1#part"}),
        "/b/d": _page("arrived"),
        "/loop": Answer(307, headers={"Location": f"{server.base}/loop"}),
        "/bad": Answer(302, headers={"Location": "http://[oops"}),
        "/file": Answer(302, headers={"Location": "file:///etc/passwd"}),
    }
    assert (await _scrape(f"{server.base}/a")).output == "arrived"
    assert (await _scrape(f"{server.base}/loop")).error_message == "Failed to fetch URL: more than 10 redirects"
    for path in ("/bad", "/file"):
        assert str((await _scrape(server.base + path)).error_message).startswith("Failed to fetch URL: ")


async def test_reading_stops_when_the_page_is_larger_than_the_limit(server: WebServer) -> None:
    """S-BIT-43: 5,242,880 bytes are read, and their text is given."""
    server.answers["/a"] = Answer(body=b"x" * 5_242_880 + b"y" * 1000)
    result = await _scrape(f"{server.base}/a", max_content_length=10_000_000)
    assert result.output == "x" * 5_242_880


async def test_limit_counts_what_is_unpacked_when_a_server_compresses(server: WebServer) -> None:
    """S-BIT-43, S-BIT-45."""
    server.answers["/a"] = Answer(body=gzip.compress(b"x" * 8_000_000), headers={"Content-Encoding": "gzip"})
    result = await _scrape(f"{server.base}/a", max_content_length=10_000_000)
    assert result.output == "x" * 5_242_880
    assert server.asked[0].headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    ("kind", "head"),
    [("text/html; charset=ISO-8859-1", b""), ("text/html", b'<meta charset="iso-8859-1">')],
)
async def test_text_is_decoded_when_the_charset_is_named(server: WebServer, kind: str, head: bytes) -> None:
    """S-BIT-41: by the server, or by the page itself."""
    server.answers["/a"] = Answer(body=head + "<p>grün".encode("latin-1"), headers={"Content-Type": kind})
    assert (await _scrape(f"{server.base}/a")).output == "grün"


async def test_text_is_decoded_when_the_charset_is_nonsense(server: WebServer) -> None:
    """S-BIT-40: bad input is never a crash."""
    server.answers["/a"] = Answer(body="<p>grün".encode(), headers={"Content-Type": "text/html; charset=klingon"})
    assert (await _scrape(f"{server.base}/a")).output == "grün"


async def test_failure_is_told_when_nothing_answers() -> None:
    """S-BIT-40."""
    with closed_port() as port:
        result = await _scrape(f"http://127.0.0.1:{port}/")
    assert str(result.error_message).startswith("Failed to fetch URL: ")


async def test_limits_in_time_are_set_when_a_page_is_fetched(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-BIT-43: 10 s to connect, 15 s in all; a server that never answers is given up."""
    assert (net.CONNECT_TIMEOUT_S, web_scrape._TIMEOUT_S) == (10.0, 15.0)
    monkeypatch.setattr(web_scrape, "_TIMEOUT_S", 0.2)
    server.answers["/a"] = Answer(0)
    assert (await _scrape(f"{server.base}/a")).error_message == "Failed to fetch URL: timed out after 0.2 s"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1", "0", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254"],
)
async def test_host_is_refused_when_it_is_private(server: WebServer, host: str) -> None:
    """S-BIT-44: and nothing is sent there."""
    server.answers["/a"] = _page("secret")
    result = await _scrape(f"http://{host}:{server.port}/a", allow_private_hosts=False)
    assert str(result.error_message).startswith("Failed to fetch URL: host ")
    assert "is refused" in str(result.error_message)
    assert server.asked == []


def _allow_only(address: str) -> Callable[[str], str | None]:
    judge = net.refusal_of
    return lambda asked: None if asked == address else judge(asked)


@pytest.mark.parametrize("target", ["http://127.0.0.2:{port}/b", "http://169.254.169.254/latest/meta-data", "//[::1]/"])
async def test_redirect_is_refused_when_it_leads_to_a_private_host(
    server: WebServer, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """S-BIT-44: each hop is judged."""
    monkeypatch.setattr(net, "refusal_of", _allow_only("127.0.0.1"))
    server.answers["/a"] = Answer(302, headers={"Location": target.format(port=server.port)})
    result = await _scrape(f"{server.base}/a", allow_private_hosts=False)
    assert "is refused" in str(result.error_message)
    assert [asked.target for asked in server.asked] == ["/a"]


@dataclass
class _Names:
    """A resolver that a test controls; every other host is resolved as always."""

    answers: dict[str, list[list[str]]]
    asked: list[str] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = socket.getaddrinfo

        def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
            if host not in self.answers:
                return real(host, port, *args, **kwargs)
            self.asked.append(host)
            addresses = self.answers[host].pop(0)
            return [entry for address in addresses for entry in real(address, port, *args, **kwargs)]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


async def test_connection_goes_to_the_judged_address_when_the_name_changes(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-BIT-44: DNS rebinding gains nothing, since the name is asked for once."""
    names = _Names({"rebind.test": [["127.0.0.1"], ["127.0.0.2"], ["127.0.0.2"]]})
    names.install(monkeypatch)
    monkeypatch.setattr(net, "refusal_of", _allow_only("127.0.0.1"))
    server.answers["/a"] = _page("judged")
    result = await _scrape(f"http://rebind.test:{server.port}/a", allow_private_hosts=False)
    assert (result.output, names.asked) == ("judged", ["rebind.test"])
    assert server.asked[0].headers["host"] == f"rebind.test:{server.port}"


async def test_host_is_refused_when_one_of_its_addresses_is_private(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-BIT-44: a name that has both kinds is up to something."""
    _Names({"both.test": [["127.0.0.1", "10.0.0.1"]]}).install(monkeypatch)
    monkeypatch.setattr(net, "refusal_of", _allow_only("127.0.0.1"))
    result = await _scrape(f"http://both.test:{server.port}/a", allow_private_hosts=False)
    assert "10.0.0.1 is a private address" in str(result.error_message)
    assert server.asked == []


async def test_next_address_is_tried_when_the_first_does_not_accept(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-BIT-43: as any client does."""
    _Names({"two.test": [["::1", "127.0.0.1"]]}).install(monkeypatch)
    server.answers["/a"] = _page("second")
    assert (await _scrape(f"http://two.test:{server.port}/a")).output == "second"


@pytest.fixture
def named_certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate for `named.test`, and its key."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl makes the certificate")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(  # noqa: S603  our own arguments
        [
            *(program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=named.test"),
            *("-addext", "subjectAltName=DNS:named.test", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


async def test_certificate_is_verified_against_the_name_when_connected_by_address(
    named_certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-BIT-44: going to a judged address must not weaken TLS."""
    certificate, key = named_certificate
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr(net, "_tls", lambda: trusting)
    _Names({"named.test": [["127.0.0.1"]], "other.test": [["127.0.0.1"]]}).install(monkeypatch)
    async with serving(tls=served) as page:
        page.answers["/"] = _page("safe")
        assert (await _scrape(f"https://named.test:{page.port}/")).output == "safe"
        refused = await _scrape(f"https://other.test:{page.port}/")
    assert "certificate" in str(refused.error_message).lower()
