"""How the requests of a map reach the provider."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ensemble_ray.definition import fields
from ensemble_ray.errors import ValidationError
from ensemble_ray.values.value import DurationField, Value

_LONGEST_S = timedelta(days=365).total_seconds()


class BatchDelivery(Value):
    """Limits and waits of the batches of a map; `delivery="batch"` selects the defaults.

    Attributes:
        max_requests: Requests per batch; 50,000, as OpenAI allows.
        max_bytes: Size of a file of requests, bytes; 200 MB, as OpenAI allows.
        max_items: Items that may wait for batches at the same time. Their tasks run with `max_parallel_tasks` as usual.
        completion_window: The time that the provider has for a batch, in its own words.
        max_age: After this time a batch is cancelled at the provider, and its open items are called one by one; None: when
            the provider's time has passed. Seconds or a `timedelta`, as all times.
        poll_interval: Longest time between two requests for the state of a batch.
        linger: How long a batch that is not full waits for further items of a slow source.

    Raises:
        ValidationError: a value is out of range.

    Examples:
        >>> BatchDelivery(max_age=3600).max_age
        datetime.timedelta(seconds=3600)
    """

    max_requests: fields.StrictInt = 50_000
    max_bytes: fields.StrictInt = 200_000_000
    max_items: fields.StrictInt = 200_000
    completion_window: fields.StrictText = "24h"
    max_age: DurationField | None = None
    poll_interval: DurationField = fields.initially(timedelta(seconds=60))
    linger: DurationField = fields.initially(timedelta(seconds=10))

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        for name in ("max_requests", "max_bytes", "max_items"):
            fields.check_least(arguments.get(name), 1, f"BatchDelivery {name}")
        for name in ("max_age", "poll_interval", "linger"):
            value = arguments.get(name)
            seconds = value.total_seconds() if isinstance(value, timedelta) else value
            if isinstance(seconds, int | float) and not 0 < seconds <= _LONGEST_S:  # `not` refuses NaN too
                raise ValidationError(f"BatchDelivery {name} must be above 0 s and at most 365 days, got: {value}")


def delivery_of(value: object) -> object:
    """Return the meaning of `"batch"` and `"calls"`; other values are unchanged."""
    if value == "batch":
        return BatchDelivery()
    if value == "calls":
        return None
    if value is not None and not isinstance(value, BatchDelivery):
        raise ValidationError(f"delivery must be 'calls', 'batch' or a BatchDelivery, got: {value!r}")
    return value
