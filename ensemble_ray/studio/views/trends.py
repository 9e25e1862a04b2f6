"""Runs by team and day: counts, failures, durations, tokens and costs, and the unusual runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from statistics import median_low

from msgspec import Struct

from ensemble_ray.studio.schemas import Millis, RunRow, TeamTrend, TrendDay, TrendMeasure, TrendSums, UnusualRun

MOST_TEAMS = 40
_MOST_UNUSUAL = 8  # of a team
_LEAST_COMPARED = 5  # runs with a value, before one of them is unusual
_UNUSUAL = 3.0  # times the median
_OPEN = frozenset({"accepted", "running", "waiting"})
_FAILED = frozenset({"failed", "interrupted"})
_DAY_MS = 86_400_000


class TrendPeriod(Struct, frozen=True, kw_only=True):
    """The last days up to now. A day begins at midnight with the reader's present offset from UTC."""

    days: int
    now: Millis
    offset_min: int = 0  # minutes east of UTC

    @property
    def last(self) -> int:
        """The number of the present day."""
        return self.day_of(self.now)

    @property
    def since(self) -> Millis:
        return self.begin_of(self.last - self.days + 1)

    def day_of(self, at: Millis) -> int:
        return (at + self.offset_min * 60_000) // _DAY_MS

    def begin_of(self, day: int) -> Millis:
        return day * _DAY_MS - self.offset_min * 60_000


def date_of(day: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day)).date().isoformat()


def trends_of(rows: Iterable[RunRow], period: TrendPeriod, *, ensemble: str = "") -> list[TeamTrend]:
    """Return the trends of the teams with this text in their names, most runs first. `rows`: newest first."""
    text, last, since = ensemble.casefold(), period.last, period.since
    teams: dict[str, dict[int, list[RunRow]]] = {}
    for row in rows:
        if row.created_at >= since and text in row.ensemble.casefold():
            day = min(last, period.day_of(row.created_at))  # the clock of another machine may be ahead
            teams.setdefault(row.ensemble, {}).setdefault(day, []).append(row)
    trends = [_trend_of(name, days, period) for name, days in teams.items()]
    return sorted(trends, key=lambda each: (-each.total.runs, each.ensemble))


def _trend_of(name: str, days: dict[int, list[RunRow]], period: TrendPeriod) -> TeamTrend:
    rows = [row for day in days.values() for row in day]
    currency = next((row.cost.currency for row in rows if row.cost is not None), None)
    return TeamTrend(
        ensemble=name,
        currency=currency,
        total=_sums_of(rows, currency),
        days=[
            TrendDay(day=date_of(day), since=period.begin_of(day), **dict(_sums_of(days[day], currency)))
            for day in sorted(days)
        ],
        unusual=_unusual(rows, currency),
    )


def _sums_of(rows: Sequence[RunRow], currency: str | None) -> TrendSums:
    ended = [row for row in rows if row.status not in _OPEN]
    times = sorted(row.duration_ms for row in ended if row.status == "completed" and row.duration_ms is not None)
    tokens = [row.tokens for row in ended if row.tokens is not None]
    costs = [cost for row in ended if (cost := _cost_of(row, currency)) is not None]
    return TrendSums(
        runs=len(rows),
        open=len(rows) - len(ended),
        failed=sum(row.status in _FAILED for row in ended),
        p50_ms=_percentile(times, 0.5),
        p95_ms=_percentile(times, 0.95),
        tokens=sum(tokens) if tokens else None,
        tokens_unknown=len(ended) - len(tokens),
        cost=f"{sum(costs):f}" if costs else None,
        cost_unknown=len(ended) - len(costs),
    )


def _percentile(ordered: Sequence[int], part: float) -> int | None:
    """Return the smallest value that is not below this part of the values."""
    return ordered[math.ceil(part * len(ordered)) - 1] if ordered else None


def _cost_of(row: RunRow, currency: str | None) -> Decimal | None:
    """Costs in another currency than the team's newest one are unknown: they cannot be added."""
    return Decimal(row.cost.amount) if row.cost is not None and row.cost.currency == currency else None


def _unusual(rows: Sequence[RunRow], currency: str | None) -> list[UnusualRun]:
    """Return the ended runs with three times the median of a measure, the furthest from it first."""
    ended = [row for row in rows if row.status not in _OPEN]
    values: dict[TrendMeasure, list[float | None]] = {
        "duration": [None if row.status == "interrupted" else row.duration_ms for row in ended],
        "tokens": [row.tokens for row in ended],
        "cost": [None if (cost := _cost_of(row, currency)) is None else float(cost) for row in ended],
    }
    times: list[dict[TrendMeasure, float]] = [{} for _ in ended]
    for measure, found in values.items():
        known = [value for value in found if value is not None]
        usual = median_low(known) if len(known) >= _LEAST_COMPARED else 0
        for place, value in enumerate(found):
            if value is not None and usual > 0 and value >= _UNUSUAL * usual:
                times[place][measure] = round(value / usual, 1)
    unusual = [
        UnusualRun(
            run_id=row.run_id,
            status=row.status,
            created_at=row.created_at,
            duration_ms=row.duration_ms,
            tokens=row.tokens,
            cost=None if row.cost is None else row.cost.amount,
            times=factors,
        )
        for row, factors in zip(ended, times, strict=True)
        if factors
    ]
    return sorted(unusual, key=lambda each: -max(each.times.values()))[:_MOST_UNUSUAL]
