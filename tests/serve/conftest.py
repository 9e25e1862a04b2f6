"""Fixtures of the HTTP edge: a home for records, and clients of an interface that runs in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient

from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.catalog import ENSEMBLES_VARIABLE
from tests.serve.driving import driven

Connect = Callable[..., AbstractAsyncContextManager[AsyncClient]]


@pytest.fixture(autouse=True)
def records(home: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test's runs are recorded; no team is named by the environment."""
    monkeypatch.delenv(ENSEMBLES_VARIABLE, raising=False)
    # No server here speaks TLS, and each client would read the certificates of all authorities, which takes 25 ms.
    monkeypatch.setenv("SSL_CERT_DIR", home)
    return Path(home)


@pytest.fixture
def connect() -> Connect:
    """Opens a client of the interface of one team or several, without a socket."""

    @asynccontextmanager
    async def client(teams: Any, runtime: Any = None, **options: Any) -> AsyncGenerator[AsyncClient, None]:
        api = build_api(driven(teams, runtime, **options))
        transport = ASGITransport(api, raise_app_exceptions=False)
        async with api.router.lifespan_context(api), AsyncClient(transport=transport, base_url="http://team") as opened:
            yield opened

    return client
