"""Base of all public frozen values. Layer: above errors and ids.

A value is a frozen pydantic model that refuses unknown names, speaks our errors and copies with `replace`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Generic, Self, TypeVar, cast

import pydantic
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    WrapValidator,
)

from ensemble_ray.errors import ValidationError

__all__ = [
    "Accepts",
    "Duration",
    "DurationField",
    "FrozenSequence",
    "Instant",
    "LazySequence",
    "Value",
    "explain",
    "utc_now",
    "utc_of",
]


def _as_duration(value: object) -> object:
    """Seconds or a timedelta (S-CONV-8)."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return timedelta(seconds=value)
        except OverflowError as error:  # which is no `ValueError`, the only one that a field's check may raise
            raise ValueError(str(error)) from error
    return value


#: A length of time; a number of seconds is accepted, a `timedelta` is kept.
Duration = Annotated[timedelta, BeforeValidator(_as_duration)]

if TYPE_CHECKING:
    _Read = TypeVar("_Read")
    _Written = TypeVar("_Written")

    class Accepts(Generic[_Read, _Written]):
        """A field that is written as one type and read as another."""

        def __get__(self, instance: object, owner: object) -> _Read: ...
        def __set__(self, instance: object, value: _Written) -> None: ...

    #: a `timedelta`, or seconds
    DurationField = Accepts[timedelta, timedelta | float]
else:

    class Accepts:
        """Only type checkers look into it."""

        def __class_getitem__(cls, types: object) -> type:
            return cls

    DurationField = Duration


def _in_utc(value: datetime) -> datetime:
    """Return the same instant in UTC."""
    return value if value.tzinfo is UTC else value.astimezone(UTC)


#: A moment; any time zone is accepted, none is not, UTC is kept (S-CONV-8).
Instant = Annotated[AwareDatetime, AfterValidator(_in_utc)]


_Item = TypeVar("_Item")


class LazySequence(Sequence[_Item]):
    """A sequence that never changes and whose parts are made when asked: fields keep it as it is, unchecked."""

    __slots__ = ()


def _as_tuple(value: object) -> object:
    """Return lists and other collections as tuples, so that the caller's list can change later (S-CONV-5)."""
    if value is None:
        return ()
    return tuple(cast("Iterable[object]", value)) if isinstance(value, list | set | frozenset) else value


def _keep(value: object, check: ValidatorFunctionWrapHandler) -> object:
    return value if isinstance(value, LazySequence) else check(_as_tuple(value))


def _dump(value: object, dump: SerializerFunctionWrapHandler) -> object:
    return dump(tuple(cast("Iterable[object]", value)) if isinstance(value, LazySequence) else value)


#: An immutable sequence; lists are copied, None is empty.
FrozenSequence = Annotated[Sequence[_Item], WrapValidator(_keep), WrapSerializer(_dump)]


def utc_of(at_s: float) -> datetime:
    """Return the UTC instant of a Unix time in seconds."""
    return datetime.fromtimestamp(at_s, UTC)


def utc_now() -> datetime:
    """Now, in UTC; only for defaults of values made by hand, never inside a machine."""
    return datetime.now(UTC)


def explain(error: pydantic.ValidationError, what: str) -> ValidationError:
    """Our error for a failure of pydantic's: what was wrong and where, one sentence per field (S-CONV-12)."""
    parts: list[str] = []
    for found in error.errors(include_url=False):
        ours = found.get("ctx", {}).get("error")
        if isinstance(ours, ValueError) and not isinstance(ours, pydantic.ValidationError):
            return ValidationError(str(ours))
        where = ".".join(str(part) for part in found["loc"])
        if found["type"] == "extra_forbidden":
            parts.append(f"unknown field '{where}'")
        else:
            parts.append(f"'{where}': {found['msg']}" if where else found["msg"])
    return ValidationError(f"{what}: {'; '.join(parts)}")


def _unknown_names(kind: type[BaseModel], names: Iterable[str]) -> ValidationError | None:
    """Return the error for names that a value does not have, with the nearest one that it has; None: it has them all."""
    known = {info.alias or name for name, info in kind.model_fields.items()}
    unknown = [name for name in names if name not in known]
    if not unknown:
        return None
    import difflib  # only mistakes pay for it

    parts: list[str] = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1)
        parts.append(f"unknown field '{name}'" + (f". Did you mean '{near[0]}'?" if near else ""))
    return ValidationError(f"{kind.__name__}: {'; '.join(parts)}")


#: Fields that the error for a positional argument names.
_SHOWN_FIELDS = 12


class Value(BaseModel):
    """A frozen value. Unknown fields are refused; `replace` copies and validates again (S-CONV-3, S-CONV-4)."""

    # Schemas are built when a class is first used: a process imports many that it never makes an instance of.
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)

    def __init__(self, *args: object, **data: object) -> None:
        """Check and keep the fields.

        Raises:
            TypeError: there are positional arguments.
            ValidationError: a name is unknown, which is told before all else, or a value is refused.
        """
        kind = type(self)
        if args:
            fields = list(kind.model_fields)
            shown = ", ".join(fields[:_SHOWN_FIELDS]) + (", ..." if len(fields) > _SHOWN_FIELDS else "")
            msg = (
                f"{kind.__name__} takes keyword arguments only, and got {reprlib.repr(args[0])} without a name. "
                f"Fields: {shown}"
            )
            raise TypeError(msg)
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _unknown_names(kind, data) or error from None
        except pydantic.ValidationError as error:
            raise _unknown_names(kind, data) or explain(error, kind.__name__) from None

    def replace(self, **changes: object) -> Self:
        """Return a copy with these fields changed, validated like a new one.

        Raises:
            ValidationError: a field is unknown or its value is refused.
        """
        fields = {info.alias or name: getattr(self, name) for name, info in type(self).model_fields.items()}
        return type(self)(**{**fields, **changes})
