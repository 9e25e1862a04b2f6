"""When a failure arrived from an endpoint. Package: llm.

In: an error as it is made, and the instant of its failure; out: how long ago that was. Naming a failure may wait for a
package to be imported, and meanwhile other calls are answered: the order of arrival is what tells whether an endpoint
fails (S-DUR-64). The instant stands on the error itself, and means nothing in another process.
"""

from __future__ import annotations

import time

__all__ = ["mark_arrival", "seconds_since_arrival"]

_FIELD = "_ensemble_ray_arrived_at"


def mark_arrival(error: BaseException, at: float) -> None:
    """Say when the failure behind an error arrived.

    Args:
        error: The error that it became.
        at: Instant of `time.monotonic`, s.
    """
    setattr(error, _FIELD, at)


def seconds_since_arrival(error: BaseException) -> float:
    """Return how long ago the failure behind an error arrived, s; 0 where it is not known."""
    at: object = getattr(error, _FIELD, None)
    return max(0.0, time.monotonic() - at) if isinstance(at, float) else 0.0
