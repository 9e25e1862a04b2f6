"""Servers whose certificates cannot be trusted, and servers without TLS: every client says what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import ssl
import urllib.error
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ensemble_ray import ChatMessage, OpenAIChatModel, ToolConfigurationError
from ensemble_ray.errors.bodies import tls_flaw
from ensemble_ray.execute.review.notifiers import SlackNotifier
from ensemble_ray.llm.failures import fault_of
from ensemble_ray.tools.a2a.client import (
    AgentAddress,
    ConnectionFailures,
    RemoteAgentError,
    connect,
    open_http_client,
)
from ensemble_ray.tools.mcp.address import ServerAddress
from ensemble_ray.tools.mcp.session import ask_server
from ensemble_ray.tools.web import net
from ensemble_ray.values.reviews import ReviewRequest, ReviewTiming

HELLO = [ChatMessage("user", "hello")]
#: Both ways to the endpoint: the lean client, and the package's own.
WAYS = [None, {"max_retries": 0}]
FLAWS = {
    "self-signed": "its certificate is self-signed. To trust it, set SSL_CERT_FILE to a PEM file",
    "unknown": "its certificate is of an authority that this machine does not know. To trust it, set SSL_CERT_FILE",
    "expired": "its certificate has expired",
    "other host": "its certificate is for another host",
}


def _signed(
    key: ec.EllipticCurvePrivateKey, *, by: ec.EllipticCurvePrivateKey, issuer: str, days: int, host: str
) -> x509.Certificate:
    name, issuer_name = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in ("x", issuer))
    now = datetime.now(UTC)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(issuer_name).public_key(key.public_key())
    made = made.serial_number(7).not_valid_before(now - timedelta(days=9)).not_valid_after(now + timedelta(days=days))
    return made.add_extension(alternative, critical=False).sign(by, hashes.SHA256())


def _context(directory: Path, flaw: str) -> tuple[ssl.SSLContext, Path]:
    """A server's TLS with such a certificate, and the certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    is_unknown = flaw == "unknown"
    certificate = _signed(
        key,
        by=ec.generate_private_key(ec.SECP256R1()) if is_unknown else key,
        issuer="nobody" if is_unknown else "x",
        days=-1 if flaw == "expired" else 9,
        host="127.0.0.2" if flaw == "other host" else "127.0.0.1",
    )
    files = directory / "certificate.pem", directory / "key.pem"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files[1].write_bytes(key.private_bytes(*form))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    return context, files[0]


@dataclass
class Port:
    """A port of loopback, and how often somebody connected to it."""

    number: int = 0
    tries: int = 0


@asynccontextmanager
async def listening(context: ssl.SSLContext | None) -> AsyncIterator[Port]:
    """A server that shakes hands, or one without TLS that answers in plain HTTP, for the block."""
    port = Port()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port.tries += 1
        with contextlib.suppress(OSError):
            if context is not None:
                await writer.start_tls(context)
            await reader.read(10)
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port.number = server.sockets[0].getsockname()[1]
        yield port


@pytest.fixture
async def untrusted(tmp_path: Path) -> AsyncIterator[Port]:
    """A server with a self-signed certificate."""
    async with listening(_context(tmp_path, "self-signed")[0]) as port:
        yield port


@pytest.mark.parametrize("flaw", FLAWS)
async def test_the_flaw_of_a_certificate_is_told(flaw: str, tmp_path: Path) -> None:
    """S-LLM-30: what is wrong with it, and what to do."""
    context, certificate = _context(tmp_path, flaw)
    is_trusted = flaw in {"expired", "other host"}
    trusting = ssl.create_default_context(cafile=str(certificate) if is_trusted else None)
    async with listening(context) as port:
        with pytest.raises(ssl.SSLError) as caught:
            await asyncio.open_connection("127.0.0.1", port.number, ssl=trusting)
    outer = ConnectionError("cannot connect")
    outer.__cause__ = caught.value
    for error in (caught.value, outer, urllib.error.URLError(caught.value), ExceptionGroup("several", [outer])):
        assert tls_flaw(error).startswith(FLAWS[flaw])
        assert fault_of(error) is None


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset"), ssl.SSLEOFError(8, "EOF occurred"), TimeoutError(), None]
)
def test_a_broken_connection_is_no_flaw(error: BaseException | None) -> None:
    """S-LLM-30, S-DUR-61: another attempt may find the server well."""
    assert tls_flaw(error) == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=["lean", "client"])
async def test_a_model_is_asked_once_when_its_certificate_is_not_trusted(
    untrusted: Port, way: dict[str, object] | None, *, stream: bool
) -> None:
    """S-LLM-30: the error names the endpoint, the flaw and `SSL_CERT_FILE`."""
    base_url = f"https://127.0.0.1:{untrusted.number}/v1"
    options = None if way is None else {**way, "max_retries": 3}
    model = OpenAIChatModel("m", base_url=base_url, api_key="k", max_retries=3, client_options=options)
    with pytest.raises(openai.APIConnectionError) as caught:
        await (anext(aiter(model.stream(HELLO))) if stream else model.chat(HELLO))
    assert str(caught.value).startswith(f"Cannot reach endpoint {base_url}: {FLAWS['self-signed']}")
    assert fault_of(caught.value) is None
    assert untrusted.tries == 1


@pytest.mark.parametrize("way", WAYS, ids=["lean", "client"])
async def test_a_port_without_tls_is_told(way: dict[str, object] | None) -> None:
    """S-LLM-30: https in the URL of a server that speaks plain HTTP."""
    async with listening(None) as port:
        base_url = f"https://127.0.0.1:{port.number}/v1"
        model = OpenAIChatModel("m", base_url=base_url, api_key="k", max_retries=3, client_options=way)
        with pytest.raises(openai.APIConnectionError, match="does not speak TLS at this port") as caught:
            await model.chat(HELLO)
        assert port.tries == 1
    assert fault_of(caught.value) is None


async def test_web_tools_tell_the_flaw(untrusted: Port) -> None:
    """S-LLM-31: to the model that asked."""
    url = f"https://127.0.0.1:{untrusted.number}/"
    with pytest.raises(net.RequestFailedError, match=FLAWS["self-signed"]):
        await net.fetch(url, headers={}, max_bytes=9, timeout_s=60, allow_private_hosts=True)


async def test_an_mcp_server_with_a_flaw_cannot_be_reached(untrusted: Port) -> None:
    """S-LLM-31: its error names the server."""
    url = f"https://127.0.0.1:{untrusted.number}/mcp"
    address = ServerAddress.of(url, env={}, headers={}, cwd=None, connect_timeout_s=60, max_samples=0)

    async def work(client: object) -> None:
        """Do nothing with it."""

    with pytest.raises(ToolConfigurationError, match=f"cannot be reached: {FLAWS['self-signed']}"):
        await ask_server(address, work, may_repeat=True)


async def test_a_remote_agent_with_a_flaw_is_asked_once(untrusted: Port) -> None:
    """S-LLM-31: it is not lost, and waiting does not help."""
    address = AgentAddress.of(f"https://127.0.0.1:{untrusted.number}")
    async with open_http_client(address, 60) as http:
        with pytest.raises(RemoteAgentError, match=FLAWS["self-signed"]):
            await connect(address, http, ConnectionFailures(asyncio.get_running_loop().time() + 60))
    assert untrusted.tries == 1


async def test_a_webhook_with_a_flaw_is_logged(untrusted: Port, caplog: pytest.LogCaptureFixture) -> None:
    """S-LLM-31, S-REV-71: without its URL."""
    request = ReviewRequest(task_description="Draft", timing=ReviewTiming.AFTER_EXECUTION)
    with caplog.at_level(logging.WARNING):
        await SlackNotifier(f"https://127.0.0.1:{untrusted.number}/secret")(request)
    assert FLAWS["self-signed"] in caplog.text
    assert "/secret" not in caplog.text
