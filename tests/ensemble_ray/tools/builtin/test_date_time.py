"""DateTimeTool: the present, conversion between zones, arithmetic, and its failures."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from ensemble_ray import DateTimeTool
from tests.ensemble_ray.tools.builtin.travel import travelled

_NOON = datetime(2024, 3, 10, 22, 30, 5, 999_999, tzinfo=UTC)


def _late_evening() -> datetime:
    return _NOON


def _answer(command: str) -> str:
    result = DateTimeTool(clock=_late_evening).execute(command)
    return result.output if result.is_success else f"failure: {result.error_message}"


@pytest.mark.parametrize("command", ["now", "  NOW ", "Now", "now in UTC", "NOW IN UTC", "now in utc"])
def test_command_is_understood_when_case_and_space_vary(command: str) -> None:
    """S-BIT-10, S-BIT-11."""
    assert _answer(command) == "2024-03-10T22:30:05 UTC"


def test_present_is_local_when_a_zone_is_named() -> None:
    """S-BIT-10, S-BIT-11: no microseconds; the date is that of the zone."""
    assert _answer("now in Europe/Berlin") == "2024-03-10T23:30:05 Europe/Berlin"
    assert _answer("today") == "2024-03-10"
    assert _answer("today in Asia/Tokyo") == "2024-03-11"


def test_clock_is_read_in_any_zone_when_injected() -> None:
    """S-BIT-11, S-SET-9: an aware clock of any offset; a naive one means UTC."""
    east = timezone(timedelta(hours=5))
    assert DateTimeTool(clock=lambda: _NOON.astimezone(east)).execute("now").output == "2024-03-10T22:30:05 UTC"
    assert DateTimeTool(clock=lambda: _NOON.replace(tzinfo=None)).execute("today").output == "2024-03-10"


def test_real_clock_is_used_when_none_is_injected() -> None:
    """S-BIT-11."""
    before = datetime.now(UTC).replace(microsecond=0)
    told = datetime.fromisoformat(DateTimeTool().execute("now").output.removesuffix(" UTC")).replace(tzinfo=UTC)
    assert before <= told <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("2024-01-30 + 3 days", "2024-02-02"),
        ("2024-01-30 + 1 day", "2024-01-31"),
        ("2024-03-01 - 1 DAY", "2024-02-29"),
        ("2024-01-30 - 2 weeks", "2024-01-16"),
        ("2024-01-31 + 1 month", "2024-02-29"),
        ("2024-01-31 + 13 months", "2025-02-28"),
        ("2024-03-31 - 1 month", "2024-02-29"),
        ("2024-01-15 - 1 month", "2023-12-15"),
        ("2024-02-29 + 1 year", "2025-02-28"),
        ("2024-02-29 + 4 years", "2028-02-29"),
        ("2024-01-30 + 1 hour", "failure: Unsupported date unit: 'hour'. Use days, weeks, months, or years"),
    ],
)
def test_date_moves_in_the_calendar_when_units_are_added(command: str, answer: str) -> None:
    """S-BIT-12."""
    assert _answer(command) == answer


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("2024-01-31T10:00:00Z + 90 minutes", "2024-01-31T11:30:00Z"),
        ("2024-01-31T10:00:00 + 30 seconds", "2024-01-31T10:00:30Z"),
        ("2024-01-31T23:00:00Z + 2 hours", "2024-02-01T01:00:00Z"),
        ("2024-01-31T10:00:00Z + 1 month", "2024-02-29T10:00:00Z"),
        ("2024-02-29T10:00:00Z - 1 year", "2023-02-28T10:00:00Z"),
        ("2024-01-31T10:00:00Z + 1 week", "2024-02-07T10:00:00Z"),
        ("2024-01-31T10:00:00+02:00 + 1 day", "2024-02-01T08:00:00Z"),
        ("2024-02-01T01:00:00+02:00 + 1 month", "2024-02-29T23:00:00Z"),
        ("2024-01-31T20:00:00-05:30 + 0 days", "2024-02-01T01:30:00Z"),
        ("2024-01-31T10:00:00.750Z + 1 second", "2024-01-31T10:00:01Z"),
        ("2024-01-31T10:00:00Z + 1 fortnight", "failure: Unsupported datetime unit: 'fortnight'"),
    ],
)
def test_datetime_moves_in_utc_when_units_are_added(command: str, answer: str) -> None:
    """S-BIT-13."""
    assert _answer(command) == answer


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("convert 2024-03-09T12:00:00 from UTC to America/New_York", "2024-03-09T07:00:00 America/New_York"),
        ("convert 2024-03-11T12:00:00 from UTC to America/New_York", "2024-03-11T08:00:00 America/New_York"),
        ("Convert 2024-07-01T12:00:00Z From Europe/Berlin To UTC", "2024-07-01T10:00:00 UTC"),
        ("convert 2024-12-31T20:00:00 from America/New_York to Asia/Tokyo", "2025-01-01T10:00:00 Asia/Tokyo"),
    ],
)
def test_time_is_converted_with_daylight_saving_when_zones_are_given(command: str, answer: str) -> None:
    """S-BIT-14: a trailing Z is ignored, the zone after `from` holds."""
    assert _answer(command) == answer


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "Command must not be blank"),
        ("   ", "Command must not be blank"),
        ("now in Mars/Olympus", "Unknown timezone: 'Mars/Olympus'"),
        ("now in ../../etc/passwd", "Unknown timezone: '../../etc/passwd'"),
        ("now in America", "Unknown timezone: 'America'"),
        ("convert 2024-01-01T00:00:00 from UTC to Nowhere/X", "Unknown timezone: 'Nowhere/X'"),
        ("2024-13-01 + 1 day", "Invalid date format: '2024-13-01'. Expected yyyy-MM-dd"),
        ("20240101 + 1 day", "Invalid date format: '20240101'. Expected yyyy-MM-dd"),
        ("yesterday + 1 day", "Invalid date format: 'yesterday'. Expected yyyy-MM-dd"),
        (
            "2024-01-01T25:00:00 + 1 day",
            "Invalid datetime format: '2024-01-01T25:00:00'. Expected yyyy-MM-ddTHH:mm:ss[Z]",
        ),
        ("convert noon from UTC to UTC", "Invalid datetime format: 'noon'. Expected yyyy-MM-ddTHH:mm:ss[Z]"),
        (
            "convert 2024-01-01T00:00:00+99:00 from UTC to UTC",
            "Invalid datetime format: '2024-01-01T00:00:00+99:00'. Expected yyyy-MM-ddTHH:mm:ss[Z]",
        ),
    ],
)
def test_failure_says_what_is_wrong_when_command_is_wrong(command: str, message: str) -> None:
    """S-BIT-15."""
    assert _answer(command) == f"failure: {message}"


@pytest.mark.parametrize(
    "command",
    [
        "9999-12-31 + 1 day",
        "0001-01-01 - 1 month",
        "2024-01-01 + 999999999999 years",
        "2024-01-01 + 9999999999999999999999 days",
        "9999-12-31T23:59:59Z + 1 second",
        "2024-01-01T00:00:00 + 999999999999 hours",
        "convert 0001-01-01T00:00:00 from Asia/Tokyo to UTC",
    ],
)
def test_failure_is_told_when_no_calendar_holds_the_result(command: str) -> None:
    """S-BIT-15."""
    assert _answer(command).startswith("failure: Date/time error: ")


@pytest.mark.parametrize("command", ["tomorrow", "now is the time", "2024-01-01 * 2 days", "2024-01-01 + days"])
def test_commands_are_listed_when_the_command_is_unknown(command: str) -> None:
    """S-BIT-15."""
    assert _answer(command).startswith("failure: Unrecognized command.")


def test_tool_travels_when_pickled() -> None:
    """S-CONV-34."""
    copy = travelled(DateTimeTool(clock=_late_evening))
    assert (copy.name, copy.execute("today").output) == ("datetime", "2024-03-10")
