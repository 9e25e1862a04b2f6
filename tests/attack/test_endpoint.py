"""Requests that cost memory, that stumble over themselves, or that come from a page of another site."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from httpx import ASGITransport, AsyncClient

from ensemble_ray.access.admission import host_name
from ensemble_ray.serve.api import build_api
from ensemble_ray.studio.http_server import DEFAULT_MAX_BODY_BYTES
from ensemble_ray.testing import ScriptedModel
from tests.processes import Program, free_ports, own_directory, own_environment, program
from tests.serve.driving import driven
from tests.serve.teams import INPUTS, pair

_SERVER = """
import sys, uvicorn
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.serve.api import build_api
from tests.serve.driving import driven
from tests.serve.teams import pair
uvicorn.run(build_api(driven(pair(ScriptedModel(otherwise="fine")))), host="127.0.0.1", port=int(sys.argv[1]))
"""
_MB = 1_000_000
_JSON = {"content-type": "application/json"}
_RUN = json.dumps({"inputs": INPUTS}).encode()


@dataclass(frozen=True)
class Server:
    """A server of the interface, alone in its process."""

    program: Program
    port: int

    def connect(self) -> http.client.HTTPConnection:
        """A connection on loopback."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)

    def status(self, method: str, path: str, body: bytes | None = None, **headers: str) -> int:
        """Status of an answer."""
        connection = self.connect()
        connection.request(
            method, path, body, {**_JSON, **{name.replace("_", "-"): value for name, value in headers.items()}}
        )
        status = connection.getresponse().status
        connection.close()
        return status

    def is_up(self) -> bool:
        """Whether it serves."""
        try:
            return self.status("GET", "/healthz") == 200
        except OSError:
            return False

    @property
    def peak_bytes(self) -> int:
        """The most memory that its process ever had."""
        text = Path(f"/proc/{self.program.process.pid}/status").read_text(encoding="utf-8")
        return int(text.partition("VmHWM:")[2].split()[0]) * 1024


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The interface behind the web server that Serve uses too, in a process of its own."""
    with own_directory() as directory:
        (port,) = free_ports(1)
        command = [sys.executable, "-c", _SERVER, str(port)]
        environment = own_environment(directory)
        with program(command, log=directory / "log", env=environment, cwd=directory, is_forked=False) as running:
            served = Server(running, port)
            running.until(served.is_up, "the server")
            yield served


def test_long_body_is_refused_by_its_header_alone(server: Server) -> None:
    """S-SEC-80: 413 before a byte of it was sent."""
    connection = server.connect()
    connection.putrequest("POST", "/runs")
    for name, value in {**_JSON, "content-length": str(100 * _MB)}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    failure = json.loads(answer.read())
    assert (answer.status, failure["error"]) == (413, "InvalidRequest")
    assert "max_body_bytes" in failure["message"]
    connection.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of another process is read from /proc")
@pytest.mark.parametrize("is_announced", [True, False])
def test_long_body_does_not_fill_the_servers_memory(server: Server, *, is_announced: bool) -> None:
    """S-SEC-80: 100 MB, announced or in chunks without a length, from a client that does not listen to refusals."""
    assert server.status("POST", "/runs?wait=60", _RUN) == 200  # what a first run loads does not count
    before = server.peak_bytes
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as opened:
        how = f"content-length: {100 * _MB}" if is_announced else "transfer-encoding: chunked"
        opened.sendall(
            f"POST /runs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{how}\r\n\r\n".encode()
        )
        part = b"[" * _MB
        with contextlib.suppress(OSError):  # the server has had enough
            for _ in range(100):
                opened.sendall(part if is_announced else b"%x\r\n%s\r\n" % (len(part), part))
    assert server.status("POST", "/runs?wait=60", _RUN) == 200
    assert server.peak_bytes - before < 30 * _MB


def test_names_of_other_hosts_are_refused(server: Server) -> None:
    """S-SEC-82: a page whose name was made to mean 127.0.0.1 neither runs the team nor reads anything."""
    own = [
        "localhost",
        f"localhost:{server.port}",
        "LocalHost.",
        f"127.0.0.1:{server.port}",
        "127.8.8.8",
        f"[::1]:{server.port}",
    ]
    assert {host: server.status("GET", "/healthz", host=host) for host in own} == dict.fromkeys(own, 200)
    foreign = [
        "evil.example",
        f"evil.example:{server.port}",
        "localhost.evil.example",
        "0.0.0.0",  # noqa: S104  a name in a request
        "192.0.2.1",
        "a@localhost",
    ]
    assert {host: server.status("POST", "/runs", _RUN, host=host) for host in foreign} == dict.fromkeys(foreign, 421)
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as opened:
        opened.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b" 421 " in opened.makefile("rb").readline()


@pytest.mark.parametrize(
    "declared",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain; x=application/json",
    ],
)
def test_requests_that_a_page_can_send_unasked_begin_no_run(server: Server, declared: str) -> None:
    """S-SEC-83, S-SRV-164: a browser sends these across sites without a preflight; the answer to a preflight allows nothing."""
    assert server.status("POST", "/runs", _RUN, content_type=declared, origin="https://evil.example") == 403
    assert server.status("POST", "/runs", _RUN, content_type=declared, origin="null") == 403
    assert server.status("POST", "/runs", _RUN, content_type=declared) == 422
    connection = server.connect()
    asks = {
        "origin": "https://evil.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    connection.request("OPTIONS", "/runs", headers=asks)
    answer = connection.getresponse()
    assert answer.status == 403
    assert not [name for name, _ in answer.getheaders() if name.lower().startswith("access-control")]
    connection.close()


def _in_inputs(value: bytes) -> bytes:
    return b'{"inputs": {"reader": "children", "topic": ' + value + b"}}"


_STUMBLES = {
    "deep lists": _in_inputs(b"[" * 300_000 + b"]" * 300_000),
    "deep mappings": _in_inputs(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "lists as deep as a reader goes": _in_inputs(b"[" * 900 + b"]" * 900),
    "open lists": b"[" * 1_000_000,
    "digits": _in_inputs(b"9" * 900_000),
    "no number": _in_inputs(b"NaN"),
    "endless": _in_inputs(b"1e999"),
    "a long id": b'{"inputs": {"topic": "a", "reader": "b"}, "run_id": "' + b"a" * 900_000 + b'"}',
    "no text": _in_inputs(b'"\xff"'),
    "many fields": b"{" + b",".join(b'"k%d":1' % number for number in range(60_000)) + b"}",
    "packed": b"\x1f\x8b\x08\x00" + b"\x00" * 100,
    "nothing": b"",
}


@pytest.fixture
async def client() -> AsyncGenerator[AsyncClient, None]:
    """A client of the interface in this process."""
    runs = driven(pair(ScriptedModel(otherwise="fine")))
    api = build_api(runs, allowed_hosts=["team.example", "*.team.example"])
    transport = ASGITransport(api, raise_app_exceptions=False)
    async with (
        api.router.lifespan_context(api),
        AsyncClient(transport=transport, base_url="http://localhost") as opened,
    ):
        yield opened


@pytest.mark.parametrize("name", list(_STUMBLES))
async def test_body_that_a_reader_stumbles_over_is_the_clients_mistake(client: AsyncClient, name: str) -> None:
    """S-SEC-81: 4xx with a failure of some kilobytes, and no run."""
    answer = await client.post("/runs", content=_STUMBLES[name], headers=_JSON)
    assert 400 <= answer.status_code < 500, answer.text[:1000]
    assert answer.json()["error"] == "InvalidRequest"
    assert len(answer.content) < 10_000


async def test_body_is_taken_up_to_the_limit_and_not_beyond(client: AsyncClient) -> None:
    """S-SRV-53, S-SEC-80: to the byte."""
    fits = _RUN + b" " * (DEFAULT_MAX_BODY_BYTES - len(_RUN))
    assert (await client.post("/runs", content=fits, headers=_JSON)).status_code == 202
    assert (await client.post("/runs", content=fits + b" ", headers=_JSON)).status_code == 413

    async def parts() -> AsyncGenerator[bytes, None]:
        for _ in range(4):
            yield fits[: len(fits) // 2]

    assert (await client.post("/runs", content=parts(), headers=_JSON)).status_code == 413


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("team.example", 200),
        ("eu.team.example:8000", 200),
        ("Team.Example.", 200),
        ("myteam.example", 421),
        ("example", 421),
    ],
)
async def test_hosts_that_the_operator_names_are_served(client: AsyncClient, host: str, status: int) -> None:
    """S-SEC-82: exactly, and names below one."""
    answer = await client.get("/healthz", headers={"host": host})
    assert answer.status_code == status
    assert status == 200 or "allowed_hosts=NAME" in answer.json()["message"]


async def test_half_a_character_of_a_model_does_not_lose_its_answer() -> None:
    """S-SEC-100: the run is paid for; the half is shown as U+FFFD."""
    api = build_api(driven(pair(ScriptedModel("one \ud800", "two \udfff"))))
    transport = ASGITransport(api, raise_app_exceptions=False)
    async with (
        api.router.lifespan_context(api),
        AsyncClient(transport=transport, base_url="http://localhost") as opened,
    ):
        answer = await opened.post("/runs?wait=60", content=_RUN, headers=_JSON)
    assert (answer.status_code, answer.json()["result"]["raw"]) == (200, "two \N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("a:80", "a"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
        ("A.", "a"),
        ("", None),
        ("[::1", None),
        ("[::1]80", None),
        ("[x]", None),
        ("a:b", None),
        ("::1", None),
        (":80", None),
    ],
)
def test_host_is_read_without_its_port(header: str, name: str | None) -> None:
    """S-SEC-82: also an address in brackets."""
    assert host_name(header) == name
