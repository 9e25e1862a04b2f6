"""Which status is worth another attempt, and after what delay. Package: llm; pure, no clock and no randomness.

Both kinds of retries ask here: a run's own (`definition.retry_policy`), and those that a model makes by itself where
its user set `max_retries` (S-SET-43).
"""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from math import isfinite

from ensemble_ray.errors.bodies import ErrorBody

__all__ = ["backoff_s", "delay_before_retry", "is_worth_repeating", "patience_asked_s", "retry_after_in"]

#: How a model that repeats by itself waits, s.
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 8.0
#: A server that asks such a model for more patience than this is answered with the failure instead.
_LONGEST_ASKED_DELAY_S = 120.0
#: Characters of the longest `Retry-After` that is read; a date has 29.
_LONGEST_WISH = 64
_WORTH_REPEATING = frozenset({408, 409, 429})
#: Doublings after which every delay is at its bound, whatever that is; 2.0 ** 5000 is no float.
_MOST_DOUBLINGS = 60


def is_worth_repeating(status: int) -> bool:
    """Whether that HTTP status may be another one next time (S-DUR-61)."""
    return status in _WORTH_REPEATING or 500 <= status <= 599  # noqa: PLR2004  HTTP's own classes


def backoff_s(attempt: int, *, first_s: float, longest_s: float, jitter: float) -> float:
    """Return the delay after that many attempts: doubled each time, between half of it and all of it (S-DUR-62).

    Args:
        attempt: Attempts made so far, from 1.
        first_s: The delay after the first one.
        longest_s: No delay is longer.
        jitter: In [0, 1); spreads the callers of one overloaded server.
    """
    delay_s = min(longest_s, first_s * 2.0 ** min(attempt - 1, _MOST_DOUBLINGS))
    return delay_s * (1 - 0.5 * jitter)


def patience_asked_s(retry_after: str | None, now: float) -> float | None:
    """Return the delay that a `Retry-After` asks for, s; None when there is none that can be read.

    Args:
        retry_after: The header: seconds or an HTTP date.
        now: Unix time, s, to which a date is compared.
    """
    # What is no number or date as HTTP writes them is no wish: digits of other scripts, infinity, whole pages.
    if not retry_after or len(retry_after) > _LONGEST_WISH or not retry_after.isascii():
        return None
    try:
        asked_s = float(retry_after)
    except ValueError:
        pass
    else:
        return max(0.0, asked_s) if isfinite(asked_s) else None
    try:
        at: float = parsedate_to_datetime(retry_after).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):  # a year 0, a month 13, a zone of a thousand hours
        return None
    return max(0.0, at - now)


def retry_after_in(headers: Mapping[str, str], told: ErrorBody) -> str | None:
    """Return the delay that an answer asks for, as a `Retry-After`; None where it asks for none (S-LLM-20).

    Args:
        headers: Of the answer, names in lower case.
        told: What its body means.
    """
    asked_ms = patience_asked_s(headers.get("retry-after-ms"), 0.0)
    if asked_ms is not None:
        return f"{asked_ms / 1000:g}"
    in_header = headers.get("retry-after")
    if in_header is not None or told.retry_after_s is None:
        return in_header
    return f"{told.retry_after_s:g}"


def delay_before_retry(
    status: int | None, *, attempt: int, retry_after: str | None, jitter: float, now: float
) -> float | None:
    """How long a model that repeats by itself waits, s; None when another attempt is of no use (S-SET-10).

    Args:
        status: HTTP status; None when there was no answer at all.
        attempt: Attempts made so far, from 1.
        retry_after: The answer's `Retry-After` header.
        jitter: In [0, 1).
        now: Unix time, s.
    """
    if status is not None and not is_worth_repeating(status):
        return None
    asked_s = patience_asked_s(retry_after, now)
    if asked_s is not None:
        return asked_s if asked_s <= _LONGEST_ASKED_DELAY_S else None
    return backoff_s(attempt, first_s=_FIRST_DELAY_S, longest_s=_LONGEST_DELAY_S, jitter=jitter)
