"""Keys of an endpoint in a real database: those of a file in its place."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from httpx import ASGITransport, AsyncClient
from msgspec.structs import replace

from ensemble_ray import EnsembleError, ValidationError
from ensemble_ray.access.admission import ApiKey, KeyPolicy, Right, new_key
from ensemble_ray.access.key_store import KeyFile, open_keys
from ensemble_ray.access.quotas import parse_quotas
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.callers import CallerCache
from ensemble_ray.testing import ScriptedModel
from tests.command_line import calling
from tests.postgres_server import PostgresServer
from tests.serve.driving import driven
from tests.serve.keys import make_key
from tests.serve.teams import pair

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def url(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty database that the environment names."""
    found = postgres.empty_database()
    monkeypatch.setenv("ENSEMBLE_RAY_STORE", found)
    return found


def made(name: str) -> ApiKey:
    """A key that may read."""
    return new_key(name, rights=frozenset({Right.READ}), teams=["letters"], rate=None, created_at=NOW)[1]


def test_keys_are_read_as_they_were_written(url: str, home: str) -> None:
    """S-SRV-163, S-QUO-2, S-QUO-3: by any process that has the database; no file is made."""
    keys, others = open_keys(), open_keys(StoreAddress(home="/elsewhere", url=url))
    assert keys.read() is keys.stamp() is None
    keys.add(made("ann"))
    before = others.stamp()
    keys.add(made("ben"))
    assert [each.name for each in others.read() or ()] == ["ann", "ben"]
    assert before != others.stamp()
    with pytest.raises(ValidationError, match="There is a key 'ann' already"):
        others.add(made("ann"))
    limited = others.change(
        "ann", lambda key: replace(key, quotas=parse_quotas(["runs=3/day"]), roles=frozenset({"lead"}))
    )
    assert (keys.read() or ())[0] == limited
    with pytest.raises(ValidationError, match="no key 'never'"):
        keys.change("never", lambda key: key)
    assert others.revoke("ann").name == "ann"
    with pytest.raises(ValidationError, match=r"no key 'ann' in postgresql://.*Known: \[ben\]"):
        others.revoke("ann")
    others.revoke("ben")
    assert keys.read() == []
    assert keys.stamp() is not None
    assert not (Path(home) / "endpoint").exists()


def test_an_endpoint_asks_for_the_keys_of_its_database(url: str, postgres: PostgresServer) -> None:
    """S-SRV-163, S-SRV-154, S-SRV-155: from the next request on; when they cannot be read nobody is let in."""
    import asyncio

    async def ask() -> list[int]:
        api = build_api(driven(pair(ScriptedModel())), callers=CallerCache(open_keys(), KeyPolicy.AUTO))
        transport = ASGITransport(api, raise_app_exceptions=False)
        codes: list[int] = []
        async with (
            api.router.lifespan_context(api),
            AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        ):
            codes.append((await client.get("/ensembles")).status_code)
            key = make_key(open_keys())
            codes.append((await client.get("/ensembles")).status_code)
            codes.append((await client.get("/ensembles", headers=key)).status_code)
            postgres.end_backends(url)
            codes.append((await client.get("/ensembles", headers=key)).status_code)
            open_keys().revoke("ann")
            codes.append((await client.get("/ensembles", headers=key)).status_code)
            with postgres.connection(url) as connection:
                connection.execute("UPDATE ensemble_ray_endpoint.keys SET version = 9, content = '{}'")
            codes.append((await client.get("/ensembles", headers=key)).status_code)
        return codes

    assert asyncio.run(ask()) == [200, 401, 200, 200, 401, 503]


def test_keys_of_a_file_open_nothing_when_a_database_took_its_place(url: str, home: str) -> None:
    """S-SRV-163: neither do they hold, nor is the endpoint open as one that never had keys."""
    file = KeyFile(Path(home))
    file.add(made("ann"))
    keys = open_keys()
    for look in (keys.read, keys.stamp):
        with pytest.raises(EnsembleError, match=r"There is no key in postgresql://.* keys add NAME"):
            look()
    keys.add(made("ben"))
    assert [each.name for each in keys.read() or ()] == ["ben"]


def test_a_newer_version_is_left_alone(url: str, postgres: PostgresServer) -> None:
    """S-SRV-163."""
    open_keys().add(made("ann"))
    with postgres.connection(url) as connection:
        connection.execute("UPDATE ensemble_ray_endpoint.version SET version = 2")
    with pytest.raises(EnsembleError, match="have version 2, but this ensemble-ray supports version 1"):
        open_keys().read()


@pytest.mark.usefixtures("url")
def test_the_command_works_on_the_database(capsys: pytest.CaptureFixture[str], home: str) -> None:
    """S-SRV-163, S-SRV-150: and shows no password of it."""
    call = calling(capsys)
    shown = call("keys", "add", "ann", "--teams", "*")
    assert shown.code == 0
    assert "Its digest is stored in postgresql://" in shown.said
    assert "secret" not in shown.said
    assert call("keys", "ls").printed.startswith("ann ")
    assert call("keys", "revoke", "ann").code == 0
    assert not (Path(home) / "endpoint").exists()
