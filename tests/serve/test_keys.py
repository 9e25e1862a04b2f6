"""Keys, origins and headers of an endpoint."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.responses import JSONResponse
from httpx import ASGITransport, AsyncClient

from ensemble_ray import RateLimit, ValidationError
from ensemble_ray.access.admission import ApiKey, Credentials, KeyPolicy
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.serve import middleware as key_check
from ensemble_ray.serve.app import EndpointOptions, EndpointPlace, app, check_keys
from ensemble_ray.serve.callers import Caller, CallerCache
from ensemble_ray.serve.middleware import KeyCheck, is_local
from ensemble_ray.serve.schemas import Refusal
from ensemble_ray.studio.http_server import HEADERS
from ensemble_ray.testing import ScriptedModel
from tests.serve.keys import guarded, make_key
from tests.serve.teams import pair

TEAM = pair(ScriptedModel(otherwise="fine"))


async def test_loopback_is_open_until_a_key_is_made(home: str) -> None:
    """S-SRV-152: and it stays shut when the key is revoked; a key that is sent in vain does no harm before."""
    async with guarded(Path(home), TEAM) as endpoint:
        client = endpoint.client
        assert (await client.get("/ensembles")).status_code == 200
        assert (await client.get("/ensembles", headers={"authorization": "Bearer none"})).status_code == 200
        headers = make_key(endpoint.file)
        assert (await client.get("/ensembles")).status_code == 401
        assert (await client.get("/ensembles", headers=headers)).status_code == 200
        endpoint.file.revoke("ann")
        assert (await client.get("/ensembles")).status_code == 401
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        {"host": "team.example"},
        {"x-forwarded-for": "10.0.0.9"},
        {"forwarded": "for=10.0.0.9"},
        {"via": "1.1 proxy"},
        {"x-real-ip": "10.0.0.9"},
    ],
    ids=str,
)
async def test_what_a_proxy_passes_on_needs_a_key(home: str, header: dict[str, str]) -> None:
    """S-SRV-152: although it comes by loopback; the answer says how to make the first key."""
    async with guarded(Path(home), TEAM, allowed_hosts=["team.example"]) as endpoint:
        answer = await endpoint.client.get("/ensembles", headers=header)
        assert answer.status_code == 401
        assert "ensemble-ray keys add" in answer.json()["message"]
        assert (await endpoint.client.get("/ensembles", headers=header | make_key(endpoint.file))).status_code == 200


async def test_other_addresses_need_a_key(home: str) -> None:
    """S-SRV-152: the address at which the connection arrived decides; no client can choose it."""
    async with guarded(Path(home), TEAM) as endpoint, endpoint.client_at("10.1.2.3") as client:
        assert (await client.get("/ensembles")).status_code == 401
        assert (await client.get("/ensembles", headers={"host": "localhost"})).status_code == 401
    async with guarded(Path(home), TEAM, KeyPolicy.NONE) as endpoint, endpoint.client_at("10.1.2.3") as client:
        assert (await client.get("/ensembles")).status_code == 200
    async with guarded(Path(home), TEAM, KeyPolicy.REQUIRED) as endpoint:
        assert (await endpoint.client.get("/ensembles")).status_code == 401


def test_a_request_of_this_machine_has_an_address_and_one_name_of_loopback() -> None:
    """S-SRV-152: what cannot be seen is none."""
    local = {"server": ("127.0.0.1", 80), "headers": [(b"host", b"localhost:80")]}
    assert is_local(local)
    assert is_local({"server": ("::1", 80), "headers": [(b"host", b"[::1]")]})
    for other in (
        {"server": None},
        {"server": ("/run/socket", None)},
        {"server": ("0.0.0.0", 80)},  # noqa: S104  no server of ours
        {"headers": []},
        {"headers": [(b"host", b"localhost"), (b"host", b"team.example")]},
        {"headers": [(b"host", b"localhost.team.example")]},
    ):
        assert not is_local(local | other)


async def test_a_rate_is_one_for_all_routes(home: str) -> None:
    """S-SRV-158: 429 says when to ask again; other keys are not concerned."""
    async with guarded(Path(home), TEAM) as endpoint:
        headers = make_key(endpoint.file, rate=RateLimit.of(2, 3600))
        for path in ("/ensembles", "/runs"):
            assert (await endpoint.client.get(path, headers=headers)).status_code == 200
        refused = await endpoint.client.get("/runs", headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (429, "RATE_LIMITED")
        assert refused.headers["retry-after"] == "1800"
        assert (await endpoint.client.get("/runs", headers=make_key(endpoint.file, "ben"))).status_code == 200


async def test_nobody_is_let_in_when_the_keys_cannot_be_read(home: str) -> None:
    """S-SRV-155: not by loopback either; and everybody again when they can."""
    async with guarded(Path(home), TEAM) as endpoint:
        headers = make_key(endpoint.file)
        content = endpoint.file.path.read_bytes()
        endpoint.file.path.write_bytes(b"{}")
        for sent in ({}, headers):
            answer = await endpoint.client.get("/ensembles", headers=sent)
            assert (answer.status_code, answer.json()["code"]) == (503, "NOT_READY")
            assert home not in answer.text
        endpoint.file.path.write_bytes(content)
        assert (await endpoint.client.get("/ensembles", headers=headers)).status_code == 200


async def test_who_comes_while_the_keys_cannot_be_read_is_refused_at_once(home: str) -> None:
    """S-SRV-163: not one after the other, each behind a database that is waited for; the next one looks anew."""

    class Counted(KeyFile):
        reads = 0

        def read(self) -> Sequence[ApiKey] | None:
            self.reads += 1
            return super().read()

    file = Counted(Path(home))
    make_key(file)
    content = file.path.read_bytes()
    file.path.write_bytes(b"{}")
    file.reads = 0
    callers = CallerCache(file)
    credentials = Credentials(digest=None, is_local=True)
    refused = await asyncio.gather(*(callers.admit(credentials) for _ in range(3)), return_exceptions=True)
    assert [(type(each), getattr(each, "code", "")) for each in refused] == [(Refusal, "NOT_READY")] * 3
    assert file.reads == 1
    file.path.write_bytes(content)
    with pytest.raises(Refusal, match="A key is needed"):
        await callers.admit(credentials)
    assert file.reads == 2


async def test_an_answer_that_goes_on_ends_when_its_key_is_revoked(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SRV-154: what is sent first after the look is not sent; it has no rate."""
    looks = itertools.count(step=20)
    monkeypatch.setattr(key_check, "time", SimpleNamespace(monotonic=lambda: next(looks)))  # others keep their clock
    file = KeyFile(Path(home))
    callers = CallerCache(file)
    headers = make_key(file, rate=RateLimit.of(1, 3600))
    sent: list[dict[str, Any]] = []
    ended: list[bool] = []

    async def events(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            for number in itertools.count():
                await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
                if number == 2:
                    file.revoke("ann")
                await asyncio.sleep(0)
        finally:
            ended.append(True)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/runs/first/events",
        "server": ("10.1.2.3", 80),
        "headers": [(b"authorization", headers["authorization"].encode())],
    }
    await KeyCheck(events, callers=callers)(scope, receive, send)
    assert [each.get("body") for each in sent] == [None, b"0", b"1", b"2", b""]
    assert not sent[-1]["more_body"]
    assert ended


async def test_a_part_of_the_interface_has_its_form_of_refusals(home: str) -> None:
    """S-SRV-156: the same status, challenge and time, in the words of another API."""

    def form(refusal: Refusal) -> JSONResponse:
        return JSONResponse({"oops": refusal.code}, refusal.status, dict(refusal.headers))

    async def served(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    callers = CallerCache(KeyFile(Path(home)), KeyPolicy.REQUIRED)
    check = KeyCheck(served, callers=callers, forms={"/v1/": form})
    async with AsyncClient(transport=ASGITransport(check), base_url="http://127.0.0.1") as client:
        other = await client.get("/v1/models")
        assert (other.status_code, other.json()) == (401, {"oops": "UNAUTHENTICATED"})
        assert other.headers["www-authenticate"].startswith("Bearer")
        assert (await client.get("/v1")).json()["code"] == "UNAUTHENTICATED"


async def test_a_web_socket_is_closed_and_its_key_unread(home: str) -> None:
    """S-SRV-159: none are served."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    class Nobody:
        async def admit(self, credentials: Credentials) -> Caller:
            raise AssertionError

    async def served(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    await KeyCheck(served, callers=Nobody())({"type": "websocket"}, served, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def _preflight(client: AsyncClient, origin: str) -> dict[str, str]:
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return dict((await client.options("/runs", headers=asked)).headers)


async def test_pages_of_other_origins_may_ask_nothing_unless_they_are_allowed(home: str) -> None:
    """S-SRV-160, S-SEC-83: those that are named, with a key."""
    mine = "https://team.example"
    async with guarded(Path(home), TEAM) as endpoint:
        assert "access-control-allow-origin" not in await _preflight(endpoint.client, mine)
        answer = await endpoint.client.get("/ensembles", headers={"origin": mine})
        assert "access-control-allow-origin" not in answer.headers
    async with guarded(Path(home), TEAM, KeyPolicy.REQUIRED, allowed_origins=[mine]) as endpoint:
        headers = await _preflight(endpoint.client, mine)
        assert headers["access-control-allow-origin"] == mine
        assert "access-control-allow-credentials" not in headers
        assert "access-control-allow-origin" not in await _preflight(endpoint.client, "https://evil.example")
        refused = await endpoint.client.get("/ensembles", headers={"origin": mine})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, mine)
        key = make_key(endpoint.file)
        assert (await endpoint.client.get("/ensembles", headers={"origin": mine, **key})).status_code == 200


def test_origins_need_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SRV-152, S-SRV-160: refused before a team is looked for; so is what Serve's HAProxy brings."""
    options = EndpointOptions.model_validate({"allowed_origins": "https://a.example, https://b.example"})
    assert options.allowed_origins == ("https://a.example", "https://b.example")
    assert options.key_policy() is KeyPolicy.REQUIRED
    with pytest.raises(ValidationError, match="allowed_origins needs keys"):
        app(options.model_copy(update={"keys": KeyPolicy.NONE}))
    assert EndpointOptions().key_policy() is KeyPolicy.AUTO
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert EndpointOptions().key_policy() is KeyPolicy.REQUIRED
    assert EndpointOptions(keys=KeyPolicy.NONE).key_policy() is KeyPolicy.NONE


async def test_every_answer_has_the_headers(home: str) -> None:
    """S-SRV-161: successes, refusals of every layer, and defects."""

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError

    async with guarded(Path(home), TEAM) as endpoint:
        endpoint.api.mount("/broken", broken)
        asked: list[tuple[str, dict[str, str], int]] = [
            ("/ensembles", {}, 200),
            ("/nowhere", {}, 404),
            ("/healthz", {"host": "evil.example"}, 421),
            ("/runs", {"via": "1.1 proxy"}, 401),
            ("/broken/it", {}, 500),
        ]
        for path, headers, status in asked:
            answer = await endpoint.client.get(path, headers=headers)
            assert answer.status_code == status
            assert HEADERS.items() <= dict(answer.headers).items(), path


def test_an_endpoint_that_nobody_could_ask_is_not_started(home: str) -> None:
    """S-SRV-157."""
    file = KeyFile(Path(home))
    loopback, everywhere = EndpointPlace(host="127.0.0.1", port=0), EndpointPlace(host="0.0.0.0", port=0)  # noqa: S104  that is the case
    check_keys(loopback, KeyPolicy.AUTO, file)
    check_keys(everywhere, KeyPolicy.NONE, file)
    for place, policy in ((everywhere, KeyPolicy.AUTO), (loopback, KeyPolicy.REQUIRED)):
        with pytest.raises(ValidationError, match="ensemble-ray keys add"):
            check_keys(place, policy, file)
    make_key(file)
    check_keys(everywhere, KeyPolicy.AUTO, file)
    file.revoke("ann")
    with pytest.raises(ValidationError, match="needs keys"):
        check_keys(everywhere, KeyPolicy.AUTO, file)
