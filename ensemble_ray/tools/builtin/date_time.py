"""Dates, times and time zones for models. Package: built-in tools. In: one command as text; out: a date or an instant.

The commands are a table of patterns with their answers (S-BIT-10). The clock comes from outside; nothing else here
knows what time it is. Arithmetic on datetimes happens in UTC, on dates in the calendar.
"""

from __future__ import annotations

import calendar
import re
import zoneinfo
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, tzinfo

from ensemble_ray.errors import ValidationError
from ensemble_ray.tools.tool import AbstractAgentTool, ToolResult
from ensemble_ray.values.value import utc_now

__all__ = ["DateTimeTool"]

_HELP = (
    "Supported: now | now in <timezone> | today | today in <timezone> | "
    "convert <datetime> from <timezone> to <timezone> | <date or datetime> +/- <N> <unit>"
)

# All are linear: a model writes the command, and a search holds every thread of the process until it ends (S-SEC-20).
_NOW = re.compile(r"(now|today)(?:\s+in\s+(\S+))?", re.IGNORECASE)
_CONVERT = re.compile(r"convert\s+(\S+)\s+from\s+(\S+)\s+to\s+(\S+)", re.IGNORECASE)
#: words and the blanks between them take turns, so that blanks can be read in one way only
_ARITHMETIC = re.compile(r"(\S+(?:\s+\S+)*?)\s+([+-])\s*([0-9]+)\s*([A-Za-z]+)")
_DATE = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")
_DATETIME = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:\.[0-9]+)?)?"
    r"(Z|[+-][0-9]{2}:?[0-9]{2})?",
    re.IGNORECASE,
)
#: what tells a datetime from a date (S-BIT-13)
_HAS_TIME = re.compile(r"[TZ]|[0-9][tz]")

_OUT_OF_RANGE = "the result is out of range (years 1 to 9999)"
_DAYS = {"day": 1, "week": 7}
_MONTHS = {"month": 1, "year": 12}
_UNIT_SECONDS = {"second": 1, "minute": 60, "hour": 3600}
#: more than any calendar holds; longer numbers are not even converted
_MAX_DIGITS = 12


class DateTimeTool(AbstractAgentTool):
    """Tells the time, converts between time zones, adds to dates and datetimes.

    Args:
        clock: Gives the present as an aware datetime; the machine's clock in UTC when None.
    """

    name = "datetime"
    effect = "none"
    description = (
        "Current date and time, time zone conversion, date arithmetic. Input is one command: "
        "'now', 'now in Europe/Berlin', 'today', 'today in Asia/Tokyo', "
        "'convert 2024-03-10T12:00:00 from UTC to America/New_York', '2024-01-31 + 1 month', "
        "'2024-01-31T10:00:00Z - 90 minutes'"
    )

    def __init__(self, clock: Callable[[], datetime] | None = None) -> None:
        if clock is not None and not callable(clock):
            raise ValidationError(f"DateTimeTool clock must be callable, got: {type(clock).__name__}")
        self._clock = clock

    def do_execute(self, text: str, /) -> ToolResult:
        """Carry out one command."""
        command = (text or "").strip()
        if not command:
            return ToolResult.failure("Command must not be blank")
        try:
            return self._answer(command)
        except OverflowError:
            return ToolResult.failure(f"Date/time error: {_OUT_OF_RANGE}")
        except ValueError as error:
            return ToolResult.failure(str(error))

    def _answer(self, command: str) -> ToolResult:
        if found := _NOW.fullmatch(command):
            return ToolResult.success(self._present(found[1].lower(), found[2] or "UTC"))
        if found := _CONVERT.fullmatch(command):
            return ToolResult.success(_convert(found[1], found[2], found[3]))
        if found := _ARITHMETIC.fullmatch(command):
            value, sign, number, unit = found.groups()
            if len(number) > _MAX_DIGITS:
                return ToolResult.failure(f"Date/time error: {_OUT_OF_RANGE}")
            amount = int(number) if sign == "+" else -int(number)
            shift = _shift_datetime if _HAS_TIME.search(value) else _shift_date
            return ToolResult.success(shift(value, amount, unit))
        return ToolResult.failure(f"Unrecognized command. {_HELP}")

    def _present(self, what: str, zone: str) -> str:
        now = utc_now() if self._clock is None else self._clock()
        aware = now if now.tzinfo is not None else now.replace(tzinfo=UTC)
        local = aware.astimezone(_zone(zone))
        zone = "UTC" if zone.upper() == "UTC" else zone
        return local.date().isoformat() if what == "today" else f"{_wall_time(local)} {zone}"


def _wall_time(moment: datetime) -> str:
    """Date and time as a clock on that wall shows them."""
    return moment.replace(tzinfo=None).isoformat(timespec="seconds")


def _zone(name: str) -> tzinfo:
    """Return the zone of that name; `UTC` needs no zone database."""
    if name.upper() in {"UTC", "Z"}:
        return UTC
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        # a name with `..` or of a directory of the database is as unknown as a misspelt one
        raise ValueError(f"Unknown timezone: '{name}'") from None


def _convert(value: str, source: str, target: str) -> str:
    found = _DATETIME.fullmatch(value)
    if found is None or (found[7] or "Z").upper() != "Z":
        raise _bad_datetime(value)
    local = _datetime_of(found, value).replace(tzinfo=_zone(source))
    return f"{_wall_time(local.astimezone(_zone(target)))} {target}"


def _shift_date(value: str, amount: int, unit: str) -> str:
    found = _DATE.fullmatch(value)
    if found is None:
        raise _bad_date(value)
    try:
        start = date(int(found[1]), int(found[2]), int(found[3]))
    except ValueError:
        raise _bad_date(value) from None
    kind = _singular(unit)
    if kind in _MONTHS:
        return _plus_months(start, amount * _MONTHS[kind]).isoformat()
    if kind in _DAYS:
        return (start + timedelta(days=amount * _DAYS[kind])).isoformat()
    raise ValueError(f"Unsupported date unit: '{unit}'. Use days, weeks, months, or years")


def _shift_datetime(value: str, amount: int, unit: str) -> str:
    found = _DATETIME.fullmatch(value)
    if found is None:
        raise _bad_datetime(value)
    start = _datetime_of(found, value) - _offset_of(found[7], value)
    kind = _singular(unit)
    if kind in _MONTHS:
        end = datetime.combine(_plus_months(start.date(), amount * _MONTHS[kind]), start.time())
    elif kind in _DAYS:
        end = start + timedelta(days=amount * _DAYS[kind])
    elif kind in _UNIT_SECONDS:
        end = start + timedelta(seconds=amount * _UNIT_SECONDS[kind])
    else:
        raise ValueError(f"Unsupported datetime unit: '{unit}'")
    return f"{_wall_time(end)}Z"


def _singular(unit: str) -> str:
    return unit.lower().removesuffix("s")


def _plus_months(start: date, months: int) -> date:
    """Return the same day that many months on, or the last day of that month where it has none (S-BIT-12)."""
    year, month = divmod(start.year * 12 + start.month - 1 + months, 12)
    if not date.min.year <= year <= date.max.year:
        raise OverflowError
    last = calendar.monthrange(year, month + 1)[1]
    return start.replace(year=year, month=month + 1, day=min(start.day, last))


def _datetime_of(found: re.Match[str], value: str) -> datetime:
    """Return the local time of a match, without its offset; fractions of a second are dropped."""
    year, month, day, hour, minute, second = (int(part or 0) for part in found.groups()[:6])
    try:
        return datetime(year, month, day, hour, minute, second)  # noqa: DTZ001  the zone is the caller's to apply
    except ValueError:
        raise _bad_datetime(value) from None


def _offset_of(text: str | None, value: str) -> timedelta:
    """Return the offset east of UTC that a value ends with; none means UTC (S-BIT-13)."""
    if text is None or text.upper() == "Z":
        return timedelta(0)
    hours, minutes = int(text[1:3]), int(text[-2:])
    if hours > 23 or minutes > 59:  # noqa: PLR2004  the clock's own limits
        raise _bad_datetime(value)
    size = timedelta(hours=hours, minutes=minutes)
    return -size if text[0] == "-" else size


def _bad_date(value: str) -> ValueError:
    return ValueError(f"Invalid date format: '{value}'. Expected yyyy-MM-dd")


def _bad_datetime(value: str) -> ValueError:
    return ValueError(f"Invalid datetime format: '{value}'. Expected yyyy-MM-ddTHH:mm:ss[Z]")
