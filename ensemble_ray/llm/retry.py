"""Which failed model call is worth repeating, and after what delay. Room: llm; pure, no clock and no randomness.

Asked only where the user set `max_retries`: by default a failed call fails at once (S-SET-43).
"""

from __future__ import annotations

from email.utils import parsedate_to_datetime

__all__ = ["delay_before_retry"]

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 8.0
#: A server that asks for more patience than this is answered with the failure instead.
_LONGEST_ASKED_DELAY_S = 120.0
_RETRYABLE = frozenset({408, 409, 429})


def delay_before_retry(
    status: int | None, *, attempt: int, retry_after: str | None, jitter: float, now: float
) -> float | None:
    """How long to wait before the next attempt, s; None when another attempt is of no use.

    Args:
        status: HTTP status; None when there was no answer at all.
        attempt: Attempts made so far, from 1.
        retry_after: The answer's `Retry-After` header: seconds or an HTTP date.
        jitter: In [0, 1); spreads the callers of one overloaded server.
        now: Unix time, s, to which an HTTP date is compared.
    """
    if status is not None and status not in _RETRYABLE and status < 500:  # noqa: PLR2004  HTTP's own classes
        return None
    asked_s = _asked(retry_after, now)
    if asked_s is not None:
        return asked_s if asked_s <= _LONGEST_ASKED_DELAY_S else None
    delay_s = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(attempt - 1, 16))
    return delay_s * (1 - 0.25 * jitter)


def _asked(retry_after: str | None, now: float) -> float | None:
    if not retry_after:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        at: float = parsedate_to_datetime(retry_after).timestamp()
    except ValueError:
        return None
    return max(0.0, at - now)
