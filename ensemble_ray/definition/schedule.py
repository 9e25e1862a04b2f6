"""When an endpoint starts runs of a team by itself: at times of a cron expression, at intervals, or for new files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast

from pydantic import BeforeValidator, InstanceOf

from ensemble_ray.definition import fields
from ensemble_ray.definition.run_options import check_tags
from ensemble_ray.errors import ValidationError
from ensemble_ray.errors.texts import brief
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.value import Accepts, Duration, Value, age_from

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_FIELDS = 5  # of a cron expression
_LONGEST_S = timedelta(days=365).total_seconds()
_MOST_WAITING = 1000
_LOOK_S = 10.0
_EPOCH = datetime.fromtimestamp(0, UTC)
_KINDS = ("cron", "every", "folder")


def _to_interval(value: object) -> object:
    return age_from(value) if isinstance(value, str) else value


if TYPE_CHECKING:
    _Every: TypeAlias = Accepts[timedelta | None, timedelta | float | str | None]
    _Folder: TypeAlias = Accepts[Path | None, Path | str | None]
    _Values: TypeAlias = Accepts[Mapping[str, object], Mapping[str, object] | None]
    _Tags: TypeAlias = Accepts[Mapping[str, str], Mapping[str, str] | None]
else:
    _Every = Annotated[Duration | None, BeforeValidator(_to_interval)]
    _Folder = Path | None
    _Values = Annotated[fields.CopiedMapping[str, object], BeforeValidator(whole_data)]
    _Tags = Annotated[fields.CopiedMapping[str, str], BeforeValidator(whole_data)]


class Schedule(Value):
    """Times or files at which `ensemble-ray serve` starts runs of a team. It has `cron`, `every` or `folder`.

    Attributes:
        cron: Minute, hour, day of month, month and day of week, such as `0 3 * * MON-FRI`, with the rules of Debian's cron.
        every: Interval, from 1 s to 365 days: a `timedelta`, seconds, or a text such as `15m`. The times are its multiples
            since 1970-01-01 00:00 UTC. With `folder`: the time between two looks at the folder; default 10 s.
        folder: Absolute path of a folder. Each new file in it starts a run.
        timezone: IANA name of the time zone of `cron`, such as `Europe/Berlin`.
        inputs: Inputs of the runs, as JSON values.
        tags: Labels of the runs, in addition to those of the team and `schedule`, which is the name of the schedule.
        overlap: What happens at a time at which an earlier run is still open. `"skip"`: no run starts; `"queue"`: the run starts
            when the earlier one has ended; `"replace"`: the earlier run is cancelled, and the new one starts at its end.
        missed: What happens after times at which the endpoint was down. `"skip"`: no run starts for them; `"once"`: one run
            starts for all of them; `"all"`: a run starts for each, which needs `overlap="queue"`.
        max_waiting: Times that may wait for their runs, 1 to 1000. Of the missed times, the newest ones count.
        pattern: Names of the files that count, such as `*.pdf`.
        input: Input that receives the absolute path of the file. Without `folder`: the scheduled time in ISO 8601, in the
            schedule's time zone.
        attach: Whether that input receives the content of the file as an attachment, in place of its path.
        changed: What happens if a file changes after its run was started: `"ignore"`, or `"run"` for another run.

    Raises:
        ValidationError: a value is invalid, or a field does not fit the others.

    Examples:
        >>> nightly = Schedule(cron="0 3 * * *", timezone="Europe/Berlin")
        >>> nightly.next_after(datetime(2026, 7, 1, 12, tzinfo=UTC)).isoformat()
        '2026-07-02T01:00:00+00:00'
    """

    cron: fields.StrictText | None = None
    every: _Every = fields.initially(None)
    folder: _Folder = fields.initially(None)
    timezone: fields.StrictText = "UTC"
    inputs: _Values = fields.initially({})
    tags: _Tags = fields.initially({})
    overlap: Literal["skip", "queue", "replace"] = "skip"
    missed: Literal["skip", "once", "all"] = "once"
    max_waiting: fields.StrictInt = 100
    pattern: fields.StrictText = "*"
    input: fields.StrictText | None = None
    attach: bool = False
    changed: Literal["ignore", "run"] = "ignore"

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        """S-SCH-1 to S-SCH-6."""
        _check_kind(arguments)
        _check_interval(arguments.get("every"))
        waiting = arguments.get("max_waiting")
        if isinstance(waiting, int) and not 1 <= waiting <= _MOST_WAITING:
            raise ValidationError(f"Schedule max_waiting must be 1 to {_MOST_WAITING}, got: {waiting}")
        for name, known in (("overlap", ("skip", "queue", "replace")), ("missed", ("skip", "once", "all"))):
            _check_word(name, arguments.get(name), known)
        _check_word("changed", arguments.get("changed"), ("ignore", "run"))
        if arguments.get("missed") == "all" and arguments.get("overlap") != "queue":
            raise ValidationError(
                "Schedule missed='all' needs overlap='queue', because the runs of missed times wait for each other"
            )
        check_tags(arguments.get("tags"), "Schedule")
        _check_inputs(arguments.get("inputs"), arguments.get("input"))
        zone = arguments.get("timezone", "UTC")
        if isinstance(zone, str):
            zone_of(zone)
            if isinstance(cron := arguments.get("cron"), str):
                _check_cron(cron, zone)

    @property
    def look_s(self) -> float:
        """Time between two looks at the folder, s."""
        return _LOOK_S if self.every is None else self.every.total_seconds()

    @property
    def timing(self) -> str:
        """Text of all that determines its times. Schedules with other times have another one."""
        if self.folder is not None:
            return f"folder {self.folder}"
        return f"cron {self.cron} {self.timezone}" if self.every is None else f"every {self.every.total_seconds():.0f}"

    def next_after(self, at: datetime) -> datetime | None:
        """Return its first time after an instant, in UTC; None: it watches a folder, or there is none."""
        return next(self._times_after(at), None)

    def times_between(self, after: datetime, until: datetime, *, most: int) -> Sequence[datetime]:
        """Return the newest of its times after one instant and up to another one, in UTC and in order."""
        if self.every is not None:  # a long interval has millions of times
            after = max(after, until - (most + 1) * self.every)
        span = timedelta(hours=1)
        while True:
            begin = max(after, until - span)
            found = [*takewhile(lambda each: each <= until, self._times_after(begin))]
            if len(found) >= most or begin == after:
                return found[-most:]
            span *= 4

    def _times_after(self, at: datetime) -> Iterator[datetime]:
        if self.folder is not None:
            return
        if self.every is not None:
            each = _EPOCH + ((at - _EPOCH) // self.every) * self.every
            while True:
                each += self.every
                yield each
        yield from _cron_times(self.cron or "", at, self.timezone)


@lru_cache(maxsize=64)
def zone_of(name: str) -> ZoneInfo:
    """Return a time zone.

    Raises:
        ValidationError: there is no zone of that name.
    """
    from zoneinfo import ZoneInfo, available_timezones  # needed only with schedules

    try:
        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):  # also for names that are paths
        known = sorted(available_timezones())
        near = fields.nearest(name, [each.lower() for each in known])
        spelt = {each.lower(): each for each in known}
        hint = re.sub(r"'(.*)'", lambda found: f"'{spelt[found[1]]}'", near)
        raise ValidationError(
            f"Schedule timezone '{brief(name)}' is no IANA time zone.{hint} Examples: UTC, Europe/Berlin"
        ) from None


def check_schedules(value: object, owner: str) -> None:
    """Refuse schedules without a proper name (S-SCH-7).

    Raises:
        ValidationError: a name or a value is invalid.
    """
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ValidationError(f"{owner} schedules must be a mapping of names to Schedules, got: {type(value).__name__}")
    for name, each in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValidationError(
                f"{owner} schedules: a name must have 1 to 64 letters, digits, '-' and '_', and begin with a letter or a "
                f"digit, got: {brief(str(name))!r}"
            )
        if not isinstance(each, Schedule):
            raise ValidationError(f"{owner} schedules: '{name}' must be a Schedule, got: {type(each).__name__}")


if TYPE_CHECKING:
    SchedulesField: TypeAlias = Accepts[Mapping[str, Schedule], Mapping[str, Schedule] | None]
else:
    SchedulesField = fields.CopiedMapping[str, InstanceOf[Schedule]]


def _check_kind(arguments: Mapping[str, object]) -> None:
    has = {name for name in _KINDS if arguments.get(name) is not None}
    if not has or has >= {"cron", "every"} or has >= {"cron", "folder"}:
        raise ValidationError(f"Schedule needs one of [{', '.join(_KINDS)}], got: [{', '.join(sorted(has))}]")
    if "folder" in has:
        for name in ("overlap", "missed", "max_waiting"):
            if name in arguments:
                raise ValidationError(f"Schedule {name} has no effect with folder: each new file starts a run")
        if arguments.get("input") is None:
            raise ValidationError("Schedule folder needs input: the name of the input that receives the file")
        folder = arguments["folder"]
        if isinstance(folder, str | Path) and not Path(folder).is_absolute():
            raise ValidationError(f"Schedule folder must be an absolute path, got: '{brief(str(folder))}'")
        if "/" in str(arguments.get("pattern", "")):
            raise ValidationError(f"Schedule pattern must match names without '/', got: '{arguments['pattern']}'")
        return
    for name in ("pattern", "attach", "changed"):
        if name in arguments:
            raise ValidationError(f"Schedule {name} needs folder")


def _check_interval(every: object) -> None:
    value = age_from(every) if isinstance(every, str) else every
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, int | float) and not (1 <= seconds <= _LONGEST_S and seconds == int(seconds)):
        raise ValidationError(f"Schedule every must be a whole number of seconds, from 1 s to 365 days, got: {every}")


def _check_word(name: str, value: object, known: Sequence[str]) -> None:
    if isinstance(value, str) and value not in known:
        hint = fields.nearest(value, known)
        raise ValidationError(f"Schedule {name}: unknown '{brief(value)}'.{hint} Known: [{', '.join(known)}]")


def _check_inputs(inputs: object, received: object) -> None:
    if not isinstance(inputs, Mapping):
        return
    given = cast("Mapping[object, object]", inputs)
    if received in given:
        raise ValidationError(f"Schedule input '{received}' is filled by the endpoint, so inputs must not contain it")
    for name, value in given.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValidationError(f"Schedule inputs: '{brief(str(name))}' must be a JSON value: {error}") from None


def _check_cron(text: str, zone: str) -> None:
    from cronsim import CronSimError

    shown = f"Schedule cron '{brief(text)}'"
    if len(text.split()) != _FIELDS:
        raise ValidationError(
            f"{shown} must have five fields: minute, hour, day of month, month, day of week. Example: '0 3 * * MON-FRI'"
        )
    try:
        first = next(_cron_times(text, _EPOCH, zone), None)
    except CronSimError as error:
        raise ValidationError(f"{shown}: {error}. Example: '0 3 * * MON-FRI'") from None
    if first is None:
        raise ValidationError(f"{shown} has no time in 50 years")


def _cron_times(text: str, after: datetime, zone: str) -> Iterator[datetime]:
    from cronsim import CronSim  # needed only with schedules

    for each in CronSim(text, after.astimezone(zone_of(zone))):
        if (found := each.astimezone(UTC)) > after:
            yield found
