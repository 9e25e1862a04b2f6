"""The declared limit: what it accepts, and what it says when it does not."""

import pickle
from datetime import timedelta

import pytest

from ensemble_ray import RateLimit, ValidationError


def test_limits_are_equal_when_their_fields_are() -> None:
    """S-RATE-1: three ways to the same value; equality and hash go by the fields."""
    assert RateLimit.per_minute(6) == RateLimit.of(6, timedelta(minutes=1)) == RateLimit.of(6, 60)
    assert RateLimit.per_second(2) == RateLimit(requests=2, period=timedelta(seconds=1))
    assert RateLimit.per_second(2) != RateLimit.per_second(3)
    assert len({RateLimit.per_minute(6), RateLimit.of(6, 60.0)}) == 1


@pytest.mark.parametrize("requests", [0, -3, None])
def test_requests_are_refused_when_not_positive(requests: int | None) -> None:
    """S-RATE-1: the text names the number given; a missing one is None (S-CONV-13)."""
    with pytest.raises(ValidationError) as refused:
        RateLimit.of(requests, timedelta(seconds=1))  # type: ignore[arg-type]
    assert str(refused.value) == f"RateLimit requests must be > 0, got: {requests}"


@pytest.mark.parametrize(("period", "shown"), [(timedelta(), "0:00:00"), (0, "0:00:00"), (-1, "-1 day, 23:59:59")])
def test_period_is_refused_when_not_positive(period: timedelta | float, shown: str) -> None:
    """S-RATE-1: a number means seconds and is shown as the time it is."""
    with pytest.raises(ValidationError) as refused:
        RateLimit.of(1, period)
    assert str(refused.value) == f"RateLimit period must be positive, got: {shown}"


def test_period_is_refused_when_missing() -> None:
    """S-RATE-1: None and nothing at all get the same text."""
    with pytest.raises(ValidationError) as refused:
        RateLimit.of(1, None)  # type: ignore[arg-type]
    assert str(refused.value) == "RateLimit period must not be None"
    with pytest.raises(ValidationError) as missing:
        RateLimit(requests=1)
    assert str(missing.value) == str(refused.value)


def test_requests_are_reported_first_when_both_are_wrong() -> None:
    """S-RATE-1: checks run in the order in which they are listed."""
    with pytest.raises(ValidationError, match=r"RateLimit requests must be > 0, got: 0"):
        RateLimit.of(0, None)  # type: ignore[arg-type]


def test_limit_is_frozen_and_travels() -> None:
    """S-RATE-1: a value; a pickled copy is equal."""
    limit = RateLimit.per_minute(3)
    assert pickle.loads(pickle.dumps(limit)) == limit  # noqa: S301  our own bytes
    with pytest.raises(Exception, match="frozen"):
        limit.requests = 5
