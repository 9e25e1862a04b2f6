"""What a retry policy accepts (S-DUR-60)."""

from __future__ import annotations

import pickle
from datetime import timedelta

import pytest

from ensemble_ray import RetryPolicy, ValidationError


def test_five_attempts_are_made_within_two_minutes_when_nothing_is_said() -> None:
    """S-DUR-60: the defaults."""
    policy = RetryPolicy()
    assert policy.max_attempts == 5
    assert policy.first_delay == timedelta(seconds=0.5)
    assert policy.max_delay == timedelta(seconds=30)
    assert policy.max_wait == timedelta(minutes=2)


def test_durations_are_equal_when_given_as_seconds_or_timedelta() -> None:
    """S-DUR-60: seconds or timedelta."""
    in_seconds = RetryPolicy(max_attempts=2, first_delay=1, max_delay=2.5, max_wait=0)
    assert in_seconds == RetryPolicy(
        max_attempts=2, first_delay=timedelta(seconds=1), max_delay=timedelta(seconds=2.5), max_wait=timedelta()
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_attempts": 0}, "RetryPolicy max_attempts must be >= 1, got: 0"),
        ({"max_attempts": "3"}, "RetryPolicy: 'max_attempts': Input should be a valid integer"),
        ({"first_delay": -1}, "RetryPolicy first_delay must be between 0 s and 365 days, got: -1"),
        ({"max_wait": float("nan")}, "RetryPolicy max_wait must be between 0 s and 365 days, got: nan"),
        ({"max_delay": float("inf")}, "RetryPolicy max_delay must be between 0 s and 365 days, got: inf"),
        (
            {"first_delay": 40},
            "RetryPolicy max_delay (0:00:30) must not be below first_delay (0:00:40)",
        ),
        ({"attempts": 3}, "RetryPolicy: unknown field 'attempts'. Did you mean 'max_attempts'?"),
    ],
)
def test_a_policy_is_refused_when_a_value_cannot_work(fields: dict[str, object], message: str) -> None:
    """S-DUR-60: the message names the field and the value."""
    with pytest.raises(ValidationError) as refused:
        RetryPolicy(**fields)
    assert str(refused.value) == message


def test_a_policy_is_the_same_when_it_travelled() -> None:
    """S-DUR-60: it reaches the processes that carry it out."""
    policy = RetryPolicy(max_attempts=3, max_wait=7)
    assert pickle.loads(pickle.dumps(policy)) == policy  # noqa: S301  our own bytes
