"""Accepted runs as clients see them, of what the ledger keeps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from ensemble_ray.serve.run_schemas import OpenReview, RunDetail, RunStatus, RunSummary

if TYPE_CHECKING:
    from ensemble_ray.serve.driving.ledger import LedgerEntry
    from ensemble_ray.serve.driving.outcomes import Outcome


def summary_of(entry: LedgerEntry, *, is_active: bool) -> RunSummary:
    """Return a run as lists show it; one that has not ended and that nobody works on is interrupted."""
    is_left = not entry.status.is_final and not is_active
    return RunSummary(
        run_id=entry.run_id,
        status=RunStatus.INTERRUPTED if is_left else entry.status,
        ensemble=entry.ensemble,
        tags=dict(entry.tags),
        created_at=entry.created_at,
        ended_at=entry.ended_at,
    )


def detail_of(
    entry: LedgerEntry,
    *,
    status: RunStatus,
    ended_at: datetime | None = None,
    outcome: Outcome | None = None,
    reviews: Sequence[OpenReview] = (),
) -> RunDetail:
    """Return a run with what became of it, or with the gates at which it waits."""
    return RunDetail(
        run_id=entry.run_id,
        status=status,
        ensemble=entry.ensemble,
        tags=dict(entry.tags),
        created_at=entry.created_at,
        ended_at=ended_at,
        result=None if outcome is None else outcome.result,
        error=None if outcome is None else outcome.error,
        reviews=[*reviews],
    )
