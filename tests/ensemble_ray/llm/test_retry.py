"""Which status is worth another attempt, and after what delay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray.llm.failures import backoff_s, delay_before_retry, is_retriable, patience_asked_s


def delay(status: int | None, *, attempt: int = 1, retry_after: str | None = None, jitter: float = 0.0) -> float | None:
    """The delay at a fixed time."""
    return delay_before_retry(status, attempt=attempt, retry_after=retry_after, jitter=jitter, now=1_700_000_000.0)


@pytest.mark.parametrize("status", [None, 408, 409, 429, 500, 503, 529])
def test_a_call_is_repeated_when_another_attempt_may_help(status: int | None) -> None:
    """S-SET-10: where `max_retries` was given: no answer, overload, the server's own failure."""
    assert delay(status) == 0.5


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_call_is_not_repeated_when_it_would_be_refused_again(status: int) -> None:
    """S-SET-10, S-DUR-61: a wrong key stays wrong."""
    assert delay(status) is None
    assert not is_retriable(status)


def test_the_delay_doubles_up_to_its_bound_when_attempts_go_on() -> None:
    """S-SET-10, S-DUR-62: 0.5 s doubled up to 8 s, less up to a half."""
    assert [delay(500, attempt=n) for n in (1, 2, 3, 5, 6, 5000)] == [0.5, 1.0, 2.0, 8.0, 8.0, 8.0]
    assert delay(500, jitter=0.5) == 0.5 * 0.75


@given(
    attempt=st.integers(1, 10_000),
    first_s=st.floats(0, 100),
    above_s=st.floats(0, 1000),
    jitter=st.floats(0, 1, exclude_max=True),
)
def test_the_delay_stays_between_half_and_all_when_it_is_spread(
    attempt: int, first_s: float, above_s: float, jitter: float
) -> None:
    """S-DUR-62: jitter between half of the delay and all of it; never above `max_delay`."""
    longest_s = first_s + above_s
    whole_s = backoff_s(attempt, first_s=first_s, longest_s=longest_s, jitter=0.0)
    assert min(first_s, longest_s) <= whole_s <= longest_s
    assert whole_s / 2 <= backoff_s(attempt, first_s=first_s, longest_s=longest_s, jitter=jitter) <= whole_s


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("3", 3.0),
        ("0", 0.0),
        ("-1", 0.0),
        ("Tue, 14 Nov 2023 22:13:30 GMT", 10.0),
        ("Tue, 14 Nov 2023 22:13:00 GMT", 0.0),
        ("soon", None),
        ("1e3", 1000.0),
        (" 3 ", 3.0),
        ("", None),
        # S-SEC-57: what no server means is no wish, and no exception
        ("\u0663", None),
        ("\uff13", None),
        ("inf", None),
        ("nan", None),
        ("1e400", None),
        ("9" * 5000, None),
        ("9" * 64, float("9" * 64)),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 251702300799.0),
        ("Fri, 31 Dec 9999 23:59:59 -2359", 251702387139.0),
        ("Sat, 01 Jan 0000 00:00:00 GMT", 0.0),
        ("Sat, 01 Jan 0001 00:00:00 +2359", 0.0),
        ("Tue, 99 Nov 2023 22:13:30 GMT", None),
        ("Tue, 14 Nov 2023 22:13:30 +99999999", None),
        (None, None),
    ],
)
def test_seconds_and_dates_are_read_when_a_server_asks_for_patience(asked: str | None, expected: float | None) -> None:
    """S-DUR-62: `Retry-After` in both its forms."""
    assert patience_asked_s(asked, 1_700_000_000.0) == expected


@pytest.mark.parametrize(("asked", "expected"), [("3", 3.0), ("soon", 0.5), ("121", None), ("inf", 0.5)])
def test_the_servers_wish_counts_when_it_asks_for_patience(asked: str, expected: float | None) -> None:
    """S-SET-10: a wish beyond two minutes ends the attempts."""
    assert delay(429, retry_after=asked) == expected
