"""What drives the runs of an endpoint, in the process of the test."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from ensemble_ray import ChatModel, InlineRuntime
from ensemble_ray.ports import Clock
from ensemble_ray.serve.catalog import DatasetCatalog, ServedTeam, ToolCatalog, served_team
from ensemble_ray.serve.driving.driven_runs import DrivenRuns
from ensemble_ray.serve.driving.ledger import Ledger, RunLedger
from ensemble_ray.serve.driving.requests import EndpointLimits
from ensemble_ray.serve.driving.webhooks import WebhookRules
from ensemble_ray.teamfile import Runnable


@asynccontextmanager
async def driven(
    teams: Runnable | Mapping[str, Runnable | ServedTeam],
    runtime: Any = None,
    *,
    limits: EndpointLimits | None = None,
    ledger: Path | RunLedger | None = None,
    tools: ToolCatalog | None = None,
    models: Mapping[str, ChatModel] | None = None,
    datasets: DatasetCatalog | None = None,
    webhooks: WebhookRules | None = None,
    clock: Clock | None = None,
    **more: Any,
) -> AsyncGenerator[DrivenRuns]:
    """Runs of teams in this process, inline unless said otherwise; what the ledger has is gone on with."""
    by_name = teams if isinstance(teams, Mapping) else {"team": teams}
    async with runtime or InlineRuntime() as entered:
        served = {
            name: each if isinstance(each, ServedTeam) else served_team(name, each) for name, each in by_name.items()
        }
        offered = {"tools": tools, "models": models, "datasets": datasets, "webhooks": webhooks}
        own = Ledger(ledger) if ledger is None or isinstance(ledger, Path) else ledger
        runs = DrivenRuns(served, entered, own, limits, **cast("Any", {**offered, **more}), clock=clock)
        await runs.recover()
        yield runs
        await runs.close()
