"""An endpoint in the process of the test that asks for keys."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from starlette.types import Receive, Scope, Send

from ensemble_ray import RateLimit
from ensemble_ray.access.admission import KeyPolicy, Right, new_key
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.access.quotas import Account, Standing, parse_quotas
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.callers import Caller, CallerCache, FindStanding
from ensemble_ray.serve.driving.driven_runs import DrivenRuns
from ensemble_ray.serve.driving.webhooks import WebhookRules
from tests.serve.driving import driven

__all__ = ["Guarded", "guarded", "make_key", "standing_callers", "transport_of"]


@dataclass(frozen=True)
class Guarded:
    """An endpoint and its keys."""

    api: FastAPI
    file: KeyFile
    client: AsyncClient

    def client_at(self, address: str, port: int = 8000) -> AsyncClient:
        """A client whose connection arrives at that address; it names the same host."""
        return AsyncClient(
            transport=ASGITransport(self.api, raise_app_exceptions=False), base_url=f"http://{address}:{port}"
        )


def make_key(
    file: KeyFile,
    name: str = "ann",
    *,
    rights: Collection[Right] = Right,
    teams: Collection[str] = "*",
    rate: RateLimit | None = None,
    quotas: Sequence[str] = (),
    roles: Collection[str] = (),
) -> dict[str, str]:
    """Make a key, and return the header that brings it."""
    text, key = new_key(
        name,
        rights=frozenset(rights),
        teams=teams,
        rate=rate,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        quotas=parse_quotas(quotas),
        roles=frozenset(roles),
    )
    file.add(key)
    return {"authorization": f"Bearer {text}"}


def transport_of(api: FastAPI, caller: Caller) -> ASGITransport:
    """A way to an interface whose requests all come from this caller, as behind `KeyCheck`."""

    async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
        await api({**scope, "state": {**scope.get("state", {}), "caller": caller}}, receive, send)

    return ASGITransport(admitted, raise_app_exceptions=False)  # type: ignore[arg-type]  # types of messages, by two names


def standing_callers(
    home: Path, teams: Any, policy: KeyPolicy = KeyPolicy.AUTO, **options: Any
) -> tuple[AbstractAsyncContextManager[DrivenRuns], CallerCache, KeyFile]:
    """Runs of teams, and their callers with the keys of a home, who are told what they have used, as in the driver's process."""
    file = KeyFile(home)
    standings: list[FindStanding] = []

    @asynccontextmanager
    async def entered() -> AsyncGenerator[DrivenRuns]:
        async with driven(teams, **options) as driver:
            standings.append(driver.standing)
            yield driver

    def find_standing(account: Account) -> Standing | None:
        return standings[-1](account)

    return entered(), CallerCache(file, policy, find_standing=find_standing), file


@asynccontextmanager
async def guarded(
    home: Path,
    teams: Any,
    policy: KeyPolicy = KeyPolicy.AUTO,
    *,
    webhooks: WebhookRules | None = None,
    **options: Any,
) -> AsyncGenerator[Guarded]:
    """An endpoint of teams whose keys are those of a home, and a client that comes by loopback."""
    made = {name: options.pop(name) for name in ("ledger", "limits") if name in options}
    runs, callers, file = standing_callers(home, teams, policy, webhooks=webhooks, **made)
    api = build_api(runs, callers=callers, **options)
    transport = ASGITransport(api, raise_app_exceptions=False)
    async with (
        api.router.lifespan_context(api),
        AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
    ):
        yield Guarded(api=api, file=file, client=client)
