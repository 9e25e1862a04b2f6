"""Checks of recorded values. Pure.

In: a value as it was read. Out: what it should be, if it is not; None where it is. So readers may rely on the types of
known fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

__all__ = [
    "ANY", "DURATION", "FLAG", "INSTANT", "NUMBER", "OBJECT", "TEXT", "Check", "list_of", "object_of", "one_of", "optional",
    "require", "type_of",
]  # fmt: skip

#: Instants from about the year 70 to 9500, and durations of up to 300 years, s: what `datetime` can hold, with room.
_FIRST_S, _LAST_S, _LONGEST_S = -6e10, 2.4e11, 1e10

#: Returns what a value must be, if it is not.
Check = Callable[[object], str | None]


def type_of(what: str, *types: type) -> Check:
    """Return a check for values of these types; a flag is no number."""

    def check(value: object) -> str | None:
        is_right = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        return None if is_right else what

    return check


def optional(check: Check) -> Check:
    """Return a check that also lets null pass."""
    return lambda value: None if value is None else check(value)


def list_of(each: Check) -> Check:
    """Return a check for lists of such values."""

    def check(value: object) -> str | None:
        if not isinstance(value, list | tuple):
            return "a list"
        wrong = (problem for one in cast("list[object]", value) if (problem := each(one)) is not None)
        found = next(wrong, None)
        return None if found is None else f"a list of which each is {found}"

    return check


def object_of(**fields: Check) -> Check:
    """Return a check for objects with at least these fields."""

    def check(value: object) -> str | None:
        if not isinstance(value, Mapping):
            return "an object"
        data = cast("Mapping[str, object]", value)
        for name, field in fields.items():
            if (problem := field(data.get(name))) is not None:
                return f"an object whose {name} is {problem}"
        return None

    return check


def one_of(*values: str) -> Check:
    """Return a check for one of these texts."""
    return lambda value: None if value in values else f"one of {', '.join(values)}"


def _within(what: str, least: float, most: float) -> Check:
    def check(value: object) -> str | None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if is_number and least <= cast("float", value) <= most else what

    return check


def require(name: str, value: object, check: Check) -> None:
    """Refuse a value of a fact that is not what it should be.

    Raises:
        ValueError: says which one, and what it should be.
    """
    if (problem := check(value)) is not None:
        raise ValueError(f"its {name} is not {problem}")


TEXT, NUMBER, FLAG = type_of("a text", str), type_of("a whole number", int), type_of("true or false", bool)
OBJECT, INSTANT = type_of("an object", Mapping), _within("an instant", _FIRST_S, _LAST_S)
DURATION = _within("a duration", -_LONGEST_S, _LONGEST_S)


def ANY(_value: object) -> None:  # noqa: N802  one of the checks above
    """Let every value pass."""
