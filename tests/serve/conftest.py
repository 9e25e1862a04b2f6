"""Fixtures of the HTTP edge: a home for records, and clients of an interface that runs in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient

from ensemble_ray import Ensemble, InlineRuntime
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.team import TEAM_VARIABLE

Connect = Callable[..., AbstractAsyncContextManager[AsyncClient]]


@pytest.fixture(autouse=True)
def records(home: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test's runs are recorded; no team is named by the environment."""
    monkeypatch.delenv(TEAM_VARIABLE, raising=False)
    return Path(home)


@pytest.fixture
def connect() -> Connect:
    """Opens a client of a team's interface, without a socket; runs are inline."""

    @asynccontextmanager
    async def client(ensemble: Ensemble, runtime: Any = None) -> AsyncGenerator[AsyncClient, None]:
        api = build_api(ensemble, runtime or InlineRuntime())
        transport = ASGITransport(api, raise_app_exceptions=False)
        async with api.router.lifespan_context(api), AsyncClient(transport=transport, base_url="http://team") as opened:
            yield opened

    return client
