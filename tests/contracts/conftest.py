"""Fixtures that several contracts use: both APIs of models, a web server, an empty PostgreSQL database and its store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest

from ensemble_ray import OpenAIChatModel, OpenAIResponsesModel
from ensemble_ray.record.postgres.store import PostgresStore
from tests.contracts.postgres_records import PATIENCE_S
from tests.contracts.web_server import WebServer, serving
from tests.postgres_server import PostgresServer


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    """A server on loopback."""
    async with serving() as found:
        yield found


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """An empty database."""
    return postgres.empty_database()


@pytest.fixture
def store(url: str) -> PostgresStore:
    """Its store."""
    return PostgresStore(url, patience_s=PATIENCE_S)


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def api(request: pytest.FixtureRequest) -> type[OpenAIChatModel]:
    """The models of both APIs, whose behaviour is the same unless a test says otherwise."""
    return cast("type[OpenAIChatModel]", request.param)
