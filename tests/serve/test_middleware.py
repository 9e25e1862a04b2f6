"""Settings of what requests have to pass, and what the shipped files say of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError as PydanticError
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from ensemble_ray import ValidationError
from ensemble_ray.serve.app import EndpointOptions
from ensemble_ray.serve.middleware import BODY_VARIABLE, OriginCheck, body_limit, for_proxy
from ensemble_ray.studio.http_server import DEFAULT_MAX_BODY_BYTES, BodyLimit

ROOT = Path(__file__).resolve().parents[2]


def test_limit_is_the_arguments_then_the_environments_then_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-80."""
    monkeypatch.delenv(BODY_VARIABLE, raising=False)
    assert body_limit() == DEFAULT_MAX_BODY_BYTES
    monkeypatch.setenv(BODY_VARIABLE, "5000")
    assert (body_limit(), body_limit(70)) == (5000, 70)
    (middleware,) = for_proxy()
    assert middleware.cls is BodyLimit
    assert middleware.kwargs["max_bytes"] == 5000


@pytest.mark.parametrize("said", ["0", "-1", "1MB", "1e6"])
def test_limit_is_refused_when_it_is_no_number(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """S-SEC-80: a limit that is not understood is not left out."""
    monkeypatch.setenv(BODY_VARIABLE, said)
    with pytest.raises(ValidationError, match=BODY_VARIABLE):
        body_limit()


def test_options_are_read_as_the_command_line_and_files_give_them() -> None:
    """S-SEC-80, S-SEC-82: texts with commas, or lists."""
    typed = EndpointOptions.model_validate({"max_body_bytes": "500", "allowed_hosts": "a.example, b.example"})
    assert (typed.max_body_bytes, typed.allowed_hosts) == (500, ("a.example", "b.example"))
    assert EndpointOptions(allowed_hosts=("*.example",)).allowed_hosts == ("*.example",)
    for wrong in ("0", "many"):
        with pytest.raises(PydanticError):
            EndpointOptions.model_validate({"max_body_bytes": wrong})


def test_clusters_of_ours_hold_the_limit_in_serves_proxy() -> None:
    """S-SEC-80: the name in the shipped file is that of the function."""
    named = f"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH={for_proxy.__module__}:{for_proxy.__name__}"
    for file, count in (("cluster.yaml", 2), ("deploy/cluster-aws.yaml", 2), ("deploy/Dockerfile", 1)):
        assert (ROOT / file).read_text(encoding="utf-8").count(named) == count
    assert named in (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


OTHERS = (
    "https://evil.example",
    "null",
    "",
    "http://localhost.evil.example",
    "http://team.example:81",
    "https://team.example.evil",
)


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer whatever passes the check."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        return
    await PlainTextResponse("passed")(scope, receive, send)


@pytest.mark.parametrize("origin", OTHERS)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_pages_of_other_sites_may_ask_nothing_without_a_key(origin: str, method: str) -> None:
    """S-SRV-164: whatever the proxy headers say, which a page can send."""
    client = TestClient(OriginCheck(answer, allowed_origins=["https://team.example"]), base_url="http://team.example")
    headers = {
        "origin": origin,
        "x-forwarded-for": "127.0.0.1",
        "x-forwarded-host": "localhost",
        "forwarded": "host=localhost",
    }
    refused = client.request(method, "/a2a/team", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "ORIGIN_NOT_ALLOWED")
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("ws://team.example/ws", headers=headers):
        pass


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:3000"},
        {"origin": "http://127.0.0.1"},
        {"origin": "https://team.example"},
        {"origin": "http://TEAM.example"},
        {"origin": "https://evil.example", "authorization": "Bearer erk_x"},
    ],
)
def test_programs_own_pages_and_keys_pass(headers: dict[str, str]) -> None:
    """S-SRV-164: a browser sends no key by itself; whether the key is known is checked behind this."""
    client = TestClient(OriginCheck(answer, allowed_origins=["https://team.example"]), base_url="http://team.example")
    assert client.post("/runs/one/cancel", headers=headers).text == "passed"
    with client.websocket_connect("ws://team.example/ws", headers=headers):
        pass
