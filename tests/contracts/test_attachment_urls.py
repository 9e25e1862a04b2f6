"""Attachments from URLs, read from a server on loopback under the rules of the web tools."""

from __future__ import annotations

import pytest

from ensemble_ray import Image, ValidationError
from ensemble_ray.tools.web.attachments import read_attachment
from tests.contracts.web_server import Answer, WebServer

PNG = b"\x89PNG\r\n\x1a\n..."


async def test_url_is_read_when_private_hosts_are_allowed(server: WebServer) -> None:
    """S-ATT-6: after a redirect too; then it is known by its content."""
    server.answers |= {
        "/a.png": Answer(302, headers={"Location": "/b"}),
        "/b": Answer(body=PNG, headers={"Content-Type": "application/octet-stream"}),
    }
    read = await read_attachment(Image(f"{server.base}/a.png?key=1", allow_private_hosts=True))
    assert (read.data, read.media_type, read.name, read.source) == (PNG, "image/png", "a.png", "")
    assert await read_attachment(read) is read
    assert len(server.asked) == 2


async def test_private_address_is_refused(server: WebServer) -> None:
    """S-ATT-6, S-BIT-44: no request is sent, and the text shows no query."""
    with pytest.raises(ValidationError) as refused:
        await read_attachment(Image(f"{server.base}/a.png?key=1"))
    assert str(refused.value) == (
        f"Image '{server.base}/a.png' cannot be fetched: host '127.0.0.1' is refused: 127.0.0.1 is a loopback address. "
        "allow_private_hosts=True permits it"
    )
    assert server.asked == []


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Answer(404, b"no"), "cannot be fetched: its server answered HTTP 404"),
        (Answer(200, b""), "is empty"),
        (Answer(200, b"x" * 11), "is larger than 10 bytes, the limit"),
        (Answer(200, b"text", {"Content-Type": "text/html"}), "is of type text/plain, which is no image"),
    ],
)
async def test_error_names_why_a_url_cannot_be_used(
    server: WebServer, monkeypatch: pytest.MonkeyPatch, answer: Answer, text: str
) -> None:
    """S-ATT-6, S-ATT-2, S-ATT-3."""
    monkeypatch.setattr("ensemble_ray.tools.web.attachments.MOST_BYTES", 10)
    server.answers["/photo"] = answer
    with pytest.raises(ValidationError, match=text):
        await read_attachment(Image(f"{server.base}/photo", allow_private_hosts=True))
