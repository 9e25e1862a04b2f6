"""What a schedule declares, what it refuses, and which times it has."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import Ensemble, Schedule, Task, ValidationError

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca")
CRONS = ("30 2 * * *", "0 3 * * *", "*/15 * * * *", "15 1,2,3 * * *", "30 */2 * * *", "0 0 1 * *", "0 9 * * MON-FRI")


def times(schedule: Schedule, after: str, count: int) -> list[str]:
    """Its next times, in UTC."""
    found: list[str] = []
    at = datetime.fromisoformat(after)
    while len(found) < count:
        following = schedule.next_after(at)
        assert following is not None
        at = following
        found.append(at.strftime("%m-%d %H:%M"))
    return found


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "Schedule needs one of [cron, every, folder], got: []"),
        ({"cron": "* * * * *", "every": 60}, "Schedule needs one of [cron, every, folder], got: [cron, every]"),
        ({"cron": "* * * * *", "folder": "/srv", "input": "a"}, "got: [cron, folder]"),
        ({"cron": "0 3 * *"}, "Schedule cron '0 3 * *' must have five fields"),
        ({"cron": "0 0 3 * * *"}, "must have five fields"),
        ({"cron": "61 * * * *"}, "Schedule cron '61 * * * *': Bad minute"),
        ({"cron": "0 0 30 2 *"}, "Bad day-of-month"),
        ({"cron": "0 3 * * *", "timezone": "Europe/Berln"}, "Did you mean 'Europe/Berlin'?"),
        ({"cron": "0 3 * * *", "timezone": "../UTC"}, "is no IANA time zone"),
        ({"every": 0}, "Schedule every must be a whole number of seconds, from 1 s to 365 days, got: 0"),
        ({"every": 1.5}, "got: 1.5"),
        ({"every": timedelta(days=366)}, "from 1 s to 365 days"),
        ({"every": "soon"}, "'soon' is no age"),
        ({"folder": "inbox", "input": "a"}, "Schedule folder must be an absolute path, got: 'inbox'"),
        ({"folder": "/srv"}, "Schedule folder needs input"),
        ({"folder": "/srv", "input": "a", "overlap": "skip"}, "Schedule overlap has no effect with folder"),
        ({"folder": "/srv", "input": "a", "pattern": "a/*"}, "Schedule pattern must match names without '/'"),
        ({"every": 60, "attach": True}, "Schedule attach needs folder"),
        ({"every": 60, "missed": "all"}, "Schedule missed='all' needs overlap='queue'"),
        ({"every": 60, "overlap": "skp"}, "Did you mean 'skip'? Known: [skip, queue, replace]"),
        ({"every": 60, "missed": "never"}, "Schedule missed: unknown 'never'"),
        ({"every": 60, "max_waiting": 0}, "Schedule max_waiting must be 1 to 1000, got: 0"),
        ({"every": 60, "inputs": {"a": object()}}, "Schedule inputs: 'a' must be a JSON value"),
        ({"every": 60, "inputs": {"a": "b"}, "input": "a"}, "inputs must not contain it"),
        ({"every": 60, "tags": {"": "b"}}, "Schedule tags"),
        ({"evry": 60}, "evry"),
    ],
)
def test_a_schedule_is_refused_when_a_value_is_wrong(values: dict[str, Any], problem: str) -> None:
    """S-SCH-1 to S-SCH-6: the message names the field and the value."""
    with pytest.raises(ValidationError) as refused:
        Schedule(**values)
    assert problem in str(refused.value)


def test_an_interval_has_the_same_times_when_it_is_written_otherwise() -> None:
    """S-SCH-3: multiples since 1970."""
    for every in ("15m", 900, timedelta(minutes=15)):
        schedule = Schedule(every=every)
        assert schedule.every == timedelta(minutes=15)
        assert times(schedule, "2026-01-01T00:07Z", 3) == ["01-01 00:15", "01-01 00:30", "01-01 00:45"]


def test_a_job_of_the_skipped_hour_runs_behind_it_and_one_of_the_repeated_hour_runs_once() -> None:
    """S-SCH-2: the rules of Debian's cron for daylight saving."""
    nightly = Schedule(cron="30 2 * * *", timezone="Europe/Berlin")
    assert times(nightly, "2026-03-28T00:00Z", 3) == ["03-28 01:30", "03-29 01:00", "03-30 00:30"]
    assert times(nightly, "2026-10-24T00:00Z", 3) == ["10-24 00:30", "10-25 00:30", "10-26 01:30"]
    often = Schedule(cron="0 * * * *", timezone="Europe/Berlin")
    assert times(often, "2026-10-24T23:30Z", 4) == ["10-25 00:00", "10-25 01:00", "10-25 02:00", "10-25 03:00"]


@given(
    st.sampled_from(CRONS),
    st.sampled_from(ZONES),
    st.integers(0, 364 * 1440),
    st.integers(0, 3 * 1440),
    st.integers(1, 40),
)
def test_times_between_two_instants_are_those_that_follow_each_other(
    cron: str, zone: str, start: int, minutes: int, most: int
) -> None:
    """S-SCH-2: wherever the search begins, it finds the same times."""
    schedule = Schedule(cron=cron, timezone=zone)
    after = BEGIN + timedelta(minutes=start)
    until = after + timedelta(minutes=minutes)
    expected: list[datetime] = []
    at = schedule.next_after(after)
    while at is not None and at <= until:
        expected.append(at)
        at = schedule.next_after(at)
    assert list(schedule.times_between(after, until, most=most)) == expected[-most:]


@given(st.integers(1, 100_000), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 50))
def test_the_newest_times_of_an_interval_are_found_without_counting_from_the_first(
    every: int, start: int, seconds: int, most: int
) -> None:
    """S-SCH-3: also after years."""
    schedule = Schedule(every=every)
    after = datetime.fromtimestamp(start, UTC)
    until = after + timedelta(seconds=seconds)
    numbers = range(start // every + 1, (start + seconds) // every + 1)[-most:]
    assert [each.timestamp() for each in schedule.times_between(after, until, most=most)] == [
        number * every for number in numbers
    ]


def test_a_team_with_schedules_is_frozen_and_travels() -> None:
    """S-SCH-7: it is equal after pickling, and its mapping is a copy."""
    given_ = {"nightly": Schedule(cron="0 3 * * *")}
    team = Ensemble([Task("Report")], schedules=given_)
    given_.clear()
    assert pickle.loads(pickle.dumps(team)).schedules == team.schedules == {"nightly": Schedule(cron="0 3 * * *")}  # noqa: S301
    watching = Schedule(folder=Path("/srv/inbox"), input="document")
    assert (watching.look_s, watching.next_after(BEGIN)) == (10, None)


@pytest.mark.parametrize(
    ("schedules", "problem"),
    [
        ({"a/b": Schedule(every=60)}, "a name must have 1 to 64 letters, digits, '-' and '_'"),
        ({"": Schedule(every=60)}, "a name must have 1 to 64"),
        ({"a": "0 3 * * *"}, "Ensemble schedules: 'a' must be a Schedule, got: str"),
        ([Schedule(every=60)], "Ensemble schedules must be a mapping of names to Schedules, got: list"),
    ],
)
def test_a_team_refuses_schedules_when_a_name_or_a_value_is_wrong(schedules: Any, problem: str) -> None:
    """S-SCH-7."""
    with pytest.raises(ValidationError) as refused:
        Ensemble([Task("Report")], schedules=schedules)
    assert problem in str(refused.value)
