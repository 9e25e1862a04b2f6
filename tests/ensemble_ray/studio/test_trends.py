"""Runs by team and day: what is counted, what stays unknown, and which runs are unusual."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ensemble_ray.studio.schemas import CostSchema, RunRow, TeamTrend, TrendMeasure
from ensemble_ray.studio.views.trends import TrendPeriod, trends_of

_NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def millis(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def period(days: int = 7, offset_min: int = 0) -> TrendPeriod:
    return TrendPeriod(days=days, now=millis(_NOW), offset_min=offset_min)


def run(ago: timedelta = timedelta(hours=1), *, status: Any = "completed", **fields: Any) -> RunRow:
    """A run of Writers that began some time ago; `usd` is its cost."""
    usd, currency = fields.pop("usd", None), fields.pop("currency", "USD")
    cost = None if usd is None else CostSchema(amount=usd, currency=currency)
    given: dict[str, Any] = {"run_id": "run", "ensemble": "Writers", "created_at": millis(_NOW - ago), "cost": cost}
    return RunRow(status=status, **(given | fields))


def only(rows: list[RunRow], **options: Any) -> TeamTrend:
    (trend,) = trends_of(rows, period(), **options)
    return trend


def test_failures_are_failed_runs_and_runs_whose_process_died() -> None:
    """S-STU-261: open runs are counted as runs, and in no other number."""
    states = ("completed", "completed", "failed", "interrupted", "cancelled", "budget_exhausted", "running", "waiting")
    total = only([run(status=status, duration_ms=10, tokens=5) for status in states]).total
    assert (total.runs, total.open, total.failed, total.tokens) == (8, 2, 2, 30)


def test_durations_are_of_completed_runs() -> None:
    """S-STU-261: a run that failed immediately makes a team no faster."""
    rows = [run(duration_ms=100 * number) for number in range(1, 21)]
    total = only([*rows, *(run(status="failed", duration_ms=1) for _ in range(20))]).total
    assert (total.p50_ms, total.p95_ms) == (1000, 1900)
    assert (only([run(status="failed", duration_ms=1)]).total.p50_ms) is None


def test_unknown_tokens_and_costs_are_not_zero() -> None:
    """S-STU-261: sums are of known values, with the number of runs without one; costs of several currencies are not added."""
    rows = [run(tokens=10, usd="0.1"), run(tokens=20, usd="0.2"), run(), run(usd="9", currency="EUR")]
    total = only(rows).total
    assert (total.tokens, total.tokens_unknown) == (30, 2)
    assert (total.cost, total.cost_unknown, only(rows).currency) == ("0.3", 2, "USD")
    nothing = only([run()]).total
    assert (nothing.tokens, nothing.cost, nothing.tokens_unknown, nothing.cost_unknown) == (None, None, 1, 1)


@pytest.mark.parametrize(
    ("offset_min", "days"), [(0, ["2026-11-28", "2026-11-29"]), (60, ["2026-11-29"]), (-720, ["2026-11-28"])]
)
def test_days_are_the_readers(offset_min: int, days: list[str]) -> None:
    """S-STU-260: by the minutes of the reader's clock east of UTC."""
    rows = [run(timedelta(hours=11)), run(timedelta(hours=12, minutes=30))]
    (trend,) = trends_of(rows, period(offset_min=offset_min))
    assert [each.day for each in trend.days] == days
    begins = [datetime.fromtimestamp(each.since / 1000, UTC) + timedelta(minutes=offset_min) for each in trend.days]
    assert [(each.date().isoformat(), each.hour, each.minute) for each in begins] == [(day, 0, 0) for day in days]


def test_runs_before_the_first_day_are_not_counted() -> None:
    """S-STU-260: the first of seven days begins six days before today; a clock that is ahead has no tomorrow."""
    rows = [run(-timedelta(days=1)), run(timedelta(days=6, hours=12)), run(timedelta(days=6, hours=12, seconds=1))]
    assert [(each.day, each.runs) for each in only(rows).days] == [("2026-11-23", 1), ("2026-11-29", 1)]


def test_teams_are_found_by_a_part_of_their_names() -> None:
    """S-STU-260: most runs first; runs without a name are one team."""
    rows = [run(), run(ensemble="Readers"), run(), run(ensemble=""), run(ensemble=""), run(ensemble="")]
    assert [(each.ensemble, each.total.runs) for each in trends_of(rows, period())] == [
        ("", 3),
        ("Writers", 2),
        ("Readers", 1),
    ]
    assert [each.ensemble for each in trends_of(rows, period(), ensemble="READ")] == ["Readers"]


def unusual(rows: list[RunRow]) -> Iterator[tuple[str, dict[TrendMeasure, float]]]:
    for each in only(rows).unusual:
        yield each.run_id, each.times


def test_unusual_runs_have_three_times_the_median() -> None:
    """S-STU-262: of duration, tokens or cost; failed runs too, and the furthest first; not a run whose end is unknown."""
    usual = [run(duration_ms=100, tokens=10, usd="0.01") for _ in range(6)]
    slow = run(run_id="slow", status="failed", duration_ms=450, tokens=10, usd="0.01")
    dear = run(run_id="dear", duration_ms=299, tokens=30, usd="0.08")
    dead = run(run_id="dead", status="interrupted", duration_ms=9000)
    goes_on = run(run_id="open", status="running", tokens=9000)
    assert list(unusual([*usual, slow, dear, dead, goes_on])) == [
        ("dear", {"tokens": 3.0, "cost": 8.0}),
        ("slow", {"duration": 4.5}),
    ]


def test_few_runs_are_not_compared() -> None:
    """S-STU-262: of four runs none is unusual; nor is one where the median is zero."""
    assert list(unusual([*(run(duration_ms=1) for _ in range(3)), run(duration_ms=900)])) == []
    assert list(unusual([*(run(tokens=0) for _ in range(9)), run(tokens=900)])) == []
