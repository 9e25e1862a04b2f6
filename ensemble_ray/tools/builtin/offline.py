"""Built-in tools without network or files: calculator, date and time, JSON, and questions to a person."""

from __future__ import annotations

import calendar
import json
import math
import re
import zoneinfo
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import cast

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from ensemble_ray.errors import ExitEarlyError, ValidationError
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.tools.approval import approval_request, ask
from ensemble_ray.tools.tool import AbstractAgentTool, AbstractTypedAgentTool, ToolResult
from ensemble_ray.values.reviews import Edit, ExitEarly, OnTimeoutAction, Review
from ensemble_ray.values.value import utc_now

_log = bounded_logger(__name__)

_MAX_CHARACTERS = 10_000
_MAX_DEPTH = 200
_WHOLE_BELOW = 1e15  # printed without a fraction (S-BIT-3)

_NUMBER = re.compile(r"[0-9.]+")
_WELL_FORMED_NUMBER = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")


class CalculatorTool(AbstractAgentTool):
    """Evaluates an arithmetic expression: `+ - * / % ^`, parentheses, decimals."""

    name = "calculator"
    effect = "none"
    description = (
        "Evaluates an arithmetic expression and returns its value. Operators: + - * / % (remainder) ^ (power), "
        "parentheses, decimal numbers. Input: the expression alone, for example (2 + 3) * 4 ^ 2"
    )

    def do_execute(self, text: str, /) -> ToolResult:
        try:
            return ToolResult.success(calculate(text))
        except ValueError as error:
            return ToolResult.failure(str(error))


def calculate(expression: str | None) -> str:
    if expression is None or not expression.strip():
        raise ValueError("Expression must not be blank")
    if len(expression) > _MAX_CHARACTERS:
        raise _invalid(f"longer than {_MAX_CHARACTERS} characters")
    value = _Evaluation(expression).value()
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return str(int(value)) if value.is_integer() and abs(value) < _WHOLE_BELOW else repr(value)


def _invalid(reason: str) -> ValueError:
    return ValueError(f"Invalid expression: {reason}")


def _power(base: float, exponent: float) -> float:
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return -math.inf if base < 0 and _is_odd(exponent) else math.inf
    except ValueError:
        # a negative base with a fractional exponent, or zero with a negative exponent
        if base != 0:
            return math.nan
        return math.copysign(math.inf, base) if _is_odd(exponent) else math.inf


def _is_odd(value: float) -> bool:
    return abs(math.fmod(value, 2)) == 1


#: (binding power, function) of operators; all except `^` are left-associative
_BINARY: Mapping[str, tuple[int, Callable[[float, float], float]]] = {
    "+": (1, lambda left, right: left + right),
    "-": (1, lambda left, right: left - right),
    "*": (2, lambda left, right: left * right),
    "/": (2, lambda left, right: left / right),
    "%": (2, lambda left, right: math.nan if math.isinf(left) else math.fmod(left, right)),
    "^": (4, _power),
}
_PREFIX_POWER = 3  # above `*`, below `^`: -2^2 is -4 (S-BIT-2)
_OPEN = "("
_NEGATE = "negate"


class _Evaluation:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._operands: list[float] = []
        self._pending: list[str] = []
        self._depth = 0

    def value(self) -> float:
        while True:
            self._read_operand()
            while self._peek() == ")" and self._depth:
                self._at += 1
                self._depth -= 1
                self._reduce(0)
                self._pending.pop()
            sign = self._peek()
            if sign == "":
                break
            if sign not in _BINARY:
                raise _invalid(f"unexpected character '{sign}' at position {self._at}")
            self._at += 1
            power, _ = _BINARY[sign]
            self._reduce(power + 1 if sign == "^" else power)  # right-associative: 2^3^2 is 2^9
            self._pending.append(sign)
        if self._depth:
            raise _invalid("missing closing parenthesis")
        self._reduce(0)
        return self._operands[0]

    def _peek(self) -> str:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _read_operand(self) -> None:
        while True:
            sign = self._peek()
            if sign == "":
                raise _invalid("unexpected end of expression")
            if number := _NUMBER.match(self._text, self._at):
                if not _WELL_FORMED_NUMBER.fullmatch(number.group()):
                    raise _invalid(f"invalid number '{number.group()}'")
                self._at = number.end()
                self._operands.append(float(number.group()))
                return
            if sign == _OPEN:
                self._depth += 1
                if self._depth > _MAX_DEPTH:
                    raise _invalid(f"nested deeper than {_MAX_DEPTH} levels")
                self._pending.append(_OPEN)
            elif sign == "-":
                self._pending.append(_NEGATE)
            elif sign != "+":
                raise _invalid(f"unexpected character '{sign}' at position {self._at}")
            self._at += 1

    def _reduce(self, least_power: int) -> None:
        while self._pending and self._pending[-1] != _OPEN:
            sign = self._pending[-1]
            if (_PREFIX_POWER if sign == _NEGATE else _BINARY[sign][0]) < least_power:
                return
            self._pending.pop()
            right = self._operands.pop()
            if right == 0 and sign in "/%":
                raise ValueError("Division by zero" if sign == "/" else "Modulo by zero")
            if sign == _NEGATE:
                self._operands.append(-right)
            else:
                self._operands.append(_BINARY[sign][1](self._operands.pop(), right))


_HELP = (
    "Supported: now | now in <timezone> | today | today in <timezone> | "
    "convert <datetime> from <timezone> to <timezone> | <date or datetime> +/- <N> <unit>"
)

# All are linear: a model writes the command, and a search blocks every thread of the process (S-SEC-20).
_NOW = re.compile(r"(now|today)(?:\s+in\s+(\S+))?", re.IGNORECASE)
_CONVERT = re.compile(r"convert\s+(\S+)\s+from\s+(\S+)\s+to\s+(\S+)", re.IGNORECASE)
#: blanks match in one way only
_ARITHMETIC = re.compile(r"(\S+(?:\s+\S+)*?)\s+([+-])\s*([0-9]+)\s*([A-Za-z]+)")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_DATETIME = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:\.[0-9]+)?)?"
    r"(Z|[+-][0-9]{2}:?[0-9]{2})?",
    re.IGNORECASE,
)
_HAS_TIME = re.compile(r"[TZ]|[0-9][tz]")  # for a datetime (S-BIT-13)

_OUT_OF_RANGE = "the result is out of range (years 1 to 9999)"
_DAYS = {"day": 1, "week": 7}
_MONTHS = {"month": 1, "year": 12}
_UNIT_SECONDS = {"second": 1, "minute": 60, "hour": 3600}
_MAX_DIGITS = 12  # larger numbers exceed every calendar


class DateTimeTool(AbstractAgentTool):
    """Returns the current time, converts between time zones, and adds to dates and datetimes.

    Args:
        clock: Returns the current time as an aware datetime; None: the machine's clock, in UTC.
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
            now, zone = utc_now() if self._clock is None else self._clock(), found[2] or "UTC"
            aware = now if now.tzinfo is not None else now.replace(tzinfo=UTC)
            local = aware.astimezone(_zone(zone))
            if found[1].lower() == "today":
                return ToolResult.success(local.date().isoformat())
            return ToolResult.success(f"{_wall_time(local)} {'UTC' if zone.upper() == 'UTC' else zone}")
        if found := _CONVERT.fullmatch(command):
            value, source, target = found.groups()
            start = _DATETIME.fullmatch(value)
            if start is None or (start[7] or "Z").upper() != "Z":
                raise _bad_datetime(value)
            moment = _datetime_of(start, value).replace(tzinfo=_zone(source)).astimezone(_zone(target))
            return ToolResult.success(f"{_wall_time(moment)} {target}")
        if found := _ARITHMETIC.fullmatch(command):
            value, sign, number, unit = found.groups()
            if len(number) > _MAX_DIGITS:
                return ToolResult.failure(f"Date/time error: {_OUT_OF_RANGE}")
            amount = int(number) if sign == "+" else -int(number)
            return ToolResult.success(_shift(value, amount, unit))
        return ToolResult.failure(f"Unrecognized command. {_HELP}")


def _wall_time(moment: datetime) -> str:
    return moment.replace(tzinfo=None).isoformat(timespec="seconds")


def _zone(name: str) -> tzinfo:
    if name.upper() in {"UTC", "Z"}:
        return UTC
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        # raised for a name with `..`, or of a directory of the database
        raise ValueError(f"Unknown timezone: '{name}'") from None


def _shift(value: str, amount: int, unit: str) -> str:
    has_time = _HAS_TIME.search(value) is not None
    if has_time:
        found = _DATETIME.fullmatch(value)
        if found is None:
            raise _bad_datetime(value)
        start = _datetime_of(found, value) - _offset_of(found[7], value)
    else:
        try:
            start = datetime.combine(date.fromisoformat(value if _DATE.fullmatch(value) else ""), time.min)
        except ValueError:
            raise ValueError(f"Invalid date format: '{value}'. Expected yyyy-MM-dd") from None
    kind = unit.lower().removesuffix("s")
    if kind in _MONTHS:
        year, month = divmod(start.year * 12 + start.month - 1 + amount * _MONTHS[kind], 12)
        if not date.min.year <= year <= date.max.year:
            raise OverflowError
        last = calendar.monthrange(year, month + 1)[1]
        end = start.replace(year=year, month=month + 1, day=min(start.day, last))
    elif kind in _DAYS:
        end = start + timedelta(days=amount * _DAYS[kind])
    elif has_time and kind in _UNIT_SECONDS:
        end = start + timedelta(seconds=amount * _UNIT_SECONDS[kind])
    elif has_time:
        raise ValueError(f"Unsupported datetime unit: '{unit}'")
    else:
        raise ValueError(f"Unsupported date unit: '{unit}'. Use days, weeks, months, or years")
    return f"{_wall_time(end)}Z" if has_time else end.date().isoformat()


def _datetime_of(found: re.Match[str], value: str) -> datetime:
    year, month, day, hour, minute, second = (int(part or 0) for part in found.groups()[:6])
    try:
        return datetime(year, month, day, hour, minute, second)  # noqa: DTZ001  the caller applies the zone
    except ValueError:
        raise _bad_datetime(value) from None


def _offset_of(text: str | None, value: str) -> timedelta:
    if text is None or text.upper() == "Z":
        return timedelta(0)
    hours, minutes = int(text[1:3]), int(text[-2:])
    if hours > 23 or minutes > 59:  # noqa: PLR2004  the clock's own limits
        raise _bad_datetime(value)
    size = timedelta(hours=hours, minutes=minutes)
    return -size if text[0] == "-" else size


def _bad_datetime(value: str) -> ValueError:
    return ValueError(f"Invalid datetime format: '{value}'. Expected yyyy-MM-ddTHH:mm:ss[Z]")


_STEP = re.compile(r"([^.\[\]]+)|\[(-?[0-9]{1,18})\]")


class JsonParserInput(BaseModel):
    """Arguments of `JsonParserTool`."""

    model_config = ConfigDict(populate_by_name=True)

    json_path: str = Field(description="Path to the value, for example user.name, items[0].title or [1].x")
    #: pydantic reserves the name `json` (S-BIT-54)
    text: str = Field(alias="json", description="The JSON text to read from")


class JsonParserTool(AbstractTypedAgentTool[JsonParserInput]):
    """Extracts a value from JSON by a path of dots and brackets.

    In a plain string, as a pipeline or a handler passes it, the first line is the path and the rest is the JSON.
    """

    input_type = JsonParserInput

    name = "json_parser"
    effect = "none"
    description = (
        "Extracts one value from a JSON text. The path names keys separated by dots and array positions in "
        "brackets, counted from 0: user.name, items[0].title, [1].x"
    )

    def do_execute(self, text: str, /) -> ToolResult | Awaitable[ToolResult]:
        text = text or ""
        if _is_named(text):
            return super().do_execute(text)
        path, _, document = text.partition("\n")
        return extract(path, document)

    def execute_typed(self, arguments: JsonParserInput, /) -> ToolResult:
        return extract(arguments.json_path, arguments.text)


def _is_named(text: str) -> bool:
    """Return whether the text is named arguments; a path never starts with a brace."""
    if not text.lstrip().startswith("{"):
        return False
    if text.partition("\n")[0].strip():
        return True
    try:
        arguments: object = from_json(text)
    except (ValueError, TypeError):  # half of a surrogate pair
        return False
    return isinstance(arguments, dict) and "json_path" in arguments


class _NotFoundError(ValueError): ...


def extract(path: str, text: str) -> ToolResult:
    """Return the value at a path of a JSON text (S-BIT-51 to S-BIT-53)."""
    if not path.strip():
        return ToolResult.failure("Path expression must not be blank")
    if not text.strip():
        return ToolResult.failure("JSON content must not be blank")

    def finite(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise ValueError(f"number {digits} is out of range" if digits[-1].isdigit() else f"{digits} is not JSON")
        return value

    try:
        document: object = json.loads(text, parse_constant=finite, parse_float=finite)
        value = _walk(document, path.strip())
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return ToolResult.success(whole_text(shown))
    except _NotFoundError as error:
        return ToolResult.failure(str(error))
    except RecursionError:
        return ToolResult.failure("Invalid JSON: nested too deeply")
    except ValueError as error:
        return ToolResult.failure(f"Invalid JSON: {error}")


def _walk(document: object, path: str) -> object:
    value = document
    for step in _steps(path):
        if not isinstance(value, list if isinstance(step, int) else dict):
            raise _NotFoundError(f"Path not found: '{path}'")
        if isinstance(step, int):
            items = cast("list[object]", value)
            if not 0 <= step < len(items):
                bounds = f"index {step} is out of bounds for array of size {len(items)}"
                raise _NotFoundError(f"Array index out of bounds: {bounds}")
            value = items[step]
        else:
            members = cast("dict[str, object]", value)
            if step not in members:
                raise _NotFoundError(f"Path not found: '{step}'")
            value = members[step]
    return value


def _steps(path: str) -> list[str | int]:
    steps: list[str | int] = []
    at = 0
    while at < len(path):
        # a dot is allowed only between a step and a key
        if steps and path[at] == ".":
            at += 1
            found = _STEP.match(path, at)
            expected = found is not None and found[1] is not None
        else:
            found = _STEP.match(path, at)
            expected = found is not None and (found[1] is None or not steps)
        if found is None or not expected:
            raise _NotFoundError(f"Path not found: '{path}'")
        steps.append(found[1] if found[1] is not None else int(found[2]))
        at = found.end()
    return steps


class HumanInputTool(AbstractAgentTool):
    """Asks the run's review handler a question. The answer is recorded; a resumed run does not ask again.

    Args:
        timeout: Time limit of the answer, a `timedelta` or seconds; 0: no limit.
        on_timeout: Action after the time limit: `"continue"`, `"exit_early"` or `"fail"`.

    Raises:
        ValidationError: the timeout is negative, or the action is unknown.
    """

    name = "human_input"
    description = (
        "Asks a person a question and gives the answer. Use it when you need a decision, an opinion or a fact that only "
        "a person has. The input is the question."
    )
    timeout = None  # only the answer has a limit
    effect = "idempotent"  # a recorded answer is not asked for again

    def __init__(
        self,
        timeout: timedelta | float = Review.DEFAULT_TIMEOUT,
        on_timeout: OnTimeoutAction | str = OnTimeoutAction.CONTINUE,
    ) -> None:
        actions = [each.value for each in OnTimeoutAction]
        if on_timeout not in actions:
            raise ValidationError(f"HumanInputTool on_timeout must be one of {actions}, got: {on_timeout!r}")
        self._review = Review(timeout=timeout, on_timeout=on_timeout)

    async def do_execute(self, text: str, /) -> ToolResult:
        handler = self.context.review_handler
        if handler is None:
            _log.warning("Tool '%s' cannot ask a person: the run has no review_handler", self.name)
            return ToolResult.success("No reviewer is available. Please proceed with your best judgment.")
        review = self._review
        request = approval_request(text, timeout=review.timeout, on_timeout=review.on_timeout, ends_run=True)
        match await ask(handler, request):
            case Edit(revised_output=answer):
                return ToolResult.success(answer)
            case ExitEarly(timed_out=timed_out):
                raise ExitEarlyError("The reviewer ended the run", timed_out)
            case _:
                return ToolResult.success("Understood. Please continue.")
