"""The declared limit. Package: values. In: numbers. Out: a frozen value; it counts nothing itself."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from ensemble_ray.values.value import Duration, DurationField, Value

__all__ = ["RateLimit"]


def _checked_requests(value: object) -> object:
    """Above zero; None is a missing argument (S-CONV-13)."""
    if value is None or (isinstance(value, int | float) and value <= 0):
        msg = f"RateLimit requests must be > 0, got: {value}"
        raise ValueError(msg)
    return value


def _present_period(value: object) -> object:
    """Anything but None."""
    if value is None:
        msg = "RateLimit period must not be None"
        raise ValueError(msg)
    return value


def _positive_period(value: timedelta) -> timedelta:
    """Above zero."""
    if value <= timedelta():
        msg = f"RateLimit period must be positive, got: {value}"
        raise ValueError(msg)
    return value


if TYPE_CHECKING:
    _Period: TypeAlias = DurationField
else:
    # Validators before the type run from the last to the first, so None is met before the duration is read.
    _Period = Annotated[Duration, AfterValidator(_positive_period), BeforeValidator(_present_period)]


class RateLimit(Value):
    """So many requests in each period. Limits with equal fields are equal.

    Attributes:
        requests: Calls allowed per period; also how many may come at once after a quiet time.
        period: Length of the period; a number means seconds.
    """

    requests: Annotated[int, BeforeValidator(_checked_requests)] = Field(default=None, validate_default=True)
    period: _Period = Field(default=None, validate_default=True)

    @classmethod
    def of(cls, requests: int, period: timedelta | float) -> RateLimit:
        """Allow that many requests per period.

        Raises:
            ValidationError: requests or period is missing or not above zero.
        """
        return cls(requests=requests, period=timedelta(seconds=period) if isinstance(period, int | float) else period)

    @classmethod
    def per_minute(cls, requests: int) -> RateLimit:
        """Allow that many requests per minute."""
        return cls.of(requests, timedelta(minutes=1))

    @classmethod
    def per_second(cls, requests: int) -> RateLimit:
        """Allow that many requests per second."""
        return cls.of(requests, timedelta(seconds=1))
