"""The adapters of `RunStore` that the contracts of records are checked over."""

from pathlib import Path

import pytest

from ensemble_ray.record.stores import StoreAddress
from tests.postgres_server import PostgresServer

#: Names of the adapters; each needs a branch in `address_of`.
STORES = ("sqlite", "postgres")


def address_of(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> StoreAddress:
    """An empty store of that kind, for one test; `request` gives fixtures that only some need."""
    if store == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        return StoreAddress(home=str(tmp_path), url=server.empty_database())
    assert store == "sqlite", store
    return StoreAddress(home=str(tmp_path))
