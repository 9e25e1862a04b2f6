"""A home with recorded runs, and studio over it, over real HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from ensemble_ray import InlineRuntime
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.server import StudioServer
from tests.ensemble_ray.record.unit_teams import TEAMS, World

Serve = Callable[..., httpx.Client]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Gives what serves a home, and a client of it that is a page of this machine."""
    with ExitStack() as stack:

        def begin(home: Path = tmp_path, **options: object) -> httpx.Client:
            server = StudioServer(StoreAddress.of(home), port=0, **options)  # type: ignore[arg-type]
            server.start()
            stack.callback(server.stop)
            client = httpx.Client(
                base_url=server.url, headers={"origin": server.url.rstrip("/")}, timeout=60, trust_env=False
            )
            return stack.enter_context(client)

        yield begin


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a completed run of each team."""
    home = tmp_path_factory.mktemp("runs")
    for name, team in TEAMS.items():
        team(World()).run(runtime=InlineRuntime(home=home), run_id=name.replace(" ", "-"))
    return home
